"""Text to token ids and back: SentencePiece BPE with byte fallback, lossless for every string.

A text is cut where no piece can reach across (before a run of spaces or newlines) and the parts are encoded separately. The ids are
those of the whole text, and the time is linear, where SentencePiece's grows faster than a text's length.
"""

import hashlib
import heapq
import io
import os
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import sentencepiece
from sentencepiece import sentencepiece_model_pb2 as model_pb2

from baton.data_pipeline.errors import DataError, is_transient, unreadable
from baton.data_pipeline.file_io import retry_transient
from baton.data_pipeline.files import write_atomically

EOD_PIECE = "<doc>"
SPACE = "\u2581"  # SentencePiece writes a space as this character; the character itself is spelt in bytes
_SPACE_UTF8 = SPACE.encode()
_SYMBOLS = ("\n", "\n\n", "\t")  # whitespace the trainer cannot learn by itself
_SMALLEST_VOCABULARY = 2 + len(_SYMBOLS) + 256 + 1  # unknown, EOD, symbols, bytes, space

_CUT = re.compile(rb"[^ \n](?=[ \n])")
_PART_BYTES = 2048  # measured fastest between 0.5 and 4 KiB
# The trainer skips sentences that are longer than this, or that hold one of its own working characters.
_SENTENCE_BYTES = 4000
_RESERVED = re.compile("[\n\t\0\u2581\u2585]+")

Ids = npt.NDArray[np.int32]


@dataclass(frozen=True)
class TokenizerReport:
    """What `train_tokenizer` did: `documents` and `text_bytes` (UTF-8) it learned from, and the vocabulary it wrote."""

    path: str
    vocab_size: int
    fingerprint: str
    documents: int
    text_bytes: int

    def __str__(self) -> str:
        learned = f"learned from {self.documents:,} documents ({self.text_bytes / 1e6:,.1f} MB)"
        return f"{self.path}: {self.vocab_size:,} pieces, {learned}, fingerprint {self.fingerprint[:16]}"


def train_tokenizer(
    texts: Iterable[str],
    path: str | os.PathLike[str],
    vocab_size: int,
    *,
    max_bytes: int = 64 << 20,
    character_coverage: float = 0.9999,
    threads: int | None = None,
) -> TokenizerReport:
    """Train SentencePiece BPE on `texts` and write the model to `path`, whole or not at all.

    texts: documents. At most `max_bytes` UTF-8 bytes of them are used (kept in memory): those with the smallest content hash, so
    that the choice is a sample of all of them and does not depend on their order.
    vocab_size: pieces in all, among them 256 bytes, the EOD token and three whitespace symbols. Each digit is a piece of its
    own, runs of spaces are pieces (indentation), and no piece crosses a space, a newline or a tab.
    character_coverage: share of the text's characters that get a piece; the others are spelt in bytes.
    threads: training threads (none: the usable cores); the vocabulary does not depend on it.
    Raises DataError: no text, or a vocabulary too large or too small for it.
    """
    path = Path(path)
    if vocab_size < _SMALLEST_VOCABULARY:
        raise DataError(
            f"vocab_size {vocab_size} is too small; {_SMALLEST_VOCABULARY} is the least (256 bytes and the fixed symbols)"
        )
    sample = _sample(texts, max_bytes)
    if not any(True for _ in _sentences(sample)):
        raise DataError(f"no text to train the tokenizer {path} on; check the inputs and their include patterns")
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_sentences(sample),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            character_coverage=character_coverage,
            required_chars=SPACE,  # else a corpus without spaces would spell them in the bytes of U+2581
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            user_defined_symbols=list(_SYMBOLS),
            control_symbols=[EOD_PIECE],
            unk_id=0,
            bos_id=-1,
            eos_id=-1,
            pad_id=-1,
            num_threads=threads or len(os.sched_getaffinity(0)),
            minloglevel=2,
        )
    except RuntimeError as error:
        limit = re.search(r"Vocabulary size too high.*?<= (\d+)", str(error))
        if limit:
            raise DataError(f"vocab_size {vocab_size} is too large for this text; it supports at most {limit[1]}") from error
        least = re.search(r"smaller than required_chars.*? vs (\d+)", str(error))
        if least:
            raise DataError(
                f"vocab_size {vocab_size} is too small for this text: {least[1]} is the least that works (its characters, the "
                f"bytes and the fixed symbols), and only more than that learns pieces of several characters"
            ) from error
        reason = re.sub(r"^.*?\.cc\(\d+\) *", "", " ".join(str(error).split()))  # without the line of its source
        raise DataError(f"SentencePiece could not train {path}: {reason}; check the texts") from error
    write_atomically(path, model.getvalue())
    return TokenizerReport(
        str(path), vocab_size, Tokenizer(path).fingerprint, len(sample), sum(len(text.encode(errors="replace")) for text in sample)
    )


