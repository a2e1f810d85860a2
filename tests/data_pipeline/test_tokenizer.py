"""A tokenizer of one's own loses nothing, invents nothing, and gives the ids SentencePiece would give for the whole text."""

import random
import re

import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.data_pipeline import sentencepiece_tokenizer as module
from baton.data_pipeline.errors import DataError
from baton.data_pipeline.tokenizer import load_tokenizer
from baton.data_pipeline.tokenizer_training import train_tokenizer

TRICKY = [
    "\u2581",
    "\u2585",
    " ",
    "  ",
    "\n",
    "\n\n",
    "\t",
    "\r\n",
    "\0",
    "\ufffd",
    "\ufeff",
    "<doc>",
    "<s>",
    "<unk>",
    "<0x0A>",
    "é",
    "e\u0301",
    "a",
    "1",
]
ANY_TEXT = st.one_of(
    st.text(),
    st.lists(st.one_of(st.sampled_from(TRICKY), st.text(max_size=3)), max_size=40).map("".join),
    st.text(" \n\u2581ab", max_size=60),
)


@settings(max_examples=400)
@given(ANY_TEXT)
def test_every_string_comes_back(tokenizer, text):
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert tokenizer.decode(ids) == text
    assert tokenizer.eod_id not in ids
    assert 0 not in ids  # the unknown piece


@settings(max_examples=60)
@given(st.integers(0, 10**9))
def test_parts_give_the_ids_of_the_whole(tokenizer, make_text, seed):
    text = make_text(random.Random(seed), 120).replace("\u2581", "")
    whole = sentencepiece.SentencePieceProcessor(model_file=tokenizer.path).encode(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_PART_BYTES", 7)
        np.testing.assert_array_equal(tokenizer.encode(text), whole)
    np.testing.assert_array_equal(tokenizer.encode(text), whole)


def test_long_texts_without_a_place_to_cut_come_back(tokenizer):
    for text in ("x" * 10_000, "語" * 5_000, " " * 10_000, "\n" * 9_999, "\u2581" * 3_000):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_batches_are_encoded_one_by_one(tokenizer, texts):
    for ids, text in zip(tokenizer.encode_batch(texts), texts, strict=True):
        np.testing.assert_array_equal(ids, tokenizer.encode(text))


def test_the_mark_is_the_only_control_and_decodes_to_nothing(tokenizer):
    assert 0 <= tokenizer.eod_id < tokenizer.vocab_size == 420
    ids = [tokenizer.eod_id, *tokenizer.encode("<doc>").tolist(), tokenizer.eod_id]
    assert tokenizer.decode(ids) == "<doc>"


def test_digits_are_single_and_spaces_join(tokenizer):
    assert len(tokenizer.encode("1111")) == 4
    assert len(tokenizer.encode("        ")) < 8


def test_fingerprint_is_of_the_vocabulary_not_of_the_file(texts, tokenizer, other_tokenizer, tmp_path):
    report = train_tokenizer(reversed(texts), tmp_path / "again.model", 420, threads=2)
    assert report.fingerprint == tokenizer.fingerprint != other_tokenizer.fingerprint
    assert (report.documents, report.vocab_size) == (len(texts), 420)
    assert "420 pieces" in str(report)


def test_a_corpus_without_spaces_still_has_a_space(tmp_path):
    train_tokenizer(["".join(chr(97 + (i * i + j) % 26) for i in range(50)) for j in range(40)], tmp_path / "t.model", 300)
    loaded = load_tokenizer(tmp_path / "t.model")
    assert loaded.decode(loaded.encode(" a b ")) == " a b "


def test_training_reads_no_more_than_asked_whatever_the_order(texts, tmp_path):
    few = [train_tokenizer(order, tmp_path / "t.model", 330, max_bytes=30_000) for order in (texts, texts[::-1])]
    assert few[0] == few[1]
    assert 30_000 <= few[0].text_bytes < 36_000


def test_sampled_ids_that_are_no_text_are_named_or_replaced(tokenizer):
    half = tokenizer.encode("\u2585")[:2]
    with pytest.raises(DataError, match="errors='replace'"):
        tokenizer.decode(half)
    assert tokenizer.decode(half, errors="replace") == "\ufffd"
    for outside in ([-1], [420], np.array([2**40])):
        with pytest.raises(DataError, match="0 <= id < 420"):
            tokenizer.decode(outside)


def test_a_lone_surrogate_is_refused_by_place(tokenizer):
    with pytest.raises(DataError, match="character 2"):
        tokenizer.encode("ab\ud800c")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"vocab_size": 100}, "262 is the least"),
        ({"vocab_size": 50_000}, "supports at most [0-9]+"),
        ({"vocab_size": 300, "texts": []}, "no text to train"),
        ({"vocab_size": 300, "texts": ["", ""]}, "no text to train"),
        ({"vocab_size": 300, "texts": ["\n\n", "\u2581", "\0"]}, "no text to train"),
    ],
)
def test_untrainable_vocabularies_are_named_and_leave_nothing(texts, tmp_path, arguments, message):
    with pytest.raises(DataError, match=message):
        train_tokenizer(**{"texts": texts, "path": tmp_path / "t.model", **arguments})
    assert not list(tmp_path.iterdir())


def test_more_characters_than_pieces_are_refused_with_the_least_vocabulary_that_works(tmp_path):
    texts = ["".join(chr(0x4E00 + (i * 7 + 13 * j) % 700) for i in range(60)) + " a" for j in range(60)]
    with pytest.raises(DataError) as caught:
        train_tokenizer(texts, tmp_path / "t.model", 400, threads=1)
    message = str(caught.value)
    for word in ("SentencePiece", ".cc(", "coverage"):
        assert word not in message
    least = int(re.search(r"([0-9]+) is the least that works", message)[1])
    with pytest.raises(DataError, match=f"{least} is the least that works"):
        train_tokenizer(texts, tmp_path / "t.model", least - 1, threads=1)
    assert not list(tmp_path.iterdir())
    assert train_tokenizer(texts, tmp_path / "t.model", least, threads=1).vocab_size == least


def test_files_that_are_no_tokenizer_are_refused(tmp_path):
    with pytest.raises(DataError, match="cannot read the tokenizer"):
        load_tokenizer(tmp_path / "none.model")
    (tmp_path / "bad.model").write_bytes(b"not a model")
    with pytest.raises(DataError, match="not a SentencePiece model"):
        load_tokenizer(tmp_path / "bad.model")
