"""Worker processes that read lanes: each has some of a data rank's lanes for good, and writes their rows step by step.

The one thing to know: which worker reads a lane changes nothing but who does the work, so their number may change at any start, and
their timing cannot reach the data's order. Rows and cursors lie in shared blocks, one for a step (see Blocks); what travels is
which block is the next step's, a byte, and that a step is written, another. The cursors that count are those of the rows that were
yielded, however far ahead a worker has read.
"""

import errno
import json
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from socket import socket, socketpair
from typing import Any

from baton.data_pipeline.batches import Batch
from baton.data_pipeline.dataset import Dataset
from baton.data_pipeline.errors import DataError, StorageError
from baton.data_pipeline.lane_order import Cursor
from baton.data_pipeline.reader import Corpus, Documents, LaneReader
from baton.data_pipeline.remote import Cache
from baton.data_pipeline.shared_memory import Blocks
from baton.data_pipeline.steps import StepPlan
from baton.data_pipeline.tokenizer import Tokenizer

Start = Callable[[Callable[..., None], tuple[Any, ...], socket], Any]


class Workers:
    """A `Fill` by `count` worker processes, at most one per lane, and the `room` that it fills. cursors: where the lanes begin.
    start: what runs a function with arguments somewhere else, given the end that speaks with it, and can be ended by `terminate`
    and `join` (for tests; default: a process).

    Raises DataError, from the call: what a worker met, or that it died.
    """

    def __init__(
        self,
        count: int,
        corpus: Corpus,
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
        self._blocks = Blocks(min(plan.prefetch + _AHEAD + _HELD, _MOST), plan, len(datasets) if len(datasets) > 1 else 0)
        self._given: deque[int] = deque()  # blocks that workers write or have written, of steps to come
        self._lanes: tuple[int, ...] = ()  # of the rows of the step under way
        self._taken, self._leased = -1, False  # its block, and whether that is given out
        self._blocks.free.extend(range(self._blocks.count))
        places = [(dataset.place, dataset.location.cache) for dataset in datasets]
        lanes = sorted(cursors)
        for number in range(min(count, len(lanes))):
            own = {lane: cursors[lane].to_json() for lane in lanes[number::count]}
            ours, theirs = socketpair()
            arguments = theirs, self._blocks, corpus, places, os.fspath(tokenizer.path), plan, own
            self._workers.append((start or _start_process)(_serve, arguments, ours))
            self._connections.append(ours)
            if start is None:
                theirs.close()  # the process has its own; with ours open its death would not be seen
        self._written = [plan.start_step] * len(self._workers)  # by each, the steps before this
        self._unread = [b""] * len(self._workers)
        self._give()

    def room(self, step: int) -> list[Batch]:
        """Batches for a step's rows: the block itself, unless whoever keeps batches would leave too few for the workers."""
        self._give()
        shape = self._plan.stretch(step)
        self._taken, self._lanes = self._given.popleft(), self._plan.rows(step)
        self._leased = len(self._given) >= _AHEAD
        if not self._leased:
            return self._plan.batches(step)
        return _parts(self._blocks.lease(self._taken, self._lanes, shape.sequence_length), shape.micro_batch_size)

    def __call__(self, step: int, batches: Sequence[Batch]) -> dict[int, Cursor]:
        for number in range(len(self._workers)):
            self._wait(number, step)
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
        """Tell the workers of the blocks that they may go on in."""
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
                    raise  # otherwise it has ended, and whoever waits for it says why

    def _wait(self, number: int, step: int) -> None:
        """Until a worker has written its rows of a step."""
        while self._written[number] <= step:
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
        """Why a worker has ended: what it said last, if it did."""
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
        """End the workers; safe to call twice, and while a call waits."""
        for worker in self._workers:
            worker.terminate()
        for worker in self._workers:
            worker.join(10)
        for connection in self._connections:
            connection.close()


_AHEAD = 4  # blocks for the workers, however many batches are kept
_TOGETHER = 2  # blocks that they are told of at once, since to be woken costs more than to be told
_HELD = 3  # blocks for the step being made and for who trains: the step under way, and the last one while it asks for the next
_GONE = errno.ECONNRESET, errno.EPIPE, errno.EBADF  # of a worker, or of a closed stream; not what a signal's handler raises
_MOST = 256  # a block's number is a byte
EXPECTED = (DataError, StorageError)
"""Errors of a worker that are raised in the training process as they are."""

_WRITTEN, _FAILED = b".", b"!"  # what a worker says: a step's rows are written; it ends, and this is why (JSON)


def _parts(whole: Batch, rows: int) -> list[Batch]:
    """A batch as several of `rows` rows."""
    if len(whole.lanes) == rows:
        return [whole]
    parts = [slice(begin, begin + rows) for begin in range(0, len(whole.lanes), rows)]
    return [Batch(whole.tokens[part], whole.labels[part], whole.pos[part], whole.lanes[part]) for part in parts]


def _start_process(serve: Callable[..., None], arguments: tuple[Any, ...], _: socket) -> Any:
    """From a server that has imported what is needed: a fork of the training process, with its threads, would not be safe."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    process = context.Process(target=serve, args=arguments, name="data-worker", daemon=True)
    process.start()
    return process


def _serve(
    connection: socket,
    blocks: Blocks,
    corpus: Corpus,
    places: Sequence[tuple[str, Cache | None]],
    tokenizer: str,
    plan: StepPlan,
    cursors: Mapping[int, Any],
) -> None:
    """Write a step's rows after the other's; what ends it is that nobody listens."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the training process ends this one
    try:
        begin = {lane: Cursor.from_json(cursor) for lane, cursor in cursors.items()}
        datasets = [Dataset.open(place, check_sizes=False, cache=cache) for place, cache in places]
        reader = LaneReader(Documents(corpus, datasets, Tokenizer(tokenizer)), begin)
        step = plan.start_step
        while given := connection.recv(_MOST):
            for block in given:
                lanes, sequence_length = plan.rows(step), plan.stretch(step).sequence_length
                after = reader(step, [blocks.rows(block, lanes, sequence_length)])
                blocks.write_cursors(
                    block, (len(lanes), sequence_length), ((r, after[lane]) for r, lane in enumerate(lanes) if lane in begin)
                )
                connection.sendall(_WRITTEN)
                step += 1
    except (BrokenPipeError, ConnectionResetError):
        pass
    except Exception as error:  # whoever listens raises it
        kind = type(error).__name__
        text = str(error) if isinstance(error, EXPECTED) else f"{kind}: {error}"
        with suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(_FAILED + json.dumps({"error": text, "kind": kind}).encode())
    finally:
        connection.close()
