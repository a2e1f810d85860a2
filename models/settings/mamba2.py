"""Settings of Mamba-2."""

from typing import Literal

from pydantic import Field, model_validator

from baton.models.settings import MixerConfig
from baton.models.settings.linear_attention import whole


class Mamba2Config(MixerConfig):
    """The state space of Mamba-2: one decay per head and token (Dao & Gu, "Transformers are SSMs")."""

    kind: Literal["mamba2"] = "mamba2"
    expand: int = Field(2, ge=1, description="d_inner / d_model; 2 in every model of the paper")
    head_dim: int = Field(64, ge=1, description="channels of a head; 64 as released")
    d_state: int = Field(128, ge=1, description="numbers of state per channel; 128 as released")
    d_conv: int = Field(4, ge=2, description="tokens that the causal convolution sees; 4 as released")
    rate_min: float = Field(1.0, gt=0, description="smallest initial exp(A_log) (uniform between rate_min and rate_max)")
    rate_max: float = Field(16.0, gt=0, description="largest initial exp(A_log)")
    dt_min: float = Field(1e-3, gt=0, description="smallest initial step size (log-uniform between dt_min and dt_max)")
    dt_max: float = Field(1e-1, gt=0, description="largest initial step size")
    dt_floor: float = Field(1e-4, gt=0, description="initial step sizes are raised to this at least")

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> "Mamba2Config":
        for name in ("rate", "dt"):
            low, high = getattr(self, f"{name}_min"), getattr(self, f"{name}_max")
            if low > high:
                raise ValueError(f"{name}_min={low} exceeds {name}_max={high}; initial values lie between them")
        return self

    def head_count(self, d_model: int) -> int:
        """The number of heads. Raises ValueError where head_dim does not divide d_inner."""
        return whole("head_dim", "expand * d_model / head_dim", self.expand * d_model, self.head_dim)

    def sizes(self, d_model: int) -> dict[str, int]:
        return {"expand * model.d_model / head_dim": self.head_count(d_model)}

    def check(self, d_model: int) -> None:
        self.head_count(d_model)

    @classmethod
    def small(cls) -> "Mamba2Config":
        return cls(expand=1, head_dim=3, d_state=5, d_conv=4)
