"""Settings of Mamba."""

from dataclasses import replace
from typing import Literal

from pydantic import Field, model_validator

from baton.models.initializers import Initializer, InverseSoftplusLogUniform, InverseSoftplusUniform, LogArange
from baton.models.settings.cost_model import EXP_FLOPS, MixerCosts, SavedTensor
from baton.models.settings.declarations import ParameterDeclaration, split
from baton.models.settings.ssm_block import SSMBlockConfig


class MambaConfig(SSMBlockConfig):
    """The selective state space model of Mamba (Gu & Dao 2023)."""

    kind: Literal["mamba"] = "mamba"
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
        description="epsilon of RMS norms without weights over the step sizes' low-rank code, over B and over C, as in FalconMamba "
        "(Zuo et al. 2024), where it is 1e-6; null: no such norms, as in Mamba",
    )

    @model_validator(mode="after")
    def _step_sizes_are_in_order(self) -> "MambaConfig":
        if self.dt_min > self.dt_max:
            raise ValueError(f"dt_min={self.dt_min} exceeds dt_max={self.dt_max}; initial step sizes lie between them")
        return self

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
        A_log = split("A_log", self.expand * d_model, self.d_state, init=LogArange())
        return (*super().parameters(d_model), A_log)

    def activation_costs(self, d_model: int) -> MixerCosts:
        # FLOPs per element of the state besides the exponential: its argument 1, input term 2, update 2, output 2
        costs, inner = self.skeleton_costs(d_model, EXP_FLOPS + 7), self.expand * d_model
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
        return replace(costs, saved=(*costs.saved, *saved))
