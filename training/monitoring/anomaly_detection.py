"""Detects steps whose loss, gradient norm or update norm is far beyond those before.

Losses and gradients are judged before the update, on all ranks at once, so parameters never hold the result of an anomalous
step. What then happens (stop, skip, roll back) is `anomaly_recovery`.
"""

import statistics
from collections import deque
from collections.abc import Mapping, Sequence

from baton.training.monitoring.config import GuardConfig


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

    def recent(self) -> dict[str, list[float]]:
        """What the medians are of, the oldest first; nothing where no spike is an anomaly. A checkpoint has it, so that a run which
        goes on from there judges as one that was never interrupted."""
        factors = {"loss": self._config.loss_spike, "norm": self._config.norm_spike, "update": self._config.update_spike}
        return {name: list(values) for name, values in self._values().items() if factors[name]}

    def restore(self, recent: Mapping[str, Sequence[float]]) -> None:
        """Go back to what `recent` returned; nothing: to the beginning."""
        for name, values in self._values().items():
            values.clear()
            values.extend(recent.get(name, ()))

    def _values(self) -> dict[str, deque[float]]:
        return {"loss": self._losses, "norm": self._norms, "update": self._updates}

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
