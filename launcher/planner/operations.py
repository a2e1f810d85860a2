"""Counts of what a rank computes, reads and writes."""

from dataclasses import dataclass

from baton.models.stages import VECTOR_COST


@dataclass(frozen=True)
class Operations:
    """Work of one rank per optimizer step: FLOPs on matrix units and on other units, bytes read and written by the passes and by
    the update."""

    matrix: float
    vector: float
    memory: float
    update: float = 0.0

    @property
    def cost(self) -> float:
        """Total work in equivalent FLOPs on matrix units, by which stages are balanced."""
        return self.matrix + VECTOR_COST * self.vector
