"""The part of a preparation that runs in worker processes: read a task's records, write its shards, then its task record.

A task's record (`task-000012.json`, with the checksums of its shards) is written last. A task with a record is verified and kept; a
task without one, or whose shards differ from it, is done from the start.
"""

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import wait as wait_for_any
from pathlib import Path
from typing import Any

from baton.data_pipeline import file_io
from baton.data_pipeline.config import PrepareConfig
from baton.data_pipeline.errors import DataError, InputError
from baton.data_pipeline.files import read_json, sha256_file, write_json
from baton.data_pipeline.input_files import DocumentIds, InputPiece, Rejected, held_out
from baton.data_pipeline.input_pieces import read_piece
from baton.data_pipeline.progress import Progress
from baton.data_pipeline.shards import ShardSummary, ShardWriter, file_size, index_name, token_payload
from baton.data_pipeline.tokenizer import Ids, Losses, load_tokenizer
from baton.data_pipeline.written_by import known_fields

_REPORT_BYTES = 1 << 20
_DECODED = 64  # documents per task that are decoded again, to say what a lossy tokenizer loses


@dataclass(frozen=True)
class PrepareTask:
    """Neighbouring pieces of the input, and where and how to write them. Picklable."""

    number: int
    pieces: tuple[InputPiece, ...]
    settings: PrepareConfig
    folder: str
    tokenizer: tuple[str, str | None] | None  # arguments of load_tokenizer

    @property
    def size(self) -> int:
        """Input bytes, for progress."""
        return sum(piece.size for piece in self.pieces)


@dataclass(frozen=True)
class TaskRecord:
    """What a finished task wrote. pieces: what it read, by `piece_key`; rejected: one dict per refused record; losses: of a lossy
    tokenizer; kept: it had been done before this run."""

    pieces: tuple[tuple[str, int, int], ...]
    shards: tuple[ShardSummary, ...]
    rejected: tuple[dict[str, Any], ...]
    losses: Losses = field(default_factory=Losses)
    kept: bool = field(default=False, compare=False)

    @classmethod
    def load(cls, path: Path) -> "TaskRecord":
        """Raises DataError when the file is damaged."""
        remedy = "delete it and prepare again"
        value = read_json(path, remedy)
        try:
            pieces = tuple((name, start, stop) for name, start, stop in value.get("pieces", ()))
            shards = tuple(ShardSummary(**known_fields(ShardSummary, shard)) for shard in value["shards"])
            losses = Losses(**known_fields(Losses, value.get("losses", {})))
            return cls(pieces, shards, tuple(value["rejected"]), losses, kept=True)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"{path} is damaged ({error!r} is missing or unknown); {remedy}") from error


def piece_key(piece: InputPiece) -> tuple[str, int, int]:
    """Identifies a piece among those of a plan's inputs."""
    return piece.source.name, piece.start, piece.stop


def record_path(task: PrepareTask) -> Path:
    """The path of a finished task's record."""
    return Path(task.folder, f"task-{task.number:06d}.json")


