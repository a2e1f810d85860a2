"""A fixed set of held-out documents as batches, and the documents of a split as text.

Bits per byte divides by `text_bytes`, the UTF-8 bytes of exactly the documents in the set, so models with different tokenizers can
be compared. Every rank sees the same set and has the same number of batches.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from baton.data_pipeline.dataset import Dataset
from baton.data_pipeline.errors import DataError
from baton.data_pipeline.packing import (
    IGNORE_INDEX,
    AnyIds,
    Batch,
    DocCursor,
    NumpyBatch,
    check_tokenizer,
    empty_batch,
    token_chunks,
)
from baton.data_pipeline.shards import tokens_of
from baton.data_pipeline.tokenizer import Tokenizer


@dataclass(frozen=True)
class EvaluationSet:
    """batches: this rank's; tokens: valid labels over all ranks (each document's tokens and its EOD token); text_bytes: UTF-8
    bytes of the documents' text over all ranks; documents: how many, over all ranks."""

    batches: list[NumpyBatch]
    text_bytes: int
    tokens: int
    documents: int

    @classmethod
    def joined(cls, parts: Sequence["EvaluationSet"]) -> "EvaluationSet":
        """Several sets as one."""
        batches = [batch for part in parts for batch in part.batches]
        return cls(batches, *(sum(getattr(part, name) for part in parts) for name in ("text_bytes", "tokens", "documents")))


def evaluation_batches(
    dataset: Dataset,
    tokenizer: Tokenizer,
    *,
    split: str = "validation",
    sequence_length: int,
    micro_batch_size: int,
    max_tokens: int,
    data_rank: int,
    data_size: int,
) -> EvaluationSet:
    """Whole documents of `split` in index order, as many as fit in `max_tokens` labels (at least one), cut into windows of
    `context`.

    The last window is padded with label -1, and windows that hold nothing else complete the last round of micro-batches of
    `micro_batch_size` windows over `data_size` ranks. pos is the place in the document also where a window begins inside one.
    Raises DataError: no such split, another tokenizer's ids, an impossible size, damaged data.
    """
    if min(sequence_length, micro_batch_size, max_tokens, data_size) < 1 or not 0 <= data_rank < data_size:
        raise DataError(
            "sequence_length, micro_batch_size, max_tokens and data_size must be at least 1, and data_rank one of the data ranks"
        )
    check_tokenizer(dataset, tokenizer)
    chosen: list[list[AnyIds]] = []
    tokens = text_bytes = 0
    for shard, sample, payload in dataset.samples_short(split):
        document, count = [], 1  # the EOD label
        for ids in token_chunks(dataset, tokenizer, shard, sample, payload):
            document.append(ids)
            count += len(ids)
            if chosen and tokens + count > max_tokens:
                break  # however long it is
        if chosen and tokens + count > max_tokens:
            break
        chosen.append(document)
        tokens += count
        text_bytes += int(dataset.index(shard).text_bytes[sample])
        if tokens >= max_tokens:
            break
    rounds = -(-tokens // (sequence_length * micro_batch_size * data_size))
    windows = empty_batch(rounds * micro_batch_size * data_size, sequence_length, ())
    windows.tokens[:] = tokenizer.eod_id
    windows.labels[:] = IGNORE_INDEX
    windows.pos[:] = np.arange(sequence_length)  # padding looks like a document, and is never one that goes on
    row = column = 0
    for pieces in chosen:
        opened = DocCursor(iter(pieces), 0, tokenizer.eod_id)
        while not opened.over:
            column = opened.fill(windows, row, column)
            if column == sequence_length:
                row, column = row + 1, 0
    if column:
        windows.pos[row, column:] = np.arange(sequence_length - column)
    batches = []
    for start in range(data_rank * micro_batch_size, len(windows.tokens), data_size * micro_batch_size):
        rows = slice(start, start + micro_batch_size)
        batches.append(Batch(windows.tokens[rows], windows.labels[rows], windows.pos[rows], ()))
    return EvaluationSet(batches, text_bytes, tokens, len(chosen))


def documents(dataset: Dataset, split: str, tokenizer: Tokenizer | None = None) -> Iterator[str]:
    """The texts of a split, in index order. A token dataset needs the tokenizer that made it. Raises DataError."""
    if dataset.content == "text":
        for _, _, payload in dataset.samples(split):
            yield payload.decode()
        return
    if tokenizer is None:
        raise DataError(f"{dataset.location.text} holds token ids; its texts need the tokenizer that made them")
    check_tokenizer(dataset, tokenizer)
    for _, _, payload in dataset.samples(split):
        yield tokenizer.decode(tokens_of(payload))
