"""The cost of recurrences that a GPU computes with PyTorch's operators, because no kernel supports their settings. Torch-free.

`baton plan` and the first lines of `baton train` report it. `Recurrence.no_kernel` gives the reason too; tests compare the two and
count the operators.
"""

from dataclasses import dataclass

LAUNCH_SECONDS = 8e-6
"""Seconds that Python and PyTorch need from one operator's launch to the next: an assumption, hosts differ."""

FLOAT32_BYTES = 4


@dataclass(frozen=True)
class Eager:
    """The cost of one recurrence.

    why: the reason, as in `no_kernel`. instead: settings that have a kernel. launches: operators per token, forward and backward,
    for any batch. moved: float32 elements that they read and write per token of one sequence, of all tensor ranks together.
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
