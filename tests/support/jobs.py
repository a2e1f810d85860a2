"""Runs on a real SLURM, observed through SLURM's commands and the run's files."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from baton.launcher.run_directory import last_step
from baton.training.monitoring import time_ledger
from baton.training.monitoring.metrics import read_metrics
from support.consumed import consumed
from support.forks import NURSERY
from support.runs import BATON, DEADLINE_S, published, wait_until

TOOL = Path(__file__).resolve().parents[1] / "tools" / "slurm-sandbox"

STEPS = 150
"""Of the small run: some fifteen seconds on two shared cores, so that something can happen to it."""
SHORT_STEPS = 100
"""Of the same run in `make test`."""

LOST_NODE_S, HANG_S = 15, 20
"""Long beside what a rank or an agent may be kept waiting for a core of a machine that does other things as well."""

RUN = {
    "device": "cpu",
    "model": {"d_model": 16, "n_layers": 2, "pattern": ["mamba"], "mixers": {"mamba": {"d_state": 4}}, "pad_vocab_to": 8},
    "data": {"kind": "mqar", "length": 16, "pairs": 2, "vocab_size": 36},
    "layout": {"data": 4, "timeout_s": 60},
    "training": {
        "steps": STEPS,
        "sequence_length": 32,
        "global_batch_tokens": 256,
        "micro_batch_size": 2,
        "compute_dtype": "float32",
        "log_every": 1,
        "optimizer": {"lr": 1e-2},
        "schedule": {"kind": "cosine", "warmup_steps": 4, "final_lr": 1e-3},
        "checkpoint": {"every": 10, "keep_last": 3},
        "evaluation": {"every": 50, "tokens": 600, "sample_tokens": 0},
    },
    "jobs": {"hang_timeout_s": HANG_S, "startup_timeout_s": 600, "node_timeout_s": LOST_NODE_S},
}
"""Two nodes of two ranks."""

CHECKED = {"enabled": True, "timeout_s": 300, "files_mb_s": 0}
"""Preflight that no speed of this machine fails, where all nodes come."""

CHECKED_APART = CHECKED | {"timeout_s": 120}
"""Where one does not come: the others wait a third of it."""


def sandbox(*words, **settings) -> subprocess.CompletedProcess:
    """The tool that makes nodes, powers them off, and on. settings: of its environment."""
    return subprocess.run([TOOL, *words], capture_output=True, text=True, timeout=DEADLINE_S, env=os.environ | settings)


@contextlib.contextmanager
def not_shared(node: str, folder: Path):
    """On one node another file system lies over the folder."""
    anchor = (Path(os.environ["SLURM_SANDBOX_DIR"]) / "ns" / node).read_text().split()[0]
    enter = ["nsenter", "--target", anchor, "--mount", "--uts"]
    subprocess.run([*enter, "mount", "-t", "tmpfs", "tmpfs", folder], check=True)
    try:
        yield
    finally:
        subprocess.run([*enter, "umount", "--lazy", folder], check=True)


class Job:
    """A submitted run. folder: its directory. where: the current directory of the submission."""

    def __init__(self, folder: Path, where: Path) -> None:
        self.folder, self.where = folder, where

    def baton(self, *words) -> subprocess.CompletedProcess:
        return subprocess.run([*BATON, *map(str, words)], cwd=self.where, capture_output=True, text=True, timeout=DEADLINE_S)

    def submit(self, run: Path, cluster: Path, *words, nodes=None) -> None:
        more = [] if nodes is None else ["--nodes", nodes]
        done = self.baton("submit", run, *words, "--cluster", cluster, *more)
        assert done.returncode == 0, done.stderr

    @property
    def name(self) -> str:
        return f"baton-{self.folder.name}"

    def ids(self, *states: str) -> list[str]:
        """Its jobs that are in one of the states (default: waiting or running), oldest first."""
        more = ["-t", ",".join(states)] if states else []
        out = subprocess.run(
            ["squeue", "-h", "-n", self.name, "-o", "%A", *more], capture_output=True, text=True, check=True
        ).stdout
        return sorted(set(out.split()), key=int)

    def rows(self, kind: str) -> list[dict]:
        return [row for row in time_ledger.read_rows(self.folder) if row["kind"] == kind]

    def wait_for_step(self, step: int, attempt: int = 1) -> None:
        """Until this attempt has started and the run has done `step`."""

        def there() -> bool:
            assert not self.rows("stopped"), self.said()
            return len(self.rows("attempt")) >= attempt and len(self.rows("start")) > 0 and last_step(self.folder) >= step

        self._wait(there, f"step {step} in attempt {attempt}")

    def wait_for_attempt(self, attempt: int) -> None:
        self._wait(lambda: len(self.rows("attempt")) >= attempt or self.rows("stopped"), f"attempt {attempt}")
        assert len(self.rows("attempt")) >= attempt, self.said()

    def wait(self) -> int:
        """Waits until the run is not restarted any more. Returns the exit code of its last job."""
        self._wait(lambda: self.rows("stopped"), "the run's end")
        self._wait(lambda: not self.ids("running"), "its job's end")
        return self.rows("stopped")[-1]["status"]

    def _wait(self, condition, what: str) -> None:
        try:
            wait_until(condition, what, every_s=0.1)  # SLURM is asked each time
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.said()}") from None

    def said(self) -> str:
        """What its jobs and ranks said, for a failing test's reader."""
        files = [*sorted(self.folder.glob("attempts/slurm-*.out")), *sorted(self.folder.glob("attempts/0*/rank-*.log"))]
        return "\n".join(f"== {file.relative_to(self.folder)}\n{file.read_text()[-1500:]}" for file in files)

    def ranks(self, node: str | None = None) -> list[psutil.Process]:
        """Its ranks' processes, on all nodes or one."""
        found = []
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if "baton.launcher.worker" in words and str(self.folder) in words[-1]:
                with contextlib.suppress(psutil.Error):
                    if not process.name().startswith("rank-"):  # it imports, and will fork them
                        continue
                    if node is None or process.environ().get("SLURMD_NODENAME") == node:
                        found.append(process)
        return found

    def checkpoints(self) -> list[int]:
        return published(self.folder)

    def losses(self) -> list[tuple[int, float, float]]:
        """(step, loss, gradient norm) of every step in the record."""
        rows = read_metrics(self.folder / "metrics.jsonl")
        return [(row["step"], row["loss"], row["grad_norm"]) for row in rows if row["kind"] == "train"]

    def end(self) -> None:
        """Its jobs are cancelled and gone."""
        subprocess.run(["scancel", "-n", self.name], check=True)
        deadline = time.monotonic() + 60
        while self.ids() and time.monotonic() < deadline:
            time.sleep(0.2)
        for process in self.ranks():
            with contextlib.suppress(psutil.Error):
                os.kill(process.pid, signal.SIGKILL)


