"""Batches, and documents packed into their rows.

A document with token ids x1..xn becomes inputs [EOD, x1..xn] and labels [x1..xn, EOD], for training and for evaluation. Every label
is scored and none belongs to another document. `DocCursor` copies one document into rows from chunks of its ids, `PackedDocs`
several short documents that are in memory.

Shapes: B rows of a batch, T tokens of a row.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from baton.data_pipeline.dataset import Dataset, LongPayloadReader
from baton.data_pipeline.errors import DataError
from baton.data_pipeline.shards import ShardSummary, token_layout
from baton.data_pipeline.tokenizer import Tokenizer

AnyIds = npt.NDArray[np.integer[Any]]
_Row = npt.NDArray[np.int64]


IGNORE_INDEX = -1
"""Label of a position that is not scored. The loss ignores every negative label."""


A = TypeVar("A")


@dataclass(frozen=True)
class Batch(Generic[A]):
    """One micro-batch: NumPy arrays where it is read, torch tensors on the device where it is computed with.

    tokens: int64 [B, T]. labels: int64 [B, T], IGNORE_INDEX where nothing is scored. pos: int32 [B, T], the position of each token
    in its document, 0 at its EOD token. lanes: the lane of each row; empty for evaluation. Of a sequence in segments T is this
    rank's spans of them, one after the other.
    """

    tokens: A
    labels: A
    pos: A
    lanes: tuple[int, ...] = ()

    def count_labels(self) -> A:
        """Number of labels that are scored, int64 []."""
        labels: Any = self.labels
        count: A = (labels != IGNORE_INDEX).sum()
        return count

    def segment(self, number: int, count: int) -> "Batch[A]":
        """This rank's span of segment `number` of `count`: views of the columns."""
        arrays: tuple[Any, ...] = self.tokens, self.labels, self.pos
        width = arrays[0].shape[1] // count
        tokens, labels, pos = (x[:, number * width : (number + 1) * width] for x in arrays)
        return Batch(tokens, labels, pos, self.lanes)


NumpyBatch = Batch[npt.NDArray[Any]]


def empty_batch(rows: int, sequence_length: int, lanes: tuple[int, ...]) -> NumpyBatch:
    """A batch of uninitialised arrays."""
    shape = (rows, sequence_length)
    return Batch(np.empty(shape, np.int64), np.empty(shape, np.int64), np.empty(shape, np.int32), lanes)


def check_tokenizer(dataset: Dataset, tokenizer: Tokenizer) -> None:
    """Raises DataError when the dataset holds token ids of another tokenizer."""
    expected = dataset.tokenizer_fingerprint
    if expected is not None and expected != tokenizer.fingerprint:
        raise DataError(
            f"the token ids in {dataset.location.text} were made by a tokenizer with fingerprint {expected[:16]}, but "
            f"{tokenizer.path} has {tokenizer.fingerprint[:16]}; use that tokenizer, or prepare the dataset with this one"
        )


