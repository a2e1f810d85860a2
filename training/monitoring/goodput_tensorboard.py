"""The ledger in TensorBoard, beside the run's curves: where the time went so far, and on which layout, at every save."""

import contextlib
from pathlib import Path

from baton.training.errors import RunError
from baton.training.monitoring import time_ledger
from baton.training.monitoring.goodput import compute_goodput
from baton.training.monitoring.tensorboard import open_writer


class GoodputTensorBoard:
    """folder: the run directory. step: done before; what an earlier attempt showed after it is dropped."""

    def __init__(self, folder: Path, step: int) -> None:
        self._folder = folder
        self._writer = open_writer(folder / "tensorboard" / "ledger", step)

    def show(self, step: int) -> None:
        """The layout, and shares of all time since the first submission. A disk that is full costs the picture, not the run."""
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
