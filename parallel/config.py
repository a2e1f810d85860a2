"""Settings of the layout: how many ranks each kind of parallelism gets. Torch-free."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from baton.parallel.errors import LayoutError


class LayoutConfig(BaseModel):
    """Sizes of the process mesh; their product is the number of ranks."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tensor: int = Field(1, ge=1, description="ranks that share one layer's heads or channels; 1: a 1B model fits one GPU")
    pipeline: int = Field(1, ge=1, description="stages, each with some of the layers; 1: a 1B model fits one GPU")
    context: int = Field(1, ge=1, description="ranks that share one sequence, each a span of it; their States are handed on")
    data: int = Field(1, ge=1, description="ranks that read different lanes of the data")
    zero: Literal[0, 1, 2] = Field(
        1,
        description="ZeRO stage: 0: every data rank has the whole optimizer; 1: its states are partitioned over data x context "
        "ranks; 2: gradients are also sent to their owners only, half the bytes (without pipeline)",
    )
    sequence_parallel: bool = Field(
        False,
        description="tensor ranks share the residual stream and the norms, each a part of the tokens (Megatron's sequence "
        "parallelism): less memory where layers are recomputed, the same bytes",
    )
    context_comm: Literal["ring", "early", "all_gather"] = Field(
        "ring",
        description="how States of linear recurrences cross the sequence ranks: from neighbour to neighbour when a rank's part has "
        "run, or before (early: more work in every layer, less waiting behind the first of many ranks), or as early but gathered "
        "by all, which waits for the slowest rank",
    )
    timeout_s: float = Field(
        600.0,
        gt=0,
        description="seconds that a rank which others wait for may give no sign of life before all ranks end with an error; each "
        "operation of a step, layer, collective and block of a checkpoint gives one (on a GPU, where the host runs ahead of the "
        "device, be longer than a step). Until the first step is done, and in a first evaluation: jobs.startup_timeout_s",
    )

    @property
    def world_size(self) -> int:
        return self.tensor * self.pipeline * self.context * self.data

    def sizes(self) -> dict[str, int]:
        """The numbers of ranks, and the ZeRO stage."""
        return {name: getattr(self, name) for name in ("tensor", "pipeline", "context", "data", "zero")}

    def check(self) -> None:
        """Refuse combinations that cannot be. Raises LayoutError."""
        if self.zero == 2 and self.pipeline > 1:
            raise LayoutError(
                f"layout.zero=2 with layout.pipeline={self.pipeline}: stages add up whole gradients over their micro-batches, so "
                f"there is nothing to partition before the step; set layout.zero=1, or layout.pipeline=1"
            )


def divisors(n: int) -> list[int]:
    """All divisors of n, ascending: the sizes an error message offers."""
    return [d for d in range(1, n + 1) if n % d == 0]
