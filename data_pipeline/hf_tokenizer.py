"""tokenizer.json files of Hugging Face's `tokenizers`: byte-level BPE, Unigram, WordPiece and WordLevel, with their added tokens.

Ids are those of the library's `encode` with `add_special_tokens=False`. Special tokens that are spelt out in a text are text, as
they are to SentencePiece: a document that mentions <|endoftext|> does not end there. Truncation and padding are off.

A text is cut between a Latin letter and a space, if the file's pre-tokenizer is one that is known to begin a new word there and
nothing else in the file can look across. Otherwise the whole text is encoded at once.
"""

import hashlib
import json
import os
import re
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from baton.data_pipeline.errors import DataError
from baton.data_pipeline.tokenizer_base import Ids, Tokenizer, declared_eod, no_eod

# one thread: a preparation and a run have as many processes as they need
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

EOD_TOKEN = "<|endoftext|>"
_USUAL_EOD = (EOD_TOKEN, "<|end_of_text|>", "</s>", "<eos>")

_CONTRACTIONS, _LAST = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = r"[^\r\n\p{L}\p{N}]?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
GPT4_WORDS = rf"{_CONTRACTIONS}|{_CASED}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_LAST}"
"""Llama 3's and GPT-4's words."""
_KNOWN_WORDS = {
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",  # GPT-2
    GPT4_WORDS,
    GPT4_WORDS.replace(r"\p{N}{1,3}", r"\p{N}"),  # Qwen 2
    rf"{_CASED}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_CASED}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LAST}",  # GPT-4o
}
_LOCAL_NORMALIZERS = {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "BertNormalizer"}
_LETTER_SPACE = re.compile("[A-Za-z] ")
_LETTERS = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
# parts of the file that do not change the ids of a text
_WITHOUT_EFFECT = ("version", "truncation", "padding", "post_processor", "decoder")


class HfTokenizer(Tokenizer):
    """A tokenizer.json. path, eod_token: see `load_tokenizer`; content: the file's bytes. Raises DataError."""

    def __init__(self, path: Path, content: bytes, eod_token: str | None) -> None:
        self.path, self.eod_token = str(path), eod_token
        try:
            spec = json.loads(content)
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode())
        except Exception as error:
            reason = " ".join(str(error).split())[:200]
            raise DataError(
                f"the tokenizer {path} is damaged or no tokenizer.json ({reason}); restore it or train a new one"
            ) from error
        if spec["model"].get("dropout"):
            raise DataError(
                f"the tokenizer {path} has dropout={spec['model']['dropout']}: its ids differ each time; set its dropout to null"
            )
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        self._vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        if not self._vocabulary:
            raise DataError(f"the tokenizer {path} has no tokens; restore it or train a new one")
        self.vocab_size = max(self._vocabulary.values()) + 1
        self._added = spec.get("added_tokens") or []
        self._special = {token["id"] for token in self._added if token.get("special")}
        self.eod_id = self._eod_id(path)
        unknown = spec["model"].get("unk_token")
        if unknown is None and spec["model"].get("unk_id") is not None:
            unknown = spec["model"]["vocab"][spec["model"]["unk_id"]][0]
        self._byte_level = any(part["type"] == "ByteLevel" for part in _parts(spec.get("pre_tokenizer"), "pretokenizers"))
        complete = self._byte_level and all(sign in self._vocabulary for sign in byte_signs())
        complete = complete or (bool(spec["model"].get("byte_fallback")) and _has_bytes(self._vocabulary))
        self.unknown_id = None if complete or unknown is None else self._vocabulary.get(unknown)
        self.lossy = tuple(_losses(spec, complete))
        self._cuttable = _is_cuttable(spec)
        deciding = {key: value for key, value in spec.items() if key not in _WITHOUT_EFFECT}
        text = json.dumps([deciding, self.eod_id], sort_keys=True)
        self.fingerprint = hashlib.sha256(b"baton tokenizer.json 1" + text.encode("utf-8", "surrogatepass")).hexdigest()

    def _eod_id(self, path: Path) -> int:
        special = [token["content"] for token in self._added if token.get("special")]
        declared, number = declared_eod(path)
        name = self.eod_token or declared
        if name is None and number is not None and number in self._special:  # a configuration's default may be any token's
            return number
        usual = [each for each in special if each in _USUAL_EOD]
        if name is None and len(usual) == 1:
            name = usual[0]
        if name is None or name not in self._vocabulary:
            raise no_eod(self, name, special)
        return self._vocabulary[name]

    def _encode_part(self, content: bytes, begins: bool) -> Ids:
        (encoding,) = self._tokenizer.encode_batch_fast([content.decode()], add_special_tokens=False)
        return np.array(encoding.ids, dtype=np.int32)

    def _last_cut(self, content: bytearray, start: int) -> tuple[int, int]:
        space = len(content) if self._cuttable else 0
        while (space := content.rfind(b" ", start, space)) > 0:
            if content[space - 1] in _LETTERS:
                return space, 0
        return 0, len(content)

    def _decode(self, ids: list[int], errors: str) -> str:
        if self._byte_level:
            return b"".join([self._bytes_of[i] for i in ids]).decode("utf-8", errors)
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text

    @cached_property
    def _bytes_of(self) -> list[bytes]:
        """The bytes that each id of a byte-level vocabulary stands for; special tokens, and ids without a token, stand for none."""
        byte = {sign: number for number, sign in enumerate(byte_signs())}
        added = {token["id"]: token["content"].encode() for token in self._added}
        found = [b""] * self.vocab_size
        for token, number in self._vocabulary.items():
            if number in added:
                found[number] = b"" if number in self._special else added[number]
            else:
                found[number] = b"".join(bytes([byte[sign]]) if sign in byte else sign.encode() for sign in token)
        return found


