"""Settings of the layout: how many ranks each kind of parallelism gets. Torch-free."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from baton.parallel.errors import LayoutError


class LayoutConfig(BaseModel):
    """Sizes of the process mesh; their product is the number of ranks."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tensor: int = Field(1, ge=1, description="ranks that share one layer's heads or channels; 1: a 1B model fits one GPU")
    pipeline: int = Field(1, ge=1, description="pipeline stages; only 1 is built so far")
    sequence: int = Field(1, ge=1, description="ranks that share one sequence, each a span of it; their States are handed on")
    data: int = Field(1, ge=1, description="ranks that read different lanes of the data")
    zero: Literal[1] = Field(1, description="ZeRO stage: optimizer states are partitioned over data x sequence ranks")

    @property
    def world_size(self) -> int:
        return self.tensor * self.pipeline * self.sequence * self.data

    def check(self) -> None:
        """Refuse what is not built. Raises LayoutError."""
        if self.pipeline != 1:
            raise LayoutError(
                f"layout.pipeline={self.pipeline}: pipeline parallelism is not built yet; set layout.pipeline=1 and give the ranks "
                f"to layout.data, layout.sequence or layout.tensor"
            )


def divisors(n: int) -> list[int]:
    """All divisors of n, ascending: the sizes an error message offers."""
    return [d for d in range(1, n + 1) if n % d == 0]
