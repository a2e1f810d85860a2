"""Settings of monitoring: the guard against anomalous steps, logged norms, Weights & Biases, the profiler. Torch-free."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from baton.training.errors import RunError


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class GuardConfig(_Settings):
    """Handling of anomalous steps: a loss or gradients that are not finite, or much larger than in the steps before."""

    policy: Literal["stop", "skip", "rollback"] = Field(
        "stop",
        description="stop: end the run; it can be resumed from its last checkpoint. skip: make no update in this step. rollback: "
        "return to the last checkpoint and leave out the documents of the anomalous step",
    )
    max_interventions: int = Field(
        3, ge=0, description="maximum number of skips or rollbacks after a start of the run; the next anomaly stops it"
    )
    loss_spike: float = Field(
        0.0,
        ge=0,
        description="a loss above this multiple of the median over the previous steps is an anomaly; 0: only a non-finite loss is",
    )
    norm_spike: float = Field(0.0, ge=0, description="as loss_spike, for the gradient norm before clipping")
    update_spike: float = Field(
        0.0,
        ge=0,
        description="as loss_spike, for the norm of the parameter update. It is known only after the update, so policy=skip stops "
        "the run",
    )
    window: int = Field(
        64, ge=2, description="number of previous steps in the median; nothing is an anomaly before half of them have been made"
    )


class WandbConfig(_Settings):
    """Mirroring of metrics.jsonl to Weights & Biases."""

    project: str = Field(description="W&B project")
    entity: str | None = Field(None, description="W&B team or user; null: the account's default")
    mode: Literal["online", "offline"] = Field("online", description="offline: write to RUN/wandb, which `wandb sync` uploads")


class MonitoringConfig(_Settings):
    """Optional metrics, and where metrics are sent."""

    update_norm_every: int = Field(
        10,
        ge=0,
        description="steps between measurements of the parameter update's norm, which is computed chunk by chunk from AdamW's "
        "moments; 0: never",
    )
    state_grad_norm_every: int = Field(
        100,
        ge=0,
        description="steps between measurements of the State gradients' norms, per layer, at the boundaries of segments and "
        "context-parallel ranks (runs without such boundaries have none); 0: never",
    )
    wandb: WandbConfig | None = Field(
        None, description="mirror metrics.jsonl to Weights & Biases at every checkpoint; null: do not"
    )


class ProfileConfig(_Settings):
    """Profiling of a few steps. Writes a trace, and a table as text and JSON, to RUN/profile."""

    steps: int = Field(3, ge=1, description="number of consecutive steps to profile; the trace's size grows with it")
    skip_steps: int = Field(
        5,
        ge=1,
        description="steps before the first profiled one: they compile kernels, fill the allocator's cache and measure the time "
        "of a step without the profiler",
    )
    ranks: Literal["first", "all"] = Field(
        "first", description="first: profile rank 0 while the other ranks wait for it; all: every rank writes its own profile"
    )
    peak_tflops: float | None = Field(
        None,
        gt=0,
        description="peak TFLOP/s of one device in the run's compute dtype, for model FLOPs utilization (MFU); null: from the data "
        "sheet of a known GPU",
    )

    def check(self, steps: int) -> None:
        """Raises RunError for a run of too few steps."""
        if self.skip_steps + self.steps > steps:
            raise RunError(
                f"profile: training.steps={steps} is less than the {self.skip_steps} steps before the profiled ones and these "
                f"{self.steps}; set training.steps={self.skip_steps + self.steps} or more, or profile.skip_steps or profile.steps "
                f"to less"
            )
