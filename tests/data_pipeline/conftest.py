"""A small corpus of every kind of text, a tokenizer trained on it, and the datasets made of it."""

import json
import random
from dataclasses import asdict
from pathlib import Path

import pytest

from baton.data_pipeline.dataset import Dataset
from baton.data_pipeline.prepare import prepare
from baton.data_pipeline.shards import ShardWriter
from baton.data_pipeline.tokenizer import Tokenizer, load_tokenizer
from baton.data_pipeline.tokenizer_training import train_tokenizer

WORDS = ["the", "lane", "reads", "a", "unit", "of", "documents", "and", "cuts", "it", "where", "context", "ends", "while", "state"]
WORDS += ["goes", "on", "x", "=", "y", "+", "1", "def", "f(self):", "return"]


def _quiet(_done, _total):
    """A progress that shows nothing."""


@pytest.fixture(scope="session")
def quiet():
    return _quiet


def _make_text(rng: random.Random, words: int) -> str:
    separators = [" "] * 12 + ["\n", "\n    ", "\t", "  ", "\n\n", " é", " 語", "\u2581", "\r\n"]
    return "".join(rng.choice(WORDS) + rng.choice(separators) for _ in range(words))


@pytest.fixture(scope="session")
def make_text():
    """(random.Random, words) -> a text with all kinds of whitespace."""
    return _make_text


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """90 different documents, from a single character to some kilobytes."""
    rng = random.Random(5)
    made = ["a", "\u2581", "<doc>", "語", *(_make_text(rng, rng.choice((2, 9, 40, 150, 600))) for _ in range(86))]
    assert len(set(made)) == 90
    return made


@pytest.fixture(scope="session")
def corpus(texts, tmp_path_factory) -> Path:
    """A folder with one .jsonl of the texts."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "all.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return folder


@pytest.fixture(scope="session")
def tokenizer(texts, tmp_path_factory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer") / "small.model"
    train_tokenizer(texts, path, 420, threads=1)
    return load_tokenizer(path)


@pytest.fixture(scope="session")
def other_tokenizer(texts, tmp_path_factory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer") / "other.model"
    train_tokenizer(texts, path, 330, threads=1)
    return load_tokenizer(path)


@pytest.fixture(scope="session")
def text_folder(corpus, tmp_path_factory) -> Path:
    """The corpus as a text dataset of several shards; read only."""
    folder = tmp_path_factory.mktemp("text") / "dataset"
    prepare([corpus], folder, shard_bytes=20_000, validation_fraction=0.2, workers=1, progress=_quiet)
    return folder


@pytest.fixture(scope="session")
def token_folder(corpus, tokenizer, tmp_path_factory) -> Path:
    """The corpus as a token dataset; read only."""
    folder = tmp_path_factory.mktemp("tokens") / "dataset"
    prepare([corpus], folder, shard_bytes=20_000, validation_fraction=0.2, tokenizer=tokenizer.path, workers=1, progress=_quiet)
    return folder


@pytest.fixture(scope="session")
def dataset(text_folder) -> Dataset:
    return Dataset.open(text_folder)


def _write_dataset(folder, contents, content, tokenizer):
    """A dataset of one training and one validation shard, each of these (payload, text bytes, tokens), as they are."""
    summaries = []
    for split in ("train", "validation"):
        writer = ShardWriter(folder / f"{split}-000000.tar", content)
        for number, (payload, size, tokens) in enumerate(contents):
            writer.add(f"{split[:5]}{number:027d}", payload, size, tokens)
        summaries.append(asdict(writer.close(split)))
    manifest = {"format": "baton-dataset", "version": 1, "content": content, "settings": {}, "totals": {}, "rejected": {}}
    manifest |= {"tokenizer": tokenizer.fingerprint if content == "tokens" else None, "shards": summaries}
    (folder / "dataset.json").write_text(json.dumps(manifest))
    return folder


@pytest.fixture(scope="session")
def write_dataset():
    """(folder, [(payload, text bytes, tokens)], "text" or "tokens", tokenizer) -> the folder, with such a dataset."""
    return _write_dataset
