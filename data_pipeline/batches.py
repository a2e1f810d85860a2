"""Rows of tokens, labels and positions, and how a document fills them.

The one thing to know: `fill` is the only place where documents become inputs and labels, for training and evaluation alike.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from baton.data_pipeline.dataset import Dataset
from baton.data_pipeline.errors import DataError
from baton.data_pipeline.shards import ShardSummary, tokens_of
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


def token_ids(dataset: Dataset, tokenizer: Tokenizer, shard: ShardSummary, sample: int, payload: bytes) -> Ids:
    """int32[n] ids of one sample, without the mark. Raises DataError when a token sample is not what the index says."""
    if dataset.content == "text":
        return tokenizer.encode_utf8(payload)
    index = dataset.index(shard)
    where = f"document {index.ids[sample].decode()} of {dataset.location.url(shard.name)}"
    try:
        ids = tokens_of(payload)
    except ValueError as error:
        raise DataError(f"{where} is no list of token ids ({error}); prepare the dataset again") from error
    if len(ids) != index.tokens[sample]:
        raise DataError(f"{where} has {len(ids)} tokens, its index says {index.tokens[sample]}; prepare the dataset again")
    return ids


def fill(row: int, start: int, ids: Ids, offset: int, doc: int, batch: Batch) -> int:
    """Copy one document's inputs from `offset` on into row `row` from column `start` on; returns how many fitted."""
    count = min(len(ids) + 1 - offset, int(batch.tokens.shape[1]) - start)
    stop, end = start + count, offset + count
    tokens, labels = batch.tokens[row], batch.labels[row]
    inside = end - (end > len(ids))  # labels that are tokens of the document; the one after the last is the mark
    labels[start : start + inside - offset] = ids[offset:inside]
    if inside != end:
        labels[stop - 1] = doc
    if offset:
        tokens[start:stop] = ids[offset - 1 : end - 1]
    else:
        tokens[start] = doc
        tokens[start + 1 : stop] = ids[: end - 1]
    batch.pos[row, start:stop] = np.arange(offset, end)
    return count
