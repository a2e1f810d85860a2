"""Settings of the block that Mamba and Longhorn share."""

from dataclasses import replace
from typing import Any, Literal

from pydantic import Field

from baton.models.initializers import Constant, Initializer, linear
from baton.models.settings import MixerConfig
from baton.models.settings.all_reduces import AllReduce
from baton.models.settings.cost_model import MixerCosts, RecurrenceCosts, SavedTensor
from baton.models.settings.declarations import (
    ParameterDeclaration,
    StateDeclaration,
    column,
    low_rank_column,
    output,
    row,
    split,
)
from baton.models.settings.saved_tensors import saved_by_gate

Block = Literal["mamba", "no_gate", "h3"]
BLOCK: Any = Field(
    "mamba",
    description="the block around the state space model, as in tables 1 and 6 of Mamba's paper. mamba: a convolution with SiLU in "
    "front of it, and a gate silu(z) behind it; no_gate: the same without the gate; h3: q SSM(conv(k) v) of a token's projections "
    "q, k and v, as in H3 (Fu et al. 2023) with heads of one channel, where expand is 1",
)
"""The setting, which S4D has, too."""


def projections(block: Block, inner: int) -> dict[str, int]:
    """What in_proj computes, with widths."""
    return dict.fromkeys({"mamba": "xz", "no_gate": "x", "h3": "qkv"}[block], inner)


def saved_by_block(block: Block, inner: int) -> tuple[SavedTensor, ...]:
    """Saved tensors between the projections: x is the state space model's input."""
    parts = len(projections(block, inner))
    return (
        SavedTensor("projection", parts * inner, "compute"),
        *((SavedTensor("convolved k", inner, "compute", recomputed=True),) if block == "h3" else ()),
        SavedTensor("x", inner, "compute", recomputed=True),
    )


class SSMBlockConfig(MixerConfig):
    """The block of Mamba and Longhorn: projection, short convolution, gated diagonal scan, projection."""

    expand: int = Field(2, ge=1, description="d_inner / d_model; 2 in both papers' language models")
    d_state: int = Field(16, ge=1, description="state size per channel; 16 in both papers' language models")
    d_conv: int = Field(4, ge=2, description="width of the causal convolution, in tokens; 4 as released, the papers do not give it")
    dt_rank: int | None = Field(None, ge=1, description="rank of the step sizes' projection; null: d_model / 16, rounded up")
    skip: bool = Field(
        True,
        description="add D x, the input scaled by a learned factor per channel, to the output; true as released, not in the "
        "papers' algorithms",
    )

    @property
    def form(self) -> Block:
        """The block around the scan."""
        return "mamba"

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

    def shared_widths(self, d_model: int) -> dict[str, int]:
        """What x_proj computes for all channels of a token, with widths: the step sizes' low-rank code ("step"), B and C."""
        return {"step": self.step_rank(d_model), "B": self.d_state, "C": self.d_state}

    @property
    def step_name(self) -> str:
        """The paper's symbol for the step sizes, which names their projection and bias."""
        raise NotImplementedError

    @property
    def state_name(self) -> str:
        """The paper's symbol for the State."""
        raise NotImplementedError

    @property
    def step_bias_init(self) -> Initializer:
        """Initial values of the step sizes' bias."""
        raise NotImplementedError

    def parameters(self, d_model: int) -> tuple[ParameterDeclaration, ...]:
        inner, shared, step = self.expand * d_model, self.shared_widths(d_model), self.step_name
        rank = shared.get("step")
        return (
            column("in_proj", d_model, projections(self.form, inner)),
            split("conv_weight", inner, self.d_conv, init=linear(self.d_conv), decay=True),
            split("conv_bias", inner, init=linear(self.d_conv)),
            # the step sizes' low-rank projection, and the vectors B and C, which all channels of a token share
            *((row("x_proj", inner, sum(shared.values()), init=linear(inner)),) if shared else ()),
            *((low_rank_column(f"{step}_proj", rank, inner, init=linear(rank)),) if rank is not None else ()),
            *((split(f"{step}_bias", inner, init=self.step_bias_init),) if self.has_step_bias else ()),
            *((split("D", inner, init=Constant(1.0)),) if self.skip else ()),
            output("out_proj", inner, d_model),
        )

    def state(self, d_model: int) -> tuple[StateDeclaration, ...]:
        inner = self.expand * d_model
        return (
            StateDeclaration("conv", (self.d_conv - 1, inner), "compute", tp=1),
            StateDeclaration(self.state_name, (inner, self.d_state), "float32", tp=0),
        )

    def skeleton_costs(self, d_model: int, flops: int) -> MixerCosts:
        """Costs of the block, to which subclasses add those of their recurrence. flops: of the scan, per element of the state."""
        inner, code = self.expand * d_model, sum(self.shared_widths(d_model).values())
        conv, scan = self.state(d_model)
        return MixerCosts(
            saved=(
                SavedTensor("in_proj input", d_model, "compute", split=False),
                *saved_by_block(self.form, inner),
                SavedTensor("step code, B and C", code, "compute", split=False),
                SavedTensor("projected step sizes", inner, "compute", in_recurrence="input", recomputed=True),
                # output of softplus or sigmoid
                SavedTensor("step sizes", inner, "float32", in_recurrence="graph"),
                *(self._saved_by_output(inner)),
                SavedTensor("out_proj input", inner, "compute"),
            ),
            recurrences=(
                RecurrenceCosts("short_conv", (conv,), chunk=0),
                RecurrenceCosts("scan", (scan,), chunk=1, scan_elements=inner * self.d_state, transition=((inner, self.d_state),)),
            ),
            # every rank's channels read all of x_proj's output
            all_reduces=(AllReduce("step code, B and C", code, "compute", "backward"),) if code else (),
            vector_flops=flops * inner * self.d_state,
        )

    def _saved_by_output(self, inner: int) -> tuple[SavedTensor, ...]:
        """Saved tensors between the scan and out_proj."""
        if self.form == "h3":
            return (SavedTensor("y", inner, "compute"),)
        if self.form == "no_gate":
            return ()
        gate = (replace(saved, in_recurrence="graph") for saved in saved_by_gate("z", inner))
        return (SavedTensor("y", inner, "float32", in_recurrence="graph"), *gate)

    @classmethod
    def small(cls) -> "SSMBlockConfig":
        return cls(expand=3, d_state=5, d_conv=4, dt_rank=2)  # type: ignore[call-arg]
