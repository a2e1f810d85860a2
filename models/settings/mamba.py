"""Settings of Mamba."""

import math
from dataclasses import replace
from typing import Literal

from pydantic import Field, model_validator

from baton.models.initializers import (
    Constant,
    Initializer,
    InverseSoftplusLogUniform,
    InverseSoftplusUniform,
    LogArange,
    Normal,
)
from baton.models.settings.cost_model import EXP_FLOPS, MixerCosts, SavedTensor
from baton.models.settings.declarations import ParameterDeclaration, split
from baton.models.settings.ssm_block import BLOCK, Block, SSMBlockConfig


class MambaConfig(SSMBlockConfig):
    """The selective state space model of Mamba (Gu & Dao 2023)."""

    kind: Literal["mamba"] = "mamba"
    block: Block = BLOCK
    A_init: Literal["s4d_real", "half", "random"] = Field(
        "s4d_real",
        description="initial values of A. s4d_real: -(n + 1) for state index n, the paper's default; half: -1/2; random: minus the "
        "exponential of a standard normal number. All are rows of table 8, whose complex A is in the kind s4d, without selection",
    )
    selective: tuple[Literal["dt", "B", "C"], ...] = Field(
        ("dt", "B", "C"),
        description="which of the step size and the projections B and C are computed from the token (table 7). The others are "
        "parameters: dt its bias alone, B and C a matrix [d_inner, d_state] each, as in algorithm 1. [] gives a time-invariant "
        "model. B or C as parameters make the scan d_state times as wide: d_state times the activations",
    )
    dt_init: Literal["uniform", "log_uniform"] = Field(
        "log_uniform",
        description="distribution of the initial step sizes between dt_min and dt_max. log_uniform: the released code's, from "
        "which the released models were trained; uniform: the paper's (section 3.6), with a mean step size of 0.05 instead of 0.02",
    )
    dt_min: float = Field(1e-3, gt=0, description="smallest initial step size; 0.001 in the paper and in the released code")
    dt_max: float = Field(1e-1, gt=0, description="largest initial step size; 0.1 in the paper and in the released code")
    dt_floor: float = Field(
        1e-4,
        gt=0,
        description="smaller initial step sizes are raised to this; from the released code, not in the paper. It has no effect "
        "unless dt_min is smaller",
    )
    discretization: Literal["euler", "zoh"] = Field(
        "euler", description="discretization of the input matrix B; euler as in the released code, zoh: zero-order hold"
    )
    projection_norm_eps: float | None = Field(
        None,
        gt=0,
        description="epsilon of RMS norms over the step sizes' low-rank code, over B and over C, as in FalconMamba (Zuo et al. "
        "2024) and Jamba (Lieber et al. 2024), where it is 1e-6; null: no such norms, as in Mamba",
    )
    projection_norm_weights: bool = Field(
        False, description="these norms have weights, as in Jamba; false: none, as in FalconMamba"
    )

    @model_validator(mode="after")
    def _step_sizes_are_in_order(self) -> "MambaConfig":
        if self.dt_min > self.dt_max:
            raise ValueError(f"dt_min={self.dt_min} exceeds dt_max={self.dt_max}; initial step sizes lie between them")
        return self

    @model_validator(mode="after")
    def _selective_parts_are_named_once(self) -> "MambaConfig":
        if len(set(self.selective)) < len(self.selective):
            raise ValueError(f"selective={list(self.selective)} names a part twice; name each of dt, B and C at most once")
        if self.projection_norm_eps is not None and len(self.selective) < 3:
            raise ValueError(
                f"projection_norm_eps={self.projection_norm_eps} normalizes dt's code, B and C, which "
                f"selective={list(self.selective)} does not all compute; set projection_norm_eps: null"
            )
        if self.projection_norm_weights and self.projection_norm_eps is None:
            raise ValueError("projection_norm_weights=true needs the norms; set projection_norm_eps, which is 1e-6 in Jamba")
        return self

    @property
    def static(self) -> tuple[str, ...]:
        """Those of B and C that are parameters."""
        return tuple(name for name in ("B", "C") if name not in self.selective)

    def shared_widths(self, d_model: int) -> dict[str, int]:
        # in this order, whatever that of the setting
        parts = {"step": "dt", "B": "B", "C": "C"}
        return {name: width for name, width in super().shared_widths(d_model).items() if parts[name] in self.selective}

    @property
    def form(self) -> Block:
        return self.block

    @property
    def step_name(self) -> str:
        return "dt"

    @property
    def state_name(self) -> str:
        return "h"

    @property
    def step_bias_init(self) -> Initializer:
        distribution = InverseSoftplusUniform if self.dt_init == "uniform" else InverseSoftplusLogUniform
        return distribution(self.dt_min, self.dt_max, self.dt_floor)

    def parameters(self, d_model: int) -> tuple[ParameterDeclaration, ...]:
        inner = self.expand * d_model
        inits: dict[str, Initializer] = {"s4d_real": LogArange(), "half": Constant(math.log(0.5)), "random": Normal(1.0)}
        A_log = split("A_log", inner, self.d_state, init=inits[self.A_init])
        # of B and C the paper gives no initial values where they are parameters: S4D's are 1 and standard normal
        inits |= {"B": Constant(1.0), "C": Normal(1.0)}
        static = (split(name, inner, self.d_state, init=inits[name]) for name in self.static)
        norms = (_norm_weight(name, width) for name, width in self.norm_weights(d_model).items())
        return (*super().parameters(d_model), A_log, *static, *norms)

    def norm_weights(self, d_model: int) -> dict[str, int]:
        """Names and widths of the weights of the norms over dt's code, B and C, in this order; empty without weights."""
        names = ("dt_norm", "B_norm", "C_norm")
        return dict(zip(names, self.shared_widths(d_model).values(), strict=True)) if self.projection_norm_weights else {}

    def activation_costs(self, d_model: int) -> MixerCosts:
        # FLOPs per element of the state besides the exponential: its argument 1, input term 2, update 2, output 2
        costs, inner = self.skeleton_costs(d_model, EXP_FLOPS + 7), self.expand * d_model
        states = inner * self.d_state
        saved: tuple[SavedTensor, ...] = (
            # softplus saves its input; A = -exp(A_log) saves the exponential and its negative
            SavedTensor("step sizes before softplus", inner, "float32", in_recurrence="graph"),
            SavedTensor("A", 2 * inner * self.d_state, "float32", per_token=False),
        )
        if self.projection_norm_eps is not None:
            code = self.step_rank(d_model) + 2 * self.d_state
            saved += (
                # on a GPU contiguous copies of the code, B and C
                SavedTensor("norms' input", code, "float32", split=False, cast=True, device="cpu"),
                SavedTensor("norms' input", code, "compute", split=False, device="gpu"),
                SavedTensor("norms' scale", 3, "float32", split=False),
                SavedTensor("normalised code, B and C", code, "compute", split=False),
            )
            if self.projection_norm_weights:
                saved += (SavedTensor("norms' normalised input", code, "float32", split=False, device="cpu"),)
        if not self.static:
            return replace(costs, saved=(*costs.saved, *saved))
        # the step sizes are computed outside the scan, whose inputs and outputs have a channel for each state
        outside = {"step sizes before softplus", "step sizes", "y", "z input", "z activated"}
        saved = tuple(replace(x, in_recurrence=None) if x.name in outside else x for x in (*costs.saved, *saved))
        saved = tuple(x for x in saved if x.name not in ("step sizes", "projected step sizes"))
        saved += (
            SavedTensor("x in float32", inner, "float32", cast=True),
            SavedTensor("B x", states, "float32"),
            SavedTensor("step sizes of every state", states, "float32"),
            SavedTensor("states", states, "float32"),
            *(
                SavedTensor(f"{name} in float32", self.d_state, "float32", split=False, cast=True)
                for name in self.shared_widths(d_model)
                if name != "step"
            ),
        )
        return replace(costs, saved=saved)


def _norm_weight(name: str, width: int) -> ParameterDeclaration:
    """Of a norm that every rank computes for its own channels, so that each has a part of its gradient."""
    return ParameterDeclaration(name, (width,), Constant(1.0), decay=False, partial=True)
