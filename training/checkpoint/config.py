"""Settings of checkpoints. Torch-free."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class CheckpointConfig(BaseModel):
    """When to save and what to keep."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    every: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(1000, description="steps between checkpoints; the last step is "
        "always saved. auto: what loses the least time, by what a save is found to cost and failures_per_rank_day")  # fmt: skip
    failures_per_rank_day: float = Field(5e-4, gt=0, description="auto: how often a rank fails; the default is what Llama 3 405B "
                                         "met, 419 failures of 16,384 GPUs in 54 days")  # fmt: skip
    async_save: bool = Field(True, description="train on while a checkpoint is written, from a copy in host memory that takes "
                               "12 bytes per parameter, over the data ranks")  # fmt: skip
    keep_last: int = Field(3, ge=1, description="checkpoints kept; more than one, to fall back on when one is damaged")
    keep_every: int = Field(0, ge=0, description="checkpoints of steps that are a multiple of this are kept for ever; 0: none is")
    keep_best: int = Field(0, ge=0, description="of the checkpoints with a validation loss (evaluation.every falls on their step), "
                           "so many of the best are kept too")  # fmt: skip
