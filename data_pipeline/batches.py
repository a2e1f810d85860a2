"""Rows of tokens, labels and positions, and how a document fills them.

The one thing to know: `OpenDocument.fill` is the only place where documents become inputs and labels, for training and evaluation
alike.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from baton.data_pipeline.dataset import Dataset
from baton.data_pipeline.errors import DataError
from baton.data_pipeline.tokenizer import Tokenizer

AnyIds = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True)
class Batch:
    """One micro-batch. tokens int64[B, T]; labels int64[B, T], -1 where there is none; pos int32[B, T], place of the input in its
    document, 0 at its mark; lanes: which lane each row belongs to (empty for evaluation)."""

    tokens: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    pos: npt.NDArray[np.int32]
    lanes: tuple[int, ...]


def empty_batch(rows: int, context: int, lanes: tuple[int, ...]) -> Batch:
    """A batch to be filled."""
    shape = (rows, context)
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

    Attributes: `offset`, as above, now; `over`, whether nothing is left. Raises IndexError: it has fewer than `offset` tokens.
    """

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
            stop, offset = start + count, self.offset
            labels[start:stop] = self._ids[self._at : self._at + count]
            tokens[start] = self._input
            if count > 1:
                tokens[start + 1 : stop] = labels[start : stop - 1]
            pos[start:stop] = (
                _PLACES[offset : offset + count] if offset + count <= len(_PLACES) else np.arange(offset, offset + count)
            )
            self._input = int(labels[stop - 1])
            start, self._at, self.offset = stop, self._at + count, offset + count
        return start


_NONE = np.zeros(0, np.int32)
_PLACES = np.arange(1 << 16, dtype=np.int32)  # to copy from is three times as fast as to count anew
