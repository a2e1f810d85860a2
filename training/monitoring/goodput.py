"""`baton goodput`: where every second of a run went, computed from its time ledger. Torch-free.

The time from the first submission to the last row is divided at the ledger's rows, and each interval belongs to one part,
so the parts add up to the whole exactly. Which steps were lost is known only from later attempts; their time is moved to
"lost".
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.training.errors import RunError
from baton.training.monitoring import time_ledger

PARTS = {
    "compute": "steps that were kept: forward, backward, optimizer",
    "exchange": "of those steps: waiting for other ranks",
    "data": "waiting for data",
    "save": "saving checkpoints",
    "evaluation": "evaluations",
    "check": "comparing replicas",
    "other": "records, and what is between",
    "compile": "checking and compiling kernels",
    "start-up": "processes, imports, meeting, reading the checkpoint",
    "preflight": "checking nodes",
    "lost": "worked in vain: steps that a later attempt did again",
    "failing": "from the last sign of work to the attempt's end: a hang, or an end that had to be noticed",
    "queue": "waiting for nodes",
    "idle": "nothing ran, and nothing waited in a queue",
}
"""What time is spent on, in the order of the table."""

PRODUCTIVE = ("compute", "exchange")
"""What counts as good."""

_OF_STEPS = ("compute", "exchange", "data", "save", "evaluation", "check", "other")


@dataclass(frozen=True)
class Goodput:
    """Time of a run.

    Attributes:
        seconds: of each part, over all attempts.
        attempts: the same for each attempt, by number.
        wall: seconds from the first submission to the end.
        failures: attempts that failed.
        intervals: (from, to, part) in order, for the plot.
    """

    folder: Path
    seconds: dict[str, float]
    attempts: dict[int, dict[str, float]]
    wall: float
    failures: int
    intervals: tuple[tuple[float, float, str], ...]

    @property
    def goodput(self) -> float:
        """Share of all time since the first submission that went into steps that were kept."""
        return sum(self.seconds[part] for part in PRODUCTIVE) / self.wall if self.wall else 0.0

    @property
    def goodput_in_job(self) -> float:
        """The same share of the time for which nodes were held."""
        held = self.wall - self.seconds["queue"] - self.seconds["idle"]
        return sum(self.seconds[part] for part in PRODUCTIVE) / held if held > 0 else 0.0

    def to_json(self) -> dict[str, Any]:
        return {
            "wall_s": self.wall,
            "seconds": self.seconds,
            "goodput": self.goodput,
            "goodput_in_job": self.goodput_in_job,
            "failures": self.failures,
            "attempts": self.attempts,
        }

    def lines(self) -> Iterator[str]:
        yield f"{self.folder}: {self.wall:,.1f} s in {len(self.attempts)} attempts, {self.failures} of which failed"
        for part, text in PARTS.items():
            if self.seconds[part]:
                yield f"  {part:<12}{self.seconds[part]:>14,.1f} s{self.seconds[part] / self.wall:>8.1%}  {text}"
        yield f"  {'sum':<12}{sum(self.seconds.values()):>14,.1f} s{sum(self.seconds.values()) / self.wall:>8.1%}"
        yield f"goodput {self.goodput:.1%} of all time, {self.goodput_in_job:.1%} of the time that nodes were held"


def compute_goodput(folder: Path, now: float | None = None) -> Goodput:
    """The goodput of a run. Raises RunError if it has no ledger.

    now: until when a running attempt is counted, on the clock of the last row; None: until the present.
    """
    rows, at_present = align_clocks(time_ledger.read_rows(folder))
    if not any(row["kind"] == "attempt" for row in rows):
        raise RunError(f"{folder / time_ledger.NAME}: no attempt is recorded; is this a run directory?")
    intervals = list(_intervals(rows, at_present if now is None else now))
    kept = _kept(rows)
    seconds: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    attempts: dict[int, dict[str, float]] = {}
    drawn: list[tuple[float, float, str]] = []
    for interval in intervals:
        lost = interval.step is not None and interval.step > kept.get(interval.attempt, interval.step)
        for part, spent in interval.seconds.items():
            known = part if part in PARTS else "other"
            counted = "lost" if lost and part in _OF_STEPS else known
            seconds[counted] += spent
            of_attempt = attempts.setdefault(interval.attempt, {})
            of_attempt[counted] = of_attempt.get(counted, 0.0) + spent
            drawn.append((interval.since, interval.until, counted))
    wall = intervals[-1].until - intervals[0].since
    failures = sum(row["kind"] == "end" and row["status"] not in (0, 75, 130, 143) for row in rows)
    attempts.pop(0, None)
    return Goodput(folder, seconds, attempts, wall, failures, tuple(drawn))


_BEGINS = ("submitted", "attempt")
"""Kinds of rows before which the run may have been on another machine, or not running."""


def align_clocks(rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], float]:
    """The rows with times on one clock that never goes back, and the present moment on it.

    rows: in the order of the ledger, which is the order of events. Between rows of one machine its steady clock decides. A
    machine that appears for the first time is trusted as far as that order allows: if its clock is behind, its first row
    follows the previous row at once; if its clock was ahead, that shows when a known machine appears again, and the
    newcomer's rows are moved back.
    """
    placed: list[dict[str, Any]] = []
    offsets: dict[str, float] = {}  # of each machine: what to add to its steady clock, of rows without one to their time
    first, newcomer = 0, ""  # the first row of the machine that was seen last for the first time, and which that is
    at, latest = rows[0]["time"] if rows else 0.0, ""  # the time of the last row, and the machine that it is of
    for row in rows:
        machine = row.get("boot", "")
        own = row["up"] if machine else row["time"]
        if machine not in offsets:
            offsets[machine] = max(at, row["time"]) - own
            first, newcomer = len(placed), machine
        elif row["kind"] in _BEGINS and not machine:
            offsets[machine] = max(0.0, at - own)
        elif row["kind"] in _BEGINS and machine != latest and own + offsets[machine] < at:
            if machine != newcomer and first > 0:
                back = min(at - own - offsets[machine], placed[first]["time"] - placed[first - 1]["time"])
                for late in placed[first:]:
                    late["time"] -= back
                offsets[newcomer] -= back
                at -= back
            offsets[machine] = max(offsets[machine], at - own)
        if (found := round(own + offsets[machine], 4)) >= at:  # beyond that digits are of the arithmetic
            at, latest = found, machine
        placed.append({**row, "time": at})
    for old, new in zip(rows, placed, strict=True):
        if old["kind"] == "spans":
            new["since"] = new["time"] - (old["time"] - old["since"])
    here = time_ledger.boot_id()
    return placed, max(at, time_ledger.steady_time() + offsets[here] if here in offsets else time.time())


@dataclass(frozen=True)
class _Interval:
    """An interval of time and what its seconds went into. step: done at its end; None: not training. attempt: 0 between
    attempts."""

    since: float
    until: float
    seconds: dict[str, float]
    attempt: int = 0
    step: int | None = None


def _intervals(rows: list[dict[str, Any]], now: float) -> Iterator[_Interval]:
    """The whole time as intervals without gaps or overlaps."""
    at, attempt, waiting, working = rows[0]["time"], 0, False, False
    for row in rows:
        kind, until = row["kind"], max(at, row["time"])
        if kind == "spans":
            since = min(max(at, row["since"]), until)
            if row["attempt"] != attempt or until <= at:
                continue  # of an attempt whose end is already recorded
            if since > at:
                yield _Interval(at, since, {"start-up": since - at}, attempt)
            own = sum(row["seconds"].values())
            scale = (until - since) / own if own else 0.0
            yield _Interval(since, until, {part: s * scale for part, s in row["seconds"].items()}, attempt, row["step"])
            at, working = until, True
            continue
        if kind == "preflight":
            yield _Interval(at, until, {"preflight": until - at}, attempt)
        elif kind == "start" and row["attempt"] == attempt:
            yield _Interval(at, until, {"start-up": until - at}, attempt)
        elif kind == "end":
            part = ("other" if row["status"] in (0, 75) else "failing") if working else "start-up"
            yield _Interval(at, until, {part: until - at}, attempt)
            attempt, waiting = 0, False
        elif kind in ("attempt", "submitted", "stopped"):
            part = "failing" if attempt else "queue" if waiting else "idle"
            yield _Interval(at, until, {part: until - at}, attempt)
            if kind == "attempt":
                attempt, working, waiting = row["attempt"], False, False
            elif not attempt:
                waiting = kind == "submitted"
        else:
            continue
        at = until
    stopped = any(row["kind"] == "stopped" for row in rows[-1:])
    if not stopped and now > at and (attempt or waiting):
        yield _Interval(at, now, {("other" if working else "start-up") if attempt else "queue": now - at}, attempt)


def _kept(rows: list[dict[str, Any]]) -> dict[int, int]:
    """For each attempt, the last of its steps that no later attempt repeated."""
    kept: dict[int, int] = {}
    resumed = [(row["attempt"], row["step"]) for row in rows if row["kind"] == "start"]
    for number, _ in resumed:
        later = [step for other, step in resumed if other > number]
        if later:
            kept[number] = min(later)
    return kept


def plot_goodput(found: Goodput, out: Path) -> Path:
    """Plot the run's time from left to right, with a row and a share for each part. Returns `out`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    from baton.training.monitoring.long_context_plots import save_figure

    shown = [part for part in PARTS if found.seconds[part] > 0]
    colours = dict(zip(PARTS, pyplot.get_cmap("tab20").colors, strict=False))
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 0.4 * len(shown) + 1.6), width_ratios=(3, 1), sharey=True)
    begin = found.intervals[0][0]
    for row, part in enumerate(shown):
        spans = [(since - begin, until - since) for since, until, of in found.intervals if of == part]
        left.broken_barh(spans, (row - 0.4, 0.8), color=colours[part])
        share = found.seconds[part] / found.wall
        right.barh(row, 100 * share, color=colours[part])
        right.annotate(f" {share:.1%}", (100 * share, row), va="center")
    left.set_yticks(range(len(shown)), shown)
    left.invert_yaxis()
    left.set_xlabel("seconds since the beginning")
    right.set_xlabel("% of all time")
    right.margins(x=0.25)
    figure.suptitle(
        f"{found.folder.name}: goodput {found.goodput:.1%} of all time, {found.goodput_in_job:.1%} of the time on nodes"
    )
    figure.tight_layout()
    try:
        return save_figure(figure, out)
    finally:
        pyplot.close(figure)
