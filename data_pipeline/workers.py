"""Worker processes that read lanes, and the memory they share with the training process.

Each worker has some of a data rank's lanes for good and writes their rows step by step. Which worker reads a lane does not change
its contents, so the number of workers may change at any start, and their timing does not affect the data's order.

Rows and cursors lie in blocks of shared memory (`SharedBlocks`), one block per step. Two kinds of one-byte messages are exchanged:
the number of the next step's block, to a worker; "written", from a worker. The memory has no name (memfd), so a killed process
leaves nothing behind. A block is used again when the last array over it is gone.
"""

import ctypes
import errno
import json
import mmap
import multiprocessing
import os
import signal
import struct
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import reduction
from socket import MSG_DONTWAIT, MSG_PEEK, socket, socketpair
from typing import Any

import numpy as np

from baton.data_pipeline.dataset import Dataset
from baton.data_pipeline.errors import DataError, StorageError
from baton.data_pipeline.lane_order import Cursor
from baton.data_pipeline.packing import Batch, NumpyBatch
from baton.data_pipeline.reader import CorpusSpec, DocReader, LaneReader
from baton.data_pipeline.remote import Cache
from baton.data_pipeline.steps import StepPlan
from baton.data_pipeline.tokenizer import Tokenizer, load_tokenizer

_LINE = 64  # bytes of a cache line, to which arrays are aligned
_INTS = 4  # integers of a cursor, without those per source


