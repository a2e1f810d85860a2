"""Settings of checkpoints. Torch-free."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class CheckpointConfig(BaseModel):
    """When to save and what to keep."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    every: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        1000,
        description="steps between checkpoints; the last step is always saved. auto: the interval that minimizes lost time, from "
        "the measured cost of a save and failures_per_rank_day",
    )
    failures_per_rank_day: float = Field(
        5e-4,
        gt=0,
        description="auto: expected failures per rank and day; the default is the rate reported for Llama 3 405B, 419 failures of "
        "16,384 GPUs in 54 days",
    )
    async_save: bool = Field(
        True,
        description="continue training while a checkpoint is written from a copy in host memory, which takes 12 bytes per "
        "parameter divided over the data ranks",
    )
    keep_last: int = Field(
        3,
        ge=1,
        description="number of most recent checkpoints to keep; if the newest one is damaged, an older one is resumed",
    )
    keep_every: int = Field(0, ge=0, description="checkpoints at multiples of this step are kept permanently; 0: none")
    keep_best: int = Field(
        0,
        ge=0,
        description="number of checkpoints with the lowest validation loss to keep; only checkpoints at a step with an evaluation "
        "count",
    )