class DocCursor:
    """One document that is copied into rows, from chunks of its token ids.

    Args:
        chunks: the document's ids, any integer type, without the EOD token and without the first `offset - 1` tokens.
        offset: number of the document's inputs (the EOD token, then its tokens) that are consumed.
        eod_id: id of the EOD token.

    Attributes:
        offset: number of inputs consumed so far.
        over: whether the document is consumed.
        count, document: 1 and 0, as for `PackedDocs`.

    Raises:
        IndexError: the document has fewer than `offset` tokens.
    """

    count, document = 1, 0

    def __init__(self, chunks: Iterator[AnyIds], offset: int, eod_id: int) -> None:
        self.offset = offset
        self.over = False
        self._chunks = chunks
        self._eod_id = eod_id
        self._ids: AnyIds = _NO_IDS
        self._at, self._end = 0, 0  # range of the chunk that is still to come as labels; the next input is the token before it
        self._last = False  # only the EOD label is left
        self._input = eod_id
        if offset:
            self._next_chunk()
            if self._last:
                raise IndexError(offset)
            self._input, self._at = int(self._ids[0]), 1

    def _next_chunk(self) -> None:
        """Go on to the next chunk that is not empty. After the last one only the EOD label is left."""
        while self._at == self._end and not self._last:
            chunk = next(self._chunks, None)
            self._last = chunk is None
            if chunk is not None:
                self._ids, self._at, self._end = chunk, 0, len(chunk)

    def fill(self, batch: NumpyBatch, row: int, start: int) -> int:
        """Copy inputs into a row from column `start` on, until the row is full or the document consumed. Returns the first free
        column."""
        tokens, labels, pos = batch.tokens[row], batch.labels[row], batch.pos[row]
        width = len(tokens)
        while start < width and not self.over:
            if self._at == self._end:
                self._next_chunk()
            if self._last:
                labels[start], tokens[start], pos[start] = self._eod_id, self._input, self.offset
                self.offset += 1
                self.over = True
                return start + 1
            count = min(self._end - self._at, width - start)
            stop = start + count
            self._input = _copy_ids(self._ids[self._at : self._at + count], self._input, tokens, labels, start, stop)
            _write_positions(pos, start, stop, self.offset)
            start, self._at, self.offset = stop, self._at + count, self.offset + count
        return start


class PackedDocs:
    """Consecutive documents in memory that are copied into rows together.

    Args:
        ids: their tokens, any integer type, an EOD token after each document. The first document begins at its token number
            `offset`.
        ends: end of each document in `ids`, its EOD token included.
        offset: number of the first document's inputs that are consumed.
        first: the next input.

    Attributes:
        count: number of documents.
        document: index of the document that comes next.
        offset: number of its inputs that are consumed.
        over: whether all documents are consumed.
    """

    def __init__(self, ids: AnyIds, ends: Sequence[int], offset: int, first: int) -> None:
        self.count, self.document, self.over = len(ends), 0, False
        self._ids, self._ends, self._input = ids, ends, first
        self._at, self._begin = 0, -offset  # _begin: index in ids at which the document's first input would be

    @property
    def offset(self) -> int:
        return self._at - self._begin

    def fill(self, batch: NumpyBatch, row: int, start: int) -> int:
        """As `DocCursor.fill`, until the row is full or all documents are consumed."""
        tokens, labels, pos = batch.tokens[row], batch.labels[row], batch.pos[row]
        begin, width = self._at, len(tokens) - start
        until = begin + width if begin + width < len(self._ids) else len(self._ids)
        stop = start + until - begin
        self._input = _copy_ids(self._ids[begin:until], self._input, tokens, labels, start, stop)
        while (end := self._ends[self.document]) <= until:
            _write_positions(pos, start, start + end - begin, begin - self._begin)
            start, begin = start + end - begin, end
            self.document, self._begin = self.document + 1, end
            if end == len(self._ids):
                self.over = True
                break
        if begin < until:
            _write_positions(pos, start, stop, begin - self._begin)
        self._at = until
        return stop


def _copy_ids(following: AnyIds, first: int, tokens: _Row, labels: _Row, start: int, stop: int) -> int:
    """Write labels, and inputs, which are `first` followed by all labels but the last. Returns the last label: the next input."""
    labels[start:stop] = following
    tokens[start] = first
    if stop - start > 1:
        tokens[start + 1 : stop] = labels[start : stop - 1]
    return int(labels[stop - 1])


def _write_positions(pos: npt.NDArray[np.int32], start: int, stop: int, offset: int) -> None:
    """Write positions that begin with `offset`."""
    end = offset + stop - start
    pos[start:stop] = _POSITIONS[offset:end] if end <= len(_POSITIONS) else np.arange(offset, end)


_NO_IDS = np.zeros(0, np.int32)
_POSITIONS = np.arange(1 << 16, dtype=np.int32)  # copying from it is three times as fast as np.arange


