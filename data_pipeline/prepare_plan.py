"""The folder of a preparation: claimed with a lock, and a plan of what is prepared, divided into tasks.

Tasks are a pure function of the plan. An unfinished folder accepts changed inputs: finished parts stay (`kept` in the plan), and
inputs outside of them are divided anew. It refuses where a finished part would be lost, unless that part holds a file that could
not be read (DAMAGED lists those).
"""

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from baton.data_pipeline.config import PrepareConfig
from baton.data_pipeline.errors import DataError, FolderBusyError, InputError, StorageError, error_reason, is_transient
from baton.data_pipeline.files import read_json, write_json
from baton.data_pipeline.input_files import InputFile, InputPiece, exclusion
from baton.data_pipeline.lock import LockHeldError, exclusive
from baton.data_pipeline.prepare_workers import PrepareTask, piece_key
from baton.data_pipeline.shards import DATASET, FORMAT, PLAN, VERSION
from baton.data_pipeline.token_files import megatron_index

PARTS = ".parts"  # finished tasks, until all are
DAMAGED = "damaged.json"  # in it: {name: why} of the inputs that could not be read
_SEARCH = ("include", "exclude")  # settings that only choose inputs
_RECORDS = "task-??????.json"


def make_plan(settings: PrepareConfig, sources: Sequence[InputFile], vocabulary: str | None) -> dict[str, Any]:
    """What is prepared: distinguishes a resumed preparation from a different one."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "settings": {**settings.model_dump(mode="json", exclude={"workers"}), "tokenizer": vocabulary},
        "inputs": {source.name: _identity(source, settings) for source in sources},
    }


def _identity(source: InputFile, settings: PrepareConfig) -> list[int]:
    """Size and time of an input, and of the index that says where its documents are."""
    index = megatron_index(source) if settings.ids is not None else None
    status = index.stat() if index is not None else None
    return [source.size, source.mtime_ns, *([] if status is None else [status.st_size, status.st_mtime_ns])]


def make_tasks(
    pieces: Sequence[InputPiece],
    plan: dict[str, Any],
    settings: PrepareConfig,
    folder: Path,
    tokenizer: tuple[str, str | None] | None,
) -> list[PrepareTask]:
    """Tasks in the order of their first pieces: those that the plan keeps, and neighbouring pieces of about one shard's worth of
    input each."""
    place = {json.dumps(piece_key(piece)): number for number, piece in enumerate(pieces)}
    groups: list[tuple[int, list[int]]] = []  # a task's number, and places of its pieces
    for number, keys in plan.get("kept", ()):
        groups.append((number, [place[json.dumps(key)] for key in keys]))
    kept = {i for _, places in groups for i in places}
    number, size = plan.get("next", 0), 0
    group: list[int] = []
    for i, piece in enumerate(pieces):
        if i in kept:
            continue
        if group and size + piece.size > settings.shard_bytes:
            groups.append((number, group))
            number, group, size = number + 1, [], 0
        group.append(i)
        size += piece.size
    if group:
        groups.append((number, group))
    groups.sort(key=lambda each: each[1][0])
    return [
        PrepareTask(number, tuple(pieces[i] for i in each), settings, str(folder / PARTS), tokenizer) for number, each in groups
    ]


@contextmanager
def claimed_folder(folder: Path, plan: dict[str, Any], pieces: Sequence[InputPiece]) -> Iterator[dict[str, Any]]:
    """Make the folder ours: new, of the same plan or of one that this one can go on from, and no other process in it. Gives the
    plan to follow. Its scratch folder goes when dataset.json is there. Raises DataError."""
    if folder.exists() and not folder.is_dir():
        raise DataError(f"{folder} is a file; choose a folder for the dataset")
    if not (folder / PLAN).exists() and folder.exists() and any(path.name != PARTS for path in folder.iterdir()):
        raise DataError(f"{folder} holds files that are not a dataset; choose an empty or new folder")
    parts, made = folder / PARTS, not folder.exists()
    if (folder / DATASET).exists() and not parts.exists():  # nothing will be written, so no lock is needed
        yield _agreed(folder, plan, pieces)
        return
    with ExitStack() as held:
        try:
            parts.mkdir(parents=True, exist_ok=True)
            held.enter_context(exclusive(parts / "lock"))
        except OSError as error:
            if is_transient(error):
                raise StorageError(
                    f"{folder}: cannot be written at present ({error_reason(error)}); start again once it can be"
                ) from error
            raise DataError(f"cannot write to {folder}: {error.strerror}; choose another folder") from error
        except LockHeldError as error:
            raise FolderBusyError(f"{folder} is being prepared by {error.holder}; wait for it{error.remedy}") from None
        if (folder / PLAN).exists():
            plan = _agreed(folder, plan, pieces)
        else:
            write_json(folder / PLAN, plan)
        try:
            yield plan
        except (DataError, StorageError):
            if not any(parts.glob(_RECORDS)):  # nothing to go on from: leave nothing that would refuse corrected settings
                (folder / PLAN).unlink()
                _remove_parts(parts, held)
                if made:
                    with suppress(OSError):  # there is something else in it by now
                        folder.rmdir()
            raise
        if (folder / DATASET).exists():
            _remove_parts(parts, held)


def forget_finished(parts: Path) -> None:
    """Give up the finished parts in a claimed folder, which is then left as it was found."""
    for path in parts.glob(_RECORDS):
        path.unlink()


def _remove_parts(parts: Path, lock: ExitStack) -> None:
    """Remove the scratch folder and end the lock in it. NFS keeps the lock's file, under another name, until it is closed."""
    shutil.rmtree(parts, ignore_errors=True)
    lock.close()
    with suppress(OSError):  # another process has begun to prepare here, and so refuses or goes on by itself
        parts.rmdir()


