"""Detects steps whose loss, gradient norm or update norm is far beyond those before; and the run's event log, events.jsonl.

Losses and gradients are judged before the update, on all ranks at once, so parameters never hold the result of an anomalous
step. What then happens (stop, skip, roll back) is `anomaly_recovery`.
"""

import json
import statistics
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from baton.data_pipeline.file_io import append_line
from baton.training.config import GuardConfig

EVENTS = "events.jsonl"


class AnomalyDetector:
    """Compares a step's norms with the medians of the accepted steps before it. The same on every rank."""

    def __init__(self, config: GuardConfig) -> None:
        self._config = config
        self._losses: deque[float] = deque(maxlen=config.window)
        self._norms: deque[float] = deque(maxlen=config.window)
        self._updates: deque[float] = deque(maxlen=config.window)

    def check_loss(self, loss: float) -> str | None:
        """What is wrong with a loss (nats per label), or None."""
        return self._exceeds("loss", loss, self._losses, self._config.loss_spike)

    def check_grad_norm(self, norm: float) -> str | None:
        """What is wrong with the gradient norm before clipping, or None."""
        return self._exceeds("gradient norm", norm, self._norms, self._config.norm_spike)

    def check_update_norm(self, norm: float) -> str | None:
        """What is wrong with the norm of the parameters' change, or None."""
        why = self._exceeds("norm of the update", norm, self._updates, self._config.update_spike)
        if why is None:
            self._updates.append(norm)
        return why

    def record(self, loss: float, norm: float) -> None:
        """Record an accepted step."""
        self._losses.append(loss)
        self._norms.append(norm)

    def _exceeds(self, what: str, value: float, before: Sequence[float], factor: float) -> str | None:
        if not factor or len(before) < self._config.window // 2:
            return None
        middle = statistics.median(before)
        if value <= factor * middle:
            return None
        return f"the {what} {value:.4g} is more than {factor:g} times {middle:.4g}, the median of the last {len(before)} steps"


class EventLog:
    """RUN/events.jsonl: a line for everything that interrupted training, and for every changed setting.

    Lines are appended and synced; no restart cuts them off. enabled: on the main rank only.
    """

    def __init__(self, folder: Path, enabled: bool) -> None:
        self._path, self._enabled = folder / EVENTS, enabled

    def write(self, kind: str, step: int, **about: Any) -> None:
        """Append an event.

        kind: skip, rollback or stop, with the step (counted from 1) that was not made; or change, with the number of steps
        made before it.
        """
        if not self._enabled:
            return
        line = json.dumps({"kind": kind, "step": step, "time": time.time(), **about})
        try:
            append_line(self._path, line, sync=True)
        except OSError as error:
            print(f"events.jsonl could not be written ({error}): {line}", flush=True)


def read_events(folder: Path) -> list[dict[str, Any]]:
    """Events of a run; lines that were cut short are left out."""
    found = []
    path = folder / EVENTS
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        with suppress(ValueError):
            found.append(json.loads(line))
    return found
