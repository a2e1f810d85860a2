"""Goodput in TensorBoard: the shares of the run's time, and its layout, written at every checkpoint."""

import contextlib
from pathlib import Path

from baton.training.errors import RunError
from baton.training.monitoring import time_ledger
from baton.training.monitoring.goodput import compute_goodput
from baton.training.monitoring.tensorboard import open_writer


class GoodputTensorBoard:
    """Writes to RUN/tensorboard/ledger. folder: the run directory. step: steps done; later events of an earlier attempt are
    dropped."""

    def __init__(self, folder: Path, step: int) -> None:
        self._folder = folder
        self._writer = open_writer(folder / "tensorboard" / "ledger", step)

    def show(self, step: int) -> None:
        """Write the layout and the shares of all time since the first submission. Skipped if the disk is full."""
        with contextlib.suppress(OSError, RunError):
            found = compute_goodput(self._folder)
            self._writer.add_scalar("goodput/of_all_time", found.goodput, step)
            self._writer.add_scalar("goodput/of_time_on_nodes", found.goodput_in_job, step)
            for part, seconds in found.seconds.items():
                self._writer.add_scalar(f"ledger_share/{part}", seconds / found.wall, step)
            layout = [row["layout"] for row in time_ledger.read_rows(self._folder) if row["kind"] == "attempt"][-1]
            for name, size in layout.items():
                self._writer.add_scalar(f"layout/{name}", size, step)
            self._writer.flush()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._writer.close()
