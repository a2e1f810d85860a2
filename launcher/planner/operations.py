"""Counts of what a rank computes, reads and writes."""

from dataclasses import dataclass

from baton.models.stages import ATTENTION_COST, VECTOR_COST


@dataclass(frozen=True)
class Operations:
    """Work of one rank per optimizer step: FLOPs on matrix units, those of softmax attention apart, and on other units, bytes read
    and written by the passes and by the update."""

    matrix: float
    attention: float
    vector: float
    memory: float
    update: float = 0.0

    @property
    def cost(self) -> float:
        """Total work in equivalent FLOPs on matrix units, by which stages are balanced."""
        return self.matrix + ATTENTION_COST * self.attention + VECTOR_COST * self.vector
