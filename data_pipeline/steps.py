"""The endless steps of one data rank: which rows a step has, made ahead by a thread, and the cursors of what was yielded.

The one thing to know: lane j lives on data rank j % data_size, and step s advances the lanes (s * g + i) % G, i < g; what a lane
holds is somebody else's business (`Fill`). Cursors tell what was *yielded*, never what was prefetched.
"""

import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

from baton.data_pipeline.batches import Batch, empty_batch
from baton.data_pipeline.errors import DataError
from baton.data_pipeline.lanes import check_layout, lanes_of_step

C = TypeVar("C")

Fill = Callable[[Sequence[Batch]], dict[int, C]]
"""Writes the next rows of a step's batches (each row's lane is in `Batch.lanes`); the cursors of all lanes after them."""


@dataclass(frozen=True)
class StepData:
    """What one data rank consumes in one optimizer step. cursors: of all lanes of the rank, after this step is consumed."""

    step: int
    micro_batches: list[Batch]
    cursors: dict[int, Any]


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """Which rows this data rank has in every step.

    context: inputs per row. lanes: G, fixed for a run. lanes_per_step: g, rows of the global batch. micro_batch: rows per Batch.
    data_rank, data_size: this rank among the data-parallel ones; it owns the lanes j with j % data_size == data_rank.
    start_step: number of the first step; step s advances lanes (s*g + i) % G, i < g. prefetch: steps made ahead by the thread.
    Raises DataError: an impossible layout (legal sizes are named).
    """

    context: int
    lanes: int
    lanes_per_step: int
    micro_batch: int
    data_rank: int
    data_size: int
    start_step: int
    prefetch: int

    def __post_init__(self) -> None:
        check_layout(lanes=self.lanes, lanes_per_step=self.lanes_per_step, micro_batch=self.micro_batch, data_size=self.data_size)
        if self.context < 1 or self.prefetch < 1:
            raise DataError("context and prefetch must both be at least 1")
        if not 0 <= self.data_rank < self.data_size:
            raise DataError(f"data_rank {self.data_rank} is not one of {self.data_size} data ranks; use 0 to {self.data_size - 1}")

    def first_cursors(self, cursors: Mapping[int, C] | None, beginning: C) -> dict[int, C]:
        """Where this rank's lanes begin. cursors: as saved after step start_step - 1, those of other ranks' lanes are ignored;
        none: all at `beginning`. Raises DataError: cursors are missing."""
        own = range(self.data_rank, self.lanes, self.data_size)
        if cursors is None and self.start_step:
            raise DataError(f"step {self.start_step} needs the lanes' cursors; pass those saved after step {self.start_step - 1}")
        missing = [lane for lane in own if cursors is not None and lane not in cursors]
        if missing:
            raise DataError(
                f"no cursor for lane {missing[0]} (of {len(missing)} missing); the checkpoint is of a run with other lanes"
            )
        return {lane: beginning if cursors is None else cursors[lane] for lane in own}


class Steps(Generic[C]):
    """The endless steps of one data rank; iterate over it. A failure of `fill`, in the background thread, is raised by `next`.

    cursors: of this rank's lanes, from `StepPlan.first_cursors`; the attribute: those after the last step yielded.
    """

    def __init__(self, plan: StepPlan, cursors: dict[int, C], fill: Fill[C]) -> None:
        self.cursors = cursors
        own = frozenset(cursors)

        def steps() -> Iterator[StepData]:
            step = plan.start_step
            while True:
                mine = [lane for lane in lanes_of_step(step, plan.lanes, plan.lanes_per_step) if lane in own]
                rows = [tuple(mine[i : i + plan.micro_batch]) for i in range(0, len(mine), plan.micro_batch)]
                batches = [empty_batch(plan.micro_batch, plan.context, lanes) for lanes in rows]
                yield StepData(step, batches, fill(batches))
                step += 1

        self._steps = _Prefetched(steps(), plan.prefetch)
        # the thread does not know of this object, so that dropping it without close() stops the thread too
        self._stop = weakref.finalize(self, self._steps.close)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> StepData:
        data = self._steps.get()
        self.cursors = data.cursors
        return data

    def close(self) -> None:
        """Stop the background thread; safe to call twice."""
        self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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
