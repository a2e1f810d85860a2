"""The folder of a run's checkpoints: atomic publishing, verified loading, falling back, pruning.

A checkpoint is copied to host memory, written into a hidden folder by a thread while training goes on, and renamed; whatever
happens before the rename leaves the older ones as they were. Every function here is called by all ranks together; the thread talks
to nobody.
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

from baton.parallel.mesh import Mesh
from baton.training.checkpoint.digest import joined
from baton.training.checkpoint.files import CheckpointFiles, Part, Rectangles, Staging, file_name, write_file
from baton.training.checkpoint.manifest import NAME, Manifest, check_file
from baton.training.checkpoint.retention import Retention
from baton.training.errors import CheckpointError

PREFIX = "step-"
UNFINISHED = ".saving-"


@dataclass(frozen=True)
class Saved:
    """A published checkpoint. bytes: of all ranks' tensors. seconds: from the call of `save` to its being published."""

    name: str
    bytes: int
    seconds: float


class CheckpointStore:
    """Checkpoints of one run under `folder` (runs/NAME/checkpoints).

    keep_last, keep_every, keep_best: see Retention. asynchronous: `save` returns once everything is copied; `poll` and `finish`
    publish. say: where sentences for the user go.
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
        asynchronous: bool = False,
    ) -> None:
        self.folder = folder
        self.mesh = mesh
        self.retention = Retention(keep_last, keep_every, keep_best)
        self.asynchronous = asynchronous
        self.say = say if mesh.is_main else lambda text: None
        self._staging = Staging(mesh.device)
        self._flight: _Flight | None = None

    def save(self, rectangles: Rectangles, manifest: Manifest) -> Saved | None:
        """Write a checkpoint; one that is still being written is published first.

        Returns what was published, if it was this one. A failure (a full disk) is said aloud and costs only itself.
        """
        self.finish()
        name = f"{PREFIX}{manifest.step:08d}"
        work, began = self.folder / f"{UNFINISHED}{name}", time.perf_counter()
        problem = self._attempt(lambda: self._prepare(work))
        if problem is not None:
            self._give_up(work, name, problem)
            return None
        parts, memory = self._staging.copy(rectangles)
        self._flight = _Flight(name, work, manifest, began, self.mesh.rank, parts, memory)
        return None if self.asynchronous else self.finish()

    def poll(self) -> Saved | None:
        """Publish what was being written, if every rank has written its part. Every rank calls it after the same steps."""
        if self._flight is None:
            return None
        written = torch.tensor(int(self._flight.is_written()), device=self.mesh.device)
        dist.all_reduce(written, op=dist.ReduceOp.MIN)
        return self.finish() if int(written) else None

    def finish(self) -> Saved | None:
        """Wait for what is being written, if anything is, and publish it."""
        flight, self._flight = self._flight, None
        if flight is None:
            return None
        mine = flight.result()
        everybody: list[Any] = [None] * self.mesh.world_size
        dist.all_gather_object(everybody, mine)
        problem = next((each["problem"] for each in everybody if each["problem"] is not None), None)
        size = sum(entry["bytes"] for each in everybody for entry in each["files"].values())
        if problem is None:
            problem = self._attempt(lambda: self._publish(flight, everybody))
        if problem is not None:
            self._give_up(flight.work, flight.name, problem)
            return None
        return Saved(flight.name, size, time.perf_counter() - flight.began)

    def load_newest(self, accept: Callable[[Manifest], None], *, tidy: bool = True) -> tuple[Path, Manifest] | None:
        """The newest checkpoint that verifies, or None where there is none at all; damaged ones are named.

        accept: raises for a manifest that does not fit this run (that is no damage, and ends the search).
        tidy: this is the run itself: remove what a killed save left, and set damaged checkpoints aside. A mere reader must not:
        the run may be saving at this moment.
        Raises CheckpointError when there are checkpoints and none is whole; they stay where they are, so that the next start
        is refused as well.
        """
        if tidy:
            self._attempt(self._clean)
        damaged: list[Path] = []
        for path in reversed(self._listed()):
            manifest, problem = self._verify(path)
            if problem is None:
                assert manifest is not None
                accept(manifest)
                if tidy:
                    for old in damaged:
                        self._attempt(lambda old=old: self._set_aside(old))  # type: ignore[misc]
                return path, manifest
            damaged.append(path)
            self.say(f"checkpoint {path.name} is damaged: {problem}; falling back to the one before it")
        if damaged:
            raise CheckpointError(
                f"{self.folder}: every checkpoint is damaged ({', '.join(p.name for p in damaged)}); "
                f"restore one from a copy, or remove the folder to start anew"
            )
        return None

    def read(self, path: Path, rectangles: Rectangles) -> None:
        """Fill the rectangles in place from a checkpoint that `load_newest` returned. Raises CheckpointError, on all ranks alike:
        the checkpoint is not of this model."""
        problem = None
        try:
            files = CheckpointFiles(path, Manifest.read(path).tensors)
            for key, boxes in rectangles.items():
                for box in boxes:
                    files.fill(key, box)
        except CheckpointError as error:
            problem = str(error)
        problem = self._agree(problem)
        if problem is not None:
            raise CheckpointError(f"{path}: {problem}")

    # what one rank, or all, do for the above

    def _prepare(self, work: Path) -> None:
        if self.mesh.is_main:
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir(parents=True)

    def _give_up(self, work: Path, name: str, problem: str) -> None:
        if self.mesh.is_main:
            shutil.rmtree(work, ignore_errors=True)
        self.say(f"checkpoint {name} could not be saved: {problem}; the run goes on, older checkpoints stay")
        dist.barrier()

    def _publish(self, flight: "_Flight", everybody: list[dict[str, Any]]) -> None:
        if not self.mesh.is_main:
            return
        files = {name: entry for each in everybody for name, entry in each["files"].items()}
        tensors = _joined([each["tensors"] for each in everybody])
        dataclasses.replace(flight.manifest, files=files, tensors=tensors).write(flight.work)
        _sync_folder(flight.work)
        target = self.folder / flight.name
        replaced = self.folder / f"{UNFINISHED}replaced-{flight.name}"
        if target.exists():  # the same step again: a resumed run that was told to start from an older one
            os.rename(target, replaced)
        os.rename(flight.work, target)
        _sync_folder(self.folder)
        shutil.rmtree(replaced, ignore_errors=True)
        prune(self.folder, self.retention)

    def _verify(self, path: Path) -> tuple[Manifest | None, str | None]:
        """All ranks check a share of the files; all get the same verdict."""
        manifest, problem = None, None
        try:
            manifest = Manifest.read(path)
            for index, (name, expected) in enumerate(sorted(manifest.files.items())):
                if index % self.mesh.world_size == self.mesh.rank:
                    problem = problem or check_file(path, name, expected)
        except (CheckpointError, OSError) as error:
            problem = str(error)
        return manifest, self._agree(problem)

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
        """The same list on every rank: a shared file system may show ranks different moments."""
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


class _Flight:
    """A checkpoint of which this rank's part is being written by a thread."""

    def __init__(
        self, name: str, work: Path, manifest: Manifest, began: float, rank: int, parts: list[Part], memory: torch.Tensor
    ) -> None:
        self.name, self.work, self.manifest, self.began = name, work, manifest, began
        self._result: dict[str, Any] = {"problem": None, "files": {}, "tensors": {}}
        self._thread = threading.Thread(target=self._run, args=(file_name(rank), parts, memory), name="checkpoint", daemon=True)
        self._thread.start()

    def _run(self, file: str, parts: list[Part], memory: torch.Tensor) -> None:
        if not parts:
            return
        try:
            entry, described = write_file(self.work / file, parts, memory)
            tensors = {key: {**of, "file": file} for key, of in described.items()}
            self._result = {"problem": None, "files": {file: entry}, "tensors": tensors}
        except Exception as error:  # whatever it is, it costs this checkpoint and not the run; it is said aloud
            self._result["problem"] = f"{type(error).__name__} {error}"

    def is_written(self) -> bool:
        return not self._thread.is_alive()

    def result(self) -> dict[str, Any]:
        """Wait for it: {problem, files: {name: {bytes, sha256}}, tensors: see files.describe, each with its file}."""
        self._thread.join()
        return self._result


