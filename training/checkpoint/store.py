"""The folder of a run's checkpoints: atomic publishing, verified loading, fallback to older checkpoints, pruning.

A checkpoint is copied to host memory, written into a hidden folder by a thread while training goes on, and renamed. A
failure before the rename leaves older checkpoints as they were. All ranks call every method together; the thread does not
communicate.
"""

import dataclasses
import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from baton.data_pipeline.errors import StorageError, error_reason, is_transient, unreadable
from baton.data_pipeline.file_io import sync_folder
from baton.parallel.mesh import Mesh
from baton.training.checkpoint.digest import combine_digests
from baton.training.checkpoint.files import CheckpointFiles, ShardBoxes, StagedBox, Staging, file_name, write_file
from baton.training.checkpoint.manifest import NAME, Manifest, check_file
from baton.training.checkpoint.retention import Retention
from baton.training.errors import CheckpointError, OtherFormatError
from baton.training.monitoring import heartbeat

PREFIX = "step-"
UNFINISHED = ".saving-"


@dataclass(frozen=True)
class Saved:
    """A published checkpoint. bytes: of all ranks' tensors. seconds: from the call of `save` to its publication."""

    name: str
    bytes: int
    seconds: float


class CheckpointStore:
    """Checkpoints of one run under `folder` (runs/NAME/checkpoints).

    keep_last, keep_every, keep_best: see Retention. asynchronous: `save` returns once everything is copied; `poll` and `finish`
    publish. say: where sentences for the user go.

    problem: why the last save failed, the same on every rank; None: it was published, or is still being written.
    """

    def __init__(
        self,
        folder: Path,
        mesh: Mesh,
        keep_last: int,
        say: Callable[[str], None] = print,
        *,
        keep_every: int = 0,
        keep_best: int = 0,
        async_save: bool = False,
    ) -> None:
        self.folder = folder
        self.mesh = mesh
        self.retention = Retention(keep_last, keep_every, keep_best)
        self.async_save = async_save
        self.say = say if mesh.is_main else lambda text: None
        self.problem: str | None = None
        self._staging = Staging(mesh.device)
        self._pending: _PendingSave | None = None

    def save(self, boxes: ShardBoxes, manifest: Manifest) -> Saved | None:
        """Begin to write a checkpoint; an unfinished one is published first.

        Returns the checkpoint if it was published at once (async_save=False). A failure, such as a full disk, is reported,
        kept in `problem`, and costs only this checkpoint.
        """
        self.finish()
        self.problem = None
        name = f"{PREFIX}{manifest.step:08d}"
        work, began = self.folder / f"{UNFINISHED}{name}", time.perf_counter()
        problem = self._attempt(lambda: self._prepare(work))
        if problem is not None:
            self._give_up(work, name, problem)
            return None
        staged, memory = self._staging.copy(boxes)
        self._pending = _PendingSave(name, work, manifest, began, self.mesh.rank, staged, memory)
        return None if self.async_save else self.finish()

    def poll(self) -> Saved | None:
        """Publish the unfinished checkpoint if every rank has written its file. Every rank calls it after the same steps."""
        if self._pending is None:
            return None
        written = torch.tensor(int(self._pending.is_written()), device=self.mesh.device)
        dist.all_reduce(written, op=dist.ReduceOp.MIN)
        return self.finish() if int(written) else None

    def finish(self) -> Saved | None:
        """Wait for the unfinished checkpoint, if any, and publish it."""
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        mine = pending.result()
        everybody: list[Any] = [None] * self.mesh.world_size
        dist.all_gather_object(everybody, mine)
        problem = next((each["problem"] for each in everybody if each["problem"] is not None), None)
        size = sum(entry["bytes"] for each in everybody for entry in each["files"].values())
        if problem is None:
            problem = self._attempt(lambda: self._publish(pending, everybody))
        if problem is not None:
            self._give_up(pending.work, pending.name, problem)
            return None
        return Saved(pending.name, size, time.perf_counter() - pending.began)

    def load_newest(
        self, accept: Callable[[Manifest], None], *, cleanup: bool = True, only: Path | None = None
    ) -> tuple[Path, Manifest] | None:
        """The newest checkpoint that verifies; None if there is none. Damaged ones are reported.

        Args:
            accept: raises if a manifest does not fit this run, which is no damage and ends the search.
            cleanup: this is the run itself: remove what a killed save left, and move damaged checkpoints aside. Mere
                readers must not, since
                the run may be saving.
            only: consider this checkpoint alone.

        Raises:
            CheckpointError: there are checkpoints, and all are damaged; they stay in place, so the next start is refused as
                well. Or a
                checkpoint's permissions forbid reading.
            StorageError: a checkpoint cannot be read at present; it may be sound, so it is neither moved nor skipped.
            OtherFormatError: another version of Baton wrote a checkpoint; it is neither moved nor skipped.
        """
        if cleanup:
            self._attempt(self._clean)
        damaged: list[Path] = []
        listed = self._listed() if only is None else [only]
        for left, path in reversed(list(enumerate(listed))):
            manifest, problem = self._verify(path)
            if problem is None:
                assert manifest is not None
                accept(manifest)
                if cleanup:
                    for old in damaged:
                        self._attempt(lambda old=old: self._set_aside(old))  # type: ignore[misc]
                return path, manifest
            if self._was_removed(path):
                continue  # another process has pruned it meanwhile
            if only is not None:
                raise CheckpointError(f"{path}: the checkpoint is damaged: {problem}")
            damaged.append(path)
            self.say(f"checkpoint {path.name} is damaged: {problem}{'; falling back to the one before it' if left else ''}")
        if damaged:
            raise CheckpointError(
                f"{self.folder}: every checkpoint is damaged ({', '.join(p.name for p in damaged)}); "
                f"restore one from a copy, or move the folder away to start anew"
            )
        return None

    def read(self, path: Path, boxes: ShardBoxes) -> None:
        """Fill the boxes from a checkpoint that `load_newest` returned.

        Raises, on all ranks alike:
            CheckpointError: the checkpoint is of another model.
            StorageError: it cannot be read at present.
        """
        problem: Exception | None = None
        try:
            files = CheckpointFiles(path, Manifest.read(path).tensors)
            for key, tensor_boxes in boxes.items():
                for box in tensor_boxes:
                    files.fill(key, box)
        except CheckpointError as error:
            problem = CheckpointError(f"{path}: {error}")
        except (StorageError, OSError) as error:
            problem = _read_error(path, error)
        self._raise_together(problem)

    # what one rank, or all, do for the above

    def _prepare(self, work: Path) -> None:
        if self.mesh.is_main:
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir(parents=True)

    def _give_up(self, work: Path, name: str, problem: str) -> None:
        if self.mesh.is_main:
            shutil.rmtree(work, ignore_errors=True)
        self.problem = problem
        self.say(f"checkpoint {name} could not be saved: {problem}; older checkpoints stay")
        dist.barrier()

    def _publish(self, pending: "_PendingSave", everybody: list[dict[str, Any]]) -> None:
        if not self.mesh.is_main:
            return
        files = {name: entry for each in everybody for name, entry in each["files"].items()}
        tensors = _joined([each["tensors"] for each in everybody])
        dataclasses.replace(pending.manifest, files=files, tensors=tensors).write(pending.work)
        sync_folder(pending.work)
        target = self.folder / pending.name
        replaced = self.folder / f"{UNFINISHED}replaced-{pending.name}"
        if target.exists():  # the same step again: a resumed run that was told to start from an older one
            os.rename(target, replaced)
        try:
            os.rename(pending.work, target)
        except OSError:
            if replaced.exists():
                os.rename(replaced, target)
            raise
        sync_folder(self.folder)
        shutil.rmtree(replaced, ignore_errors=True)
        try:
            prune(self.folder, self.retention)
        except OSError as error:  # the checkpoint is published all the same
            self.say(f"an older checkpoint could not be deleted ({error}); it is tried again after the next save")

    def _verify(self, path: Path) -> tuple[Manifest | None, str | None]:
        """Check a checkpoint, with the files divided among the ranks; all ranks return the same. If a rank could not read and
        the others found no damage, all raise its error; so they do if one has read another format."""
        manifest, problem, unread, other = None, None, None, None
        try:
            manifest = Manifest.read(path)
            for index, (name, expected) in enumerate(sorted(manifest.files.items())):
                if index % self.mesh.world_size == self.mesh.rank:
                    problem = problem or check_file(path, name, expected)
        except OtherFormatError as error:
            other = error
        except CheckpointError as error:
            problem = str(error)
        except (StorageError, OSError) as error:
            unread = _read_error(path, error)
        self._raise_together(other)
        problem = self._agree(problem)
        self._raise_together(unread if problem is None else None)
        return manifest, problem

    def _was_removed(self, path: Path) -> bool:
        """Whether a checkpoint no longer exists, as seen by the main rank."""
        there = [path.exists() if self.mesh.is_main else None]
        dist.broadcast_object_list(there, src=0)
        return not there[0]

    def _raise_together(self, error: Exception | None) -> None:
        """Raise the first rank's error on all ranks."""
        errors: list[Exception | None] = [None] * self.mesh.world_size
        dist.all_gather_object(errors, error)
        if (first := next((e for e in errors if e is not None), None)) is not None:
            raise first

    def _clean(self) -> None:
        if self.mesh.is_main:
            for left in self.folder.glob(f"{UNFINISHED}*"):
                shutil.rmtree(left)

    def _set_aside(self, path: Path) -> None:
        if self.mesh.is_main:
            aside = path.with_name(f"{path.name}.damaged")
            shutil.rmtree(aside, ignore_errors=True)
            os.rename(path, aside)

    def _listed(self) -> list[Path]:
        """The same list on every rank: a shared file system may show ranks different states."""
        names = [published(self.folder) if self.mesh.is_main else None]
        dist.broadcast_object_list(names, src=0)
        return names[0] or []

    def _attempt(self, work: Callable[[], None]) -> str | None:
        """Run `work` on every rank; returns the first OSError of any rank, on all of them."""
        problem = None
        try:
            work()
        except OSError as error:
            problem = f"{type(error).__name__} {error}"
        return self._agree(problem)

    def _agree(self, problem: str | None) -> str | None:
        problems: list[str | None] = [None] * self.mesh.world_size
        dist.all_gather_object(problems, problem)
        return next((p for p in problems if p is not None), None)


