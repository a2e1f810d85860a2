"""Worker processes that read lanes: each has some of a data rank's lanes for good, and sends their rows step by step.

The one thing to know: which worker reads a lane changes nothing but who does the work, so their number may change at any start, and
their timing cannot reach the data's order. What travels is JSON and plain arrays; the cursors that count are those that came with
the rows, however far ahead a worker has read.
"""

import fcntl
import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from baton.data_pipeline.batches import Batch
from baton.data_pipeline.dataset import Dataset
from baton.data_pipeline.errors import DataError
from baton.data_pipeline.lanes import Cursor
from baton.data_pipeline.reader import Corpus, Documents, LaneReader
from baton.data_pipeline.remote import Cache
from baton.data_pipeline.steps import StepPlan
from baton.data_pipeline.tokenizer import Tokenizer

Start = Callable[[Callable[..., None], tuple[Any, ...], Connection], Any]


class Workers:
    """A `Fill` by `count` worker processes, at most one per lane. cursors: where the lanes begin. start: what runs a function with
    arguments somewhere else, given the end where its rows arrive, and can be ended by `terminate` and `join` (for tests; default: a
    process).

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
        self._cursors = dict(cursors)
        self._connections: list[Connection] = []
        self._workers: list[Any] = []
        self._worker_of: dict[int, int] = {}
        places = [(dataset.place, dataset.location.cache) for dataset in datasets]
        lanes = sorted(cursors)
        for number in range(min(count, len(lanes))):
            own = {lane: cursors[lane].to_json() for lane in lanes[number::count]}
            self._worker_of |= dict.fromkeys(own, number)
            ours, theirs = multiprocessing.Pipe(duplex=False)
            with suppress(OSError):  # more than the system gives to a user; a worker then waits more often until it is listened to
                fcntl.fcntl(theirs.fileno(), fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
            arguments = theirs, corpus, places, os.fspath(tokenizer.path), plan, own
            self._workers.append((start or _start_process)(_serve, arguments, ours))
            self._connections.append(ours)
            if start is None:
                theirs.close()  # the process has its own; with ours open its death would not be seen

    def __call__(self, step: int, batches: Sequence[Batch]) -> dict[int, Cursor]:
        rows: list[list[tuple[Batch, int]]] = [[] for _ in self._workers]
        for batch in batches:
            for row, lane in enumerate(batch.lanes):
                rows[self._worker_of[lane]].append((batch, row))
        for number, mine in enumerate(rows):
            if mine:
                self._receive(number, step, mine)
        return dict(self._cursors)

    def _receive(self, number: int, step: int, rows: Sequence[tuple[Batch, int]]) -> None:
        connection, context = self._connections[number], rows[0][0].tokens.shape[1]
        try:
            header = json.loads(connection.recv_bytes())
            block = b"" if "error" in header else connection.recv_bytes()
        except (EOFError, OSError):
            worker = self._workers[number]
            worker.join(1)
            raise DataError(
                f"data worker {number} ended by itself (exit status {getattr(worker, 'exitcode', None)}; out of memory?); start "
                f"the run again, it resumes from its last checkpoint, with fewer data.workers if need be"
            ) from None
        if "error" in header:
            raise DataError(header["error"]) if header["expected"] else RuntimeError(f"data worker {number}: {header['error']}")
        assert header["step"] == step, "workers go through the same steps"
        arrays, at = np.frombuffer(block, np.int32).reshape(3, len(rows), context), 0
        for _, of_batch in groupby(rows, key=lambda item: id(item[0])):
            here = list(of_batch)
            (batch, _), places, until = here[0], [row for _, row in here], at + len(here)
            for name, array in zip(_SENT, arrays, strict=True):
                getattr(batch, name)[places] = array[at:until]
            at = until
        self._cursors |= {int(lane): Cursor.from_json(cursor) for lane, cursor in header["cursors"].items()}

    def close(self) -> None:
        """End the workers; safe to call twice, and while a call waits."""
        for worker in self._workers:
            worker.terminate()
        for worker in self._workers:
            worker.join(10)


_SENT = ("tokens", "labels", "pos")
_PIPE_BYTES = 1 << 20
"""What a worker may be ahead by: as much as Linux gives to anybody. A pipe's own 64 KiB are less than one step."""


def _start_process(serve: Callable[..., None], arguments: tuple[Any, ...], _: Connection) -> Any:
    """From a server that has imported what is needed: a fork of the training process, with its threads, would not be safe."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    process = context.Process(target=serve, args=arguments, name="data-worker", daemon=True)
    process.start()
    return process


def _serve(
    connection: Connection,
    corpus: Corpus,
    places: Sequence[tuple[str, Cache | None]],
    tokenizer: str,
    plan: StepPlan,
    cursors: Mapping[int, Any],
) -> None:
    """Send a step's rows after the other's; what ends it is that nobody listens."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the training process ends this one
    try:
        begin = {lane: Cursor.from_json(cursor) for lane, cursor in cursors.items()}
        datasets = [Dataset.open(place, check_sizes=False, cache=cache) for place, cache in places]
        reader = LaneReader(Documents(corpus, datasets, Tokenizer(tokenizer)), begin)
        step = plan.start_step
        while True:
            batches = plan.batches(step, begin)
            after = reader(step, batches)
            if batches:
                advanced = {lane: after[lane].to_json() for batch in batches for lane in batch.lanes}
                connection.send_bytes(json.dumps({"step": step, "cursors": advanced}).encode())
                arrays = [
                    np.concatenate([getattr(b, name) for b in batches], dtype=np.int32, casting="same_kind") for name in _SENT
                ]
                connection.send_bytes(np.stack(arrays).data.cast("B"))
            step += 1
    except (BrokenPipeError, ConnectionResetError):
        pass
    except Exception as error:  # whoever listens raises it
        expected = isinstance(error, DataError)
        text = str(error) if expected else f"{type(error).__name__}: {error}"
        with suppress(BrokenPipeError, ConnectionResetError):
            connection.send_bytes(json.dumps({"error": text, "expected": expected}).encode())
    finally:
        connection.close()
