"""Rows of tokens, labels and positions, and how a document fills them.

The one thing to know: `OpenDocument.fill` is the only place where documents become inputs and labels, for training and evaluation
alike.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from baton.data_pipeline.dataset import Dataset
from baton.data_pipeline.errors import DataError
from baton.data_pipeline.tokenizer import Ids, Tokenizer


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

    pieces: its ids, int32, without the mark and without its first `offset - 1` tokens. offset: how many of its inputs (its mark,
    then its tokens) are consumed. doc: the mark.

    Attributes: `offset`, as above, now; `over`, whether nothing is left. Raises IndexError: it has fewer than `offset` tokens.
    """

    def __init__(self, pieces: Iterator[Ids], offset: int, doc: int) -> None:
        self.offset = offset
        self.over = False
        self._pieces = pieces
        self._doc = doc
        self._labels: Ids = np.zeros(0, np.int32)  # what follows; the next input is the token before
        self._last = False
        self._input = doc
        if offset:
            self._more()
            if self._last:
                raise IndexError(offset)
            self._input, self._labels = int(self._labels[0]), self._labels[1:]

    def _more(self) -> None:
        """Go on to the next piece that holds something; after all of them, the mark."""
        while not len(self._labels) and not self._last:
            piece = next(self._pieces, None)
            self._last = piece is None
            self._labels = np.array([self._doc], np.int32) if piece is None else piece

    def fill(self, batch: Batch, row: int, start: int) -> int:
        """Copy its next inputs into row `row` of a batch from column `start` on, until the row is full or the document over;
        returns the first column left."""
        width = int(batch.tokens.shape[1])
        while start < width and not self.over:
            self._more()
            count = min(len(self._labels), width - start)
            stop = start + count
            batch.labels[row, start:stop] = self._labels[:count]
            batch.tokens[row, start] = self._input
            batch.tokens[row, start + 1 : stop] = self._labels[: count - 1]
            batch.pos[row, start:stop] = np.arange(self.offset, self.offset + count)
            self._input, self._labels = int(self._labels[count - 1]), self._labels[count:]
            start, self.offset = stop, self.offset + count
            self.over = self._last and not len(self._labels)
        return start
