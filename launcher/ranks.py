"""Starts a machine's ranks: one process imports what all of them need, and forks them.

The imports take seconds of processor time (benchmarks/startup.py), so ranks share them. The forking process ends immediately after
the forks, and the ranks become children of the process that requested them, which is a subreaper meanwhile, as if it had started
each of them itself. The GPU is not used before the fork.
"""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

START = "BATON_START"
"""Environment variable that makes a worker import and fork, as JSON: {ranks: [first, count], logs: descriptors, told: descriptor,
listen: descriptor or null, stacks: folder}."""

_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER, Linux
_POLL_S = 0.02


class Process(Protocol):
    """The interface of a rank's process that watching needs."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def send_signal(self, number: int) -> None: ...


class Rank:
    """One rank, with the interface of subprocess.Popen. Until it is forked, its process is the one that imports for it."""

    def __init__(self, number: int, place: int, origin: "_Origin") -> None:
        self.number, self._place, self._origin = number, place, origin
        self.returncode: int | Any = None  # as that of subprocess.Popen
        self._told: list[int] = []

    @property
    def pid(self) -> int:
        pids = self._origin.pids()
        return self._origin.process.pid if pids is None else pids[self._place]

    @property
    def forked(self) -> bool:
        return self._origin.pids() is not None

    def poll(self) -> int | None:
        """The exit status, negative if a signal ended it; None: it is running."""
        if self.returncode is not None:
            return self.returncode
        if (pids := self._origin.pids()) is None:
            self.returncode = self._origin.failed
            return self.returncode
        told, self._told = self._told, []
        for number in told:
            os.kill(pids[self._place], number)
        try:
            pid, status = os.waitpid(pids[self._place], os.WNOHANG)
        except ChildProcessError:  # its exit status is unknown
            self.returncode = -signal.SIGKILL
            return self.returncode
        if pid:
            self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Waits for the exit status. Raises subprocess.TimeoutExpired after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(f"rank {self.number}", timeout)
            time.sleep(_POLL_S)
        return status

    def send_signal(self, number: int) -> None:
        """Of a rank that is not forked yet: SIGKILL and SIGUSR2 (stacks) are for the process that imports; others wait for the
        rank."""
        if self.poll() is not None:
            return
        if self._origin.pids() is not None or number in (signal.SIGKILL, signal.SIGUSR2):
            os.kill(self.pid, number)
        else:
            self._told.append(number)


class _Origin:
    """The process that imports and forks. failed: its exit status if it ended before it had forked all ranks."""

    def __init__(self, process: "subprocess.Popen[bytes]", told: int, count: int) -> None:
        self.process, self._told, self._count = process, told, count
        self.failed: int | None = None
        self._pids: list[int] | None = None

    def pids(self) -> list[int] | None:
        """Of the ranks, this process's children; None: they are not forked yet, or never will be."""
        if self._pids is None and self.failed is None and (status := self.process.poll()) is not None:
            # all of them are told at once, before any rank goes on
            told = os.read(self._told, 1 << 20)
            os.close(self._told)
            _subreaper(False)
            if told:
                self._pids = json.loads(told)
            else:
                self.failed = status or 1
        return self._pids


def start_ranks(
    numbers: range, environment: dict[str, str], logs: Sequence[Path], stacks: Path, config: Path, listen: int | None
) -> list[Rank]:
    """Starts consecutive ranks on this machine and returns immediately. Raises OSError.

    environment: their common environment. logs: one file per rank. stacks: the folder for stack traces. listen: descriptor of the
    rendezvous socket, for rank 0.
    """
    with contextlib.ExitStack() as files:
        opened = [files.enter_context(open(log, "wb")) for log in logs]
        told, tell = os.pipe()
        files.callback(os.close, tell)
        descriptors = [log.fileno() for log in opened]
        start = {"ranks": [numbers.start, len(numbers)], "logs": descriptors, "told": tell, "listen": listen, "stacks": str(stacks)}
        handed = [*descriptors, tell] + ([] if listen is None else [listen])
        # a signal that comes before a rank can take it waits until then (training.preemption.install_handlers)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGUSR1, signal.SIGTERM))
        _subreaper(True)
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "baton.launcher.worker", str(config)],
                env=environment | {START: json.dumps(start)},
                stdin=subprocess.DEVNULL,
                stdout=opened[0],
                stderr=subprocess.STDOUT,
                pass_fds=handed,
                start_new_session=True,  # a Ctrl-C reaches this process alone, which then ends the ranks
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    origin = _Origin(process, told, len(numbers))
    return [Rank(number, place, origin) for place, number in enumerate(numbers)]


def fork(start: dict[str, Any]) -> int:
    """Forks the ranks from the process that has imported. Returns in each rank, with its index on this machine and its environment
    set; the forking process ends."""
    (first, count), origin = start["ranks"], os.getpid()
    ready, go = os.pipe()
    pids = []
    for place in range(count):
        pid = os.fork()
        if pid == 0:
            os.close(go)
            os.close(start["told"])
            _settle(start, first, place, origin, ready)
            return place
        pids.append(pid)
    os.write(start["told"], json.dumps(pids).encode())
    os.write(go, bytes(count))
    os._exit(0)


def _settle(start: dict[str, Any], first: int, place: int, origin: int, ready: int) -> None:
    """Turns a forked process into a rank, with its own session, log and environment."""
    if not os.read(ready, 1):  # the others could not be forked
        os._exit(1)
    os.close(ready)
    os.setsid()
    for descriptor in (1, 2):
        os.dup2(start["logs"][place], descriptor)
    for log in start["logs"]:
        os.close(log)
    rank, listen = first + place, start["listen"]
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(place), "BATON_STACKS": str(Path(start["stacks"]) / f"rank-{rank}")}
    if listen is not None and rank == 0:
        os.environ["BATON_LISTEN_FD"] = str(listen)
    elif listen is not None:
        os.close(listen)
    while os.getppid() == origin:
        time.sleep(0.001)


def name_process(name: str) -> None:
    """Sets this process's name in `ps -o comm` and `top`, at most 15 characters (PR_SET_NAME, Linux)."""
    ctypes.CDLL(None).prctl(15, name.encode())


def _subreaper(on: bool) -> None:
    """Sets whether grandchildren become children of this process when their parent ends."""
    if ctypes.CDLL(None).prctl(_SUBREAPER, int(on), 0, 0, 0) != 0:
        raise OSError("this system does not let a process adopt its descendants (PR_SET_CHILD_SUBREAPER, Linux 3.4)")
