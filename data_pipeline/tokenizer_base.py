"""What every tokenizer has: text to token ids and back, whichever library makes them.

`Tokenizer` is the interface; `sentencepiece_tokenizer` and `hf_tokenizer` implement it, and `tokenizer.load_tokenizer` chooses. The
ids are those of the library for the whole text. A long text is encoded in parts only where that provably gives the same ids, since
a cursor counts tokens from the document's beginning.
"""

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from baton.data_pipeline.errors import DataError, UnknownEodError

Ids = npt.NDArray[np.int32]


class Tokenizer(ABC):
    """A vocabulary, read from a file.

    Attributes:
        path: the file's path.
        eod_token: the name of the EOD token as it was given to `load_tokenizer`; None: the tokenizer's own.
        vocab_size: ids are 0 <= id < vocab_size.
        eod_id: id of the EOD token, which stands between documents. Special tokens that are spelt out in a text are text:
            `encode` does not make their ids.
        unknown_id: id of text that has no other; None: there is no such text.
        lossy: what may keep a text from being the same after encoding and decoding, in words; (): nothing.
        fingerprint: hex sha256 of everything that decides ids. Equal vocabularies have equal fingerprints, wherever their files
            came from.
    """

    path: str
    eod_token: str | None
    vocab_size: int
    eod_id: int
    unknown_id: int | None
    lossy: tuple[str, ...]
    fingerprint: str

    @property
    def source(self) -> tuple[str, str | None]:
        """Arguments of `load_tokenizer` that load this tokenizer again, also in another process."""
        return self.path, self.eod_token

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
        return self._encode_part(content, True)

    def encode_blocks(self, blocks: Iterable[bytes]) -> Iterator[Ids]:
        """`encode_utf8` of a text that comes in blocks, cut anywhere, also inside a character: the same ids, in pieces.

        In memory are a block, its ids, and what has come since the last place that no token can reach across: a word, mostly. A
        stretch without such a place (one letter a million times) is kept whole, because its ids depend on all of it; so is all
        text of a tokenizer for which no such place is known.
        """
        rest = bytearray()
        searched = 0  # no place to cut begins before this byte
        begins = True
        for block in blocks:
            rest += block
            cut, searched = self._last_cut(rest, searched)
            if cut:
                yield self._encode_part(bytes(rest[:cut]), begins)
                begins = False
                del rest[:cut]
        if rest:
            yield self._encode_part(bytes(rest), begins)

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """`encode` of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: npt.ArrayLike, errors: str = "strict") -> str:
        """The text of `ids`, int[n]. Of a tokenizer that is not `lossy`, `decode(encode(text)) == text` for every text. Special
        tokens decode to nothing.

        errors: what to do with bytes that are not UTF-8, which only a model's own output can hold: "strict" raises DataError,
        "replace" puts U+FFFD. Raises DataError for an id outside the vocabulary.
        """
        numbers = np.asarray(ids, dtype=np.int64)
        if numbers.size and not 0 <= numbers.min() <= numbers.max() < self.vocab_size:
            raise DataError(f"an id is outside the vocabulary of {self.path} (0 <= id < {self.vocab_size}); use its own tokenizer")
        try:
            return self._decode(numbers.tolist(), errors)
        except UnicodeDecodeError as error:
            raise DataError(
                f"these ids are not valid UTF-8 text (byte {error.start}); decode sampled ids with errors='replace'"
            ) from error

    def continuation(self, before: Sequence[int], ids: Sequence[int]) -> str:
        """The text that `ids` add to that of `before`. Decoding `ids` alone would lose their first space where the tokenizer puts
        a space in front of every text."""
        return self.decode([*before, *ids], errors="replace")[len(self.decode(before, errors="replace")) :]

    @abstractmethod
    def _encode_part(self, content: bytes, begins: bool) -> Ids:
        """Ids of the part of a text between two cuts. begins: it is the text's beginning."""

    def _last_cut(self, content: bytearray, start: int) -> tuple[int, int]:
        """The last place to cut behind a character that begins at `start` or later, 0 if there is none; and where to go on
        searching when more has come."""
        return 0, len(content)

    @abstractmethod
    def _decode(self, ids: list[int], errors: str) -> str:
        """`decode` of ids that are in the vocabulary. May raise UnicodeDecodeError."""


@dataclass(frozen=True)
class Losses:
    """What a tokenizer lost of some text. tokens: encoded, `unknown` of them the unknown token; documents: decoded again, `changed`
    of them to another text."""

    tokens: int = 0
    unknown: int = 0
    documents: int = 0
    changed: int = 0

    def __add__(self, other: "Losses") -> "Losses":
        return Losses(
            self.tokens + other.tokens,
            self.unknown + other.unknown,
            self.documents + other.documents,
            self.changed + other.changed,
        )

    @classmethod
    def of(cls, tokenizer: Tokenizer, content: bytes, ids: Ids, *, decoded: bool) -> "Losses":
        """The losses of one document. content: its UTF-8; ids: what `encode_utf8` made of it; decoded: whether to decode them."""
        unknown = 0 if tokenizer.unknown_id is None else int(np.count_nonzero(ids == tokenizer.unknown_id))
        changed = decoded and tokenizer.decode(ids, errors="replace").encode() != content
        return cls(len(ids), unknown, int(decoded), int(changed))

    def describe(self, lossy: Sequence[str]) -> str:
        """One line. lossy: the tokenizer's."""
        if not lossy:
            return "the tokenizer loses nothing"
        unknown = f"{self.unknown:,} of {self.tokens:,} tokens ({self.unknown / max(1, self.tokens):.3%}) are unknown"
        share = f"{self.changed / max(1, self.documents):.1%}"
        changed = f"{self.changed:,} of {self.documents:,} documents decode to another text ({share})"
        return f"the tokenizer is lossy ({', '.join(lossy)}): {unknown}, {changed}"


def joined(parts: list[Ids]) -> Ids:
    """Parts of a text's ids as one array."""
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32)


def declared_eod(path: str | os.PathLike[str]) -> tuple[str | None, int | None]:
    """What the files beside a tokenizer's say of its EOS token: the name in tokenizer_config.json or special_tokens_map.json, and
    the eos_token_id of a model's config.json. None where they say nothing, or several."""

    def value(name: str, key: str) -> Any:
        try:
            return json.loads(Path(path).with_name(name).read_bytes()).get(key)
        except (OSError, ValueError, AttributeError):
            return None

    found = [value(name, "eos_token") for name in ("tokenizer_config.json", "special_tokens_map.json")]
    names = [token.get("content") if isinstance(token, dict) else token for token in found]
    number = value("config.json", "eos_token_id")
    return next((name for name in names if isinstance(name, str)), None), number if type(number) is int else None


def no_eod(tokenizer: Tokenizer, eod_token: str | None, known: Iterable[str]) -> UnknownEodError:
    """The error of a tokenizer that lacks the EOD token that was named, or any. known: its special tokens."""
    names, path = list(known), tokenizer.path
    shown = ", ".join(names[:8]) + (", …" if len(names) > 8 else "") or "none"
    if eod_token is not None:
        message = f"the tokenizer {path} has no token {eod_token!r}; name another with eod_token (special tokens: {shown})"
    else:
        message = (
            f"the tokenizer {path} does not say which token ends a document; name it with data.eod_token, --eod-token or the "
            f"eos_token of a tokenizer_config.json beside it (special tokens: {shown})"
        )
    return UnknownEodError(message, path, tokenizer.vocab_size)
