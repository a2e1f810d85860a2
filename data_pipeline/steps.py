"""The endless steps of one data rank: which rows a step has, made ahead by a thread or by workers, and the cursors of what was
yielded.

The one thing to know: lane j lives on data rank j % data_size, and a step advances the next lanes cyclically, as many as it has
rows: after R rows of earlier steps, lanes (R + i) % G. How many rows a step has and how long they are may change over the run
(`Stretch`); what a lane holds is somebody else's business (`Fill`). Cursors tell what was *yielded*, never what was prefetched.
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

from baton.data_pipeline.batches import Batch, empty_batch
from baton.data_pipeline.errors import DataError
from baton.data_pipeline.lane_order import check_layout, next_lanes

C = TypeVar("C")

Fill = Callable[[int, Sequence[Batch]], dict[int, C]]
"""Writes the rows of a step's batches (each row's lane is in `Batch.lanes`); the cursors of all lanes after them. Called once for
every step, in order."""


@dataclass(frozen=True)
class StepData:
    """What one data rank consumes in one optimizer step. cursors: of all lanes of the rank, after this step is consumed."""

    step: int
    micro_batches: list[Batch]
    cursors: dict[int, Any]


@dataclass(frozen=True)
class Place:
    """A document where a lane reads it. source, unit (how many units of the source came before in the lane), document (position in
    the unit's order): as in Cursor.skipped. name: as errors name it."""

    source: int
    unit: int
    document: int
    name: str


@dataclass(frozen=True)
class Stretch:
    """Steps of one shape, from `first_step` to the next stretch or for ever. context: inputs per row. lanes_per_step: g, rows of
    the global batch. micro_batch_size: rows per Batch."""

    first_step: int
    sequence_length: int
    lanes_per_step: int
    micro_batch_size: int


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """Which rows this data rank has in every step.

    lanes: G, fixed for a run. stretches: the steps' shapes, in order, from step 0 on. With one stretch, step s advances lanes
    (s*g + i) % G, i < g; with several, the rows of earlier ones count with their own g.
    data_rank, data_size: this rank among the data-parallel ones; it owns the lanes j with j % data_size == data_rank.
    start_step: number of the first step. prefetch: steps made ahead.
    Raises DataError: an impossible layout (legal sizes are named, and the stretch if there are several).
    """

    lanes: int
    stretches: tuple[Stretch, ...]
    data_rank: int
    data_size: int
    start_step: int
    prefetch: int

    @classmethod
    def constant(cls, *, sequence_length: int, lanes_per_step: int, micro_batch_size: int, **others: int) -> Self:
        """A plan whose steps are all alike. others: the fields of StepPlan but for `stretches`."""
        return cls(stretches=(Stretch(0, sequence_length, lanes_per_step, micro_batch_size),), **others)

    def __post_init__(self) -> None:
        firsts = [stretch.first_step for stretch in self.stretches]
        if firsts[:1] != [0] or any(a >= b for a, b in pairwise(firsts)):
            raise DataError(f"the stretches of a run begin at steps {firsts}; begin the first at 0, and each after the one before")
        self.check(self._check_stretch)
        if self.prefetch < 1 or self.start_step < 0:
            raise DataError("prefetch must be at least 1 and start_step at least 0")
        if not 0 <= self.data_rank < self.data_size:
            raise DataError(f"data_rank {self.data_rank} is not one of {self.data_size} data ranks; use 0 to {self.data_size - 1}")

    def check(self, require: Callable[[Stretch], None]) -> None:
        """Call `require` with every stretch; a DataError of one of several is raised with its steps in front."""
        for stretch, end in self._spans():
            try:
                require(stretch)
            except DataError as error:
                if len(self.stretches) == 1:
                    raise
                last = "on" if end is None else f"to {end - 1}"
                raise DataError(f"from step {stretch.first_step} {last}: {error}") from error

    def _spans(self) -> Iterator[tuple[Stretch, int | None]]:
        """Each stretch and the step after its last; None for ever."""
        yield from zip(self.stretches, [*(stretch.first_step for stretch in self.stretches[1:]), None])

    def _check_stretch(self, stretch: Stretch) -> None:
        check_layout(
            lanes=self.lanes,
            lanes_per_step=stretch.lanes_per_step,
            micro_batch_size=stretch.micro_batch_size,
            data_size=self.data_size,
        )
        if stretch.sequence_length < 1:
            raise DataError(f"sequence_length {stretch.sequence_length} must be at least 1")

    def stretch(self, step: int) -> Stretch:
        """The shape of step number `step`."""
        return self.stretches[bisect_right(self.stretches, step, key=lambda stretch: stretch.first_step) - 1]

    def lanes_of(self, step: int) -> list[int]:
        """The lanes that step number `step` advances, on all ranks."""
        return next_lanes(self._rows_before(step), self.lanes, self.stretch(step).lanes_per_step)

    def _rows_before(self, step: int) -> int:
        """Rows of all earlier steps, on all ranks."""
        ends = ((stretch, step if end is None else min(step, end)) for stretch, end in self._spans())
        return sum(stretch.lanes_per_step * max(0, end - stretch.first_step) for stretch, end in ends)

    def rows(self, step: int) -> tuple[int, ...]:
        """The lanes of this rank's rows in a step, in order."""
        count = self.stretch(step).lanes_per_step
        return _rank_lanes(self._rows_before(step) % self.lanes, self.lanes, count, self.data_rank, self.data_size)

    def batches(self, step: int) -> list[Batch]:
        """Empty batches for this rank's rows in a step."""
        shape, mine = self.stretch(step), self.rows(step)
        rows = [mine[i : i + shape.micro_batch_size] for i in range(0, len(mine), shape.micro_batch_size)]
        return [empty_batch(len(lanes), shape.sequence_length, lanes) for lanes in rows]

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


@lru_cache(64)  # rows come round again after a few steps
def _rank_lanes(first: int, lanes: int, count: int, data_rank: int, data_size: int) -> tuple[int, ...]:
    return tuple(lane for lane in next_lanes(first, lanes, count) if lane % data_size == data_rank)


class Steps(Generic[C]):
    """The endless steps of one data rank; iterate over it. A failure of `fill`, also in the background thread, is raised by `next`.

    cursors: of this rank's lanes, from `StepPlan.first_cursors`; the attribute: those after the last step yielded. stop: what ends
    `fill` for good when it may be waiting. room: of a fill that works ahead by itself, what gives the batches that it fills; None:
    the plan's, and a thread that works ahead.
    """

    def __init__(
        self,
        plan: StepPlan,
        cursors: dict[int, C],
        fill: Fill[C],
        stop: Callable[[], None] = lambda: None,
        room: Callable[[int], list[Batch]] | None = None,
    ) -> None:
        self.cursors = cursors
        give = room or plan.batches

        def steps() -> Iterator[StepData]:
            step = plan.start_step
            while True:
                batches = give(step)
                yield StepData(step, batches, fill(step, batches))
                step += 1

        self._steps = _Prefetched(steps(), plan.prefetch, stop) if room is None else _Direct(steps(), stop)
        # the thread does not know of this object, so that dropping it without close() stops the thread too
        self._stop = weakref.finalize(self, self._steps.close)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> StepData:
        data = self._steps.get()
        self.cursors = data.cursors
        return data

    def touched(self, lane: int, before: C | None, after: C, step: int) -> list[Place]:
        """The documents that a lane of this rank gave tokens of in a step between two cursors (before: None, the beginning), in
        order; [] where there are none."""
        return []

    def close(self) -> None:
        """Stop the background thread; safe to call twice."""
        self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_CLOSED = "the data stream is closed; make a new one"


class _Direct:
    """An endless iterator whose exception is raised by `get` ever after."""

    def __init__(self, items: Iterator[StepData], stop: Callable[[], None]) -> None:
        self._items, self._stop = items, stop
        self._closing = False
        self._failure: BaseException | None = None

    def get(self) -> StepData:
        if self._closing:
            raise DataError(_CLOSED)
        if self._failure is not None:
            raise self._failure
        try:
            return next(self._items)
        except BaseException as error:  # also what a signal's handler raises: the iterator is over, and must not end quietly
            self._failure = error
            if self._closing:  # by another thread, which took from it what it waited for
                raise DataError(_CLOSED) from None
            raise

    def close(self) -> None:
        self._closing = True
        self._stop()


class _Prefetched:
    """Runs an endless iterator in a thread, at most `ahead` items ahead; its exception is raised by `get`, after the items before
    it."""

    def __init__(self, items: Iterator[StepData], ahead: int, stop: Callable[[], None]) -> None:
        self._stop = stop
        self._queue: queue.Queue[StepData | BaseException] = queue.Queue(ahead)
        self._closing = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(items,), name="data-prefetch", daemon=True)
        self._thread.start()

    def _run(self, items: Iterator[StepData]) -> None:  # nobody else keeps `items`: streams it has open close when the thread ends
        try:
            for item in items:
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
                raise DataError(_CLOSED)
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
        self._stop()
        with contextlib.suppress(queue.Empty):  # a thread that waits for room need not wait for its time-out
            self._queue.get_nowait()
        self._thread.join(timeout=10)
