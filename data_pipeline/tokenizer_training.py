"""Tokenizers of one's own: SentencePiece BPE that loses nothing, or byte-level BPE as a tokenizer.json."""

import hashlib
import heapq
import io
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import sentencepiece

from baton.data_pipeline.errors import DataError
from baton.data_pipeline.files import write_atomically
from baton.data_pipeline.sentencepiece_tokenizer import EOD_PIECE, SPACE, SYMBOLS
from baton.data_pipeline.tokenizer import load_tokenizer

Kind = Literal["sentencepiece", "hf-bpe"]
_SMALLEST: dict[Kind, int] = {
    "sentencepiece": 2 + len(SYMBOLS) + 256 + 1,  # unknown, EOD, symbols, bytes, space
    "hf-bpe": 1 + 256,  # EOD, bytes
}

# The trainer skips sentences that are longer than this, or that hold one of its own working characters.
_SENTENCE_BYTES = 4000
_RESERVED = re.compile("[\n\t\0\u2581\u2585]+")


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
    kind: Kind = "sentencepiece",
    max_bytes: int = 64 << 20,
    character_coverage: float = 0.9999,
    threads: int | None = None,
) -> TokenizerReport:
    """Train a tokenizer on `texts` and write it to `path`, whole or not at all. It loses nothing of any text.

    kind: "sentencepiece", BPE with byte fallback as a .model; "hf-bpe", byte-level BPE over Llama 3's words as a tokenizer.json,
    whose EOD token is <|endoftext|>.
    texts: documents. At most `max_bytes` UTF-8 bytes of them are used (kept in memory): those with the smallest content hash, so
    that the choice is a sample of all of them and does not depend on their order.
    vocab_size: tokens in all, among them 256 bytes and the EOD token. Of SentencePiece also three whitespace symbols; each digit
    is a piece of its own, runs of spaces are pieces (indentation), and no piece crosses a space, a newline or a tab.
    character_coverage: of SentencePiece, share of the text's characters that get a piece; the others are spelt in bytes.
    threads: training threads (none: the usable cores); the vocabulary does not depend on it.
    Raises DataError: no text, or a vocabulary too large or too small for it.
    """
    path = Path(path)
    least = _SMALLEST[kind]
    if vocab_size < least:
        raise DataError(f"vocab_size {vocab_size} is too small; {least} is the least (256 bytes and the fixed symbols)")
    sample = _sample(texts, max_bytes)
    if not any(True for _ in _sentences(sample)):
        raise DataError(f"no text to train the tokenizer {path} on; check the inputs and their include patterns")
    threads = threads or len(os.sched_getaffinity(0))
    if kind == "sentencepiece":
        content = _sentencepiece(sample, path, vocab_size, character_coverage, threads)
    else:
        content = _byte_level_bpe(sample, vocab_size, threads)
    write_atomically(path, content)
    text_bytes = sum(len(text.encode(errors="replace")) for text in sample)
    return TokenizerReport(str(path), vocab_size, load_tokenizer(path).fingerprint, len(sample), text_bytes)


def _byte_level_bpe(sample: list[str], vocab_size: int, threads: int) -> bytes:
    from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Trained

    from baton.data_pipeline.hf_tokenizer import EOD_TOKEN, GPT4_WORDS

    trained = Trained(models.BPE())
    words = pre_tokenizers.Split(Regex(GPT4_WORDS), behavior="isolated")
    trained.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    trained.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOD_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"
    try:
        trained.train_from_iterator((text.encode(errors="replace").decode() for text in sample), trainer)
    finally:
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before
    if trained.get_vocab_size() < vocab_size:
        raise DataError(f"vocab_size {vocab_size} is too large for this text; it supports at most {trained.get_vocab_size()}")
    return trained.to_str(pretty=True).encode()


def _sentencepiece(sample: list[str], path: Path, vocab_size: int, character_coverage: float, threads: int) -> bytes:
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
            user_defined_symbols=list(SYMBOLS),
            control_symbols=[EOD_PIECE],
            unk_id=0,
            bos_id=-1,
            eos_id=-1,
            pad_id=-1,
            num_threads=threads,
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
    return model.getvalue()


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
