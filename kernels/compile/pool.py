"""Compiles Triton kernels in several processes, the slowest to compile first, and reports progress.

Each kernel is compiled in its own forked process, so a compiler that crashes or runs out of memory affects only one kernel, whose
name is reported. The results go to Triton's cache, which replaces files atomically, so processes and nodes can share it.
"""

import ctypes
import math
import multiprocessing as mp
import os
import resource
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any

import psutil

SAY_S = 5.0
"""Seconds between two progress lines."""

PROCESS_BYTES = 1 << 30
"""Memory to reserve per compiler process, in bytes. Measured: 0.4 GiB, most of which is shared with the parent."""

SECONDS = {
    "diagonal_scan.triton_forward.diagonal_scan_forward_kernel": 5.0,
    "diagonal_scan.triton_backward.diagonal_scan_backward_kernel": 10.0,
    "diagonal_scan.triton_forward.diagonal_scan_transition_kernel": 2.0,
    "diagonal_scan.triton_backward.diagonal_scan_transition_backward_kernel": 2.5,
    "lattice.triton_chunk_backward.lattice_chunk_backward_kernel": 10.0,
    "lattice.triton_chunk_forward.lattice_chunk_forward_kernel": 7.5,
    "lattice.triton_chunk_backward.lattice_backward_pre_kernel": 2.5,
    "lattice.triton_backward.lattice_backward_kernel": 2.5,
    "lattice.triton_forward.lattice_forward_kernel": 2.0,
    "delta_rule.wy_forward_kernels.wy_inverse_kernel": 4.5,
    "delta_rule.wy_backward_kernels.wy_gradients_kernel": 2.5,
    "delta_rule.wy_backward_kernels.wy_u_backward_kernel": 1.5,
    "short_conv.triton_kernels.short_conv_backward_kernel": 2.0,
    "gated_linear_attention.triton_kernels.gla_chunk_dqk_kernel": 1.5,
}
"""Processor time of compiling a kernel for sm_90 in seconds, by its module in baton.kernels and function, for the order and the
first estimate. Measured on the checks of `baton doctor` and on Mamba, on a busy machine."""

OTHER_SECONDS = 0.6
"""Seconds assumed for a kernel that is not in the table."""


@dataclass(frozen=True)
class Job:
    """A kernel to compile. name: its module and function. compile: compiles it into Triton's cache."""

    name: str
    compile: Callable[[], object]

    @property
    def seconds(self) -> float:
        """Expected processor time in seconds."""
        return SECONDS.get(self.name.removeprefix("baton.kernels."), OTHER_SECONDS)


@dataclass(frozen=True)
class Outcome:
    """Outcome of a job. seconds: processor time. failure: the error in one line; None: the kernel was compiled."""

    name: str
    seconds: float
    failure: str | None = None


def usable_cores() -> int:
    """Number of cores that this process may use, from its affinity, its cgroup's quota and, in a SLURM job, the job's cores
    here."""
    found = [len(os.sched_getaffinity(0))]
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        found += [] if quota == "max" else [math.ceil(int(quota) / int(period))]
    except (OSError, ValueError):  # no cgroup of version 2
        pass
    if (given := os.environ.get("SLURM_CPUS_ON_NODE", "")).isdigit():
        found.append(int(given))
    return max(1, min(found))


def _free_bytes() -> int:
    """Available memory in bytes, of the machine and of this process's cgroup."""
    free = psutil.virtual_memory().available
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text(encoding="ascii"))
        return free if limit == "max" else min(free, int(limit) - used)
    except (OSError, ValueError):  # no cgroup of version 2
        return free


