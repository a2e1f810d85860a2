"""Tokenizers that other projects train: the ids are their library's for the whole text, whatever blocks it comes in."""

import json
import random
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tokenizers import MAKERS, mixed_text
from tokenizers import Tokenizer as Library

from baton.data_pipeline.dataset import Dataset
from baton.data_pipeline.errors import DataError
from baton.data_pipeline.evaluation import evaluation_batches
from baton.data_pipeline.prepare import prepare
from baton.data_pipeline.tokenizer import load_tokenizer
from baton.data_pipeline.tokenizer_training import train_tokenizer
from baton.launcher.cli import main


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """{name: (our tokenizer, text -> the library's ids)}."""
    found = {}
    for name, (make, file, eod_token) in MAKERS.items():
        path = tmp_path_factory.mktemp(name) / file
        make(path)
        ours = load_tokenizer(path, eod_token)
        if file.endswith(".json"):
            library = Library.from_file(str(path))
            library.encode_special_tokens = True
            found[name] = ours, lambda text, library=library: library.encode(text, add_special_tokens=False).ids
        else:
            found[name] = ours, sentencepiece.SentencePieceProcessor(model_file=str(path)).encode
    return found


def blocks_of(rng, content):
    """The bytes cut at random places."""
    cuts = sorted({0, len(content), *(rng.randrange(len(content) + 1) for _ in range(20))})
    return [content[a:b] for a, b in pairwise(cuts)]


@pytest.mark.parametrize("name", MAKERS)
def test_ids_are_the_librarys_whole_and_in_blocks(made, name):
    ours, library = made[name]
    rng = random.Random(name)
    for words in (1, 3, *[40] * 60, 4000):
        text = mixed_text(rng, words)
        expected = library(text)
        ids = ours.encode(text)
        assert ids.dtype == np.int32
        assert ids.tolist() == expected
        pieces = [ids.tolist() for ids in ours.encode_blocks(blocks_of(rng, text.encode()))]
        assert [i for piece in pieces for i in piece] == expected
        assert ours.eod_id not in expected


