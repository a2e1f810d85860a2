"""Settings of what watches a run: the guard against anomalous steps, norms, Weights & Biases, the profiler. Torch-free."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from baton.training.errors import RunError


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class GuardConfig(_Settings):
    """What to do about anomalous steps: a loss or gradients that are not finite, or far beyond those before."""

    policy: Literal["stop", "skip", "rollback"] = Field("stop", description="stop: end the run, which resumes from its last "
        "checkpoint; skip: make no update from this step's documents; rollback: go back to the last checkpoint and leave the "
        "documents out that did it")  # fmt: skip
    max_interventions: int = Field(3, ge=0, description="skips or rollbacks of one start of the run; the next one stops it")
    loss_spike: float = Field(0.0, ge=0, description="a loss this many times the median of the steps before is a spike; 0: only "
                              "what is not finite counts")  # fmt: skip
    norm_spike: float = Field(0.0, ge=0, description="the same for the gradients' norm before the clip, which the clip else tames")
    update_spike: float = Field(0.0, ge=0, description="the same for the norm of the parameters' change, seen after it was made: "
                                "skip cannot help any more, and stops")  # fmt: skip
    window: int = Field(64, ge=2, description="steps before that are compared with; half of them must be there")


class WandbConfig(_Settings):
    """The W&B run that metrics.jsonl is mirrored to."""

    project: str = Field(description="of Weights & Biases")
    entity: str | None = Field(None, description="its team or user; null: the account's own")
    mode: Literal["online", "offline"] = Field("online", description="offline: into RUN/wandb, for `wandb sync` to upload")


class MonitoringConfig(_Settings):
    """Further norms that are logged."""

    update_norm_every: int = Field(10, ge=0, description="steps between norms of the parameters' change, from AdamW's moments, at "
                                   "the memory of one chunk; 0: never")  # fmt: skip
    state_grad_norm_every: int = Field(100, ge=0, description="steps between norms of the State gradients at the boundaries of "
                                  "segments and sequence ranks, by layer; 0: never. None where no State goes on")  # fmt: skip
    wandb: WandbConfig | None = Field(None, description="mirror metrics.jsonl to Weights & Biases at every checkpoint; null: no")


class ProfileConfig(_Settings):
    """Profiling of a few steps: RUN/profile gets their trace, and a table as text and JSON."""

    steps: int = Field(3, ge=1, description="steps that are looked at, one after the other; more: a larger trace, of which the "
                       "first ones say most")  # fmt: skip
    skip_steps: int = Field(
        5,
        ge=1,
        description="steps of this start before the profiled ones: they compile kernels, fill the allocator's cache and give the "
        "time of a step without the profiler",
    )
    ranks: Literal["first", "all"] = Field("first", description="first: rank 0 alone, and the others wait for it; all: each rank "
                                           "writes its own")  # fmt: skip
    peak_tflops: float | None = Field(None, gt=0, description="of one device, in the run's precision, that utilisation (MFU) is a "
                                      "share of; null: its data sheet's, where the GPU is known")  # fmt: skip

    def check(self, steps: int) -> None:
        """Raises RunError for a run of too few steps."""
        if self.skip_steps + self.steps > steps:
            raise RunError(
                f"profile: training.steps={steps} is less than the {self.skip_steps} steps before the profiled ones and these "
                f"{self.steps}; set training.steps={self.skip_steps + self.steps} or more, or profile.skip_steps or profile.steps "
                f"to less"
            )