def _agreed(folder: Path, plan: dict[str, Any], pieces: Sequence[InputPiece]) -> dict[str, Any]:
    """The plan to follow in a folder that has one. Raises DataError where it differs in what cannot change."""
    before = read_json(folder / PLAN, "delete the folder and prepare it again")
    settings, inputs = _differing_settings(before, plan), _differing_inputs(before, plan)
    if not settings and not inputs:
        return before
    parts = folder / PARTS
    lost: list[Path] = []
    if not settings and not (folder / DATASET).exists():
        lost_by, lost, kept = _split_finished(parts, inputs, pieces)
        if not lost_by:
            for path in lost:
                path.unlink()
            taken = (int(path.name[5:11]) for path in parts.glob("task-??????.*"))
            plan = plan | {"kept": kept, "next": max(taken, default=-1) + 1}
            write_json(folder / PLAN, plan)
            return plan
        inputs = {name: how for name, how in inputs.items() if name in lost_by}
    differences = settings + [f"input {name} {how}" for name, how in inputs.items()]
    more = f" and {len(differences) - 4} more" if len(differences) > 4 else ""
    raise DataError(
        f"{folder} was prepared differently ({'; '.join(differences[:4])}{more}); choose another folder, or delete this one"
    )


def _split_finished(
    parts: Path, changed: dict[str, str], pieces: Sequence[InputPiece]
) -> tuple[set[str], list[Path], list[tuple[int, list[list[Any]]]]]:
    """Changed inputs for which sound finished parts would be lost; the finished parts that are given up; those that are kept, as
    the plan lists them."""
    damaged = read_json(parts / DAMAGED, "") if (parts / DAMAGED).exists() else {}
    known = {json.dumps(piece_key(piece)) for piece in pieces}
    lost_by: set[str] = set()
    lost: list[Path] = []
    kept: list[tuple[int, list[list[Any]]]] = []
    for path in sorted(parts.glob(_RECORDS)):
        keys = read_json(path, "delete it and prepare again").get("pieces", [])
        names = {name for name, *_ in keys}
        if keys and not names & changed.keys() and all(json.dumps(key) in known for key in keys):
            kept.append((int(path.name[5:11]), keys))
        elif names & damaged.keys():
            lost.append(path)
        else:
            lost_by |= names & changed.keys() or changed.keys()
    return lost_by, lost, kept


def _differing_settings(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    found = [f"{key} was {before.get(key)}, is {now[key]}" for key in ("format", "version") if before.get(key) != now[key]]
    old, new = before.get("settings", {}), now["settings"]
    keys = sorted(key for key in old.keys() | new if key not in _SEARCH)
    return found + [f"{key} was {old.get(key)}, is {new.get(key)}" for key in keys if old.get(key) != new.get(key)]


def _differing_inputs(before: dict[str, Any], now: dict[str, Any]) -> dict[str, str]:
    old, new = before.get("inputs", {}), now["inputs"]
    return {
        name: "is new" if name not in old else "is gone" if name not in new else "has changed"
        for name in sorted(old.keys() | new)
        if old.get(name) != new.get(name)
    }


def unreadable(folder: Path, failures: Sequence[InputError], tasks: Sequence[PrepareTask]) -> DataError | StorageError:
    """Record the inputs that could not be read. Returns an error that says what was kept and which options exclude them; a
    StorageError when none of them is known to be damaged."""
    parts = folder / PARTS
    finished = sum(1 for _ in parts.glob(_RECORDS))
    failed = {failure.source: failure for failure in failures}  # a file's pieces may fail one by one
    if finished:
        write_json(parts / DAMAGED, {name: failure.what for name, failure in failed.items()})
    shown = [f"{_on_a_line(failure.path)}: {failure.what}" for failure in list(failed.values())[:3]]
    more = f"; and {len(failed) - 3} more" if len(failed) > 3 else ""
    kept = f"{finished} of {len(tasks)} parts are finished and kept; " if finished else ""
    which = "the input" if len(failed) == 1 else f"{len(failed)} inputs:"
    it = "it" if len(failed) == 1 else "them"
    words = " ".join(exclusion(name) for name in failed)
    passing = all(failure.is_transient for failure in failures)
    first = "start again once the file system answers" if passing else f"restore {it}"
    return (StorageError if passing else DataError)(
        f"cannot read {which} {'; '.join(shown)}{more}; {kept}{first}, or leave {it} out: the same command with {words}"
    )


def _on_a_line(path: str) -> str:
    return "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in path)
