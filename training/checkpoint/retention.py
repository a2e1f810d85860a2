"""Which checkpoints of a run are kept: the latest, multiples of a step number, and the best by validation loss."""

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Retention:
    """last: number of latest checkpoints kept. every: those whose step is a multiple are kept forever; 0: none. best: number
    of checkpoints with the lowest validation loss kept."""

    last: int
    every: int = 0
    best: int = 0

    def kept(self, checkpoints: Mapping[int, float | None]) -> set[int]:
        """Steps of the checkpoints to keep. checkpoints: step to validation loss; None: not measured. One that is not finite
        is not among the best."""
        kept = set(sorted(checkpoints)[-self.last :])
        kept |= {step for step in checkpoints if self.every and step % self.every == 0}
        measured = sorted((loss, -step) for step, loss in checkpoints.items() if loss is not None and math.isfinite(loss))
        return kept | {-step for _, step in measured[: self.best]}
