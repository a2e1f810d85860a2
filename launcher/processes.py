"""The ranks of this machine: started together, watched, and ended together.

Each rank writes its own log; rank 0's is shown as it grows. A rank that fails ends all the others, and ranks die with the process
that started them.
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

GRACE_S = 10.0

LAST_WORDS_S = 2.0
"""How long the other ranks may say what they miss of one that has failed, before they are ended."""


def run_ranks(world_size: int, attempt: Path) -> int:
    """Run the ranks of `attempt` (a folder with config.yaml) to their end; returns the exit status for the command.

    0: all ranks ended well. 2: a rank refused its input (its sentence has been printed). 1: a rank died or missed another one's
    message (who, and what was missed, has been printed); 130, 143: interrupted.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    listener.set_inheritable(True)
    ranks = [_start(rank, world_size, attempt, listener) for rank in range(world_size)]
    shown = _Shown(_log(attempt, 0))
    stopped: list[int] = []
    previous = {s: signal.signal(s, lambda number, frame: stopped.append(number)) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        while not stopped and any(p.poll() is None for p in ranks) and not any(p.poll() for p in ranks):
            shown.update()
            time.sleep(0.05)
        # asked again, because the rank that failed first may not be the first that was seen to have
        failed = [(rank, p.returncode) for rank, p in enumerate(ranks) if p.poll()]
        if any(status != 2 for _, status in failed) and not stopped:
            _wait(ranks, LAST_WORDS_S)
        _end(ranks)
        shown.update()
    finally:
        listener.close()
        for number, handler in previous.items():
            signal.signal(number, handler)
    if stopped:
        print(f"baton: stopped by {signal.Signals(stopped[0]).name}; start the same command to resume", file=sys.stderr)
        return 128 + stopped[0]
    return _report(failed, world_size, attempt) if failed else 0


def _start(rank: int, world_size: int, attempt: Path, listener: socket.socket) -> subprocess.Popen[bytes]:
    environment = dict(os.environ)
    environment |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(listener.getsockname()[1]),
        "PYTHONUNBUFFERED": "1",
        "BATON_PARENT": str(os.getpid()),
    }
    # more threads than cores fight each other; torch's default is all cores in every rank
    environment.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // world_size)))
    if rank == 0:
        environment["BATON_LISTEN_FD"] = str(listener.fileno())
    with open(_log(attempt, rank), "wb") as log:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "baton.launcher.worker", str(attempt / "config.yaml")],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=(listener.fileno(),) if rank == 0 else (),
            start_new_session=True,  # a Ctrl-C reaches this process alone, which then ends the ranks
        )


def _end(ranks: list[subprocess.Popen[bytes]]) -> None:
    """Ask the remaining ranks to stop, then make them."""
    for p in ranks:
        if p.poll() is None:
            p.terminate()
    _wait(ranks, GRACE_S)
    for p in ranks:
        if p.poll() is None:
            p.kill()
            p.wait()


def _wait(ranks: list[subprocess.Popen[bytes]], seconds: float) -> None:
    """Until all ranks have ended, `seconds` at most."""
    deadline = time.monotonic() + seconds
    for p in ranks:
        with contextlib.suppress(subprocess.TimeoutExpired):
            p.wait(timeout=max(0.0, deadline - time.monotonic()))


def _no_room(attempt: Path) -> str:
    """Why ranks may have said nothing: their logs had no room."""
    return f"; No space left on the disk of {attempt}: make room" if shutil.disk_usage(attempt).free < 1 << 16 else ""


def _report(failed: list[tuple[int, int]], world_size: int, attempt: Path) -> int:
    said = {rank: _sentence(_log(attempt, rank)) for rank in range(world_size)}
    refused = [rank for rank, status in failed if status == 2]
    if refused:
        print(f"baton: {said[refused[0]] or f'rank {refused[0]} refused to run{_no_room(attempt)}'}", file=sys.stderr)
        return 2
    # Ranks that miss another one fail as well, and say whom they miss. A signal came from outside, and is the cause; next to it, a
    # failure that is not for want of a message; else who spoke first.
    rank, status = min(
        failed, key=lambda f: (f[1] >= 0, f[1] >= 0 and (said[f[0]] is not None, _log(attempt, f[0]).stat().st_mtime_ns))
    )
    how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"failed with status {status}"
    sentence = said[rank] or next(filter(None, said.values()), None)
    missed = f" ({sentence.removeprefix(f'rank {rank}: ')})" if sentence else _no_room(attempt)
    print(f"baton: rank {rank} {how}{missed}; see {_log(attempt, rank)}; start the same command to resume", file=sys.stderr)
    return 1


def _sentence(log: Path) -> str | None:
    """What a rank that ended by itself said last."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line.removeprefix("baton: ") for line in reversed(lines) if line.startswith("baton: ")), None)


def _log(attempt: Path, rank: int) -> Path:
    return attempt / f"rank-{rank}.log"


class _Shown:
    """Rank 0's log on this terminal, whole lines at a time, without the one-line errors: those are printed once, at the end,
    whichever rank wrote them."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, encoding="utf-8", errors="replace")  # noqa: SIM115 (open as long as the ranks run)
        self._rest = ""

    def update(self) -> None:
        *lines, self._rest = (self._rest + self._file.read()).split("\n")
        for line in lines:
            if not line.startswith("baton: "):
                sys.stdout.write(line + "\n")
        sys.stdout.flush()
