"""When to save: at a fixed interval, or at the interval that minimizes the time lost to saves and failures.

With failures at a constant rate, that is sqrt(2 * cost of a save * mean time between failures). Young, "A first order
approximation to the optimum checkpoint interval", 1974; Daly, 2006.
"""

import math
import time

import torch
import torch.distributed as dist

from baton.parallel.mesh import Mesh
from baton.training.checkpoint.config import CheckpointConfig

FIRST_SAVE_STEPS = 10
"""Steps to the first save where the interval is to be found: enough to know a step's time."""


def optimal_interval_s(cost_s: float, failures_per_day: float) -> float:
    """Seconds between saves. cost_s: seconds for which a save stops training. failures_per_day: of the whole run."""
    return math.sqrt(2 * cost_s * 86400 / failures_per_day)


class CheckpointSchedule:
    """After which steps to save. steps: of the whole run, whose last step is always saved. start: steps done."""

    def __init__(self, config: CheckpointConfig, steps: int, mesh: Mesh, start: int) -> None:
        self._config, self._steps, self._mesh = config, steps, mesh
        self._next = start + FIRST_SAVE_STEPS
        self._since, self._from, self._stalled = time.perf_counter(), start, 0.0

    def due(self, step: int, *, stop_requested: bool = False) -> bool:
        """Whether to save after step `step`, counted from 1. stop_requested: this start ends with it. The same on every rank."""
        if stop_requested or step == self._steps:
            return True
        return step == self._next if self._config.every == "auto" else step % self._config.every == 0

    def record_save(self, step: int, stall_s: float) -> int | None:
        """Report on every rank for how long a save stopped training; returns the next step to save after, if `every` is auto."""
        if self._config.every != "auto":
            return None
        self._stalled += stall_s
        running = time.perf_counter() - self._since - self._stalled
        step_s = max(1e-6, running / max(1, step - self._from))
        failures = self._config.failures_per_rank_day * self._mesh.world_size
        steps = max(1, round(optimal_interval_s(stall_s, failures) / step_s))
        chosen = torch.tensor(steps, device=self._mesh.device)
        dist.broadcast(chosen, src=0)  # ranks measure different times
        self._next = step + int(chosen)
        return self._next
