"""The training stream: lanes of documents, tokenized and cut into batches, with the cursors that resume it at any step.

The one thing to know: a document x1..xn gives inputs [doc, x1..xn] with labels [x1..xn, doc] and pos 0..n, so every label is valid
and none crosses documents; documents of a lane are joined and cut every `context` inputs. What is the same for every kind of lane
(steps, ranks, the thread) is in steps.py.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from baton.data_pipeline.batches import Batch, check_tokenizer, fill, token_ids
from baton.data_pipeline.config import ShardsConfig
from baton.data_pipeline.dataset import Dataset
from baton.data_pipeline.errors import DataError
from baton.data_pipeline.evaluation import EvaluationSet, documents, evaluation_batches
from baton.data_pipeline.files import fingerprint
from baton.data_pipeline.lanes import Cursor, LaneOrder, Units
from baton.data_pipeline.shards import ShardSummary
from baton.data_pipeline.steps import StepData, StepPlan, Steps
from baton.data_pipeline.tokenizer import Ids, Tokenizer

__all__ = [
    "Batch",
    "BatchStream",
    "Cursor",
    "Dataset",
    "EvaluationSet",
    "StepData",
    "documents",
    "evaluation_batches",
    "stream_fingerprint",
]

STREAM_VERSION = 1  # part of the fingerprint: raise it when the order or the cutting changes


class _Lane:
    """One lane being read: its unit's payloads from the cursor on, and the tokens of the document under way."""

    def __init__(self, read: Callable[[int, int], "_OpenUnit"], lane: int, cursor: Cursor) -> None:
        self._read = read
        self._lane = lane
        self.cursor = cursor
        self._unit: _OpenUnit | None = None
        self._ids: Ids | None = None

    def fill(self, batch: Batch, row: int, doc: int) -> None:
        """Write the lane's next inputs into a row of a batch, and move the cursor past them."""
        start, context = 0, batch.tokens.shape[1]
        while start < context:
            unit, document, offset = self.cursor.unit, self.cursor.document, self.cursor.offset
            if self._unit is None:
                self._unit = self._read(self._lane, unit)
                if document >= self._unit.count:
                    raise DataError(
                        f"the cursor of lane {self._lane} points at document {document} of a unit of {self._unit.count}; "
                        "it belongs to another dataset, or other unit settings"
                    )
            if self._ids is None:
                self._ids = self._unit.ids(document)
                if offset > len(self._ids):
                    raise DataError(
                        f"the cursor of lane {self._lane} points at token {offset} of a document of {len(self._ids)}; "
                        "it belongs to another dataset or tokenizer"
                    )
            count = fill(row, start, self._ids, offset, doc, batch)
            start, offset = start + count, offset + count
            if offset > len(self._ids):
                self._ids, document, offset = None, document + 1, 0
                if document == self._unit.count:
                    self._unit, unit, document = None, unit + 1, 0
            self.cursor = Cursor(unit, document, offset)


class _OpenUnit:
    """A unit's payloads in reading order; each is given out, and forgotten, once."""

    def __init__(
        self, dataset: Dataset, tokenizer: Tokenizer, shard: ShardSummary, first: int, order: npt.NDArray[np.int64]
    ) -> None:
        self._dataset, self._tokenizer, self._shard, self._first, self._order = dataset, tokenizer, shard, first, order
        self.count = len(order)
        self._payloads: list[bytes | None] = list(dataset.read(shard, first, self.count))

    def ids(self, document: int) -> Ids:
        sample = int(self._order[document])
        payload, self._payloads[sample] = self._payloads[sample], None
        assert payload is not None, "a lane reads each document of a unit once"
        return token_ids(self._dataset, self._tokenizer, self._shard, self._first + sample, payload)


class BatchStream(Steps[Cursor]):
    """The endless steps of one data rank; iterate over it.

    tokenizer: makes the ids of a text dataset, and must be the one that made those of a token dataset. split: which documents.
    seed: of the order. context: inputs per row (may change on resuming).
    lanes: G, fixed for a run. lanes_per_step: g, rows of the global batch. micro_batch: rows per Batch.
    data_rank, data_size: this rank among the data-parallel ones; it owns the lanes j with j % data_size == data_rank.
    start_step: number of the first step; step s advances lanes (s*g + i) % G, i < g.
    cursors: where lanes begin, as saved after step start_step - 1; those of other ranks' lanes are ignored; none: the beginning.
    prefetch: steps made ahead by a background thread. unit_documents, unit_bytes: see ShardsConfig.

    Attributes: `fingerprint`, hex sha256 of everything that decides the lanes' contents; a resumed run must find it unchanged.
    `cursors`, of this rank's lanes after the last step yielded.
    Raises DataError: an impossible layout (legal sizes are named), another tokenizer's ids, missing cursors, damaged data; a
    failure of the background thread is raised by `next`.
    """

    def __init__(
        self,
        dataset: Dataset,
        tokenizer: Tokenizer,
        *,
        split: str = "train",
        seed: int,
        context: int,
        lanes: int,
        lanes_per_step: int,
        micro_batch: int,
        data_rank: int,
        data_size: int,
        start_step: int = 0,
        cursors: Mapping[int, Cursor] | None = None,
        prefetch: int = ShardsConfig.model_fields["prefetch"].default,
        unit_documents: int = ShardsConfig.model_fields["unit_documents"].default,
        unit_bytes: int = ShardsConfig.model_fields["unit_bytes"].default,
    ) -> None:
        if unit_documents < 1 or unit_bytes < 1:
            raise DataError("unit_documents and unit_bytes must both be at least 1")
        plan = StepPlan(
            context=context,
            lanes=lanes,
            lanes_per_step=lanes_per_step,
            micro_batch=micro_batch,
            data_rank=data_rank,
            data_size=data_size,
            start_step=start_step,
            prefetch=prefetch,
        )
        begin = plan.first_cursors(cursors, Cursor())
        check_tokenizer(dataset, tokenizer)
        shards = dataset.require(split)
        self.fingerprint = stream_fingerprint(
            dataset, tokenizer, split=split, seed=seed, lanes=lanes, unit_documents=unit_documents, unit_bytes=unit_bytes
        )
        order = LaneOrder(Units([dataset.index(shard).text_bytes for shard in shards], unit_documents, unit_bytes), seed, lanes)

        def read(lane: int, k: int) -> _OpenUnit:
            unit, samples = order.unit(lane, k)
            return _OpenUnit(dataset, tokenizer, shards[unit.shard], unit.first, samples)

        sources = {lane: _Lane(read, lane, cursor) for lane, cursor in begin.items()}

        def fill_rows(batches: Sequence[Batch]) -> dict[int, Cursor]:
            for batch in batches:
                for row, lane in enumerate(batch.lanes):
                    sources[lane].fill(batch, row, tokenizer.doc)
            return {lane: source.cursor for lane, source in sources.items()}

        super().__init__(plan, begin, fill_rows)


def stream_fingerprint(
    dataset: Dataset, tokenizer: Tokenizer, *, split: str = "train", seed: int, lanes: int, unit_documents: int, unit_bytes: int
) -> str:
    """Hex sha256 of everything that decides the lanes' contents; arguments as of BatchStream. A resumed run must find it equal."""
    return fingerprint([STREAM_VERSION, dataset.fingerprint, tokenizer.fingerprint, split, seed, lanes, unit_documents, unit_bytes])