class _PendingSave:
    """A checkpoint whose file on this rank is being written by a thread."""

    def __init__(
        self, name: str, work: Path, manifest: Manifest, began: float, rank: int, staged: list[StagedBox], memory: torch.Tensor
    ) -> None:
        self.name, self.work, self.manifest, self.began = name, work, manifest, began
        self._result: dict[str, Any] = {"problem": None, "files": {}, "tensors": {}}
        self._blocks = 0
        self._thread = threading.Thread(target=self._run, args=(file_name(rank), staged, memory), name="checkpoint", daemon=True)
        self._thread.start()

    def _run(self, file: str, staged: list[StagedBox], memory: torch.Tensor) -> None:
        if not staged:
            return
        try:
            entry, described = write_file(self.work / file, staged, memory, self._count_block)
            tensors = {key: {**of, "file": file} for key, of in described.items()}
            self._result = {"problem": None, "files": {file: entry}, "tensors": tensors}
        except Exception as error:  # whatever it is, it costs this checkpoint and not the run; it is said aloud
            self._result["problem"] = f"{type(error).__name__} {error}"

    def _count_block(self) -> None:
        self._blocks += 1

    def is_written(self) -> bool:
        return not self._thread.is_alive()

    def result(self) -> dict[str, Any]:
        """Wait for it: {problem, files: {name: {bytes, sha256}}, tensors: see files.describe, each with its file}."""
        beats = heartbeat.own_heartbeat()
        beats.set_location("writing its file")
        while self._thread.is_alive():
            seen = self._blocks
            self._thread.join(timeout=1.0)
            if self._blocks != seen:
                beats.set_location("writing its file")
        beats.set_location("publishing")
        return self._result


