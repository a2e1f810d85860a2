"""Settings of the mirror on Weights & Biases. Torch-free."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class WandbConfig(BaseModel):
    """The W&B run that metrics.jsonl is mirrored to."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    project: str = Field(description="of Weights & Biases")
    entity: str | None = Field(None, description="its team or user; null: the account's own")
    mode: Literal["online", "offline"] = Field("online", description="offline: into RUN/wandb, for `wandb sync` to upload")
