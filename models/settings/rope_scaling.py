"""Settings of scaled rotary positions, with transformers' names and defaults; `models.rope` computes the rates. Torch-free."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

_CONTEXT = "tokens of the context with which the model was trained before its rotary positions were scaled"


class _Scaling(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class LinearScaling(_Scaling):
    """All rotary angles are divided by `factor` (Chen et al. 2023)."""

    kind: Literal["linear"] = "linear"
    factor: float = Field(gt=0, description="by which all angles are divided")


class Llama3Scaling(_Scaling):
    """Rotary angles of slow pairs of channels are divided by `factor`, those of fast ones are kept (Llama 3.1)."""

    kind: Literal["llama3"] = "llama3"
    factor: float = Field(gt=0, description="by which the angles of slow pairs are divided; 8 in Llama 3.1, 32 in Llama 3.2")
    original_max_position_embeddings: int = Field(ge=1, description=f"{_CONTEXT}; 8192 in Llama 3")
    low_freq_factor: float = Field(1.0, gt=0, description="pairs that turn at most so often in that context are slow")
    high_freq_factor: float = Field(4.0, gt=0, description="pairs that turn at least so often in that context are fast")

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> "Llama3Scaling":
        if self.low_freq_factor >= self.high_freq_factor:
            bounds = f"low_freq_factor={self.low_freq_factor} is not below high_freq_factor={self.high_freq_factor}"
            raise ValueError(f"{bounds}; slow pairs turn less often")
        return self


class YarnScaling(_Scaling):
    """Rotary angles of slow pairs of channels are divided by `factor`, and rotated queries and keys are lengthened (Peng et al.
    2023, "YaRN")."""

    kind: Literal["yarn"] = "yarn"
    factor: float = Field(gt=0, description="by which the angles of slow pairs are divided")
    original_max_position_embeddings: int = Field(ge=1, description=_CONTEXT)
    beta_fast: float = Field(32.0, gt=0, description="pairs that turn at least so often in that context are fast")
    beta_slow: float = Field(1.0, gt=0, description="pairs that turn at most so often in that context are slow")
    attention_factor: float | None = Field(
        None, gt=0, description="by which rotated queries and keys are multiplied; null: 0.1 ln(factor) + 1, at least 1"
    )
    truncate: bool = Field(True, description="whether the bounds are rounded to whole pairs, outwards; gpt-oss has false")

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> "YarnScaling":
        if self.beta_slow >= self.beta_fast:
            raise ValueError(f"beta_slow={self.beta_slow} is not below beta_fast={self.beta_fast}; slow pairs turn less often")
        return self


RopeScaling = Annotated[LinearScaling | Llama3Scaling | YarnScaling, Field(discriminator="kind")]
