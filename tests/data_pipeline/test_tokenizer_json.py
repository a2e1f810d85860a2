"""SentencePiece models as tokenizer.json: the ids are the library's own, or there is none."""

import json
import random

import pytest
import tokenizers
from support.tokenizers import MAKERS, VOCABULARY, mixed_text, sentencepiece_model

from baton.data_pipeline import tokenizer_json
from baton.data_pipeline.tokenizer import load_tokenizer
from baton.data_pipeline.tokenizer_training import train_tokenizer

LLAMA_2 = {
    "model_type": "bpe", "vocab_size": VOCABULARY + 260, "byte_fallback": True, "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False, "allow_whitespace_only_pieces": True, "split_digits": True, "character_coverage": 0.99,
}  # fmt: skip


def texts(seed):
    """Without the names of special tokens, which transformers finds in a text."""
    rng = random.Random(seed)
    found = [mixed_text(rng, 60) for _ in range(80)]
    for name in ("<s>", "</s>", "<unk>", "<doc>", "\u2581"):
        found = [text.replace(name, "") for text in found]
    return found


def test_a_tokenizer_trained_here_has_the_same_ids_and_text(tmp_path):
    train_tokenizer(texts(1), tmp_path / "own.model", 500)
    own = load_tokenizer(tmp_path / "own.model")
    written = tokenizer_json.as_tokenizer_json(own, (tmp_path / "own.model").read_bytes())
    theirs = tokenizers.Tokenizer.from_str(written)
    for text in texts(2):
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ids == own.encode(text).tolist()
        assert theirs.decode(ids) == text
    (tmp_path / "tokenizer.json").write_text(written)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer_json.tokenizer_config(written, own.eod_id)))
    assert load_tokenizer(tmp_path / "tokenizer.json").eod_id == own.eod_id


def test_so_has_one_like_llamas(tmp_path):
    sentencepiece_model(tmp_path / "llama.model", **LLAMA_2)
    model = load_tokenizer(tmp_path / "llama.model")
    theirs = tokenizers.Tokenizer.from_str(tokenizer_json.as_tokenizer_json(model, (tmp_path / "llama.model").read_bytes()))
    for text in texts(2):
        assert theirs.encode(text, add_special_tokens=False).ids == model.encode(text).tolist()


@pytest.mark.parametrize("name", ["mistral", "unigram"])
def test_one_that_would_have_other_ids_is_not_converted(name, tmp_path):
    """Symbols behind which the space in front would be put again; and Unigram pieces that overlap with symbols."""
    MAKERS[name][0](tmp_path / "some.model")
    model = load_tokenizer(tmp_path / "some.model")
    assert tokenizer_json.as_tokenizer_json(model, (tmp_path / "some.model").read_bytes()) is None


def test_a_text_with_other_ids_is_enough(tmp_path, monkeypatch):
    """Without the texts of pieces, the one text that is given decides."""
    MAKERS["mistral"][0](tmp_path / "some.model")
    model, content = load_tokenizer(tmp_path / "some.model"), (tmp_path / "some.model").read_bytes()
    monkeypatch.setattr(tokenizer_json, "_probes", lambda model: [])
    assert tokenizer_json.as_tokenizer_json(model, content, ["no symbol in it"]) is not None
    assert tokenizer_json.as_tokenizer_json(model, content, ["no symbol in it", "one[SEP] of them"]) is None