def undisturbed(folder: Path, run: Path, *words: str) -> Job:
    """The same run on this machine, from its first step to its last in one go."""
    return begin_undisturbed(folder, run, *words)()


def begin_undisturbed(folder: Path, run: Path, *words: str) -> Callable[[], Job]:
    """The same, beside what is done until its result is asked for by calling what this returns."""
    said = folder.with_name(f"{folder.name}.said")
    said.touch()
    command = ["train", str(run), *words, f"directory={folder}"]
    process = NURSERY.fork("command", command, where=run.parent, out=str(said), err=str(said))

    def end() -> Job:
        assert process.wait(DEADLINE_S) == 0, said.read_text()[-3000:]
        return Job(folder, run.parent)

    return end


class Expected:
    """What a run must have come to, whatever befell it: the losses of `calm`, which nothing happened to, and `due`, what its steps
    must have consumed (support.consumed), worked out without a run."""

    def __init__(self, calm: Callable[[], Job], due: list[str]) -> None:
        self._calm, self._due = calm, due

    def check(self, job: Job, *, steps: int = STEPS, rel: float | None = None) -> None:
        """steps: as many should be finished. rel: how far losses may be from those of the undisturbed run, where the layout
        changed; None: the same bits. Every finished step is in the record once, and has consumed exactly what it should."""
        found, calm = job.losses(), self._calm().losses()[:steps]
        assert [step for step, _, _ in found] == list(range(1, steps + 1))
        if rel is None:
            assert found == calm
        for (step, loss, _), (_, other, _) in zip(found, calm, strict=True):
            assert abs(loss - other) <= (rel or 0.0) * abs(other), f"step {step}"
        assert consumed(job.folder) == self._due[:steps]


assert sys.platform == "linux", "SLURM's nodes are Linux namespaces"
