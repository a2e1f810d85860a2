"""Rows of tokens, labels and positions, and how a document fills them.

The one thing to know: a document x1..xn becomes inputs [doc, x1..xn] and labels [x1..xn, doc], here and nowhere else, for training
and evaluation alike: `OpenDocument` has one in pieces, `OpenRun` several in memory.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from baton.data_pipeline.dataset import Dataset
from baton.data_pipeline.errors import DataError
from baton.data_pipeline.tokenizer import Tokenizer

AnyIds = npt.NDArray[np.integer[Any]]
_Row = npt.NDArray[np.int64]


IGNORE_INDEX = -1
"""The label of a position that has none and does not count in the loss; the loss takes any negative label for one."""


@dataclass(frozen=True)
class Batch:
    """One micro-batch. tokens int64[B, T]; labels int64[B, T], IGNORE_INDEX where there is none; pos int32[B, T], place of the
    input in its document, 0 at its mark; lanes: which lane each row belongs to (empty for evaluation)."""

    tokens: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    pos: npt.NDArray[np.int32]
    lanes: tuple[int, ...]


def empty_batch(rows: int, sequence_length: int, lanes: tuple[int, ...]) -> Batch:
    """A batch to be filled."""
    shape = (rows, sequence_length)
    return Batch(np.empty(shape, np.int64), np.empty(shape, np.int64), np.empty(shape, np.int32), lanes)


def check_tokenizer(dataset: Dataset, tokenizer: Tokenizer) -> None:
    """Raises DataError when the dataset holds token ids of another tokenizer."""
    theirs = dataset.tokenizer_fingerprint
    if theirs is not None and theirs != tokenizer.fingerprint:
        raise DataError(
            f"the token ids in {dataset.location.text} were made by a tokenizer with fingerprint {theirs[:16]}, but "
            f"{tokenizer.path} has {tokenizer.fingerprint[:16]}; use that tokenizer, or prepare the dataset with this one"
        )


class OpenDocument:
    """A document on its way into rows, in pieces.

    pieces: its ids, of any integer type, without the mark and without its first `offset - 1` tokens. offset: how many of its inputs
    (its mark, then its tokens) are consumed. doc: the mark.

    Attributes: `offset`, as above, now; `over`, whether nothing is left; `count`, of documents, and `document`, which of them it is
    at: as `OpenRun`. Raises IndexError: it has fewer than `offset` tokens.
    """

    count, document = 1, 0

    def __init__(self, pieces: Iterator[AnyIds], offset: int, doc: int) -> None:
        self.offset = offset
        self.over = False
        self._pieces = pieces
        self._doc = doc
        self._ids: AnyIds = _NONE
        self._at, self._end = 0, 0  # of the piece, what follows as labels; the next input is the token before
        self._last = False  # nothing follows but the mark
        self._input = doc
        if offset:
            self._more()
            if self._last:
                raise IndexError(offset)
            self._input, self._at = int(self._ids[0]), 1

    def _more(self) -> None:
        """Go on to the next piece that holds something; after all of them, the mark."""
        while self._at == self._end and not self._last:
            piece = next(self._pieces, None)
            self._last = piece is None
            if piece is not None:
                self._ids, self._at, self._end = piece, 0, len(piece)

    def fill(self, batch: Batch, row: int, start: int) -> int:
        """Copy its next inputs into row `row` of a batch from column `start` on, until the row is full or the document over;
        returns the first column left."""
        tokens, labels, pos = batch.tokens[row], batch.labels[row], batch.pos[row]
        width = len(tokens)
        while start < width and not self.over:
            if self._at == self._end:
                self._more()
            if self._last:
                labels[start], tokens[start], pos[start] = self._doc, self._input, self.offset
                self.offset += 1
                self.over = True
                return start + 1
            count = min(self._end - self._at, width - start)
            stop = start + count
            self._input = _copy(self._ids[self._at : self._at + count], self._input, tokens, labels, start, stop)
            _count(pos, start, stop, self.offset)
            start, self._at, self.offset = stop, self._at + count, self.offset + count
        return start


class OpenRun:
    """Documents on their way into rows that follow each other and are in memory: rows take what they need of all at once.

    ids: their tokens, of any integer type, each document's followed by its mark; of the first, those from token number `offset` on.
    ends: where each document's mark ends in `ids`. offset: how many inputs of the first are consumed. first: the next input.

    Attributes: `count`, of documents; `document`, which of them is next, and `offset`, how many of its inputs are consumed; `over`,
    whether nothing is left.
    """

    def __init__(self, ids: AnyIds, ends: Sequence[int], offset: int, first: int) -> None:
        self.count, self.document, self.over = len(ends), 0, False
        self._ids, self._ends, self._input = ids, ends, first
        self._at, self._begin = 0, -offset  # of the document, where its mark would be as an input

    @property
    def offset(self) -> int:
        return self._at - self._begin

    def fill(self, batch: Batch, row: int, start: int) -> int:
        """As `OpenDocument.fill`, until the row is full or the run over."""
        tokens, labels, pos = batch.tokens[row], batch.labels[row], batch.pos[row]
        begin, width = self._at, len(tokens) - start
        until = begin + width if begin + width < len(self._ids) else len(self._ids)
        stop = start + until - begin
        self._input = _copy(self._ids[begin:until], self._input, tokens, labels, start, stop)
        while (end := self._ends[self.document]) <= until:
            _count(pos, start, start + end - begin, begin - self._begin)
            start, begin = start + end - begin, end
            self.document, self._begin = self.document + 1, end
            if end == len(self._ids):
                self.over = True
                break
        if begin < until:
            _count(pos, start, stop, begin - self._begin)
        self._at = until
        return stop


def _copy(following: AnyIds, first: int, tokens: _Row, labels: _Row, start: int, stop: int) -> int:
    """Write labels, and inputs, which are `first` and all labels but the last; returns that one, the next input."""
    labels[start:stop] = following
    tokens[start] = first
    if stop - start > 1:
        tokens[start + 1 : stop] = labels[start : stop - 1]
    return int(labels[stop - 1])


def _count(pos: npt.NDArray[np.int32], start: int, stop: int, offset: int) -> None:
    """Write positions from `offset` on."""
    end = offset + stop - start
    pos[start:stop] = _PLACES[offset:end] if end <= len(_PLACES) else np.arange(offset, end)


_NONE = np.zeros(0, np.int32)
_PLACES = np.arange(1 << 16, dtype=np.int32)  # to copy from is three times as fast as to count anew
