"""The training stream: lanes of documents, tokenized and cut into batches, with the cursors that resume it at any step.

The one thing to know: a document x1..xn gives inputs [doc, x1..xn] with labels [x1..xn, doc] and pos 0..n, so every label is valid
and none crosses documents; documents of a lane are joined and cut every `context` inputs. Cursors tell what was *yielded*, never
what was prefetched.
"""

import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from baton.data_pipeline.batches import Batch, check_tokenizer, empty_batch, fill, token_ids
from baton.data_pipeline.config import DataConfig
from baton.data_pipeline.dataset import Dataset
from baton.data_pipeline.errors import DataError
from baton.data_pipeline.evaluation import EvaluationSet, documents, evaluation_batches
from baton.data_pipeline.files import fingerprint
from baton.data_pipeline.lanes import Cursor, LaneOrder, Units, check_layout, lanes_of_step
from baton.data_pipeline.shards import ShardSummary
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


@dataclass(frozen=True)
class StepData:
    """What one data rank consumes in one optimizer step. cursors: of all lanes of the rank, after this step is consumed."""

    step: int
    micro_batches: list[Batch]
    cursors: dict[int, Cursor]


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


class BatchStream:
    """The endless steps of one data rank; iterate over it.

    tokenizer: makes the ids of a text dataset, and must be the one that made those of a token dataset. split: which documents.
    seed: of the order. context: inputs per row (may change on resuming).
    lanes: G, fixed for a run. lanes_per_step: g, rows of the global batch. micro_batch: rows per Batch.
    data_rank, data_size: this rank among the data-parallel ones; it owns the lanes j with j % data_size == data_rank.
    start_step: number of the first step; step s advances lanes (s*g + i) % G, i < g.
    cursors: where lanes begin, as saved after step start_step - 1; those of other ranks' lanes are ignored; none: the beginning.
    prefetch: steps made ahead by a background thread. unit_documents, unit_bytes: see DataConfig.

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
        prefetch: int = DataConfig.model_fields["prefetch"].default,
        unit_documents: int = DataConfig.model_fields["unit_documents"].default,
        unit_bytes: int = DataConfig.model_fields["unit_bytes"].default,
    ) -> None:
        check_layout(lanes=lanes, lanes_per_step=lanes_per_step, micro_batch=micro_batch, data_size=data_size)
        if context < 1 or prefetch < 1 or unit_documents < 1 or unit_bytes < 1:
            raise DataError("context, prefetch, unit_documents and unit_bytes must all be at least 1")
        if not 0 <= data_rank < data_size:
            raise DataError(f"data_rank {data_rank} is not one of {data_size} data ranks; use 0 to {data_size - 1}")
        check_tokenizer(dataset, tokenizer)
        shards = dataset.require(split)
        own = range(data_rank, lanes, data_size)
        if cursors is None and start_step:
            raise DataError(f"step {start_step} needs the lanes' cursors; pass those saved after step {start_step - 1}")
        missing = [lane for lane in own if cursors is not None and lane not in cursors]
        if missing:
            raise DataError(
                f"no cursor for lane {missing[0]} (of {len(missing)} missing); the checkpoint is of a run with other lanes"
            )
        self.fingerprint = stream_fingerprint(
            dataset, tokenizer, split=split, seed=seed, lanes=lanes, unit_documents=unit_documents, unit_bytes=unit_bytes
        )
        self.cursors: dict[int, Cursor] = {lane: Cursor() if cursors is None else cursors[lane] for lane in own}
        order = LaneOrder(Units([dataset.index(shard).text_bytes for shard in shards], unit_documents, unit_bytes), seed, lanes)

        def read(lane: int, k: int) -> _OpenUnit:
            unit, samples = order.unit(lane, k)
            return _OpenUnit(dataset, tokenizer, shards[unit.shard], unit.first, samples)

        sources = {lane: _Lane(read, lane, cursor) for lane, cursor in self.cursors.items()}

        def steps() -> Iterator[StepData]:
            step = start_step
            while True:
                mine = [lane for lane in lanes_of_step(step, lanes, lanes_per_step) if lane in sources]
                batches = []
                for i in range(0, len(mine), micro_batch):
                    batch = empty_batch(micro_batch, context, tuple(mine[i : i + micro_batch]))
                    for row, lane in enumerate(batch.lanes):
                        sources[lane].fill(batch, row, tokenizer.doc)
                    batches.append(batch)
                yield StepData(step, batches, {lane: source.cursor for lane, source in sources.items()})
                step += 1

        self._steps = _Prefetched(steps(), prefetch)
        # the thread does not know of this object, so that dropping it without close() stops the thread too
        self._stop = weakref.finalize(self, self._steps.close)

    def __iter__(self) -> "BatchStream":
        return self

    def __next__(self) -> StepData:
        data = self._steps.get()
        self.cursors = data.cursors
        return data

    def close(self) -> None:
        """Stop the background thread; safe to call twice."""
        self._stop()

    def __enter__(self) -> "BatchStream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def stream_fingerprint(
    dataset: Dataset, tokenizer: Tokenizer, *, split: str = "train", seed: int, lanes: int, unit_documents: int, unit_bytes: int
) -> str:
    """Hex sha256 of everything that decides the lanes' contents; arguments as of BatchStream. A resumed run must find it equal."""
    return fingerprint([STREAM_VERSION, dataset.fingerprint, tokenizer.fingerprint, split, seed, lanes, unit_documents, unit_bytes])


class _Prefetched:
    """Runs an endless iterator in a thread, at most `ahead` items ahead; its exception is raised by `get`, after the items before
    it."""

    def __init__(self, items: Iterator[StepData], ahead: int) -> None:
        self._items = items
        self._queue: queue.Queue[StepData | BaseException] = queue.Queue(ahead)
        self._closing = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="data-prefetch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for item in self._items:
                if not self._put(item):
                    return
        except BaseException as error:  # handed to the consumer, whatever it is
            self._put(error)

    def _put(self, item: StepData | BaseException) -> bool:
        while not self._closing.is_set():
            try:
                self._queue.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def get(self) -> StepData:
        while self._failure is None:
            if self._closing.is_set():
                raise DataError("the data stream is closed; make a new one")
            try:
                item = self._queue.get(timeout=0.5)  # not for ever: another thread may close the stream
            except queue.Empty:
                continue
            if not isinstance(item, BaseException):
                return item
            self._failure = item
        raise self._failure

    def close(self) -> None:
        self._closing.set()
        self._thread.join(timeout=10)
