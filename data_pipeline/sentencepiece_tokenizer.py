"""SentencePiece models: BPE and Unigram, with any normalisation, prefix, byte fallback and symbols.

A model of `tokenizer_training` loses nothing: the characters that SentencePiece uses for itself are spelt in bytes.

For BPE with byte fallback that does not normalise (Llama's and Mistral's models too), a text is cut where no piece can reach across
(before a run of spaces or newlines) and the parts are encoded separately. The ids are those of the whole text, and the time is
linear, where SentencePiece's grows faster than a text's length. Other models get the whole text: a Unigram model adds scores along
it, whose rounding may decide, and a normalisation may work across any place.
"""

import hashlib
import re
import struct
from functools import cached_property
from pathlib import Path

import numpy as np
import sentencepiece
from sentencepiece import sentencepiece_model_pb2 as model_pb2

from baton.data_pipeline.errors import DataError
from baton.data_pipeline.tokenizer_base import Ids, Tokenizer, declared_eod, joined, no_eod

EOD_PIECE = "<doc>"
SPACE = "\u2581"  # SentencePiece writes a space as this character
SYMBOLS = ("\n", "\n\n", "\t")  # whitespace that the trainer cannot learn by itself
_SPACE_UTF8 = SPACE.encode()

_CUT = re.compile(rb"[^ \n](?=[ \n])")
_CROSSES = re.compile(r"[^ \n][ \n]")
_PART_BYTES = 2048  # measured fastest between 0.5 and 4 KiB

_Kinds = model_pb2.ModelProto.SentencePiece


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model. path, eod_token: see `load_tokenizer`; content: the file's bytes. Raises DataError."""

    def __init__(self, path: Path, content: bytes, eod_token: str | None) -> None:
        self.path, self.eod_token = str(path), eod_token
        model = model_pb2.ModelProto()
        try:
            model.ParseFromString(content)
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=content)
            if not model.pieces:  # an empty file is a valid message of nothing
                raise ValueError("no pieces")
        except Exception as error:
            raise DataError(
                f"the tokenizer {path} is damaged or not a SentencePiece model (nor a tokenizer.json); restore it or train one"
            ) from error
        kinds = {entry.piece: (number, entry.type) for number, entry in enumerate(model.pieces)}
        self.vocab_size = len(model.pieces)
        self.eod_id = _eod_id(self, kinds, self._processor.eos_id())
        spec, trainer = model.normalizer_spec, model.trainer_spec
        self._bytes_of = _bytes_of(model)
        unchanged = spec.escape_whitespaces and spec.name == "identity" and not spec.precompiled_charsmap
        unchanged = unchanged and not spec.remove_extra_whitespaces and not trainer.treat_whitespace_as_suffix
        complete = trainer.byte_fallback and sum(entry.type == _Kinds.BYTE for entry in model.pieces) == 256
        self.unknown_id = None if complete else next((n for n, e in enumerate(model.pieces) if e.type == _Kinds.UNKNOWN), None)
        own = (EOD_PIECE in kinds and kinds[EOD_PIECE][1] == _Kinds.CONTROL) and unchanged and complete
        own = own and not spec.add_dummy_prefix and kinds.get(SPACE, (0, None))[1] == _Kinds.NORMAL
        self._prefix = b" " if spec.add_dummy_prefix else b""
        self._suffixed = trainer.treat_whitespace_as_suffix
        self._cuttable = unchanged and complete and trainer.model_type == model_pb2.TrainerSpec.BPE
        self._cuttable = self._cuttable and not any(
            entry.type == _Kinds.UNUSED or _CROSSES.search(text.decode("utf-8", "replace"))
            for entry, text in zip(model.pieces, self._bytes_of)
        )
        self._space_ids: Ids | None = None
        if own and self._cuttable:
            self._space_ids = np.array([self._processor.piece_to_id(f"<0x{byte:02X}>") for byte in _SPACE_UTF8], dtype=np.int32)
        self._denormalizes = bool(model.denormalizer_spec.precompiled_charsmap)
        self.lossy = tuple(_losses(model, complete, self._space_ids is not None))
        self.fingerprint = _fingerprint(model, self.eod_id)
        if self._cuttable and self._prefix:  # `_encode_part` puts the space in front, of the first part alone
            bare = model_pb2.ModelProto()
            bare.CopyFrom(model)
            bare.normalizer_spec.add_dummy_prefix = False
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=bare.SerializeToString())

    def _encode_part(self, content: bytes, begins: bool) -> Ids:
        if not self._cuttable:
            encoded: Ids = self._processor.encode(content, return_type="numpy")
            return encoded
        if begins and content:
            content = self._prefix + content
        if _SPACE_UTF8 not in content:
            return joined(self._encode_parts(content))
        if self._space_ids is None:  # a space to SentencePiece, of which the places to cut must know
            return joined(self._encode_parts(content.replace(_SPACE_UTF8, b" ")))
        parts: list[Ids] = []
        for i, segment in enumerate(content.split(_SPACE_UTF8)):
            if i:
                parts.append(self._space_ids)
            parts += self._encode_parts(segment)
        return joined(parts)

    def _encode_parts(self, content: bytes) -> list[Ids]:
        encode = self._processor.encode
        parts: list[Ids] = []
        start = 0
        while len(content) - start > 2 * _PART_BYTES:
            cut = _CUT.search(content, start + _PART_BYTES)
            if cut is None:
                break
            parts.append(encode(content[start : cut.end()], return_type="numpy"))
            start = cut.end()
        if start < len(content):
            parts.append(encode(content[start:], return_type="numpy"))
        return parts

    def _decode(self, ids: list[int], errors: str) -> str:
        if self._denormalizes:
            text: str = self._processor.decode(ids)
            return text
        content = b"".join([self._bytes_of[i] for i in ids])
        if self._prefix:
            content = content.removesuffix(b" ") if self._suffixed else content.removeprefix(b" ")
        return content.decode("utf-8", errors)

    def _last_cut(self, content: bytearray, start: int) -> tuple[int, int]:
        if not self._cuttable:
            return 0, len(content)
        space = max(content.rfind(b" ", start), content.rfind(b"\n", start))
        word = len(content[start:space].rstrip(b" \n")) if space > start else 0
        if word and (self._space_ids is not None or not content.endswith(_SPACE_UTF8, 0, start + word)):
            return start + word, 0
        text = content[start:].decode("utf-8", "ignore")  # it may end inside a character
        for i in range(len(text) - 1, 0, -1):
            pair = text[i - 1 : i + 1]
            if pair.replace(SPACE, " ") not in self._neighbours and pair not in self._neighbours:
                return start + len(text[:i].encode()), 0
        return 0, start + len(text[:-1].encode())

    @cached_property
    def _neighbours(self) -> frozenset[str]:
        """Every two characters that stand side by side in a piece. BPE joins nothing across any others."""
        texts = (piece.decode() for piece in self._bytes_of if len(piece) > 1)
        return frozenset(text[i : i + 2] for text in texts for i in range(len(text) - 1))