def byte_signs() -> list[str]:
    """The character by which byte-level BPE writes each byte, 256 of them. Source: GPT-2's bytes_to_unicode."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _parts(spec: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    """The steps of a normalizer or a pre-tokenizer, sequences resolved."""
    if spec is None:
        return []
    if spec["type"] == "Sequence":
        return [part for each in spec[key] for part in _parts(each, key)]
    return [spec]


def _has_bytes(vocabulary: dict[str, int]) -> bool:
    return all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))


def _losses(spec: dict[str, Any], complete: bool) -> list[str]:
    found = [] if complete else ["unknown characters"]
    for part in _parts(spec.get("normalizer"), "normalizers"):
        kind = part["type"]
        if kind == "Lowercase" or (kind == "BertNormalizer" and part.get("lowercase")):
            found.append("case")
        if kind == "Replace" and part["pattern"] == {"String": " "} and part["content"] == "\u2581":
            found.append("U+2581, which becomes a space")
        elif kind not in ("Lowercase", "Prepend"):
            found.append(f"normalisation {kind}")
    for part in _parts(spec.get("pre_tokenizer"), "pretokenizers"):
        kind = part["type"]
        if kind in ("BertPreTokenizer", "Whitespace", "WhitespaceSplit", "CharDelimiterSplit") or part.get("behavior") == "Removed":
            found.append("whitespace")
        elif kind == "Metaspace":
            found.append("U+2581, which becomes a space")
        elif kind == "ByteLevel" and part.get("add_prefix_space"):
            found.append("a space is put in front")
    return found


def _is_cuttable(spec: dict[str, Any]) -> bool:
    """Whether a text may be cut between an ASCII letter and a space: see the module."""
    if any(part["type"] not in _LOCAL_NORMALIZERS for part in _parts(spec.get("normalizer"), "normalizers")):
        return False
    for token in spec.get("added_tokens") or []:
        if token.get("single_word") or token.get("rstrip") or _LETTER_SPACE.search(token["content"]):
            return False
    parts = [
        part
        for part in _parts(spec.get("pre_tokenizer"), "pretokenizers")
        if part["type"] not in ("Digits", "Punctuation") and not (part["type"] == "ByteLevel" and not part.get("use_regex", True))
    ]
    if len(parts) != 1:
        return False
    part = parts[0]
    if part["type"] == "Split":
        return part["pattern"].get("Regex") in _KNOWN_WORDS
    if part["type"] == "Metaspace":
        return bool(part.get("split", True))
    return part["type"] in ("ByteLevel", "BertPreTokenizer", "Whitespace", "WhitespaceSplit")