class SharedBlocks:
    """`count` blocks of shared memory, each with room for any step of `plan`. Pickled to another process, it is the same memory
    there.

    sources: number of sources that a cursor counts, 0 for a single one.

    Attributes:
        free: numbers of blocks that were leased and are no longer in use.
    """

    _layouts: dict[tuple[int, int], tuple[int, int, int, int, int]]

    def __init__(self, count: int, plan: StepPlan, sources: int) -> None:
        shapes = [(shape.lanes_per_step // plan.data_size, shape.sequence_length) for shape in plan.phases]
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
        self._views: dict[tuple[int, int, int], NumpyBatch] = {}
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
        """First byte in a block of tokens, labels, positions and cursors, and the end."""
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

    def rows(self, number: int, lanes: tuple[int, ...], sequence_length: int) -> NumpyBatch:
        """A block as one batch, valid as long as the caller owns the block."""
        key = number, len(lanes), sequence_length
        view = self._views.get(key)
        if view is None:
            if len(self._views) >= 2 * self.count:  # also shapes of earlier phases
                self._views.clear()
            view = self._views[key] = self._batch(self._memory, number * self._size, lanes, sequence_length)
        return Batch(view.tokens, view.labels, view.pos, lanes)

    def lease(self, number: int, lanes: tuple[int, ...], sequence_length: int) -> NumpyBatch:
        """A block as one batch that may be kept. When the batch and all arrays over its memory are gone, the block is `free`."""
        held = (ctypes.c_char * self._size).from_buffer(self._memory, number * self._size)
        weakref.finalize(held, self.free.append, number).atexit = False
        return self._batch(held, 0, lanes, sequence_length)

    def _batch(self, memory: Any, begin: int, lanes: tuple[int, ...], sequence_length: int) -> NumpyBatch:
        shape = len(lanes), sequence_length
        tokens, labels, pos, _, _ = self._offsets(*shape)
        return Batch(
            np.ndarray(shape, np.int64, memory, begin + tokens),
            np.ndarray(shape, np.int64, memory, begin + labels),
            np.ndarray(shape, np.int32, memory, begin + pos),
            lanes,
        )

    def write_cursors(self, number: int, shape: tuple[int, int], cursors: Iterable[tuple[int, Cursor]]) -> None:
        """Write (row, cursor) after the rows of a block. shape: rows and sequence length."""
        begin = number * self._size + self._offsets(*shape)[3]
        memory, size, pack = self._memory, self._place.size, self._place.pack_into
        for row, cursor in cursors:
            source = -1 if cursor.source is None else cursor.source
            pack(memory, begin + row * size, cursor.unit, cursor.document, cursor.offset, source, *cursor.taken)

    def cursors(self, number: int, shape: tuple[int, int], before: Iterable[Cursor]) -> list[Cursor]:
        """The cursors of all rows that `write_cursors` wrote. before: earlier cursors of the same lanes, for their constant
        fields."""
        begin = number * self._size + self._offsets(*shape)[3]
        places = self._place.iter_unpack(self._memory[begin : begin + shape[0] * self._place.size])
        return [
            Cursor(place[0], place[1], place[2], place[_INTS:], None if place[3] < 0 else place[3], old.skipped)
            for place, old in zip(places, before)
        ]


Start = Callable[[Callable[..., None], tuple[Any, ...], socket], Any]


class Workers:
    """A `FillRows` by `count` worker processes, at most one per lane, and the `room` it fills.

    Args:
        cursors: where the lanes begin.
        start: runs a function with arguments elsewhere, given this process's end of the socket, and returns an object with
            `terminate` and `join` (for tests; default: a process).

    Raises:
        DataError: from the call: a worker's error, or a worker has died.
    """

    def __init__(
        self,
        count: int,
        corpus: CorpusSpec,
        datasets: Sequence[Dataset],
        tokenizer: Tokenizer,
        plan: StepPlan,
        cursors: Mapping[int, Cursor],
        start: Start | None = None,
    ) -> None:
        self._plan = plan
        self._cursors = dict(cursors)
        self._connections: list[socket] = []
        self._workers: list[Any] = []
        self._blocks = SharedBlocks(min(plan.prefetch + _AHEAD + _HELD, _MOST), plan, len(datasets) if len(datasets) > 1 else 0)
        self._given: deque[int] = deque()  # blocks of later steps, that workers write or have written
        self._lanes: tuple[int, ...] = ()  # of the current step's rows
        self._taken, self._leased = -1, False  # the current step's block, and whether its batches are views of it
        self._blocks.free.extend(range(self._blocks.count))
        places = [(dataset.place, dataset.location.cache) for dataset in datasets]
        lanes = sorted(cursors)
        for number in range(min(count, len(lanes))):
            own = {lane: cursors[lane].to_json() for lane in lanes[number::count]}
            ours, theirs = socketpair()
            arguments = theirs, self._blocks, corpus, places, tokenizer.source, plan, own
            self._workers.append((start or _start_process)(_serve, arguments, ours))
            self._connections.append(ours)
            if start is None:
                theirs.close()  # while a copy is open here, the worker's death would go unnoticed
        self._written = [plan.start_step] * len(self._workers)  # each has written the steps before this one
        self._next = plan.start_step
        self._unread = [b""] * len(self._workers)
        self._give()

    def room(self, step: int) -> list[NumpyBatch]:
        """Batches for a step's rows: views of the block, unless batches kept by the caller would leave the workers too few
        blocks."""
        self._give()
        shape = self._plan.phase(step)
        self._taken, self._lanes = self._given.popleft(), self._plan.rows(step)
        self._leased = len(self._given) >= _AHEAD
        if not self._leased:
            return self._plan.batches(step)
        return _parts(self._blocks.lease(self._taken, self._lanes, shape.sequence_length), shape.micro_batch_size)

    def __call__(self, step: int, batches: Sequence[NumpyBatch]) -> dict[int, Cursor]:
        for number in range(len(self._workers)):
            while self._written[number] <= step:
                self._hear(number)
        self._next = step + 1
        rows, sequence_length = batches[0].tokens.shape
        before = [self._cursors[lane] for lane in self._lanes]
        after = self._blocks.cursors(self._taken, (len(self._lanes), sequence_length), before)
        self._cursors.update(zip(self._lanes, after))
        if not self._leased:
            written = self._blocks.rows(self._taken, self._lanes, sequence_length)
            for batch, part in zip(batches, _parts(written, rows), strict=True):
                batch.tokens[:], batch.labels[:], batch.pos[:] = part.tokens, part.labels, part.pos
            self._blocks.free.append(self._taken)
        return dict(self._cursors)

    def _give(self) -> None:
        """Send the workers the numbers of free blocks."""
        free = self._blocks.free
        if len(free) < _TOGETHER and self._given:
            return
        blocks = bytes(free.popleft() for _ in range(len(free)))
        self._given.extend(blocks)
        for connection in self._connections:
            try:
                connection.sendall(blocks)
            except OSError as error:
                if error.errno not in _GONE:
                    raise  # else the worker has ended: `_hear` raises its error

    def made(self) -> bool:
        """Whether the next call does not wait."""
        return all(self._has_written(number) for number in range(len(self._workers)))

    def _has_written(self, number: int) -> bool:
        """Whether a worker has written its rows of the next step, or has ended."""
        while self._written[number] <= self._next:
            try:
                ended = not self._connections[number].recv(1, MSG_PEEK | MSG_DONTWAIT)
            except BlockingIOError:
                return False
            except OSError as error:
                if error.errno not in _GONE:
                    raise
                ended = True
            if ended:  # the call raises its error
                return True
            self._hear(number)
        return True

    def _hear(self, number: int) -> None:
        """Wait for the next message of a worker."""
        try:
            heard = self._connections[number].recv(1 << 16)
        except OSError as error:
            if error.errno not in _GONE:
                raise
            heard = b""
        if not heard:
            raise self._failure(number)
        written, failed, failure = (self._unread[number] + heard).partition(_FAILED)
        self._written[number] += len(written)
        self._unread[number] = failed + failure

    def _failure(self, number: int) -> Exception:
        """The error of a worker that has ended."""
        with suppress(ValueError):
            failure = json.loads(self._unread[number].removeprefix(_FAILED))
            text = str(failure["error"])
            kinds = {kind.__name__: kind for kind in EXPECTED}
            return kinds[failure["kind"]](text) if failure["kind"] in kinds else RuntimeError(f"data worker {number}: {text}")
        worker = self._workers[number]
        worker.join(1)
        return DataError(
            f"data worker {number} ended by itself (exit status {getattr(worker, 'exitcode', None)}; out of memory?); start "
            f"the run again, it resumes from its last checkpoint, with fewer data.workers if need be"
        )

    def close(self) -> None:
        """End the workers. May be called twice, and while a call waits."""
        for worker in self._workers:
            worker.terminate()
        for worker in self._workers:
            worker.join(10)
        for connection in self._connections:
            connection.close()


_AHEAD = 4  # blocks reserved for the workers
_TOGETHER = 2  # block numbers per message: waking a worker costs more than reading a number
_HELD = 3  # blocks of the step being filled, the step in training, and the last one while the next is requested
_GONE = errno.ECONNRESET, errno.EPIPE, errno.EBADF  # a worker that has ended, or a closed stream
_MOST = 256  # a block's number is a byte
EXPECTED = (DataError, StorageError)
"""Classes of workers' errors that are raised unchanged in the training process."""

_WRITTEN, _FAILED = b".", b"!"  # messages of a worker: a step's rows are written; it ends with the error that follows as JSON


def _parts(whole: NumpyBatch, rows: int) -> list[NumpyBatch]:
    """A batch as batches of `rows` rows."""
    if len(whole.lanes) == rows:
        return [whole]
    parts = [slice(begin, begin + rows) for begin in range(0, len(whole.lanes), rows)]
    return [Batch(whole.tokens[part], whole.labels[part], whole.pos[part], whole.lanes[part]) for part in parts]


def _start_process(serve: Callable[..., None], arguments: tuple[Any, ...], _: socket) -> Any:
    """Started by a fork server that has imported this module: forking the training process, which has threads, would not be
    safe."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    process = context.Process(target=serve, args=arguments, name="data-worker", daemon=True)
    try:
        process.start()
    except OSError as error:
        if error.errno is not None or "too long" not in str(error):
            raise
        raise DataError(
            f"TMPDIR={tempfile.gettempdir()} is too long for the sockets of data workers; set TMPDIR to a shorter path, or "
            f"data.workers=0"
        ) from error
    return process


def _serve(
    connection: socket,
    blocks: SharedBlocks,
    corpus: CorpusSpec,
    places: Sequence[tuple[str, Cache | None]],
    tokenizer: tuple[str, str | None],
    plan: StepPlan,
    cursors: Mapping[int, Any],
) -> None:
    """Write one step's rows after the other, until the connection closes."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the training process ends this one
    try:
        begin = {lane: Cursor.from_json(cursor) for lane, cursor in cursors.items()}
        datasets = [Dataset.open(place, check_sizes=False, cache=cache) for place, cache in places]
        reader = LaneReader(DocReader(corpus, datasets, load_tokenizer(*tokenizer)), begin)
        step = plan.start_step
        while given := connection.recv(_MOST):
            for block in given:
                lanes, sequence_length = plan.rows(step), plan.phase(step).sequence_length
                after = reader(step, [blocks.rows(block, lanes, sequence_length)])
                blocks.write_cursors(
                    block, (len(lanes), sequence_length), ((r, after[lane]) for r, lane in enumerate(lanes) if lane in begin)
                )
                connection.sendall(_WRITTEN)
                step += 1
    except (BrokenPipeError, ConnectionResetError):
        pass
    except Exception as error:  # the reading process raises it
        kind = type(error).__name__
        text = str(error) if isinstance(error, EXPECTED) else f"{kind}: {error}"
        with suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(_FAILED + json.dumps({"error": text, "kind": kind}).encode())
    finally:
        connection.close()
