"""Starts this machine's ranks, watches them, and ends them together.

Each rank writes its own log; rank 0's is also shown on the terminal. If a rank fails, all others are ended. If the process that
started the ranks dies, they end too.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from baton.data_pipeline.errors import StorageError
from baton.launcher.liveness import LOOK_S, Watch, account, ask_stacks, remedy
from baton.launcher.ranks import Rank, start_ranks

SAVE_S = 120.0
"""Seconds for ranks that were asked to end to finish their step and save."""

LAST_WORDS_S = 2.0
"""Seconds for the other ranks to log what they miss from a failed rank, before they are ended."""

REFUSED = (2, StorageError.exit_status)
"""Exit statuses of a rank whose own message is sufficient: bad input, and errors of storage."""

KILLED_S = 10.0
"""Seconds for killed ranks to disappear."""

STOPPED = 75
"""Exit status of a rank that ended because it was asked to (training.errors.StoppedError)."""

HUNG = 76
"""Exit status of the command if a rank hung (baton.slurm.exits.Exit.HUNG)."""


def run_ranks(world_size: int, attempt: Path, *, limit_s: float, startup_timeout_s: float) -> int:
    """Run the ranks of `attempt` (a folder with config.yaml) to their end; returns the exit status for the command.

    0: all ranks ended well. 2: a rank refused its input, 74: its files could not be read or written at present (its sentence has
    been printed). 1: a rank died or missed another one's message (who, and what was missed, has been printed); 76: a rank gave no
    sign of life for limit_s seconds, or for startup_timeout_s in a phase that may compile, and others waited for it; 130, 143:
    interrupted. An interrupt lets the ranks finish their step and save; a second one does not. The status is 74 where that save
    fails.
    """
    try:
        watch = Watch(range(world_size), limit_s, startup_timeout_s)
        (attempt / "stacks").mkdir()
    except OSError as error:
        print(f"baton: no room to watch the ranks ({error}); make room and start the same command", file=sys.stderr)
        return StorageError.exit_status
    listener = listen("127.0.0.1", (0, 0))
    environment = rank_environment("127.0.0.1", listener.getsockname()[1], world_size, world_size) | watch.environment
    ranks = start_of(attempt, range(world_size), environment, listener)
    shown, looking = _Shown(log_of(attempt, 0)), _Looking(watch, ranks)
    stopped: list[int] = []
    previous = {s: signal.signal(s, lambda number, frame: stopped.append(number)) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        while not (stopped or looking.hung()) and any(p.poll() is None for p in ranks) and not any(p.poll() for p in ranks):
            shown.update()
            time.sleep(0.05)
        # asked again, because the rank that failed first may not be the first that was seen to have
        failed = [(rank, p.returncode) for rank, p in enumerate(ranks) if p.poll()]
        if stopped:
            tell(ranks, signal.SIGTERM)
            deadline = time.monotonic() + SAVE_S
            while any(p.poll() is None for p in ranks) and len(stopped) == 1 and time.monotonic() < deadline:
                if looking.hung():
                    break
                shown.update()
                time.sleep(0.05)
        elif any(status not in REFUSED for _, status in failed):
            _wait(ranks, LAST_WORDS_S)
            # and once more: who waits for a killed rank is told so when its connections close, before the last of its threads ends
            failed = [(rank, p.returncode) for rank, p in enumerate(ranks) if p.poll()]
        hung = _hung(watch, ranks, attempt) if not failed and looking.hung() else None
        left = end_ranks(ranks)
        # a refusal is all there is to say, not who misses whom after it
        if all(status not in REFUSED for _, status in failed):
            shown.finish()
    finally:
        listener.close()
        watch.close()
        for number, handler in previous.items():
            signal.signal(number, handler)
    if hung is not None:
        print(f"baton: {hung}{left}; start the same command to resume", file=sys.stderr)
        return HUNG
    unsaved = {rank: p.returncode for rank, p in enumerate(ranks) if p.returncode == StorageError.exit_status}
    if stopped and unsaved:
        _, sentence = report(unsaved, attempt, range(world_size))
        print(f"baton: stopped by {signal.Signals(stopped[0]).name}; {sentence}", file=sys.stderr)
        return StorageError.exit_status
    if stopped:
        print(f"baton: stopped by {signal.Signals(stopped[0]).name}{left}; start the same command to resume", file=sys.stderr)
        return 128 + stopped[0]
    if failed and all(p.returncode in (0, STOPPED) for p in ranks):  # asked by others than this process
        print(f"baton: {_sentence(log_of(attempt, failed[0][0]))}", file=sys.stderr)
        return STOPPED
    if failed:
        status, sentence = report(dict(failed), attempt, range(world_size))
        print(f"baton: {sentence}" + ("" if status in REFUSED else f"{left}; start the same command to resume"), file=sys.stderr)
        return status
    return 0


class _Looking:
    """Checks the ranks' heartbeats periodically."""

    def __init__(self, watch: Watch, ranks: list[Rank]) -> None:
        self._watch, self._ranks, self._due, self._found = watch, ranks, 0.0, False

    def hung(self) -> bool:
        """Whether a rank hangs. Once true, it stays true."""
        if (now := time.monotonic()) >= self._due and not self._found:
            self._due = now + LOOK_S
            self._watch.look(now, {rank: p.pid for rank, p in enumerate(self._ranks) if p.poll() is None})
            self._found = bool(self._watch.hung())
        return self._found


