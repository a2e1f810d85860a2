"""Settings of the optimizer and of its learning rate. Torch-free."""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Decay = Annotated[float, Field(ge=0, lt=1)]
Rate = Annotated[float, Field(gt=0)]

LARGEST_BFLOAT16_BETA = 63 / 64


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class OptimizerConfig(_Settings):
    """AdamW with a global gradient norm clip."""

    lr: float = Field(gt=0, description="peak learning rate")
    lr_overrides: dict[str, Rate] = Field(
        default_factory=dict,
        description="peak learning rates for parameters whose names match a pattern, for example {'*.ssm.*': 1e-3}; the first "
        "matching pattern applies",
    )
    betas: tuple[Decay, Decay] = Field((0.9, 0.95), description="decay rates of the two moments; (0.9, 0.95) as in Mamba's recipe")
    eps: float = Field(1e-8, gt=0, description="added to the square root of the second moment")
    weight_decay: float = Field(
        0.1,
        ge=0,
        description="decoupled weight decay of projections. Norms, biases, A_log, D and the like have none, and embeddings only "
        "with model.decay_embedding",
    )
    moments_dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="type in which the two moments are kept; bfloat16 saves 4 bytes a parameter, needs betas of at most 63/64, "
        "and layout.zero of 1 or 2",
    )
    clip_norm: float = Field(
        1.0, ge=0, description="maximum global gradient norm; larger gradients are scaled down to it. 0: no clipping"
    )

    @model_validator(mode="after")
    def _moments_are_not_stuck(self) -> Self:
        """A step changes a moment by (1 - beta) of its distance from what is new; less than half a unit in the last of bfloat16's 8
        bits is no change."""
        if self.moments_dtype == "bfloat16" and max(self.betas) > LARGEST_BFLOAT16_BETA:
            raise ValueError(
                f"moments_dtype=bfloat16 does not go with betas={list(self.betas)}: moments that change so slowly are rounded to "
                f"where they were; set betas of at most {LARGEST_BFLOAT16_BETA}, or moments_dtype=float32"
            )
        return self


class ScheduleConfig(_Settings):
    """Learning rate over steps: linear warm-up, then cosine or warmup-stable-decay (WSD)."""

    kind: Literal["cosine", "wsd", "constant"] = Field("cosine", description="shape of the schedule after the warm-up")
    warmup_steps: int = Field(0, ge=0, description="steps of linear warm-up from 0; 0: none. The papers use 1 to 10 % of a run")
    decay_steps: int = Field(
        0, ge=0, description="wsd: steps at the end of the run over which the learning rate falls to final_lr; 0: no decay"
    )
    decay_shape: Literal["linear", "sqrt"] = Field(
        "linear",
        description="wsd: how the learning rate falls over decay_steps; sqrt: as 1 - sqrt(progress), which is steep first and then "
        "flat (Hägele et al. 2024)",
    )
    final_lr: float = Field(
        1e-5, ge=0, description="learning rate at the last step (cosine, wsd), as an absolute value like in the papers"
    )
