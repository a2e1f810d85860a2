"""Which checkpoints of a run stay: the last ones, every so many steps one for ever, and the best by validation."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Retention:
    """last: how many of the newest stay. every: those whose step is a multiple stay for ever; 0: none does. best: how many of those
    with the lowest validation loss stay."""

    last: int
    every: int = 0
    best: int = 0

    def kept(self, checkpoints: Mapping[int, float | None]) -> set[int]:
        """Of checkpoints by step, with their validation loss (None: not measured), the steps of those that stay."""
        kept = set(sorted(checkpoints)[-self.last :])
        kept |= {step for step in checkpoints if self.every and step % self.every == 0}
        measured = sorted((loss, -step) for step, loss in checkpoints.items() if loss is not None)
        return kept | {-step for _, step in measured[: self.best]}