def _sample(texts: Iterable[str], max_bytes: int) -> list[str]:
    """The documents of smallest content hash that together reach `max_bytes`, in order of that hash."""
    heap: list[tuple[int, int, str]] = []  # largest hash first
    total = 0
    for text in texts:
        content = text.encode(errors="replace")
        heapq.heappush(heap, (-int.from_bytes(hashlib.blake2b(content, digest_size=8).digest()), len(content), text))
        total += len(content)
        while total - heap[0][1] >= max_bytes:
            total -= heapq.heappop(heap)[1]
    return [text for _, size, text in sorted(heap, reverse=True) if size]


def _sentences(texts: Iterable[str]) -> Iterator[str]:
    """Lines, cut where they are too long for the trainer."""
    for text in texts:
        for line in _RESERVED.split(text):
            content = line.encode(errors="replace")
            while len(content) > _SENTENCE_BYTES:
                cut = content.rfind(b" ", 1, _SENTENCE_BYTES)
                if cut < 0:
                    cut = _SENTENCE_BYTES
                    while content[cut] & 0xC0 == 0x80:  # inside a character
                        cut -= 1
                yield content[:cut].decode()
                content = content[cut:]
            if content:
                yield content.decode()


class Tokenizer:
    """A vocabulary trained by `train_tokenizer`, read from its .model file.

    Attributes: `path`; `vocab_size` (ids are 0 <= id < vocab_size); `eod_id`, the id of the EOD token, which `encode` never makes;
    `fingerprint`, a hex sha256 over pieces, scores, types and normaliser settings (equal vocabularies have equal fingerprints,
    wherever their files came from). Raises DataError when the file is missing, is no SentencePiece model, or is one that would lose
    text.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = str(path)
        try:
            content = retry_transient(Path(path).read_bytes)
        except OSError as error:
            if is_transient(error):
                raise unreadable(path, error) from error
            raise DataError(f"cannot read the tokenizer {path}: {error.strerror}; train one or correct the path") from error
        model = model_pb2.ModelProto()
        try:
            model.ParseFromString(content)
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=content)
        except Exception as error:
            raise DataError(
                f"the tokenizer {path} is damaged or not a SentencePiece model; restore it or train a new one"
            ) from error
        self._bytes_of = _checked_pieces(model, self.path)
        self.vocab_size = len(self._bytes_of)
        self.eod_id = self._processor.piece_to_id(EOD_PIECE)
        self.fingerprint = _fingerprint(model)
        self._space_ids: Ids = np.array([self._processor.piece_to_id(f"<0x{byte:02X}>") for byte in _SPACE_UTF8], dtype=np.int32)

    def encode(self, text: str) -> Ids:
        """int32[n] ids of `text`, without the EOD token. Raises DataError when `text` holds a lone surrogate (it has no
        UTF-8)."""
        try:
            return self.encode_utf8(text.encode())
        except UnicodeEncodeError as error:
            raise DataError(
                f"text cannot be tokenized: {error.reason} at character {error.start}; remove the lone surrogate"
            ) from error

    def encode_utf8(self, content: bytes) -> Ids:
        """`encode` for text that is already UTF-8 (which must be valid: the documents of a prepared dataset are)."""
        if _SPACE_UTF8 not in content:
            return _joined(self._encode_parts(content))
        parts: list[Ids] = []
        for i, segment in enumerate(content.split(_SPACE_UTF8)):
            if i:
                parts.append(self._space_ids)
            parts += self._encode_parts(segment)
        return _joined(parts)

    def encode_blocks(self, blocks: Iterable[bytes]) -> Iterator[Ids]:
        """`encode_utf8` of a text that comes in blocks, cut anywhere, also inside a character: the same ids, in pieces.

        In memory are a block, its ids, and what has come since the last place that no piece can reach across: a word, mostly. A
        stretch without such a place (one letter a million times) is kept whole, because its ids depend on all of it.
        """
        rest = bytearray()
        searched = 0  # no place to cut begins before this byte
        for block in blocks:
            rest += block
            cut, searched = self._last_cut(rest, searched)
            if cut:
                yield self.encode_utf8(bytes(rest[:cut]))
                del rest[:cut]
        if rest:
            yield self.encode_utf8(bytes(rest))

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """`encode` of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: npt.ArrayLike, errors: str = "strict") -> str:
        """The text of `ids`, int[n]: `decode(encode(text)) == text` for every text. The EOD token (and the unknown
        piece, which `encode` never makes either) decode to nothing.

        errors: what to do with bytes that are not UTF-8, which only a model's own output can hold: "strict" raises DataError,
        "replace" puts U+FFFD. Raises DataError for an id outside the vocabulary.
        """
        numbers = np.asarray(ids, dtype=np.int64)
        if numbers.size and not 0 <= numbers.min() <= numbers.max() < self.vocab_size:
            raise DataError(f"an id is outside the vocabulary of {self.path} (0 <= id < {self.vocab_size}); use its own tokenizer")
        try:
            return b"".join([self._bytes_of[i] for i in numbers.tolist()]).decode("utf-8", errors)
        except UnicodeDecodeError as error:
            raise DataError(
                f"these ids are not valid UTF-8 text (byte {error.start}); decode sampled ids with errors='replace'"
            ) from error

    def _last_cut(self, content: bytearray, start: int) -> tuple[int, int]:
        """The last place to cut behind a character that begins at `start` or later, 0 if there is none; and where to go on
        searching when more has come."""
        space = max(content.rfind(b" ", start), content.rfind(b"\n", start))
        word = len(content[start:space].rstrip(b" \n")) if space > start else 0
        if word:
            return start + word, 0
        text = content[start:].decode("utf-8", "ignore")  # it may end inside a character
        for i in range(len(text) - 1, 0, -1):
            if text[i - 1 : i + 1] not in self._neighbours:
                return start + len(text[:i].encode()), 0
        return 0, start + len(text[:-1].encode())

    @cached_property
    def _neighbours(self) -> frozenset[str]:
        """Every two characters that stand side by side in a piece. BPE joins nothing across any others."""
        texts = (piece.decode() for piece in self._bytes_of if len(piece) > 1)
        return frozenset(text[i : i + 2] for text in texts for i in range(len(text) - 1))

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


