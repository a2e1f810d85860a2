"""Detects hanging ranks from heartbeats and process states of this machine's ranks, and determines which rank the others wait for.

`baton train` and the agents of SLURM jobs both use this module. A heartbeat's age is measured with the watching process's monotonic
clock, from the moment at which a change was last seen, without periods in which the watcher itself did not run (for example while
the machine was suspended). Clocks of other nodes and modification times of files are not used.
"""

import contextlib
import shutil
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from baton.launcher.ranks import Process
from baton.training.monitoring.heartbeat import HEARTBEAT_DIR, Beat, create_file, read_beat

LOOK_S = 0.25
LAST_WORDS_S = 3.0
"""Seconds for ranks to write their stack traces."""

_GAP_S = 2.0
"""Maximum time between two looks that counts, in seconds. After a longer gap the watcher itself was not running."""

_ASIDE = "stopped by a signal (SIGSTOP, or a debugger): it can say nothing\n"


@dataclass
class Seen:
    """State of a rank: seconds without a heartbeat, stopped by a signal, and continuously in uninterruptible sleep."""

    beat: Beat | None = None
    silent_s: float = 0.0
    stopped_s: float = 0.0
    blocked_s: float = 0.0

    @property
    def slow(self) -> bool:
        return self.beat is None or self.beat.slow

    @property
    def blocked(self) -> bool:
        """Whether it has been in uninterruptible sleep for about as long as it has been silent."""
        return self.blocked_s > 0 and self.silent_s - self.blocked_s < 2 * _GAP_S

    @property
    def waits(self) -> bool:
        return self.beat is not None and bool(self.beat.waiting)


class Watch:
    """Watches this machine's ranks.

    limit_s: maximum seconds without a heartbeat; startup_timeout_s: the same in phases that may compile. A rank is late if it
    exceeds its limit, or if it has been stopped or blocked in the kernel for limit_s in any phase.
    """

    def __init__(self, ranks: Sequence[int], limit_s: float, startup_timeout_s: float) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="baton-beats-"))
        self._limit_s, self._startup_s = limit_s, max(limit_s, startup_timeout_s)
        self._last: float | None = None
        self._count, self.seen = len(ranks), {rank: Seen() for rank in ranks}
        try:
            for rank in ranks:
                create_file(self.folder, rank)
        except OSError:
            self.close()
            raise

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables for the ranks' heartbeats."""
        return {HEARTBEAT_DIR: str(self.folder)}

    def look(self, now: float, running: Mapping[int, int]) -> None:
        """Updates the states of the running ranks, {rank: process id}. now: time.monotonic()."""
        passed = 0.0 if self._last is None else min(now - self._last, _GAP_S)
        self._last = now
        self.seen = {rank: seen for rank, seen in self.seen.items() if rank in running}
        for rank, seen in self.seen.items():
            beat = read_beat(self.folder, rank)
            moved = beat is not None and (seen.beat is None or beat.pulse != seen.beat.pulse)
            seen.beat = beat or seen.beat
            seen.silent_s = 0.0 if moved else seen.silent_s + passed
            seen.stopped_s = seen.stopped_s + passed if is_stopped(running[rank]) else 0.0
            # a process has many threads: it is not looked at while it gives signs
            blocked = seen.silent_s >= _GAP_S and is_blocked(running[rank])
            seen.blocked_s = seen.blocked_s + passed if blocked else 0.0

    def late(self) -> dict[int, float]:
        """Late ranks, with the seconds since their last heartbeat."""
        return {rank: seen.silent_s for rank, seen in self.seen.items() if self._is_late(seen)}

    def _is_late(self, seen: Seen) -> bool:
        halted = max(seen.stopped_s, seen.blocked_s)
        return seen.silent_s > (self._startup_s if seen.slow else self._limit_s) or min(halted, seen.silent_s) > self._limit_s

    def hung(self) -> dict[int, float]:
        """Late ranks that other ranks wait for, with the seconds since their last heartbeat. For runs on one machine.

        A late rank that no other rank waits for is tolerated, because it may be in a long computation.
        """
        late, seen = self.late(), self.seen
        if self._count < 2:
            return {}
        if len(seen) < self._count:  # the others have ended, and it is waited for
            return late
        halted = {rank for rank in late if max(seen[rank].stopped_s, seen[rank].blocked_s) > self._limit_s}
        if all(one.stopped_s > 0 for one in seen.values()):  # on purpose, it seems
            return {}
        if halted:
            return {rank: late[rank] for rank in halted}
        held = {rank for rank in late if not seen[rank].waits}
        waiting = {rank for rank in seen if seen[rank].waits}
        if held and waiting:
            return {rank: late[rank] for rank in held}
        # messages that miss one another; or GPUs, where a host that waits need not know for what
        on_gpu = all(one.beat is not None and one.beat.gpu for one in seen.values())
        return late if len(late) == len(seen) and (waiting or on_gpu) else {}

    def culprit(self, late: Mapping[int, float]) -> "Culprit | None":
        """The late rank that the others wait for."""
        involved = {rank: beat for rank, beat in self.beats().items() if rank in late or beat.waiting}
        stopped = [rank for rank in late if self.seen[rank].stopped_s > 0]
        return Culprit.among(involved, stopped, [rank for rank in late if self.seen[rank].blocked])

    def beats(self) -> dict[int, Beat]:
        """The last heartbeats."""
        return {rank: seen.beat for rank, seen in self.seen.items() if seen.beat is not None}

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


