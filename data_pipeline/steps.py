"""The rows of every step of one data rank, batches made ahead of use, and the cursors of consumed steps.

Lane j belongs to data rank j % data_size. A step advances the next lanes cyclically, one row each: after R rows of earlier steps
these are lanes (R + i) % G, i = 0, 1, ... The number of rows and their length may change over the run (`PhaseSpec`). `StepStream`
calls a `FillRows` for the contents, in a background thread. Its cursors are those of the steps it has *yielded*, not of the steps
made ahead.
"""

import contextlib
import queue
import threading
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, Generic, Self, TypeVar

from baton.data_pipeline.errors import DataError
from baton.data_pipeline.lane_order import check_layout, next_lanes
from baton.data_pipeline.packing import NumpyBatch, empty_batch

C = TypeVar("C")

FillRows = Callable[[int, Sequence[NumpyBatch]], dict[int, C]]
"""Writes the rows of a step's batches (`Batch.lanes` names each row's lane) and returns the cursors of all lanes after them. Called
once for each step, in order."""


@dataclass(frozen=True)
class StepData:
    """What one data rank consumes in one optimizer step. cursors: of all its lanes, after this step is consumed."""

    step: int
    micro_batches: list[NumpyBatch]
    cursors: dict[int, Any]


@dataclass(frozen=True)
class DocumentRef:
    """A document at a place of a lane.

    source, unit, document: as in `Cursor.skipped` (unit: number of units of the source that came before in the lane; document:
    position in the unit's order). name: the document's name in error messages.
    """

    source: int
    unit: int
    document: int
    name: str


@dataclass(frozen=True)
class PhaseSpec:
    """Steps of one shape, from `first_step` to the next phase or without end. sequence_length: tokens per row. lanes_per_step: g,
    rows of the global batch. micro_batch_size: rows per Batch."""

    first_step: int
    sequence_length: int
    lanes_per_step: int
    micro_batch_size: int


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """Which rows this data rank has in every step.

    lanes: G, fixed for a run. phases: shapes of the steps, in order, from step 0 on. With one phase, step s advances lanes (s*g +
    i) % G, i < g. With several, the rows of earlier phases count with their own g. data_rank, data_size: this rank and the number
    of data-parallel ranks. The rank owns the lanes j with j % data_size == data_rank. start_step: number of the first step.
    prefetch: number of steps made ahead.

    Raises:
        DataError: an impossible layout. The message names possible sizes, and the phase if there are several.
    """

    lanes: int
    phases: tuple[PhaseSpec, ...]
    data_rank: int
    data_size: int
    start_step: int
    prefetch: int

    @classmethod
    def constant(cls, *, sequence_length: int, lanes_per_step: int, micro_batch_size: int, **others: int) -> Self:
        """A plan with one phase. others: the fields of StepPlan except `phases`."""
        return cls(phases=(PhaseSpec(0, sequence_length, lanes_per_step, micro_batch_size),), **others)

    def __post_init__(self) -> None:
        firsts = [phase.first_step for phase in self.phases]
        if firsts[:1] != [0] or any(a >= b for a, b in pairwise(firsts)):
            raise DataError(f"the phases of a run begin at steps {firsts}; begin the first at 0, and each after the one before")
        self.check(self._check_phase)
        if self.prefetch < 1 or self.start_step < 0:
            raise DataError("prefetch must be at least 1 and start_step at least 0")
        if not 0 <= self.data_rank < self.data_size:
            raise DataError(f"data_rank {self.data_rank} is not one of {self.data_size} data ranks; use 0 to {self.data_size - 1}")

    def check(self, require: Callable[[PhaseSpec], None]) -> None:
        """Call `require` with each phase. A DataError about one of several phases is raised with its steps in front."""
        for phase, end in self._phase_ranges():
            try:
                require(phase)
            except DataError as error:
                if len(self.phases) == 1:
                    raise
                last = "on" if end is None else f"to {end - 1}"
                raise DataError(f"from step {phase.first_step} {last}: {error}") from error

    def _phase_ranges(self) -> Iterator[tuple[PhaseSpec, int | None]]:
        """Each phase and the step after its last one; None: no end."""
        yield from zip(self.phases, [*(phase.first_step for phase in self.phases[1:]), None])

    def _check_phase(self, phase: PhaseSpec) -> None:
        check_layout(
            lanes=self.lanes,
            lanes_per_step=phase.lanes_per_step,
            micro_batch_size=phase.micro_batch_size,
            data_size=self.data_size,
        )
        if phase.sequence_length < 1:
            raise DataError(f"sequence_length {phase.sequence_length} must be at least 1")

    def phase(self, step: int) -> PhaseSpec:
        """The phase of step number `step`."""
        return self.phases[bisect_right(self.phases, step, key=lambda phase: phase.first_step) - 1]

    def lanes_of(self, step: int) -> list[int]:
        """The lanes that step number `step` advances, on all ranks."""
        return next_lanes(self._rows_before(step), self.lanes, self.phase(step).lanes_per_step)

    def _rows_before(self, step: int) -> int:
        """Rows of all earlier steps, on all ranks."""
        ends = ((phase, step if end is None else min(step, end)) for phase, end in self._phase_ranges())
        return sum(phase.lanes_per_step * max(0, end - phase.first_step) for phase, end in ends)

    def rows(self, step: int) -> tuple[int, ...]:
        """The lanes of this rank's rows in a step, in order."""
        count = self.phase(step).lanes_per_step
        return _rank_lanes(self._rows_before(step) % self.lanes, self.lanes, count, self.data_rank, self.data_size)

    def batches(self, step: int) -> list[NumpyBatch]:
        """Empty batches for this rank's rows in a step."""
        shape, mine = self.phase(step), self.rows(step)
        rows = [mine[i : i + shape.micro_batch_size] for i in range(0, len(mine), shape.micro_batch_size)]
        return [empty_batch(len(lanes), shape.sequence_length, lanes) for lanes in rows]

    def first_cursors(self, cursors: Mapping[int, C] | None, beginning: C) -> dict[int, C]:
        """Cursors at which this rank's lanes begin.

        Args:
            cursors: saved after step start_step - 1; cursors of other ranks' lanes are ignored. None: all lanes are at `beginning`.

        Raises:
            DataError: cursors are missing.
        """
        own = range(self.data_rank, self.lanes, self.data_size)
        if cursors is None and self.start_step:
            raise DataError(f"step {self.start_step} needs the lanes' cursors; pass those saved after step {self.start_step - 1}")
        missing = [lane for lane in own if cursors is not None and lane not in cursors]
        if missing:
            raise DataError(
                f"no cursor for lane {missing[0]} (of {len(missing)} missing); the checkpoint is of a run with other lanes"
            )
        return {lane: beginning if cursors is None else cursors[lane] for lane in own}