def compile_all(
    jobs: Sequence[Job], what: str, processes: int | None = None, say: Callable[[str], None] | None = None
) -> list[Outcome]:
    """Compiles all jobs and returns their outcomes. Without jobs no process is started.

    what: the GPU's name for progress lines. processes: number of processes (default: the usable cores, fewer if memory is short).
    say: called with a progress line every SAY_S seconds.
    """
    if not jobs:
        return []
    count = min(processes or usable_cores(), len(jobs), max(1, _free_bytes() // PROCESS_BYTES))
    progress, waiting = _Progress(jobs, what, count, say), sorted(jobs, key=lambda job: -job.seconds)
    running: dict[int, tuple[Job, Any, connection.Connection]] = {}
    progress.begin()
    try:
        while waiting or running:
            while waiting and len(running) < count:
                job = waiting.pop(0)
                process, results = _start(job)
                running[process.sentinel] = job, process, results
                progress.started(job)
            ready = connection.wait(list(running), progress.due_s())
            for sentinel in [sentinel for sentinel in running if sentinel in ready]:
                job, process, results = running.pop(sentinel)
                progress.ended(job, _outcome(job, process, results))
            progress.look()
    finally:
        for _, process, _ in running.values():  # only where this process was interrupted
            process.kill()
    progress.end()
    return progress.outcomes


class _Progress:
    """Progress lines, and the outcomes of jobs."""

    def __init__(self, jobs: Sequence[Job], what: str, processes: int, say: Callable[[str], None] | None) -> None:
        self._say: Callable[[str], None] = say or (lambda line: None)
        self._what, self._count, self._processes = what, len(jobs), processes
        self._left = sum(job.seconds for job in jobs)
        self._began = self._said = time.monotonic()
        self._running: dict[int, tuple[Job, float]] = {}
        self._took = self._expected = 1.0  # seconds of the jobs that have ended, beside what was expected of them
        self.outcomes: list[Outcome] = []

    def begin(self) -> None:
        kernels = "1 kernel" if self._count == 1 else f"{self._count} kernels"
        processes = "1 process" if self._processes == 1 else f"{self._processes} processes"
        self._say(f"compiling {kernels} for {self._what} in {processes}, which takes about {_round(self.left_s())} s")

    def started(self, job: Job) -> None:
        self._running[id(job)] = job, time.monotonic()

    def ended(self, job: Job, outcome: Outcome) -> None:
        _, began = self._running.pop(id(job))
        self._left -= job.seconds
        self._took, self._expected = self._took + time.monotonic() - began, self._expected + job.seconds
        self.outcomes.append(outcome)

    def left_s(self) -> float:
        """Estimated seconds until all are compiled: the remaining work over all processes, at least that of the longest running
        job."""
        now, factor = time.monotonic(), self._took / self._expected
        ages = [(job.seconds * factor, now - began) for job, began in self._running.values()]
        done = sum(min(age, seconds) for seconds, age in ages)
        return max([(self._left * factor - done) / self._processes, *(seconds - age for seconds, age in ages), 1.0])

    def due_s(self) -> float:
        """Seconds until the next progress line."""
        return max(0.0, self._said + SAY_S - time.monotonic())

    def look(self) -> None:
        if self._running and self.due_s() == 0:
            self._said = time.monotonic()
            done = f"{len(self.outcomes)} done, about {_round(self.left_s())} s left"
            self._say(f"compiling {self._count} kernels for {self._what}: {done}")

    def end(self) -> None:
        failed = sum(outcome.failure is not None for outcome in self.outcomes)
        but = f", {failed} of them in vain" if failed else ""
        self._say(f"compiled {self._count} kernels for {self._what} in {time.monotonic() - self._began:.0f} s{but}")


def _round(seconds: float) -> int:
    """A rounded duration as text, since estimates are rough."""
    return math.ceil(seconds) if seconds < 5 else 5 * math.ceil(seconds / 5)


def _start(job: Job) -> tuple[Any, connection.Connection]:
    context = mp.get_context("fork")
    results, sender = context.Pipe(duplex=False)
    process = context.Process(target=_compile, args=(job, sender, os.getpid()), daemon=True)
    process.start()
    sender.close()
    return process, results


def _compile(job: Job, sender: connection.Connection, parent: int) -> None:
    """Runs a job in its process."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: nothing is left running where the parent is killed
    if os.getppid() != parent:
        os._exit(1)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    os.dup2(2, 1)  # Triton prints the whole program where ptxas fails
    failure = None
    try:
        job.compile()
    except BaseException as error:  # any error belongs to this kernel
        failure = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    sender.send((sum(one.ru_utime + one.ru_stime for one in used), failure))


def _outcome(job: Job, process: Any, results: connection.Connection) -> Outcome:
    process.join()
    try:
        seconds, failure = results.recv() if results.poll() else (0.0, None)
    except EOFError:
        seconds, failure = 0.0, None
    code = process.exitcode
    results.close()
    process.close()
    if code and failure is None:
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        failure = f"its compiler {how}" + (", maybe for lack of memory" if code == -signal.SIGKILL else "")
    return Outcome(job.name, seconds, failure)
