"""`baton logs`: prints a rank's log over all attempts, and follows it. Logs are never truncated, so no line is printed twice."""

import sys
import time
from pathlib import Path

from baton.launcher.errors import ConfigError
from baton.launcher.processes import log_of
from baton.launcher.run_directory import last_attempt
from baton.training.monitoring import time_ledger

LOOK_S = 0.5


def show(run: Path, rank: int, attempt: int | None, *, follow: bool) -> None:
    """Prints a rank's log. attempt: one attempt; None: all attempts, each with a heading. follow: wait for new lines until the run
    is over. Raises ConfigError if there is no such attempt or rank."""
    if not last_attempt(run):
        raise ConfigError(f"{run}: no attempt has begun; is this a run directory?")
    numbers = iter([attempt] if attempt is not None else range(1, 1 << 30))
    for number in numbers:
        folder = run / "attempts" / f"{number:04d}"
        while not folder.exists():
            if not follow or attempt is not None or _is_over(run):
                if attempt is not None:
                    raise ConfigError(f"{folder}: no such attempt; the last one is {last_attempt(run)}")
                return
            time.sleep(LOOK_S)
        if attempt is None:
            print(f"== attempt {number}", flush=True)
        _print(run, log_of(folder, rank), number, follow=follow)


def _print(run: Path, log: Path, number: int, *, follow: bool) -> None:
    """Prints the log of one attempt."""
    while follow and not log.exists() and not _has_ended(run, number):
        time.sleep(LOOK_S)
    if not log.exists():
        known = sorted(int(p.stem.removeprefix("rank-")) for p in log.parent.glob("rank-*.log"))
        if known and int(log.stem.removeprefix("rank-")) > known[-1]:
            raise ConfigError(f"{log}: no such rank; attempt {number} had {len(known)}")
        return
    with log.open(encoding="utf-8", errors="replace") as f:
        while True:
            ended = not follow or _has_ended(run, number)
            for line in f:
                sys.stdout.write(line)
            sys.stdout.flush()
            if ended:
                return
            time.sleep(LOOK_S)


def _has_ended(run: Path, number: int) -> bool:
    return last_attempt(run) > number or any(
        row["kind"] == "end" and row["attempt"] == number for row in time_ledger.read_rows(run)
    )


def _is_over(run: Path) -> bool:
    """Whether the run is not restarted automatically."""
    rows = [row["kind"] for row in time_ledger.read_rows(run)]
    return not rows or rows[-1] in ("stopped", "end")
