"""Settings of S4D."""

import math
from dataclasses import replace
from typing import Literal

from pydantic import Field, model_validator

from baton.models.initializers import Between, Constant, Normal, S4DFrequencies, linear
from baton.models.settings import MixerConfig
from baton.models.settings.cost_model import MixerCosts, RecurrenceCosts, SavedTensor
from baton.models.settings.declarations import ParameterDeclaration, StateDeclaration, column, output, split
from baton.models.settings.eager import Eager
from baton.models.settings.saved_tensors import saved_by_gate
from baton.models.settings.ssm_block import BLOCK, Block, projections, saved_by_block

CHUNK = 16
"""Tokens of a chunk, as in kernels/s4d/chunked.py, which imports torch."""


class S4DConfig(MixerConfig):
    """The time-invariant state space model S4D with a complex diagonal (Gu et al. 2022, arXiv:2206.11893) in the block of Mamba,
    whose paper compares with it (tables 1 and 6). With a real diagonal it is the kind mamba with selective=[] and
    discretization=zoh."""

    kind: Literal["s4d"] = "s4d"
    block: Block = BLOCK
    expand: int = Field(2, ge=1, description="d_inner / d_model; 2 as in Mamba")
    d_state: int = Field(
        64, ge=2, multiple_of=2, description="states per channel, of which each conjugate pair is computed once; 64 in S4D's paper"
    )
    d_conv: int = Field(4, ge=2, description="width of the causal convolution, in tokens; 4 as in Mamba")
    A_init: Literal["lin", "inv"] = Field(
        "lin",
        description="initial values of A, -1/2 + i times a frequency: lin, pi n (S4D-Lin); inv, S4D-Inv's inverse law",
    )
    dt_min: float = Field(1e-3, gt=0, description="smallest initial step size; 0.001 in the paper")
    dt_max: float = Field(1e-1, gt=0, description="largest initial step size; 0.1 in the paper")

    @model_validator(mode="after")
    def _step_sizes_are_in_order(self) -> "S4DConfig":
        if self.dt_min > self.dt_max:
            raise ValueError(f"dt_min={self.dt_min} exceeds dt_max={self.dt_max}; initial step sizes lie between them")
        return self

    @property
    def pairs(self) -> int:
        """Conjugate pairs of states per channel."""
        return self.d_state // 2

    def sizes(self, d_model: int) -> dict[str, int]:
        return {"expand * model.d_model": self.expand * d_model}

    @property
    def longest_tail(self) -> int:
        return self.d_conv - 1

    def parameters(self, d_model: int) -> tuple[ParameterDeclaration, ...]:
        inner = self.expand * d_model
        return (
            column("in_proj", d_model, projections(self.block, inner)),
            split("conv_weight", inner, self.d_conv, init=linear(self.d_conv), decay=True),
            split("conv_bias", inner, init=linear(self.d_conv)),
            split("log_dt", inner, init=Between(math.log(self.dt_min), math.log(self.dt_max))),
            split("A_log", inner, self.pairs, init=Constant(math.log(0.5))),
            split("A_imag", inner, self.pairs, init=S4DFrequencies(self.A_init)),
            # real and imaginary parts of a complex standard normal number
            split("C", inner, self.pairs, 2, init=Normal(math.sqrt(0.5))),
            split("D", inner, init=Constant(1.0)),
            output("out_proj", inner, d_model),
        )

    def state(self, d_model: int) -> tuple[StateDeclaration, ...]:
        inner = self.expand * d_model
        return (
            StateDeclaration("conv", (self.d_conv - 1, inner), "compute", tp=1),
            StateDeclaration("h", (inner, self.pairs, 2, 1), "float32", tp=0),
        )

    def activation_costs(self, d_model: int) -> MixerCosts:
        inner = self.expand * d_model
        states, (conv, h) = inner * self.pairs, self.state(d_model)
        powers = (CHUNK + 1) * (8 * states + inner)
        forms: tuple[Literal["graph", "kernel"], ...] = ("graph", "kernel")
        return MixerCosts(
            saved=(
                SavedTensor("in_proj input", d_model, "compute", split=False),
                *(replace(saved, recomputed=False) for saved in saved_by_block(self.block, inner)),
                *self._saved_by_output(inner),
                SavedTensor("out_proj input", inner, "compute"),
                SavedTensor("discretized A and C", 21 * states, "float32", per_token=False),
                # not saved where the recurrence runs again
                *(SavedTensor("powers of A", powers, "float32", per_token=False, in_recurrence=form) for form in forms),
            ),
            recurrences=(
                RecurrenceCosts("short_conv", (conv,), chunk=0),
                RecurrenceCosts("s4d", (h,), chunk=CHUNK, transition=((inner, self.pairs, 2, 2),), eager=self._eager(inner)),
            ),
            # a chunk's convolution, and per pair of states 4 to read and 4 to write
            vector_flops=2 * CHUNK * inner + 8 * states,
        )

    def _saved_by_output(self, inner: int) -> tuple[SavedTensor, ...]:
        """Saved tensors between the state space model and out_proj."""
        if self.block == "no_gate":
            return ()
        if self.block == "h3":
            return (SavedTensor("y", inner, "compute"),)
        return (SavedTensor("y", inner, "float32"), *saved_by_gate("z", inner))

    def _eager(self, inner: int) -> Eager:
        """Cost of PyTorch's operators on a GPU, as a test counts them. inner: channels."""
        return Eager(
            why="it has a form in PyTorch alone",
            instead="mamba with selective=[] has kernels",
            launches=(1.9, 5.1),
            moved=((134 + 17.4 * self.pairs) * inner, (357 + 65.6 * self.pairs) * inner),
        )

    @classmethod
    def small(cls) -> "S4DConfig":
        return cls(expand=3, d_state=10)