def _hung(watch: Watch, ranks: list[Rank], attempt: Path) -> str:
    """The message about the hanging rank. Writes the stack traces of all ranks first."""
    late, stacks = watch.hung(), attempt / "stacks"
    culprit = watch.culprit(late)
    ask_stacks(dict(enumerate(ranks)), stacks)
    return f"{account(culprit, late, watch.beats())}; {remedy(culprit, stacks)}"


def listen(address: str, ports: tuple[int, int]) -> socket.socket:
    """A listening socket on the first free port of a range ((0, 0): any port), for the rendezvous. Raises OSError if none is
    free."""
    first, last = ports
    for port in range(first, last + 1):
        try:
            listener = socket.create_server((address, port))
        except OSError:
            if port == last:
                raise
        else:
            listener.set_inheritable(True)
            return listener
    raise OSError(f"no ports in {first}-{last}")


def rank_environment(address: str, port: int, world_size: int, local_world_size: int) -> dict[str, str]:
    """The common environment of this machine's ranks, in addition to this process's."""
    environment = dict(os.environ) | {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(local_world_size),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "PYTHONUNBUFFERED": "1",
        "BATON_PARENT": str(os.getpid()),
    }
    # Ranks are watched by their signs of life. NCCL's own monitor would end them with a message that names no rank, and after a
    # dump that takes a minute.
    environment.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
    environment.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
    # more threads than cores fight each other; torch's default is all cores in every rank
    environment.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // local_world_size)))
    return environment


def start_of(attempt: Path, numbers: range, environment: dict[str, str], listener: socket.socket | None = None) -> list[Rank]:
    """Starts this machine's ranks of an attempt, with logs in its folder. listener: the rendezvous socket for rank 0."""
    listen = None if listener is None else listener.fileno()
    logs = [log_of(attempt, rank) for rank in numbers]
    return start_ranks(numbers, environment, logs, attempt / "stacks", attempt / "config.yaml", listen)


def tell(ranks: list[Rank], number: signal.Signals) -> None:
    """Sends a signal to the ranks that are running."""
    for p in ranks:
        if p.poll() is None:
            p.send_signal(number)