@lru_cache(64)  # the same rows recur after a few steps
def _rank_lanes(first: int, lanes: int, count: int, data_rank: int, data_size: int) -> tuple[int, ...]:
    return tuple(lane for lane in next_lanes(first, lanes, count) if lane % data_size == data_rank)


class StepStream(Generic[C]):
    """Iterator over the endless steps of one data rank. `next` also raises errors of `fill` from the background thread.

    Args:
        cursors: of this rank's lanes, from `StepPlan.first_cursors`.
        stop: ends `fill` for good, also while it waits.
        room: for a `fill` that works ahead by itself, returns the batches it fills. None: the plan's empty batches, filled by a
            background thread.
        made: with `room`, whether the next step's batches are filled.

    Attributes:
        cursors: of this rank's lanes, after the last step yielded.
    """

    def __init__(
        self,
        plan: StepPlan,
        cursors: dict[int, C],
        fill: FillRows[C],
        stop: Callable[[], None] = lambda: None,
        room: Callable[[int], list[NumpyBatch]] | None = None,
        made: Callable[[], bool] = lambda: False,
    ) -> None:
        self.cursors = cursors
        give = room or plan.batches

        def steps() -> Iterator[StepData]:
            step = plan.start_step
            while True:
                batches = give(step)
                yield StepData(step, batches, fill(step, batches))
                step += 1

        self._steps = _Prefetched(steps(), plan.prefetch, stop) if room is None else _Direct(steps(), stop, made)
        # the thread holds no reference to this object, so dropping it without close() stops the thread too
        self._stop = weakref.finalize(self, self._steps.close)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> StepData:
        data = self._steps.get()
        self.cursors = data.cursors
        return data

    def is_ready(self) -> bool:
        """Whether `next` returns, or raises, without waiting."""
        return self._steps.is_ready()

    def documents_between(self, lane: int, before: C | None, after: C, step: int) -> list[DocumentRef]:
        """Documents of which a lane of this rank gave tokens between two cursors of a step, in order; [] if the stream has no
        documents. before: None is the lane's beginning."""
        return []

    def close(self) -> None:
        """Stop the background thread. May be called twice."""
        self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_CLOSED = "the data stream is closed; make a new one"


class _Direct:
    """Reads an endless iterator. `get` raises the iterator's exception, also in later calls."""

    def __init__(self, items: Iterator[StepData], stop: Callable[[], None], made: Callable[[], bool]) -> None:
        self._items, self._stop, self._made = items, stop, made
        self._closing = False
        self._failure: BaseException | None = None

    def get(self) -> StepData:
        if self._closing:
            raise DataError(_CLOSED)
        if self._failure is not None:
            raise self._failure
        try:
            return next(self._items)
        except BaseException as error:  # also from a signal handler: the iterator has ended, and later calls must raise
            self._failure = error
            if self._closing:  # closed by another thread while this one waited
                raise DataError(_CLOSED) from None
            raise

    def is_ready(self) -> bool:
        return self._closing or self._failure is not None or self._made()

    def close(self) -> None:
        self._closing = True
        self._stop()


class _Prefetched:
    """Runs an endless iterator in a thread, at most `ahead` items ahead. `get` raises its exception after the items that precede
    it."""

    def __init__(self, items: Iterator[StepData], ahead: int, stop: Callable[[], None]) -> None:
        self._stop = stop
        self._queue: queue.Queue[StepData | BaseException] = queue.Queue(ahead)
        self._closing = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(items,), name="data-prefetch", daemon=True)
        self._thread.start()

    def _run(self, items: Iterator[StepData]) -> None:  # holds the only reference to `items`: its open files close with the thread
        try:
            for item in items:
                if not self._put(item):
                    return
        except BaseException as error:  # raised by the consumer
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
                raise DataError(_CLOSED)
            try:
                item = self._queue.get(timeout=0.5)  # finite, because another thread may close the stream
            except queue.Empty:
                continue
            if not isinstance(item, BaseException):
                return item
            self._failure = item
        raise self._failure

    def is_ready(self) -> bool:
        return self._closing.is_set() or self._failure is not None or not self._queue.empty()

    def close(self) -> None:
        self._closing.set()
        self._stop()
        with contextlib.suppress(queue.Empty):  # wakes a thread that waits for a free place
            self._queue.get_nowait()
        self._thread.join(timeout=10)
