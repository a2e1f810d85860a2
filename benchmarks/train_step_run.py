"""A run that is watched from outside, for train_step.py: what it has recorded, how long it took to start, and its end."""

import contextlib
import subprocess
import time
from typing import Any

import psutil

from baton.launcher.config import RunConfig
from baton.training.monitoring import time_ledger
from baton.training.monitoring.metrics import read_metrics

LONGEST_END_S = 60.0


def steps_of(config: RunConfig) -> list[dict[str, Any]]:
    """What the run has recorded of its steps so far."""
    return [row for row in read_metrics(config.folder / "metrics.jsonl") if row["kind"] == "train"]


def start_of(config: RunConfig, began: float, first: float) -> dict[str, float]:
    """Seconds from the command, at `began`, to the end of the first step, at `first`: until the ranks began, and then as far as the
    run's ledger has said by now."""
    rows = [row for row in time_ledger.read_rows(config.folder) if row["kind"] == "spans"]
    found = {"launcher": rows[0]["since"] - began} if rows else {}
    for part in ("start-up", "compile"):
        seconds = sum(row["seconds"].get(part, 0.0) for row in rows)
        found |= {part: seconds} if seconds else {}
    return found | {"first step": first - began - sum(found.values())}


def end(process: "subprocess.Popen[bytes]") -> None:
    """The launcher and its ranks, and wait until the GPU's memory is free again."""
    ranks = []
    with contextlib.suppress(psutil.NoSuchProcess):
        ranks = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    for rank in ranks:
        with contextlib.suppress(psutil.NoSuchProcess):
            rank.kill()
    process.wait()
    deadline = time.monotonic() + LONGEST_END_S
    while any(_holds_memory(rank) for rank in ranks) and time.monotonic() < deadline:
        time.sleep(0.05)


def _holds_memory(process: psutil.Process) -> bool:
    """Not if it is gone, nor if it has ended and its parent, which was killed before it, has not heard."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