def end_ranks(ranks: list[Rank]) -> str:
    """Kills the ranks that are running: they wait for ranks that will not respond, and checkpoints are safe at any time. Returns an
    addition to the message if processes do not end because a disk or driver blocks them in the kernel."""
    tell(ranks, signal.SIGKILL)
    _wait(ranks, KILLED_S)
    left = [str(p.pid) for p in ranks if p.poll() is None]
    return f"; the kernel has not ended process {', '.join(left)} yet, which waits for a disk or a driver" if left else ""


def _wait(ranks: list[Rank], seconds: float) -> None:
    """Waits until all ranks have ended, for at most `seconds`."""
    deadline = time.monotonic() + seconds
    for p in ranks:
        with contextlib.suppress(subprocess.TimeoutExpired):
            p.wait(timeout=max(0.0, deadline - time.monotonic()))


def _no_room(attempt: Path) -> str:
    """A hint that logs may be missing because the disk is full."""
    return f"; No space left on the disk of {attempt}: make room" if shutil.disk_usage(attempt).free < 1 << 16 else ""


def report(failed: dict[int, int], attempt: Path, ranks: range) -> tuple[int, str]:
    """The exit status of the command (one of REFUSED, else 1) and a message, from the failed rank that was the cause.

    failed: exit statuses by rank. ranks: ranks whose logs are on this machine.
    """
    said = {rank: _sentence(log_of(attempt, rank)) for rank in ranks}
    for refusal in REFUSED:
        if refused := [rank for rank, status in failed.items() if status == refusal]:
            return refusal, said[refused[0]] or f"rank {refused[0]} refused to run{_no_room(attempt)}"
    rank, status = cause(failed, attempt)
    how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"failed with status {status}"
    sentence = said[rank] or next(filter(None, said.values()), None)
    missed = f" ({sentence.removeprefix(f'rank {rank}: ')})" if sentence else _no_room(attempt)
    return 1, f"rank {rank} {how}{missed}; see {log_of(attempt, rank)}"


def cause(failed: dict[int, int], attempt: Path) -> tuple[int, int]:
    """The failed rank that was the cause, and its status. Other ranks fail because they miss its messages, and log that. The order
    of preference is a rank that a signal killed, a rank that failed for another reason than a missing message, the earliest log
    line."""

    def order(rank: int) -> tuple[bool, bool, int]:
        if failed[rank] < 0:
            return False, False, 0
        log = log_of(attempt, rank)
        return True, _sentence(log) is not None, log.stat().st_mtime_ns

    rank = min(failed, key=order)
    return rank, failed[rank]


MISSING = ("Connection reset", "Connection closed", "Broken pipe", "remote process", "NCCL error", "imed out", "did not come from")
"""Parts of the last log lines of a rank that failed because another rank was gone."""


def misses_others(log: Path) -> bool:
    """Whether a rank failed because another rank's message was missing."""
    return any(sign in log.read_text(encoding="utf-8", errors="replace")[-4000:] for sign in MISSING)


def _sentence(log: Path) -> str | None:
    """The last message of a rank that ended by itself."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line.removeprefix("baton: ") for line in reversed(lines) if line.startswith("baton: ")), None)


def log_of(attempt: Path, rank: int) -> Path:
    return attempt / f"rank-{rank}.log"


class _Shown:
    """Shows rank 0's log on this terminal by whole lines, without one-line errors, which are printed once at the end. Lines are
    shown one update after they were read, so that rank 0's failure is not shown if another rank was its cause."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, encoding="utf-8", errors="replace")  # noqa: SIM115 (open as long as the ranks run)
        self._rest = ""
        self._lines: list[str] = []

    def update(self) -> None:
        """Shows the lines that the last update read, and reads new ones."""
        for line in self._lines:
            if not line.startswith("baton: "):
                sys.stdout.write(line + "\n")
        sys.stdout.flush()
        *self._lines, self._rest = (self._rest + self._file.read()).split("\n")

    def finish(self) -> None:
        """Shows all remaining lines."""
        self.update()
        self.update()