def run_tasks(
    tasks: Sequence[PrepareTask], moved: dict[str, str], workers: int, progress: Progress
) -> tuple[list[TaskRecord], list[InputError]]:
    """Do what is left to do of `tasks` on `workers` processes; records in the order of the tasks, and the inputs that could not be
    read, whose tasks have no record. Other tasks are done nevertheless.

    moved: shard name -> where a shard may be that is no longer in the tasks' folder. Raises DataError for other trouble; tasks
    finished by then stay finished.
    """
    total = sum(task.size for task in tasks)
    done = 0

    def add(size: int) -> None:
        nonlocal done
        done += size
        progress(min(done, total), total)

    if min(workers, len(tasks)) <= 1:
        return _sorted_out([_run(task, moved, add) for task in tasks])
    context = multiprocessing.get_context("spawn")
    sizes = context.SimpleQueue()
    pool = ProcessPoolExecutor(min(workers, len(tasks)), context, _begin_worker, (sizes,))
    try:
        futures: list[Future[TaskRecord | InputError]] = [pool.submit(_run_in_worker, task, moved) for task in tasks]
        pending = set(futures)
        while pending:
            finished, pending = wait(pending, timeout=0.2, return_when=FIRST_COMPLETED)
            while not sizes.empty():
                add(sizes.get())
            for future in finished:
                future.result()  # the first failure ends the run
        while not sizes.empty():
            add(sizes.get())
        return _sorted_out([future.result() for future in futures])
    except BrokenProcessPool as error:
        raise DataError(
            "a worker process died (out of memory?); run the command again to go on, with fewer workers if need be"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _sorted_out(results: Sequence[TaskRecord | InputError]) -> tuple[list[TaskRecord], list[InputError]]:
    return [each for each in results if isinstance(each, TaskRecord)], [each for each in results if isinstance(each, InputError)]


_sizes: Any = None  # in a worker: the queue its progress goes to


def _begin_worker(sizes: Any) -> None:
    global _sizes
    _sizes = sizes
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:  # a killed parent never says goodbye, and its workers would wait for work for ever
        wait_for_any([parent.sentinel])
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _run_in_worker(task: PrepareTask, moved: dict[str, str]) -> TaskRecord | InputError:
    return _run(task, moved, _sizes.put)


def _run(task: PrepareTask, moved: dict[str, str], add: Callable[[int], None]) -> TaskRecord | InputError:
    kept = _verified(task, moved)
    if kept is not None:
        add(task.size)
        return kept
    try:
        record = _patiently_written(task, add)
    except InputError as error:
        return error
    shards = [asdict(shard) for shard in record.shards]
    about = {"pieces": record.pieces, "shards": shards, "rejected": list(record.rejected), "losses": asdict(record.losses)}
    write_json(record_path(task), about)
    return record


def _patiently_written(task: PrepareTask, add: Callable[[int], None]) -> TaskRecord:
    """A task's shards. They are begun again after read errors that may pass."""
    for pause in file_io.PAUSES_S:
        reported = 0

        def count(size: int) -> None:
            nonlocal reported
            reported += size
            add(size)

        try:
            return _Writer(task, count).run()
        except InputError as error:
            add(-reported)
            if not error.is_transient:
                raise
        time.sleep(pause)
    return _Writer(task, add).run()


def _verified(task: PrepareTask, moved: dict[str, str]) -> TaskRecord | None:
    """The record of a task whose shards are all there and as recorded."""
    path = record_path(task)
    if not path.exists():
        return None
    record = TaskRecord.load(path)
    if record.pieces not in ((), tuple(map(piece_key, task.pieces))):
        return None
    for shard in record.shards:
        tar = Path(task.folder, shard.name)
        index = Path(task.folder, index_name(shard.name))
        away = Path(moved.get(shard.name, tar))
        tar = tar if tar.exists() else away
        index = index if index.exists() else away.with_name(index_name(away.name))
        if file_size(tar) != shard.tar_bytes or file_size(index) != shard.index_bytes:
            return None
        if sha256_file(tar) != shard.tar_sha256 or sha256_file(index) != shard.index_sha256:
            return None
    return record


class _Writer:
    """One task under way: at most one open shard per split."""

    def __init__(self, task: PrepareTask, add: Callable[[int], None]) -> None:
        self._task = task
        self._add = add
        self._tokenizer = load_tokenizer(*task.tokenizer) if task.tokenizer is not None else None
        self._open: dict[str, ShardWriter] = {}
        self._shards: list[ShardSummary] = []
        self._rejected: list[dict[str, Any]] = []
        self._losses = Losses()

    def run(self) -> TaskRecord:
        try:
            for piece in self._task.pieces:
                self._piece(piece)
            for split in sorted(self._open):
                self._close(split)
        finally:
            for writer in self._open.values():
                writer.discard()
        return TaskRecord(tuple(map(piece_key, self._task.pieces)), tuple(self._shards), tuple(self._rejected), self._losses)

    def _piece(self, piece: InputPiece) -> None:
        settings = self._task.settings
        seen = reported = 0
        for record in read_piece(piece, settings.text_field, settings.ids):
            if isinstance(record, Rejected):
                self._rejected.append(asdict(record))
                continue
            ids: Ids | None = None
            if isinstance(record, DocumentIds):
                assert self._tokenizer is not None
                ids, text = record.ids, self._tokenizer.decode(record.ids, errors="replace").encode()
            else:
                text = record.text
            split = "validation" if held_out(text, settings.validation_fraction) else "train"
            self._document(split, record.id, text, ids)
            seen += len(text) if ids is None else ids.nbytes
            if seen - reported >= _REPORT_BYTES and seen < piece.size:
                self._add(seen - reported)
                reported = seen
        self._add(piece.size - reported)

    def _document(self, split: str, document: str, text: bytes, ids: Ids | None) -> None:
        payload, tokens = text, -1
        if self._tokenizer is not None:
            encoded = ids is None
            if ids is None:
                ids = self._tokenizer.encode_utf8(text)
            payload, tokens = token_payload(ids, self._tokenizer.vocab_size), len(ids)
            if self._tokenizer.lossy and encoded:
                decoded = self._losses.documents < _DECODED
                self._losses += Losses.of(self._tokenizer, text, ids, decoded=decoded)
        writer = self._open.get(split)
        if writer is not None and writer.text_bytes + len(text) > self._task.settings.shard_bytes:
            self._close(split)
            writer = None
        if writer is None:
            number = sum(shard.split == split for shard in self._shards)
            name = f"task-{self._task.number:06d}.{split}-{number:06d}.tar"
            content = "text" if self._tokenizer is None else "tokens"
            writer = self._open[split] = ShardWriter(Path(self._task.folder, name), content)
        writer.add(document, payload, len(text), tokens)

    def _close(self, split: str) -> None:
        self._shards.append(self._open[split].close(split))
        del self._open[split]
