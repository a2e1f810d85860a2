"""Costs of recurrences that run as PyTorch operators on a GPU because no kernel supports their settings. Torch-free.

`baton plan` and the first lines of `baton train` report them. `Recurrence.no_kernel` gives the reason as well; tests compare the
two and count the operators.
"""

from dataclasses import dataclass

LAUNCH_SECONDS = 8e-6
"""Assumed seconds from one operator's launch in Python and PyTorch to the next; hosts differ."""

FLOAT32_BYTES = 4


@dataclass(frozen=True)
class Eager:
    """Cost of one recurrence without a kernel.

    why: the reason, as in `no_kernel`.
    instead: settings that have a kernel.
    launches: operators per token in the forward and the backward pass, for any batch size.
    moved: float32 elements read and written per token of one sequence, over all tensor ranks, in the forward and the backward pass.
    """

    why: str
    instead: str
    launches: tuple[float, float]
    moved: tuple[float, float]

    def seconds(self, batch: int, tensor: int, memory_bandwidth_tb_s: float) -> tuple[float, float]:
        """Seconds per token of `batch` sequences, forward and backward: the longer of launches and memory traffic."""
        rate = memory_bandwidth_tb_s * 1e12
        forward, backward = (
            max(launches * LAUNCH_SECONDS, FLOAT32_BYTES * moved * batch / tensor / rate)
            for launches, moved in zip(self.launches, self.moved, strict=True)
        )
        return forward, backward
