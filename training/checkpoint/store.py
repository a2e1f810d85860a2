"""The folder of a run's checkpoints: atomic publishing, verified loading, falling back, pruning.

A checkpoint is written into a hidden folder, checked, and renamed; whatever happens before the rename leaves the older ones as
they were. Every function here is called by all ranks together.
"""

import dataclasses
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from baton.parallel.mesh import Mesh
from baton.training.checkpoint.manifest import NAME, Manifest, check_file, checksum
from baton.training.checkpoint.planner import RectangleLoadPlanner, Rectangles, RectangleSavePlanner, SafeReader
from baton.training.errors import CheckpointError

PREFIX = "step-"
UNFINISHED = ".saving-"


class CheckpointStore:
    """Checkpoints of one run under `folder` (runs/NAME/checkpoints). say: where sentences for the user go."""

    def __init__(self, folder: Path, mesh: Mesh, keep_last: int, say: Callable[[str], None] = print) -> None:
        self.folder = folder
        self.mesh = mesh
        self.keep_last = keep_last
        self.say = say if mesh.is_main else lambda text: None

    def save(self, rectangles: Rectangles, manifest: Manifest) -> int | None:
        """Write a checkpoint; returns its bytes, or None if it is not published: a failure (a full disk) is said aloud and costs
        only itself."""
        name = f"{PREFIX}{manifest.step:08d}"
        work = self.folder / f"{UNFINISHED}{name}"
        problem = self._attempt(lambda: self._prepare(work))
        if problem is None:
            problem = self._write(rectangles, work)
        files: list[Any] = [None] * self.mesh.world_size
        everything: dict[str, dict[str, Any]] = {}
        if problem is None:
            mine: dict[str, Any] = {}
            problem = self._attempt(lambda: mine.update(self._checksums(work)))
            dist.all_gather_object(files, mine)
        if problem is None:
            everything.update({name: entry for part in files for name, entry in part.items()})
            problem = self._attempt(lambda: self._publish(work, name, dataclasses.replace(manifest, files=everything)))
        if problem is not None:
            if self.mesh.is_main:
                shutil.rmtree(work, ignore_errors=True)
            self.say(f"checkpoint {name} could not be saved: {problem}; the run goes on, older checkpoints stay")
        dist.barrier()
        return None if problem is not None else sum(entry["bytes"] for entry in everything.values())

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
        """Fill the rectangles in place from a checkpoint that `load_newest` returned."""
        reader = SafeReader(path)
        reader.read_metadata()  # dcp.load would take a refusal for a missing file and look for another one
        try:
            dcp.load(rectangles, storage_reader=reader, planner=RectangleLoadPlanner())
        except CheckpointException as error:
            raise CheckpointError(f"{path}: {_failures(error)}") from error

    # what one rank, or all, do for the above

    def _prepare(self, work: Path) -> None:
        if self.mesh.is_main:
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir(parents=True)

    def _write(self, rectangles: Rectangles, work: Path) -> str | None:
        try:
            dcp.save(rectangles, storage_writer=dcp.FileSystemWriter(work), planner=RectangleSavePlanner())
        except CheckpointException as error:  # the library has made every rank raise it
            return _failures(error)
        return None

    def _checksums(self, work: Path) -> dict[str, Any]:
        """Checksums of the files this rank answers for: its own, and on the main rank the metadata."""
        mine = {p.name: checksum(p) for p in sorted(work.glob(f"__{self.mesh.rank}_*.distcp"))}
        if self.mesh.is_main:
            mine[".metadata"] = checksum(work / ".metadata")
        return mine

    def _publish(self, work: Path, name: str, manifest: Manifest) -> None:
        if not self.mesh.is_main:
            return
        manifest.write(work)
        _sync_folder(work)
        target = self.folder / name
        replaced = self.folder / f"{UNFINISHED}replaced-{name}"
        if target.exists():  # the same step again: a resumed run that was told to start from an older one
            os.rename(target, replaced)
        os.rename(work, target)
        _sync_folder(self.folder)
        shutil.rmtree(replaced, ignore_errors=True)
        for old in _steps(self.folder)[: -self.keep_last]:
            shutil.rmtree(old)

    def _verify(self, path: Path) -> tuple[Manifest | None, str | None]:
        """All ranks check a share of the files; all get the same verdict."""
        manifest, problem = None, None
        try:
            manifest = Manifest.read(path)
            for index, (name, expected) in enumerate(sorted(manifest.files.items())):
                if index % self.mesh.world_size == self.mesh.rank:
                    problem = problem or check_file(path, name, expected)
            if ".metadata" not in manifest.files:
                problem = ".metadata is missing from the manifest"
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
        names = [_steps(self.folder) if self.mesh.is_main else None]
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


def _failures(error: CheckpointException) -> str:
    """The ranks' errors in one line, equal ones once."""
    return "; ".join(sorted({f"{type(e[0]).__name__} {e[0]}" for e in error.failures.values()}))


def _steps(folder: Path) -> list[Path]:
    """Published checkpoints, oldest first."""
    return sorted(p for p in folder.glob(f"{PREFIX}*") if p.is_dir() and p.name[len(PREFIX) :].isdigit())


def newest(folder: Path) -> Path | None:
    """The newest published checkpoint that has a manifest, unverified; for readers outside a run."""
    steps = [p for p in _steps(folder) if (p / NAME).exists()]
    return steps[-1] if steps else None


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