@dataclass(frozen=True)
class Culprit:
    """The rank that the others wait for. what: the evidence."""

    rank: int
    what: str

    @classmethod
    def among(cls, beats: Mapping[int, Beat], stopped: Sequence[int], blocked: Sequence[int] = ()) -> "Culprit | None":
        """A rank that is stopped by a signal or blocked in the kernel; else the only rank that does not wait, or that is behind all
        others; None: unknown."""
        if stopped:
            return cls(stopped[0], "stopped by a signal")
        if blocked:
            return cls(blocked[0], "blocked inside the kernel, by a disk or a driver")
        if len(beats) < 2:
            return None
        busy = [rank for rank, beat in beats.items() if not beat.waiting]
        if len(busy) == 1:
            return cls(busy[0], f"{_place(beats[busy[0]])}, waiting for no rank")
        # within a step all ranks of a layout without stages pass the same points, so the one with fewest has stayed behind
        (*least, rank), (*next_least, _) = sorted((beat.step, beat.count, rank) for rank, beat in beats.items())[:2]
        if least == next_least:
            return None
        return cls(rank, f"{_place(beats[rank])}, behind all others")


def _place(beat: Beat) -> str:
    return f"in step {beat.step}, {beat.doing}" if beat.step else beat.doing


def account(culprit: Culprit | None, late: Mapping[int, float], beats: Mapping[int, Beat], where: str = "") -> str:
    """A sentence that says which rank gave no sign of life, for how long, its last operation, and which ranks wait for it in
    which."""
    who = f"rank {culprit.rank} ({culprit.what}){where}" if culprit is not None else f"ranks {', '.join(map(str, sorted(late)))}"
    parts = [f"{who} gave no sign of life for {max(late.values()):.0f} s"]
    if culprit is not None and culprit.rank in beats and _place(beats[culprit.rank]) not in culprit.what:
        parts.append(f"it was {_place(beats[culprit.rank])}")
    waits: dict[str, list[int]] = {}
    for rank, beat in sorted(beats.items()):
        if beat.waiting and (culprit is None or rank != culprit.rank):
            waits.setdefault(f"({_place(beat)}) for {beat.waiting}", []).append(rank)
    for what, ranks in list(waits.items())[:2]:
        parts.append(f"{_named(ranks)} wait{'s' if len(ranks) == 1 else ''} {what}")
    if not waits and culprit is not None:
        others = [rank for rank in sorted(beats) if rank != culprit.rank][:2]
        parts += [f"rank {rank} is {_place(beats[rank])}" for rank in others]
    return "; ".join(parts)


def _named(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:4]))
    return f"ranks {shown}" + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")


def remedy(culprit: Culprit | None, stacks: Path) -> str:
    """Advice for the user."""
    if culprit is not None and culprit.what == "stopped by a signal":
        return "find out what stopped it (SIGSTOP, a debugger, a scheduler)"
    if culprit is not None and culprit.what.startswith("blocked"):
        return "look at its disk and at the kernel's log (dmesg)"
    return f"read the stacks in {stacks}, and the kernel's log (dmesg) if a GPU hangs"


def ask_stacks(ranks: Mapping[int, Process], folder: Path) -> None:
    """Makes each rank write the stack traces of its threads to folder/rank-N, and waits a few seconds for them. For a stopped rank
    the file says so."""
    asked = []
    for rank, process in ranks.items():
        if process.poll() is not None:
            continue
        if is_stopped(process.pid):
            with contextlib.suppress(OSError):
                (folder / f"rank-{rank}").write_text(_ASIDE)
            continue
        process.send_signal(signal.SIGUSR2)
        asked.append(folder / f"rank-{rank}")
    deadline, sizes = time.monotonic() + LAST_WORDS_S, None
    while time.monotonic() < deadline:
        before, sizes = sizes, [path.stat().st_size if path.exists() else 0 for path in asked]
        if all(sizes) and sizes == before:
            return
        time.sleep(LOOK_S)


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal or a debugger."""
    return _state(Path(f"/proc/{pid}/stat")) in ("T", "t")


def is_blocked(pid: int) -> bool:
    """Whether a thread of a process is in the kernel's uninterruptible sleep, as one that waits for a disk that does not answer."""
    try:
        return any(_state(thread / "stat") == "D" for thread in Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return False


def _state(stat: Path) -> str:
    try:
        return stat.read_text(encoding="utf-8", errors="replace").rpartition(") ")[2][:1]
    except OSError:
        return ""