def token_chunks(
    dataset: Dataset, tokenizer: Tokenizer, shard: ShardSummary, sample: int, payload: bytes | None, first: int = 0
) -> Iterator[AnyIds]:
    """Token ids of a sample from token number `first` on, in chunks, without the EOD token.

    Memory is one chunk and its ids, whatever the document's length. Token ids are sought in the shard. The position of a token in a
    text is not known, so a text is tokenized from its beginning and the tokens before `first` are dropped; that happens once, when
    a run is resumed inside a document.

    Args:
        payload: the sample's bytes as `Dataset.read_short` returns them; None for a long sample, which is read as needed.

    Raises:
        DataError: damaged data.
    """
    if dataset.content == "text":
        return _text_chunks(dataset, tokenizer, shard, sample, payload, first)
    return _token_id_chunks(dataset, shard, sample, payload, first)


def _text_chunks(
    dataset: Dataset, tokenizer: Tokenizer, shard: ShardSummary, sample: int, payload: bytes | None, first: int
) -> Iterator[AnyIds]:
    if payload is not None:
        yield tokenizer.encode_utf8(payload)[first:]
        return
    for ids in tokenizer.encode_blocks(LongPayloadReader(dataset, shard, sample).chunks()):
        yield ids[first:]
        first = max(0, first - len(ids))


def _token_id_chunks(dataset: Dataset, shard: ShardSummary, sample: int, payload: bytes | None, first: int) -> Iterator[AnyIds]:
    if payload is not None:
        dtype, count, begin = _layout(dataset, shard, sample, payload)
        yield np.frombuffer(payload, dtype, count, begin)[first:]
        return
    long = LongPayloadReader(dataset, shard, sample)
    dtype, _, begin = _layout(dataset, shard, sample, long.head)
    for chunk in long.chunks(begin + first * dtype.itemsize):
        yield np.frombuffer(chunk, dtype)


def packed_docs(
    dataset: Dataset, shard: ShardSummary, payloads: Iterable[tuple[int, bytes]], offset: int, eod_id: int
) -> PackedDocs:
    """Samples of token ids as `PackedDocs`: all of `payloads` (sample, bytes), or those before the first damaged one.

    Args:
        offset: number of the first sample's inputs that are consumed.
        eod_id: id of the EOD token.

    Raises:
        DataError: the first sample is damaged.
        IndexError: the first sample has fewer than `offset` tokens.
    """
    eod: AnyIds = np.array([eod_id], np.uint16 if eod_id < 1 << 16 else np.uint32)
    parts: list[AnyIds] = []
    ends: list[int] = []
    following, end = eod_id, 0
    for sample, payload in payloads:
        try:
            dtype, count, begin = _layout(dataset, shard, sample, payload)
        except DataError:
            if not ends:
                raise
            break  # what comes before it is sound, and comes first
        ids: AnyIds = np.frombuffer(payload, dtype, count, begin)
        if not ends and offset:
            if offset > count:
                raise IndexError(offset)
            following, ids, count = int(ids[offset - 1]), ids[offset:], count - offset
        end += count + 1
        parts += ids, eod
        ends.append(end)
    return PackedDocs(np.concatenate(parts), ends, offset, following)


def _layout(dataset: Dataset, shard: ShardSummary, sample: int, head: bytes) -> tuple[np.dtype[Any], int, int]:
    """`token_layout`, agreeing with the index. Raises DataError."""
    index = dataset.index(shard)
    try:
        layout = token_layout(head, int(index.sizes[sample]))
    except ValueError as error:
        raise DataError(f"{dataset.named(shard, sample)} is no list of token ids ({error}); prepare the dataset again") from error
    if layout[1] != index.tokens[sample]:
        found, said = layout[1], index.tokens[sample]
        raise DataError(f"{dataset.named(shard, sample)} has {found} tokens, its index says {said}; prepare the dataset again")
    return layout
