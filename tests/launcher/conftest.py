"""Fixtures: a small corpus from the source of the standard library, and a run that trains on it."""

import json
import shutil
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from support.runs import SAME_PLACES, STEPS, Launch

from baton.data_pipeline.dataset import Dataset
from baton.data_pipeline.evaluation import documents
from baton.data_pipeline.prepare import prepare
from baton.data_pipeline.tokenizer_training import train_tokenizer

SOURCES = ("textwrap", "heapq", "bisect", "shlex", "sched", "copy", "json/decoder", "json/encoder", "json/scanner", "queue")
VOCABULARY = 380


def _quiet(_done, _total):
    """A progress that shows nothing."""


@dataclass(frozen=True)
class Inputs:
    """What the small run reads; nothing here is changed by a test.

    run: its file. shards, tokens: the corpus as text, and as ids of `other`. other: a tokenizer of the same size, from other text.
    elsewhere: another corpus.
    """

    run: Path
    shards: Path
    tokens: Path
    elsewhere: Path
    tokenizer: Path
    other: Path

    def settings(self):
        """The run file's values, to be changed and written elsewhere."""
        return yaml.safe_load(self.run.read_text())


@pytest.fixture(scope="session")
def inputs(tmp_path_factory) -> Inputs:
    folder = tmp_path_factory.mktemp("inputs")
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    pieces = []
    for name in SOURCES:
        text = (stdlib / f"{name}.py").read_bytes().decode("ascii", errors="ignore")  # few characters, small vocabulary
        pieces += [text[i : i + 1500] for i in range(0, len(text), 1500)]
    for corpus, chosen in (("all", pieces), ("half", pieces[::2])):
        (folder / f"{corpus}.jsonl").write_text("".join(json.dumps({"text": piece}) + "\n" for piece in chosen))
    found = Inputs(*(folder / name for name in ("run.yaml", "shards", "tokens", "elsewhere", "tokenizer.model", "other.model")))
    settings = {"shard_bytes": 12_000, "validation_fraction": 0.1, "workers": 1, "progress": _quiet}
    prepare([folder / "all.jsonl"], found.shards, **settings)
    prepare([folder / "half.jsonl"], found.elsewhere, **settings)
    for model, dataset in ((found.tokenizer, found.shards), (found.other, found.elsewhere)):
        train_tokenizer(documents(Dataset.open(dataset), "train"), model, VOCABULARY, threads=1)
    prepare([folder / "all.jsonl"], found.tokens, tokenizer=found.other, **settings)
    run = {
        "name": "small",
        "device": "cpu",
        "model": {"d_model": 16, "n_layers": 2, "mixers": {"mamba": {"d_state": 4}}},
        "data": {"path": str(found.shards), "tokenizer": str(found.tokenizer), "unit_documents": 4},
        "layout": {"data": 2},
        "training": {
            "steps": STEPS,
            "sequence_length": 32,
            "global_batch_tokens": 128,
            "compute_dtype": "float32",
            "log_every": 1,
            "optimizer": {"lr": 1e-2},
            "schedule": {"kind": "cosine", "warmup_steps": 4, "final_lr": 1e-3},
            "checkpoint": {"every": 5, "keep_last": 3},
            "evaluation": {"every": 10, "tokens": 600, "sample_tokens": 8},
        },
    }
    found.run.write_text(yaml.safe_dump(run, sort_keys=False))
    return found


@pytest.fixture
def copy_of(tmp_path):
    """A function that copies a dataset to where a test may damage it."""

    def copy(dataset: Path) -> Path:
        return Path(shutil.copytree(dataset, tmp_path / f"copy-of-{dataset.name}"))

    return copy


@pytest.fixture(scope="session")
def launch():
    """A function that starts `baton train`, forked where nothing else is said: see support.runs.Launch. Runs that a failed test
    leaves behind are ended."""
    started = []

    def start(folder: Path, *words: str, where: Path, forked: bool = True) -> Launch:
        started.append(Launch(folder, *words, where=where, forked=forked))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.process.kill()  # its ranks die with it


@pytest.fixture(scope="session")
def undisturbed(inputs, launch, tmp_path_factory) -> Path:
    """The small run on two ranks, from its first step to its last in one go, by the real command. Not to be changed."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    ended = launch(folder, str(inputs.run), *SAME_PLACES, where=inputs.run.parent, forked=False).end()
    assert (ended.status, ended.err) == (0, "")
    return folder
