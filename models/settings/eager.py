"""Recurrences that a GPU computes with PyTorch's operators because no kernel has their settings: why, and what that takes.

Torch-free, for `baton plan` and the first lines of `baton train`. The recurrence says the reason too (`Recurrence.no_kernel`);
tests compare them and count the operators.
"""

from dataclasses import dataclass

LAUNCH_SECONDS = 8e-6
"""From one operator's launch to the next, which a host's Python and PyTorch take: assumed, hosts differ."""

FLOAT32_BYTES = 4


@dataclass(frozen=True)
class Eager:
    """Of one recurrence.

    why: as `no_kernel` says it. instead: what to set for kernels. launches: operators per token of a pass, forwards and backwards,
    whatever the batch. moved: numbers in float32 that they read and write per token of one sequence, all tensor ranks together.
    """

    why: str
    instead: str
    launches: tuple[float, float]
    moved: tuple[float, float]

    def seconds(self, batch: int, tensor: int, memory_bandwidth_tb_s: float) -> tuple[float, float]:
        """Of a token of `batch` sequences, forwards and backwards: launches or memory traffic, which takes longer."""
        rate = memory_bandwidth_tb_s * 1e12
        forward, backward = (
            max(launches * LAUNCH_SECONDS, FLOAT32_BYTES * moved * batch / tensor / rate)
            for launches, moved in zip(self.launches, self.moved, strict=True)
        )
        return forward, backward
