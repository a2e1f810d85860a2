"""The token ids of one document, in pieces, or of several at once.

The one thing to know: a document that is in memory is one piece; a long one is read, and if it is text tokenized, piece by piece,
with the very same ids. Lists of ids that follow each other in memory are joined.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from baton.data_pipeline.batches import AnyIds, OpenRun
from baton.data_pipeline.dataset import Dataset, LongPayload
from baton.data_pipeline.errors import DataError
from baton.data_pipeline.shards import ShardSummary, token_layout
from baton.data_pipeline.tokenizer import Tokenizer


def id_pieces(
    dataset: Dataset, tokenizer: Tokenizer, shard: ShardSummary, sample: int, payload: bytes | None, first: int = 0
) -> Iterator[AnyIds]:
    """Ids of a sample from its token number `first` on, without the mark; nothing when it has no more.

    payload: its bytes, as `Dataset.read_short` gives them; None for a long one, which is then read as it is needed.

    Memory is that of a piece and its ids, whatever the document's length. Token ids are found at their place. Where a token stands
    in a text is not known, so a text is tokenized from its start, and what comes before `first` is dropped: the time of tokenizing
    that much, once, when a run is resumed in its middle. Raises DataError: damaged data.
    """
    if dataset.content == "text":
        return _of_text(dataset, tokenizer, shard, sample, payload, first)
    return _of_tokens(dataset, shard, sample, payload, first)


def _of_text(
    dataset: Dataset, tokenizer: Tokenizer, shard: ShardSummary, sample: int, payload: bytes | None, first: int
) -> Iterator[AnyIds]:
    if payload is not None:
        yield tokenizer.encode_utf8(payload)[first:]
        return
    for ids in tokenizer.encode_blocks(LongPayload(dataset, shard, sample).pieces()):
        yield ids[first:]
        first = max(0, first - len(ids))


def _of_tokens(dataset: Dataset, shard: ShardSummary, sample: int, payload: bytes | None, first: int) -> Iterator[AnyIds]:
    if payload is not None:
        dtype, count, begin = _layout(dataset, shard, sample, payload)
        yield np.frombuffer(payload, dtype, count, begin)[first:]
        return
    long = LongPayload(dataset, shard, sample)
    dtype, _, begin = _layout(dataset, shard, sample, long.head)
    for piece in long.pieces(begin + first * dtype.itemsize):
        yield np.frombuffer(piece, dtype)


def id_run(dataset: Dataset, shard: ShardSummary, payloads: Iterable[tuple[int, bytes]], offset: int, doc: int) -> OpenRun:
    """Some samples of token ids as a run: all of `payloads` (sample, its bytes), or those before one that is damaged. offset: how
    many inputs of the first are consumed. doc: the mark.

    Raises DataError: the first one is damaged; IndexError: it has fewer than `offset` tokens.
    """
    mark: AnyIds = np.array([doc], np.uint16 if doc < 1 << 16 else np.uint32)
    parts: list[AnyIds] = []
    ends: list[int] = []
    following, end = doc, 0
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
        parts += ids, mark
        ends.append(end)
    return OpenRun(np.concatenate(parts), ends, offset, following)


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