@pytest.mark.long
@pytest.mark.parametrize("name", MAKERS)
def test_ids_of_10_mb_are_the_librarys_whole_and_in_blocks(made, name):
    """Documents of 10 bytes to 1 MB; their UTF-8 is damaged at random places, and read with U+FFFD there."""
    ours, library = made[name]
    rng = random.Random(f"long {name}")
    seen = 0
    while seen < 10 << 20:
        content = bytearray(mixed_text(rng, rng.choice((2, 30, 500, 5_000, 80_000))).encode())
        for _ in range(len(content) // 2000):
            content[rng.randrange(len(content))] = rng.choice(b"\x80\xc3\xff\xf0")
        text = content.decode(errors="replace")
        expected = np.array(library(text), np.int32)
        np.testing.assert_array_equal(ours.encode(text), expected)
        parts = list(ours.encode_blocks(blocks_of(rng, text.encode())))
        np.testing.assert_array_equal(np.concatenate(parts), expected)
        seen += len(text.encode())


@settings(max_examples=150, deadline=None)
@given(st.text(st.sampled_from("aZé \n\t\r.'s1語\u2581\u0301<>/|\u00a0"), max_size=60), st.integers(0, 10**6))
def test_no_short_text_is_cut_wrongly(made, text, seed):
    for ours, library in made.values():
        expected = library(text)
        assert ours.encode(text).tolist() == expected
        if text:
            parts = list(ours.encode_blocks(blocks_of(random.Random(seed), text.encode())))
            assert np.concatenate(parts).tolist() == expected


def test_a_long_text_is_encoded_in_parts_where_that_is_known_to_be_exact(made):
    blocks = [b"a few words " * 50] * 40
    parts = {name: len(list(ours.encode_blocks(blocks))) for name, (ours, _) in made.items()}
    assert parts == {"gpt-neox": 41, "llama-3": 41, "mistral": 41, "wordpiece": 41, "unigram": 1, "llama-2-json": 1}


def test_what_is_lossless_comes_back_and_what_is_not_says_why(made):
    rng = random.Random(3)
    texts = [mixed_text(rng, 30) for _ in range(40)]
    lossy = {name: [text for text in texts if ours.decode(ours.encode(text)) != text] for name, (ours, _) in made.items()}
    assert lossy["llama-3"] == []
    assert made["llama-3"][0].lossy == ()
    assert made["gpt-neox"][0].lossy == ("normalisation NFC",)
    assert all("e\u0301" in text for text in lossy["gpt-neox"])
    assert lossy["gpt-neox"]
    assert all("\u2581" in text for text in lossy["mistral"])
    assert lossy["mistral"]
    assert {"unknown characters", "case", "whitespace"} <= set(made["wordpiece"][0].lossy)
    assert {"unknown characters", "normalisation nmt_nfkc", "runs of spaces"} <= set(made["unigram"][0].lossy)
    for name in ("wordpiece", "unigram"):
        ours, library = made[name]
        assert ours.unknown_id in library("\u0e01")
        assert len(lossy[name]) == len(texts)


def test_decoding_and_continuing_are_the_librarys(made):
    library = sentencepiece.SentencePieceProcessor(model_file=made["mistral"][0].path)
    for name in ("gpt-neox", "llama-3", "mistral", "llama-2-json", "wordpiece"):
        ours = made[name][0]
        ids = ours.encode("The lane reads units").tolist()
        expected = "the lane reads units" if name == "wordpiece" else "The lane reads units"
        assert ours.decode([ours.eod_id, *ids, ours.eod_id]) == expected
        if name != "wordpiece":
            assert ours.decode(ids[:2]) + ours.continuation(ids[:2], ids[2:]) == expected, name
    ids = made["mistral"][0].encode("The lane 語学").tolist()
    assert made["mistral"][0].decode(ids) == library.decode(ids)


def test_the_eod_token_is_the_tokenizers_own_or_named(made, tmp_path):
    names = {name: (ours.eod_id, ours.eod_token) for name, (ours, _) in made.items()}
    neox, llama = (json.loads(Path(made[name][0].path).read_text()) for name in ("gpt-neox", "llama-3"))
    ids = {token["content"]: token["id"] for spec in (neox, llama) for token in spec["added_tokens"]}
    assert names["gpt-neox"] == (ids["<|endoftext|>"], None)
    assert names["llama-3"] == (ids["<|end_of_text|>"], None)
    assert load_tokenizer(made["mistral"][0].path, "<s>").eod_id == 1
    assert names["mistral"] == (2, None)
    path = made["llama-3"][0].path
    assert load_tokenizer(path, "<|eot_id|>").fingerprint != made["llama-3"][0].fingerprint
    (tmp_path / "tokenizer.json").write_text(Path(path).read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|eot_id|>"}}))
    assert load_tokenizer(tmp_path).eod_id == ids["<|eot_id|>"]
    with pytest.raises(DataError, match=r"no token '<nothing>'.*<\|end_of_text\|>"):
        load_tokenizer(path, "<nothing>")
    with pytest.raises(DataError, match=r"does not say which token ends a document.*\[SEP\]"):
        load_tokenizer(made["wordpiece"][0].path)


def test_fingerprints_cover_what_changes_ids_and_nothing_else(made, tmp_path):
    ours = made["gpt-neox"][0]
    spec = json.loads(Path(ours.path).read_text())

    def changed(**parts):
        (tmp_path / "t.json").write_text(json.dumps(spec | parts))
        return load_tokenizer(tmp_path / "t.json")

    assert changed(truncation=None, post_processor=None, decoder=None).fingerprint == ours.fingerprint
    others = [
        {"normalizer": None},
        {"added_tokens": spec["added_tokens"][:-1]},
        {"pre_tokenizer": {**spec["pre_tokenizer"], "use_regex": False}},
    ]
    others.append({"model": spec["model"] | {"merges": spec["model"]["merges"][:-1]}})
    assert len({changed(**other).fingerprint for other in others} | {ours.fingerprint}) == 5
    with pytest.raises(DataError, match=r"dropout=0\.1: its ids differ"):
        changed(model=spec["model"] | {"dropout": 0.1})


def test_damaged_files_are_named(made, tmp_path):
    path = tmp_path / "tokenizer.json"
    for content in ("{", "{}", '{"model": 3}', Path(made["gpt-neox"][0].path).read_text()[:-50]):
        path.write_text(content)
        with pytest.raises(DataError, match=r"damaged or no tokenizer\.json"):
            load_tokenizer(path)
    with pytest.raises(DataError, match="holds neither"):
        load_tokenizer(tmp_path.parent)


def test_a_byte_level_tokenizer_of_ones_own_loses_nothing(tmp_path):
    rng = random.Random(2)
    texts = [mixed_text(rng, 50) for _ in range(40)]
    report = train_tokenizer(texts, tmp_path / "tokenizer.json", 350, kind="hf-bpe", threads=1)
    again = train_tokenizer(texts[::-1], tmp_path / "again.json", 350, kind="hf-bpe", threads=2)
    assert report.fingerprint == again.fingerprint
    ours = load_tokenizer(tmp_path / "tokenizer.json")
    assert (ours.vocab_size, ours.lossy) == (350, ())
    for text in texts:
        assert ours.decode(ours.encode(text)) == text
    for size, what in ((200, "257 is the least"), (90_000, "supports at most [0-9]+")):
        with pytest.raises(DataError, match=what):
            train_tokenizer(texts, tmp_path / "none.json", size, kind="hf-bpe", threads=1)
    assert not (tmp_path / "none.json").exists()


@pytest.mark.parametrize(("kind", "name"), [("hf-bpe", "tokenizer.json"), ("sentencepiece", "tokenizer.model")])
def test_the_command_trains_either_kind(text_folder, tmp_path, capsys, kind, name):
    out = tmp_path / name
    assert main(["tokenizer", "train", str(text_folder), "--kind", kind, "--vocab-size", "300", "--out", str(out)]) == 0
    ours = load_tokenizer(out)
    assert (ours.vocab_size, ours.lossy) == (300, ())
    assert ours.fingerprint[:16] in capsys.readouterr().out


def test_a_lossy_tokenizer_is_reported_with_its_rates_and_bits_per_byte_divides_by_the_text(made, tmp_path, quiet):
    rng = random.Random(4)
    texts = [mixed_text(rng, 40) for _ in range(50)]
    (tmp_path / "all.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    ours = made["wordpiece"][0]
    arguments = {"workers": 1, "progress": quiet, "validation_fraction": 0.4, "tokenizer": ours.path, "eod_token": "[SEP]"}
    report = prepare([tmp_path / "all.jsonl"], tmp_path / "tokens", **arguments)
    ids = [ours.encode(text) for text in texts]
    unknown, tokens = sum(int((each == ours.unknown_id).sum()) for each in ids), sum(map(len, ids))
    assert "lossy (unknown characters, case" in str(report)
    assert f"{unknown:,} of {tokens:,} tokens ({unknown / tokens:.3%}) are unknown, 50 of 50 documents" in str(report)
    dataset = Dataset.open(tmp_path / "tokens")
    held = evaluation_batches(dataset, ours, sequence_length=64, micro_batch_size=1, max_tokens=10**6, data_rank=0, data_size=1)
    assert held.text_bytes == dataset.totals["validation"]["text_bytes"] > 0
    assert held.documents < 50
    assert sum(total["text_bytes"] for total in dataset.totals.values()) == sum(len(text.encode()) for text in texts)
