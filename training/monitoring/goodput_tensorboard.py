"""Goodput in TensorBoard: the shares of the run's time, and its layout, written at every checkpoint."""

import contextlib
from pathlib import Path

from baton.training.errors import RunError
from baton.training.monitoring import time_ledger
from baton.training.monitoring.goodput import compute_goodput
from baton.training.monitoring.metrics import MetricsLogger


def show_goodput(folder: Path, metrics: MetricsLogger, step: int) -> None:
    """Show the layout and the shares of all time since the first submission. folder: the run directory. Skipped if the
    ledger cannot be read."""
    with contextlib.suppress(OSError, RunError):
        found = compute_goodput(folder)
        layout = [row["layout"] for row in time_ledger.read_rows(folder) if row["kind"] == "attempt"][-1]
        metrics.show_scalars(
            step,
            {
                "goodput/of_all_time": found.goodput,
                "goodput/of_time_on_nodes": found.goodput_in_job,
                **{f"ledger_share/{part}": seconds / found.wall for part, seconds in found.seconds.items()},
                **{f"layout/{name}": size for name, size in layout.items()},
            },
        )
