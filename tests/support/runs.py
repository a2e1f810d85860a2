"""The real `baton train` in processes of its own, watched from outside: through its exit status, its output and its files."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from baton.training.monitoring.metrics import read_metrics
from support.forks import NAMED, NURSERY

BATON = [sys.executable, "-P", "-m", "baton.launcher.cli"]
DEADLINE_S = 600
"""Far beyond what anything here takes on a machine that does other things as well."""

STEPS = 40
"""Optimizer steps of the small run of tests/launcher/conftest.py; it saves a checkpoint every 5 and keeps 3."""

SAME_PLACES = ("data.path=shards", "data.tokenizer=tokenizer.model")
"""Where the small run finds its data, relative: another current directory may have other contents in the same places."""


def wait_until(condition: Callable[[], Any], what: str, *, every_s: float = 0.01) -> Any:
    """The condition's first true value; looks every so often, gives up at the deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        found = condition()
        if found:
            return found
        assert time.monotonic() < deadline, f"after {DEADLINE_S} s still waiting for {what}"
        time.sleep(every_s)


class Launch:
    """`baton train` with `words`, running. folder: the run directory it writes. where: the current directory. forked: it and its
    ranks do not start an interpreter each, but are forked from a process that has imported everything (support.forks)."""

    def __init__(self, folder: Path, *words: str, where: Path, forked: bool = False) -> None:
        self.folder = folder
        self._out, self._err = (tempfile.NamedTemporaryFile("w+") for _ in range(2))  # noqa: SIM115 (end() closes them)
        command = ["train", *words, f"directory={folder}"]
        if forked:
            self.process = NURSERY.fork("command", command, where=where, out=self._out.name, err=self._err.name)
        else:
            given = {"cwd": where, "stdin": subprocess.DEVNULL, "stdout": self._out, "stderr": self._err}
            self.process = subprocess.Popen([*BATON, *command], **given)

    def rows(self) -> list[dict[str, Any]]:
        """Rows of metrics.jsonl at this moment."""
        return read_metrics(self.folder / "metrics.jsonl")

    def last_step(self) -> int:
        """The last step that is recorded at this moment; 0 before the first."""
        return max((row["step"] for row in self.rows() if row["kind"] == "train"), default=0)

    def checkpoints(self) -> list[int]:
        """Steps of the published checkpoints."""
        return published(self.folder)

    def ranks(self) -> list[psutil.Process]:
        """Processes of the ranks, in rank order."""
        found = {}
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children():
                with contextlib.suppress(psutil.Error):
                    if (name := child.name()).startswith(NAMED):
                        found[int(name.removeprefix(NAMED))] = child
        return [found[rank] for rank in sorted(found)]

    def wait_for_steps(self, attempt: int, count: int) -> list[psutil.Process]:
        """Wait until this attempt, the run's `attempt`-th, has done `count` steps; its ranks."""
        # every attempt prints where it begins; steps are recorded before they are printed
        log = self.folder / "attempts" / f"{attempt:04d}" / "rank-0.log"

        def trained() -> bool:
            assert self.process.poll() is None, f"training ended by itself with {self.process.returncode}:\n{self.read()}"
            return log.exists() and sum(line.startswith("step ") for line in log.read_text().splitlines()) >= count

        wait_until(trained, f"{count} steps of attempt {attempt}")
        return self.ranks()

    def freeze_between_checkpoints(self, ranks: list[psutil.Process]) -> None:
        """Stop all ranks at a moment when steps have been done since the newest checkpoint and none is being saved."""

        def frozen() -> bool:
            assert self.process.poll() is None, "training ended before it could be stopped between two checkpoints"
            for rank in ranks:
                rank.send_signal(signal.SIGSTOP)
            saved, saving = self.checkpoints(), list((self.folder / "checkpoints").glob(".saving-*"))
            if saved and self.last_step() > saved[-1] and not saving:
                return True
            for rank in ranks:
                rank.send_signal(signal.SIGCONT)
            return False

        wait_until(frozen, "a moment between two checkpoints")

    def end(self) -> "Ended":
        """Wait for the launcher's end."""
        self.process.wait(DEADLINE_S)
        out, err = self.read()
        self._out.close()
        self._err.close()
        return Ended(self.folder, self.process.returncode, out, err)

    def read(self) -> tuple[str, str]:
        """What it has written to stdout and stderr."""
        for stream in (self._out, self._err):
            stream.seek(0)
        return self._out.read(), self._err.read()


class Ended:
    """What a launch left: exit status (negative: the signal that ended it), stdout, stderr, and the record as it was then."""

    def __init__(self, folder: Path, status: int, out: str, err: str) -> None:
        self.status, self.out, self.err = status, out, err
        self.rows = read_metrics(folder / "metrics.jsonl")
        self.checkpoints = published(folder)


def published(folder: Path) -> list[int]:
    """Steps of a run's published checkpoints, ascending."""
    return sorted(int(p.name[5:]) for p in (folder / "checkpoints").glob("step-*") if p.name[5:].isdigit())


def flip(path: Path) -> None:
    """Damage one byte in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def gone(process: psutil.Process) -> bool:
    """Whether a process has ended (nobody may have collected an orphan's exit status)."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def kill(processes: list[psutil.Process]) -> None:
    """SIGKILL, all at once."""
    for process in processes:
        os.kill(process.pid, signal.SIGKILL)