def _eod_id(tokenizer: Tokenizer, kinds: dict[str, tuple[int, int]], eos_id: int) -> int:
    if tokenizer.eod_token is not None and tokenizer.eod_token in kinds:
        return kinds[tokenizer.eod_token][0]
    controls = {piece: number for piece, (number, kind) in kinds.items() if kind in (_Kinds.CONTROL, _Kinds.USER_DEFINED)}
    if tokenizer.eod_token is None:
        name, number = declared_eod(tokenizer.path)
        if name is not None and name in kinds:  # else it is a token that was added, which a tokenizer.json alone has
            return kinds[name][0]
        if number is not None and (number, _Kinds.CONTROL) in kinds.values():  # a configuration's default may be any piece's
            return number
        if EOD_PIECE in kinds and kinds[EOD_PIECE][1] == _Kinds.CONTROL:
            return kinds[EOD_PIECE][0]
        if eos_id >= 0:
            return eos_id
    raise no_eod(tokenizer, tokenizer.eod_token, controls)


def _bytes_of(model: model_pb2.ModelProto) -> list[bytes]:
    """The bytes that each id stands for."""
    found = []
    for entry in model.pieces:
        if entry.type == _Kinds.BYTE:
            found.append(bytes([int(entry.piece[3:5], 16)]))
        elif entry.type == _Kinds.UNKNOWN:
            found.append(b"" if model.trainer_spec.byte_fallback else model.trainer_spec.unk_surface.encode())
        elif entry.type == _Kinds.CONTROL:
            found.append(b"")
        else:
            found.append(entry.piece.replace(SPACE, " ").encode())
    return found


def _losses(model: model_pb2.ModelProto, complete: bool, spelt: bool) -> list[str]:
    spec = model.normalizer_spec
    found = []
    if not complete:
        found.append("unknown characters")
    if spec.precompiled_charsmap or spec.name not in ("identity", ""):
        found.append(f"normalisation {spec.name}" + (", case" if spec.name.endswith("_cf") else ""))
    if spec.remove_extra_whitespaces:
        found.append("runs of spaces")
    if not spelt:
        found.append("U+2581, which becomes a space")
    return found


def _fingerprint(model: model_pb2.ModelProto, eod_id: int) -> str:
    trainer = model.trainer_spec
    digest = hashlib.sha256(b"baton tokenizer 2")
    for entry in model.pieces:
        piece = entry.piece.encode()
        digest.update(struct.pack("<IfI", len(piece), entry.score, entry.type) + piece)
    digest.update(model.normalizer_spec.SerializeToString(deterministic=True))
    digest.update(struct.pack("<I??I", trainer.model_type, trainer.byte_fallback, trainer.treat_whitespace_as_suffix, eod_id))
    return digest.hexdigest()
