"""Weights & Biases as a view of metrics.jsonl: `WandbWriter`, and the check that its package is installed.

W&B's history can only be appended to, so a step that is made again after a crash or a rollback would be in it twice. Rows
are therefore sent once a checkpoint holds their step; until then only the run's summary shows the newest row. The file
RUN/wandb/baton.json has the W&B run's id and how many rows of metrics.jsonl it has, so that each start continues it.

All calls of wandb are made by a thread of their own: connecting and uploading take as long as the network does.
"""

import contextlib
import importlib.metadata
import json
import queue
import secrets
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from baton.data_pipeline.files import write_json
from baton.training.errors import RunError
from baton.training.monitoring.config import WandbConfig
from baton.training.monitoring.tensorboard import row_scalars

FINISH_S = 30.0
"""Seconds that the end of a run waits for what is not uploaded yet."""


def check_wandb(config: WandbConfig | None) -> None:
    """Raises RunError if W&B is asked for and not installed."""
    if config is None:
        return
    try:
        importlib.metadata.version("wandb")  # not find_spec: a folder named wandb in the working directory is importable
    except importlib.metadata.PackageNotFoundError:
        raise RunError(
            "training.monitoring.wandb is set, and the package wandb is not installed; pip install wandb, or set it to null"
        ) from None


class WandbWriter:
    """The W&B run of a run directory; only the main rank has one. An error of wandb is printed once and ends the mirroring.

    folder: the run directory. rows: of metrics.jsonl, all of them covered by the checkpoint that this start continues from.
    """

    def __init__(self, folder: Path, config: WandbConfig, config_text: str, rows: Sequence[dict[str, Any]]) -> None:
        self._folder, self._config, self._settings = folder, config, yaml.safe_load(config_text)
        self._state_path = folder / "wandb" / "baton.json"
        self._id, self._queued = secrets.token_hex(8), 0
        with contextlib.suppress(OSError, ValueError, KeyError):  # not there, or damaged: a W&B run of its own
            state = json.loads(self._state_path.read_text(encoding="utf-8"))
            self._id, self._queued = state["id"], state["rows"]
        self._sent = self._queued
        self._pending: list[dict[str, Any]] = []
        self._saved_step = 0
        self._failed = False
        self._queue: queue.SimpleQueue[tuple[list[dict[str, Any]], int] | dict[str, Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="wandb", daemon=True)
        self.restart(rows)
        self._thread.start()

    def restart(self, rows: Sequence[dict[str, Any]]) -> None:
        """The run goes on from a checkpoint. rows: of metrics.jsonl up to it; those that W&B has not got yet are sent."""
        self._queued = min(self._queued, len(rows))
        self._pending = list(rows[self._queued :])
        self.checkpoint_saved(rows[-1]["step"] if rows else 0)

    def add(self, row: dict[str, Any]) -> None:
        """Take the next row of metrics.jsonl."""
        if self._failed:
            return
        self._pending.append(row)
        if row["kind"] == "train":
            self._queue.put(row)
        self._send()

    def checkpoint_saved(self, step: int) -> None:
        """Send the rows up to a step that a checkpoint holds."""
        self._saved_step = step
        self._send()

    def close(self) -> None:
        """Wait for the upload, at most FINISH_S."""
        self._queue.put(None)
        self._thread.join(FINISH_S)
        if self._thread.is_alive() and not self._failed:
            print(f"W&B has not uploaded all; `wandb sync` sends what is in {self._folder / 'wandb'}", flush=True)

    def _send(self) -> None:
        count = sum(row["step"] <= self._saved_step for row in self._pending)
        if count:
            self._queued += count
            self._queue.put((self._pending[:count], self._queued))
            self._pending = self._pending[count:]

    def _work(self) -> None:
        """The thread: connect, send what is queued, and finish."""
        try:
            run = self._connect()
            while (item := self._queue.get()) is not None:
                if isinstance(item, dict):
                    run.summary.update(_values(item))
                    continue
                rows, total = item
                for row in rows:
                    run.log(_values(row))
                self._sent = total
                self._write_state()
            run.finish()
        except Exception as error:  # of any kind: a mirror must not stop the run
            self._failed = True
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            print(f"W&B gets no more rows from this start ({reason}); metrics.jsonl has all of them, the run goes on", flush=True)

    def _connect(self) -> Any:
        import wandb

        self._write_state()
        run = wandb.init(
            project=self._config.project,
            entity=self._config.entity,
            mode=self._config.mode,
            id=self._id,
            resume="allow",
            name=self._settings.get("name"),
            dir=str(self._folder),
            config=self._settings,
            allow_val_change=True,
            settings=wandb.Settings(console="off", silent=True, disable_git=True, init_timeout=60, finish_timeout=FINISH_S),
        )
        # rows of one step are several entries of the history, which W&B would number by itself
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        if self._config.mode == "online":
            print(f"W&B:  {run.url}", flush=True)
        return run

    def _write_state(self) -> None:
        write_json(self._state_path, {"id": self._id, "rows": self._sent})


def _values(row: dict[str, Any]) -> dict[str, Any]:
    """TensorBoard's tags and values of a row, with its step and tokens."""
    sample = {"sample": row["sample"]} if "sample" in row else {}
    return {"step": row["step"], "tokens": row["tokens"], **dict(row_scalars(row)), **sample}