def _joined(of_ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """The manifest's tensors from what the ranks say of their parts."""
    found: dict[str, Any] = {}
    for key, of in (item for one in of_ranks for item in one.items()):
        entry = found.setdefault(key, {"dtype": of["dtype"], "shape": of["shape"], "digests": [], "parts": []})
        entry["digests"].append(of["digest"])
        entry["parts"] += [[of["file"], *part] for part in of["parts"]]
    return {key: {**entry, "checksum": joined(entry.pop("digests"))} for key, entry in found.items()}


def prune(folder: Path, retention: Retention) -> list[Path]:
    """Delete the checkpoints that need not stay; those deleted. One whose manifest cannot be read stays, as evidence. Raises
    OSError."""
    steps, validation = {}, {}
    for path in published(folder):
        try:
            manifest = Manifest.read(path)
        except CheckpointError:
            continue
        steps[manifest.step], validation[manifest.step] = path, manifest.validation
    gone = [path for step, path in steps.items() if step not in retention.kept(validation)]
    for path in gone:
        # a folder without its manifest would look damaged: it goes under another name first
        aside = path.with_name(f"{UNFINISHED}pruned-{path.name}")
        os.rename(path, aside)
        shutil.rmtree(aside)
    return gone


def published(folder: Path) -> list[Path]:
    """Published checkpoints, oldest first."""
    return sorted(p for p in folder.glob(f"{PREFIX}*") if p.is_dir() and p.name[len(PREFIX) :].isdigit())


def newest(folder: Path) -> Path | None:
    """The newest published checkpoint that has a manifest, unverified; for readers outside a run."""
    steps = [p for p in published(folder) if (p / NAME).exists()]
    return steps[-1] if steps else None


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
