"""What Mamba and Longhorn share."""

from dataclasses import replace

from pydantic import Field

from baton.models.settings import MixerConfig
from baton.models.settings.cost_model import (
    Carrier,
    Footprint,
    Kept,
    Reduction,
    StateLeaf,
    activated,
    column,
    column_gradient,
    row,
    row_sum,
    split,
)


class SSMBlockConfig(MixerConfig):
    """The skeleton: projection, short convolution, gated diagonal scan, projection."""

    expand: int = Field(2, ge=1, description="d_inner / d_model; 2 in both papers' language models")
    d_state: int = Field(16, ge=1, description="numbers of state per channel; 16 in both papers' language models")
    d_conv: int = Field(4, ge=2, description="tokens that the causal convolution sees; 4 as released, the papers do not say")
    dt_rank: int | None = Field(None, ge=1, description="rank of the step sizes' projection; null: d_model / 16, rounded up")
    skip: bool = Field(True, description="add D u, a learned factor of each channel's input, to the output; true as released, "
                       "neither paper's algorithm has it")  # fmt: skip

    @property
    def has_step_bias(self) -> bool:
        """Whether the step sizes have a bias."""
        return True

    def sizes(self, d_model: int) -> dict[str, int]:
        return {"expand * model.d_model": self.expand * d_model}

    @property
    def longest_tail(self) -> int:
        return self.d_conv - 1

    def step_rank(self, d_model: int) -> int:
        """Rank of the step sizes' projection."""
        return self.dt_rank or -(-d_model // 16)

    def skeleton(self, d_model: int, step: str, flops: int) -> Footprint:
        """Everything but what the recurrence itself adds. step: name of the step sizes. flops: of the scan, per number of state."""
        inner, rank = self.expand * d_model, self.step_rank(d_model)
        code = rank + 2 * self.d_state
        return Footprint(
            parameters=(
                column("in_proj", d_model, 2 * inner),
                split("conv_weight", inner, self.d_conv),
                split("conv_bias", inner),
                row("x_proj", inner, code),
                column(f"{step}_proj", rank, inner),
                *((split(f"{step}_bias", inner),) if self.has_step_bias else ()),
                *((split("D", inner),) if self.skip else ()),
                row("out_proj", inner, d_model),
            ),
            kept=(
                Kept("in_proj input", d_model, "compute", split=False),
                Kept("x and z", 2 * inner, "compute"),
                Kept("convolved x", inner, "compute", cheap=True),
                Kept("code and vectors", code, "compute", split=False),
                Kept("projected step sizes", inner, "compute", inside="input", cheap=True),
                # after softplus or sigmoid
                Kept("step sizes", inner, "float32", inside="graph"),
                Kept("y", inner, "float32", inside="graph"),
                *(replace(kept, inside="graph") for kept in activated("z", inner)),
                Kept("out_proj input", inner, "compute"),
            ),
            carriers=(
                Carrier("short_conv", (StateLeaf("conv", (self.d_conv - 1, inner), "compute", tp=1),), chunk=0),
                Carrier(
                    "scan",
                    (StateLeaf("scan", (inner, self.d_state), "float32", tp=0),),
                    chunk=1,
                    elements=inner * self.d_state,
                    transition=((inner, self.d_state),),
                ),
            ),
            reductions=(
                column_gradient("in_proj", d_model),
                # every rank's channels give a part of the code and vectors, and use all of them
                Reduction("x_proj", code, "compute", "forward"),
                Reduction("code and vectors", code, "compute", "backward"),
                row_sum("out_proj", d_model),
            ),
            vector_flops=flops * inner * self.d_state,
        )

    @classmethod
    def small(cls) -> "SSMBlockConfig":
        return cls(expand=3, d_state=5, d_conv=4, dt_rank=2)  # type: ignore[call-arg]