def _joined(of_ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """The manifest's tensors from all ranks' descriptions of their boxes."""
    found: dict[str, Any] = {}
    for key, of in (item for one in of_ranks for item in one.items()):
        entry = found.setdefault(key, {"dtype": of["dtype"], "shape": of["shape"], "digests": [], "parts": []})
        entry["digests"].append(of["digest"])
        entry["parts"] += [[of["file"], *part] for part in of["parts"]]
    return {key: {**entry, "checksum": combine_digests(entry.pop("digests"))} for key, entry in found.items()}


def prune(folder: Path, retention: Retention, *, delete: bool = True) -> list[Path]:
    """Delete the checkpoints that the retention does not keep; returns those that were, or with delete=False would be,
    deleted.

    Checkpoints whose manifest is damaged or cannot be read are kept. Raises OSError.
    """
    steps, validation = {}, {}
    for path in published(folder):
        try:
            manifest = Manifest.read(path)
        except (CheckpointError, StorageError, OSError):
            continue
        steps[manifest.step], validation[manifest.step] = path, manifest.validation
    kept, gone = retention.kept(validation), []
    for step, path in steps.items():
        if step in kept:
            continue
        if delete:
            # a folder without its manifest would look damaged: it goes under another name first
            aside = path.with_name(f"{UNFINISHED}pruned-{path.name}")
            try:
                os.rename(path, aside)
            except FileNotFoundError:
                continue  # another process has pruned it
            shutil.rmtree(aside)
        gone.append(path)
    return gone


def _read_error(path: Path, error: StorageError | OSError) -> StorageError | CheckpointError:
    """The error for a checkpoint that a rank could not read."""
    if isinstance(error, StorageError):
        return error
    if is_transient(error):
        return unreadable(path, error)
    return CheckpointError(
        f"{error.filename or path}: cannot be read ({error_reason(error)}); make it readable for this user, then start again"
    )


def published(folder: Path) -> list[Path]:
    """Published checkpoints, oldest first; none if the folder does not exist. Raises OSError if it cannot be listed."""
    try:
        entries = [*folder.iterdir()]
    except FileNotFoundError:
        return []
    return sorted(p for p in entries if p.name.startswith(PREFIX) and p.name[len(PREFIX) :].isdigit() and p.is_dir())


def newest(folder: Path) -> Path | None:
    """The newest published checkpoint that has a manifest, unverified; for readers outside of a run."""
    steps = [p for p in published(folder) if (p / NAME).exists()]
    return steps[-1] if steps else None
