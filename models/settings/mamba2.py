"""Settings of Mamba-2."""

from typing import Literal

from pydantic import Field, model_validator

from baton.models.settings import MixerConfig
from baton.models.settings.cost_model import (
    LINEAR_ATTENTION_CHUNK,
    Carrier,
    Footprint,
    Kept,
    Parameter,
    StateLeaf,
    activated,
    column,
    column_gradient,
    linear_attention_flops,
    replicated_gradient,
    row,
    row_sum,
    split,
    split_norm,
)
from baton.models.settings.linear_attention import whole


class Mamba2Config(MixerConfig):
    """The state space of Mamba-2: one decay per head and token (Dao & Gu, "Transformers are SSMs")."""

    kind: Literal["mamba2"] = "mamba2"
    expand: int = Field(2, ge=1, description="d_inner / d_model; 2 in every model of the paper")
    head_dim: int = Field(64, ge=1, description="channels of a head; 64 as released")
    d_state: int = Field(128, ge=1, description="numbers of state per channel; 128 as released")
    d_conv: int = Field(4, ge=2, description="tokens that the causal convolution sees; 4 as released")
    A_init_min: float = Field(1.0, gt=0, description="smallest initial exp(A_log) (uniform between A_init_min and A_init_max)")
    A_init_max: float = Field(16.0, gt=0, description="largest initial exp(A_log)")
    dt_min: float = Field(1e-3, gt=0, description="smallest initial step size (log-uniform between dt_min and dt_max)")
    dt_max: float = Field(1e-1, gt=0, description="largest initial step size")
    dt_floor: float = Field(1e-4, gt=0, description="initial step sizes are raised to this at least")

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> "Mamba2Config":
        for name in ("A_init", "dt"):
            low, high = getattr(self, f"{name}_min"), getattr(self, f"{name}_max")
            if low > high:
                raise ValueError(f"{name}_min={low} exceeds {name}_max={high}; initial values lie between them")
        return self

    def head_count(self, d_model: int) -> int:
        """The number of heads. Raises ValueError where head_dim does not divide d_inner."""
        return whole("head_dim", "expand * d_model / head_dim", self.expand * d_model, self.head_dim)

    def sizes(self, d_model: int) -> dict[str, int]:
        return {"expand * model.d_model / head_dim": self.head_count(d_model)}

    @property
    def longest_tail(self) -> int:
        return self.d_conv - 1

    def check(self, d_model: int) -> None:
        self.head_count(d_model)

    def footprint(self, d_model: int) -> Footprint:
        inner, heads, state, chunk = self.expand * d_model, self.head_count(d_model), self.d_state, LINEAR_ATTENTION_CHUNK
        tail = self.d_conv - 1
        norm, norm_sums = split_norm("norm", inner)
        return Footprint(
            parameters=(
                column("in_proj", d_model, 2 * inner + heads),
                Parameter("bc_proj.weight", (2 * state, d_model), uses=1),
                split("conv_weight", inner, self.d_conv),
                split("conv_bias", inner),
                Parameter("bc_conv_weight", (2 * state, self.d_conv)),
                Parameter("bc_conv_bias", (2 * state,)),
                split("A_log", heads),
                split("dt_bias", heads),
                split("D", heads),
                split("norm.weight", inner),
                row("out_proj", inner, d_model),
            ),
            kept=(
                Kept("in_proj input", d_model, "compute", split=False),
                Kept("z, x and step sizes", 2 * inner + heads, "compute"),
                # before and after the convolution
                Kept("B and C", 2 * 2 * state, "compute", split=False),
                Kept("convolved x", inner, "compute"),
                # softplus's input and result, and the decay
                Kept("step sizes", 3 * heads, "float32"),
                Kept("x times step size", inner, "compute"),
                Kept("output with skip", inner, "float32"),
                *activated("z", inner),
                *norm,
                Kept("out_proj input", inner, "compute"),
            ),
            carriers=(
                Carrier("short_conv", (StateLeaf("conv_x", (tail, inner), "compute", tp=1),), chunk=0),
                Carrier("short_conv", (StateLeaf("conv_bc", (tail, 2 * state), "compute", tp=None),), chunk=0),
                Carrier(
                    "gated_linear_attention",
                    (StateLeaf("S", (heads, state, self.head_dim), "float32", tp=0),),
                    chunk=chunk,
                    remade=True,
                    transition=((heads, 1, 1),),
                ),
            ),
            reductions=(
                column_gradient("in_proj", d_model),
                replicated_gradient("B and C", 2 * state),
                *norm_sums,
                row_sum("out_proj", d_model),
            ),
            matrix_flops=linear_attention_flops(heads, state, self.head_dim, chunk),
        )

    @classmethod
    def small(cls) -> "Mamba2Config":
        return cls(expand=1, head_dim=3, d_state=5, d_conv=4)
