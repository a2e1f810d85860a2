"""What to do about a step whose loss or gradients are not finite, or far beyond those before it: stop, skip it, or roll back.

The one thing to know: the decision falls before the update, on all ranks at once, so parameters never hold what a bad step made.
What happened is said, and written as a line of events.jsonl, which no restart cuts.
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
    """Compares a step's loss and gradient norm with those of the accepted steps before it. The same on every rank."""

    def __init__(self, config: GuardConfig) -> None:
        self._config = config
        self._losses: deque[float] = deque(maxlen=config.window)
        self._norms: deque[float] = deque(maxlen=config.window)
        self._updates: deque[float] = deque(maxlen=config.window)

    def check_loss(self, loss: float) -> str | None:
        """What is wrong with a loss in nats per label, or None."""
        return self._exceeds("loss", loss, self._losses, self._config.loss_spike)

    def check_grad_norm(self, norm: float) -> str | None:
        """What is wrong with the gradients' norm before the clip, or None."""
        return self._exceeds("gradient norm", norm, self._norms, self._config.norm_spike)

    def check_update_norm(self, norm: float) -> str | None:
        """What is wrong with the norm of the change that an update has made, or None."""
        why = self._exceeds("norm of the update", norm, self._updates, self._config.update_spike)
        if why is None:
            self._updates.append(norm)
        return why

    def record(self, loss: float, norm: float) -> None:
        """A step that was made."""
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
    """RUN/events.jsonl: a line for everything that interrupted training and for every change of a setting of what is learned,
    appended and synced; only the main rank writes."""

    def __init__(self, folder: Path, enabled: bool) -> None:
        self._path, self._enabled = folder / EVENTS, enabled

    def write(self, kind: str, step: int, **about: Any) -> None:
        """kind: skip, rollback or stop, with the step whose update was not made, counted from 1; or change, with the number of
        steps done before it."""
        if not self._enabled:
            return
        line = json.dumps({"kind": kind, "step": step, "time": time.time(), **about})
        try:
            append_line(self._path, line, sync=True)
        except OSError as error:
            print(f"events.jsonl could not be written ({error}): {line}", flush=True)


def read_events(folder: Path) -> list[dict[str, Any]]:
    """Events of a run; a line that a kill or a full disk cut short is left out."""
    found = []
    path = folder / EVENTS
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        with suppress(ValueError):
            found.append(json.loads(line))
    return found
