"""A SentencePiece model as a tokenizer.json of Hugging Face's `tokenizers`, for libraries that read no others.

Both may cut a text differently with one vocabulary: `tokenizers` orders merges by their parts and SentencePiece by what they make,
puts the space in front behind each symbol again, and finds names of special tokens and of bytes as Unigram pieces. So a
conversion is compared with the original on texts, and is returned only if its ids are the same. U+2581, which SentencePiece uses
for spaces, is a space in a tokenizer.json, and names of special tokens are not compared: transformers finds them in a text.
"""

import random
from collections.abc import Iterable

import numpy as np
from sentencepiece import sentencepiece_model_pb2 as model_pb2
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers

from baton.data_pipeline.sentencepiece_tokenizer import SPACE, SentencePieceTokenizer

_Kinds = model_pb2.ModelProto.SentencePiece
_TEXTS, _WORDS = 400, 40


def as_tokenizer_json(tokenizer: SentencePieceTokenizer, content: bytes, texts: Iterable[str] = ()) -> str | None:
    """The text of a tokenizer.json with the same ids, or None where none is found that has them.

    content: the model's file. texts: compared, beside texts made of the vocabulary's own pieces and of characters outside it.
    """
    model = model_pb2.ModelProto()
    model.ParseFromString(content)
    if model.trainer_spec.treat_whitespace_as_suffix or not model.normalizer_spec.escape_whitespaces:
        return None
    compared = [text.replace(SPACE, "") for text in (*texts, *_probes(model))]
    expected = [tokenizer.encode(text) for text in compared]
    converted = _converted(model)
    found = (converted.encode(text, add_special_tokens=False).ids for text in compared)
    return str(converted.to_str()) if all(map(np.array_equal, found, expected)) else None


def tokenizer_config(tokenizer_json: str, eod_id: int) -> dict[str, object]:
    """The tokenizer_config.json beside a tokenizer.json, whose token `eod_id` begins and ends documents."""
    end = Tokenizer.from_str(tokenizer_json).id_to_token(eod_id)
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": end,
        "eos_token": end,
        "clean_up_tokenization_spaces": False,
    }


def _converted(model: model_pb2.ModelProto) -> Tokenizer:
    trainer, spec = model.trainer_spec, model.normalizer_spec
    if trainer.model_type == model_pb2.TrainerSpec.UNIGRAM:
        scores = [(entry.piece, entry.score) for entry in model.pieces]
        unknown = next((n for n, entry in enumerate(model.pieces) if entry.type == _Kinds.UNKNOWN), None)
        found = Tokenizer(models.Unigram(scores, unk_id=unknown, byte_fallback=trainer.byte_fallback))
    else:
        vocabulary = {entry.piece: number for number, entry in enumerate(model.pieces)}
        unknown_piece = next((entry.piece for entry in model.pieces if entry.type == _Kinds.UNKNOWN), None)
        found = Tokenizer(
            models.BPE(vocabulary, _merges(model), unk_token=unknown_piece, fuse_unk=True, byte_fallback=trainer.byte_fallback)
        )
    steps: list[normalizers.Normalizer] = []
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if spec.add_dummy_prefix:
        steps.append(normalizers.Prepend(SPACE))
    found.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    restore: list[decoders.Decoder] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    found.decoder = decoders.Sequence([*restore, decoders.Strip(" ", 1, 0)] if spec.add_dummy_prefix else restore)
    found.add_special_tokens(
        [
            AddedToken(entry.piece, normalized=False, special=True)
            for entry in model.pieces
            if entry.type in (_Kinds.CONTROL, _Kinds.UNKNOWN)
        ]
    )
    symbols = [entry.piece.replace(SPACE, " ") for entry in model.pieces if entry.type == _Kinds.USER_DEFINED]
    found.add_tokens([AddedToken(symbol, normalized=False) for symbol in symbols])
    found.encode_special_tokens = True  # to SentencePiece, their names are text
    return found


def _merges(model: model_pb2.ModelProto) -> list[tuple[str, str]]:
    """Pairs of pieces that make a piece, those of the highest score first. Of one piece's, the pairs with frequent parts first."""
    scores = {entry.piece: entry.score for entry in model.pieces if entry.type == _Kinds.NORMAL}
    found = []
    for piece, score in scores.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in scores and right in scores:
                found.append((-score, -max(scores[left], scores[right]), cut, left, right))
    return [(left, right) for *_, left, right in sorted(found)]


def _probes(model: model_pb2.ModelProto) -> list[str]:
    """Texts of pieces in random order, of characters that may have no piece, and of spaces and newlines."""
    draw = random.Random(0)
    pieces = [entry.piece.replace(SPACE, " ") for entry in model.pieces if entry.type in (_Kinds.NORMAL, _Kinds.USER_DEFINED)]
    others = ["\U0001f680", "語", "é", "\u0301", " ", "  ", "    ", "\n", "\n\n", "\t", "\r\n", ".", "1234", "The", " a"]
    return [
        "".join(draw.choice(pieces if draw.random() < 0.7 and pieces else others) for _ in range(draw.randint(1, _WORDS)))
        for _ in range(_TEXTS)
    ]
