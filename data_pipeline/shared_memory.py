"""Blocks of memory that a process and its workers share, each room for all rows of one step of a data rank.

The one thing to know: the memory has no name (memfd), so that whoever is killed leaves nothing behind; what is written in a worker
is what a batch shows, and a block is used again when the last array that shows it is gone.
"""

import ctypes
import mmap
import os
import struct
import weakref
from collections import deque
from collections.abc import Iterable
from multiprocessing import reduction
from typing import Any

import numpy as np

from baton.data_pipeline.batches import Batch
from baton.data_pipeline.lane_order import Cursor
from baton.data_pipeline.steps import StepPlan

_LINE = 64  # bytes of a cache line: where arrays begin
_INTS = 4  # of a cursor, besides those of its sources


class Blocks:
    """`count` blocks, each large enough for any step of `plan`; `sources`: how many a cursor counts, 0 for one alone. Sent to a
    process, it is the same memory there.

    Attributes: `free`, the numbers of those that were leased and are not in use any more.
    """

    _layouts: dict[tuple[int, int], tuple[int, int, int, int, int]]

    def __init__(self, count: int, plan: StepPlan, sources: int) -> None:
        shapes = [(shape.lanes_per_step // plan.data_size, shape.sequence_length) for shape in plan.stretches]
        self._place, self._layouts = struct.Struct(f"{_INTS + sources}q"), {}
        self._size = -(-max(self._offsets(*shape)[-1] for shape in shapes) // mmap.PAGESIZE) * mmap.PAGESIZE
        self.count = count
        fd = os.memfd_create("baton-rows")
        try:
            os.ftruncate(fd, count * self._size)  # pages that are never written take no memory
            self._open(fd)
        finally:
            os.close(fd)

    def _open(self, fd: int) -> None:
        self._fd = os.dup(fd)
        self._memory = mmap.mmap(fd, self.count * self._size)
        self._views: dict[tuple[int, int, int], Batch] = {}
        self.free: deque[int] = deque()
        weakref.finalize(self, os.close, self._fd)

    def __getstate__(self) -> tuple[Any, ...]:
        return reduction.DupFd(self._fd), self.count, self._size, self._place.size // 8  # works while a process is started

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        received, self.count, self._size, ints = state
        self._place, self._layouts = struct.Struct(f"{ints}q"), {}
        fd = received.detach()
        try:
            self._open(fd)
        finally:
            os.close(fd)

    def _offsets(self, rows: int, sequence_length: int) -> tuple[int, int, int, int, int]:
        """First byte in a block of its tokens, labels, positions and cursors, and its end."""
        if (rows, sequence_length) not in self._layouts:
            at = [0]
            for size in (
                8 * rows * sequence_length,
                8 * rows * sequence_length,
                4 * rows * sequence_length,
                rows * self._place.size,
            ):
                at.append(at[-1] + -(-size // _LINE) * _LINE)
            self._layouts[rows, sequence_length] = at[0], at[1], at[2], at[3], at[4]
        return self._layouts[rows, sequence_length]

    def rows(self, number: int, lanes: tuple[int, ...], sequence_length: int) -> Batch:
        """A block as one batch. Whoever asks keeps it no longer than the block is theirs."""
        key = number, len(lanes), sequence_length
        view = self._views.get(key)
        if view is None:
            if len(self._views) >= 2 * self.count:  # shapes of steps that are over
                self._views.clear()
            view = self._views[key] = self._batch(self._memory, number * self._size, lanes, sequence_length)
        return Batch(view.tokens, view.labels, view.pos, lanes)

    def lease(self, number: int, lanes: tuple[int, ...], sequence_length: int) -> Batch:
        """A block as one batch that may be kept: when it and all that shows its memory is gone, the block is `free`."""
        held = (ctypes.c_char * self._size).from_buffer(self._memory, number * self._size)
        weakref.finalize(held, self.free.append, number).atexit = False
        return self._batch(held, 0, lanes, sequence_length)

    def _batch(self, memory: Any, begin: int, lanes: tuple[int, ...], sequence_length: int) -> Batch:
        shape = len(lanes), sequence_length
        tokens, labels, pos, _, _ = self._offsets(*shape)
        return Batch(
            np.ndarray(shape, np.int64, memory, begin + tokens),
            np.ndarray(shape, np.int64, memory, begin + labels),
            np.ndarray(shape, np.int32, memory, begin + pos),
            lanes,
        )

    def write_cursors(self, number: int, shape: tuple[int, int], cursors: Iterable[tuple[int, Cursor]]) -> None:
        """Where lanes are after their row of a block of `shape` rows and context: (row, cursor)."""
        begin = number * self._size + self._offsets(*shape)[3]
        memory, size, pack = self._memory, self._place.size, self._place.pack_into
        for row, cursor in cursors:
            source = -1 if cursor.source is None else cursor.source
            pack(memory, begin + row * size, cursor.unit, cursor.document, cursor.offset, source, *cursor.taken)

    def cursors(self, number: int, shape: tuple[int, int], before: Iterable[Cursor]) -> list[Cursor]:
        """What `write_cursors` wrote of every row; before: cursors of the same lanes, for what never changes."""
        begin = number * self._size + self._offsets(*shape)[3]
        places = self._place.iter_unpack(self._memory[begin : begin + shape[0] * self._place.size])
        return [
            Cursor(place[0], place[1], place[2], place[_INTS:], None if place[3] < 0 else place[3], old.skipped)
            for place, old in zip(places, before)
        ]