def _joined(parts: list[Ids]) -> Ids:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32)


def _fingerprint(model: model_pb2.ModelProto) -> str:
    digest = hashlib.sha256(b"baton tokenizer 1")
    for entry in model.pieces:
        piece = entry.piece.encode()
        digest.update(struct.pack("<IfI", len(piece), entry.score, entry.type) + piece)
    digest.update(model.normalizer_spec.SerializeToString(deterministic=True))
    return digest.hexdigest()


def _checked_pieces(model: model_pb2.ModelProto, path: str) -> list[bytes]:
    """The bytes each id stands for; refuses a model that would lose text or whose pieces reach across our cuts."""

    def require(condition: bool, what: str) -> None:
        if not condition:
            raise DataError(
                f"the tokenizer {path} is not lossless here ({what}); train one with train_tokenizer (`baton tokenizer train`)"
            )

    kinds = model_pb2.ModelProto.SentencePiece
    spec, trainer = model.normalizer_spec, model.trainer_spec
    require(trainer.model_type == model_pb2.TrainerSpec.BPE, "it is not BPE")
    require(trainer.byte_fallback, "it has no byte fallback")
    require(spec.name == "identity" and not spec.precompiled_charsmap, "it normalises text")
    require(not spec.add_dummy_prefix and not spec.remove_extra_whitespaces and spec.escape_whitespaces, "it changes whitespace")
    require(not trainer.treat_whitespace_as_suffix, "it ends words with their space")
    texts: list[bytes] = []
    controls: list[str] = []
    spelt: set[bytes] = set()
    for entry in model.pieces:
        text = b""
        if entry.type == kinds.CONTROL:
            controls.append(entry.piece)
        elif entry.type == kinds.BYTE:
            text = bytes([int(entry.piece[3:5], 16)])
            spelt.add(text)
        elif entry.type in (kinds.NORMAL, kinds.USER_DEFINED):
            text = entry.piece.replace(SPACE, " ").encode()
            if entry.type == kinds.NORMAL:
                require(
                    "\n" not in entry.piece and not re.search(r"[^ ] ", text.decode()), f"piece {entry.piece!r} crosses a space"
                )
            else:
                require(entry.piece in _SYMBOLS, f"unexpected symbol {entry.piece!r}")
        else:
            require(entry.type == kinds.UNKNOWN, f"piece {entry.piece!r} is unused")
        texts.append(text)
    require(controls == [EOD_PIECE], f"its control symbols are {controls}, not [{EOD_PIECE!r}]")
    require(len(spelt) == 256, "some bytes have no piece")
    require(any(entry.piece == SPACE and entry.type == kinds.NORMAL for entry in model.pieces), "the space has no piece")
    return texts
