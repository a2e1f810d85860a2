"""Settings of the layout: how many ranks each kind of parallelism gets. Torch-free."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from baton.parallel.errors import LayoutError


class LayoutConfig(BaseModel):
    """Sizes of the process mesh; their product is the number of ranks."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    tensor: int = Field(1, ge=1, description="tensor-parallel ranks, which split each layer's heads or channels")
    pipeline: int = Field(1, ge=1, description="pipeline-parallel stages, each with some of the layers")
    context: int = Field(
        1, ge=1, description="context-parallel ranks, which split each sequence into spans and pass States from span to span"
    )
    data: int = Field(1, ge=1, description="data-parallel ranks, which read different lanes of the data")
    zero: Literal[0, 1, 2] = Field(
        1,
        description="ZeRO stage. 0: every data rank has the whole optimizer state; 1: the optimizer state is partitioned over "
        "data x context ranks; 2: in addition, gradients are reduce-scattered, which halves their traffic (not with pipeline)",
    )
    sequence_parallel: bool = Field(
        False,
        description="split the residual stream and the norms by tokens over the tensor ranks (Megatron's sequence parallelism): "
        "less memory where layers are recomputed, for the same communication volume",
    )
    context_comm: Literal["ring", "early", "all_gather"] = Field(
        "ring",
        description="how context-parallel ranks exchange the States of linear recurrences. ring: each rank sends its final State "
        "to the next rank. early: each rank first computes its span's state transition, which takes more work in every layer and "
        "shortens the wait for earlier ranks. all_gather: as early, with an all-gather, which waits for the slowest rank; as ring "
        "where a gradient goes through several segments (training.bptt)",
    )
    timeout_s: float = Field(
        600.0,
        gt=0,
        description="seconds without progress on one rank after which all ranks end with an error. Every operation of a step, "
        "layer, collective and block of a checkpoint counts as progress. On a GPU it must exceed the time of a step, because the "
        "host runs ahead of the device. Until the first step is done, and in a first evaluation, jobs.startup_timeout_s applies",
    )

    @property
    def world_size(self) -> int:
        return self.tensor * self.pipeline * self.context * self.data

    def gathers_states(self, gradient_segments: int) -> bool:
        """Whether context ranks gather the transitions of linear recurrences. Not where a gradient goes through several segments:
        the first rank's next segment begins with the last rank's final State, so a collective would hold all ranks in one layer of
        one segment, where the ring lets the first rank go on."""
        return self.context > 1 and self.context_comm == "all_gather" and gradient_segments == 1

    def uses_transitions(self, gradient_segments: int) -> bool:
        """Whether context ranks compute the transition of their span in each linear recurrence, which they apply or gather."""
        return (self.context > 1 and self.context_comm == "early") or self.gathers_states(gradient_segments)

    def sizes(self) -> dict[str, int]:
        """The numbers of ranks and the ZeRO stage, by setting."""
        return {name: getattr(self, name) for name in ("tensor", "pipeline", "context", "data", "zero")}

    def check(self) -> None:
        """Raises LayoutError for a combination that is not supported."""
        if self.zero == 2 and self.pipeline > 1:
            raise LayoutError(
                f"layout.zero=2 with layout.pipeline={self.pipeline}: stages add up whole gradients over their micro-batches, so "
                f"there is nothing to partition before the step; set layout.zero=1, or layout.pipeline=1"
            )


def divisors(n: int) -> list[int]:
    """All divisors of n in ascending order, for error messages that name possible sizes."""
    return [d for d in range(1, n + 1) if n % d == 0]
