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


class EvaluationStream:
    """Whole documents of `split` in index order, as many as fit in `max_tokens` labels (at least one; None: all), cut into windows
    of `sequence_length`, `micro_batch_size` at a time. One batch and one document are in memory.

    The last window is padded with label -1, and windows that hold nothing else complete the last batch. pos is the place in the
    document also where a window begins inside one.

    Attributes, of the batches so far: tokens, text_bytes and documents, as of EvaluationSet.
    """

    def __init__(
        self,
        dataset: Dataset,
        tokenizer: Tokenizer,
        *,
        split: str = "validation",
        sequence_length: int,
        micro_batch_size: int,
        max_tokens: int | None = None,
    ) -> None:
        """Raises DataError: no such split, another tokenizer's ids, an impossible size."""
        if min(sequence_length, micro_batch_size, 1 if max_tokens is None else max_tokens) < 1:
            raise DataError("sequence_length, micro_batch_size and max_tokens must be at least 1")
        check_tokenizer(dataset, tokenizer)
        dataset.require(split)
        self.tokens = self.text_bytes = self.documents = 0
        self._dataset, self._tokenizer, self._split, self._max_tokens = dataset, tokenizer, split, max_tokens
        self._shape = micro_batch_size, sequence_length

    @property
    def batches(self) -> Iterator[NumpyBatch]:
        """Raises DataError: damaged data."""
        rows, width = self._shape
        batch, row, column = self.padding(), 0, 0
        for pieces in self._documents():
            document = DocCursor(iter(pieces), 0, self._tokenizer.eod_id)
            while not document.over:
                column = document.fill(batch, row, column)
                if column == width:
                    row, column = row + 1, 0
                if row == rows:
                    yield batch
                    batch, row = self.padding(), 0
        if column:
            batch.pos[row, column:] = np.arange(width - column)
        if row or column:
            yield batch

    def padding(self) -> NumpyBatch:
        """A batch without labels. It looks like documents of EOD tokens, and is never one that goes on."""
        batch = empty_batch(*self._shape, ())
        batch.tokens[:] = self._tokenizer.eod_id
        batch.labels[:] = IGNORE_INDEX
        batch.pos[:] = np.arange(self._shape[1])
        return batch

    def _documents(self) -> Iterator[list[AnyIds]]:
        """Token ids of a document, in pieces."""
        for shard, sample, payload in self._dataset.samples_short(self._split):
            document, count = [], 1  # the EOD label
            for ids in token_chunks(self._dataset, self._tokenizer, shard, sample, payload):
                document.append(ids)
                count += len(ids)
                if self._exceeds(count):
                    return  # however long it is
            if self._exceeds(count):
                return
            self.tokens, self.documents = self.tokens + count, self.documents + 1
            self.text_bytes += int(self._dataset.index(shard).text_bytes[sample])
            yield document
            if self._max_tokens is not None and self.tokens >= self._max_tokens:
                return

    def _exceeds(self, count: int) -> bool:
        """Whether a document of so many labels is one too many."""
        return self._max_tokens is not None and self.documents > 0 and self.tokens + count > self._max_tokens


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
    """A data rank's share of an EvaluationStream's batches, in memory; batches without labels complete the last round of ranks.

    Raises DataError: no such split, another tokenizer's ids, an impossible size, damaged data.
    """
    if data_size < 1 or not 0 <= data_rank < data_size:
        raise DataError("data_size must be at least 1, and data_rank one of the data ranks")
    sizes = {"sequence_length": sequence_length, "micro_batch_size": micro_batch_size, "max_tokens": max_tokens}
    stream = EvaluationStream(dataset, tokenizer, split=split, **sizes)
    batches, count = [], 0
    for number, batch in enumerate(stream.batches):
        count = number + 1
        if number % data_size == data_rank:
            batches.append(batch)
    if len(batches) < -(-count // data_size):
        batches.append(stream.padding())
    return EvaluationSet(batches, stream.text_bytes, stream.tokens, stream.documents)


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
