"""Settings of Mamba."""

from dataclasses import replace
from typing import Literal

from pydantic import Field, model_validator

from baton.models.initializers import Initializer, InverseSoftplusLogUniform, InverseSoftplusUniform, LogArange
from baton.models.settings.cost_model import EXP_FLOPS, MixerCosts, SavedTensor
from baton.models.settings.declarations import ParameterDeclaration, split
from baton.models.settings.ssm_block import SSMBlockConfig


class MambaConfig(SSMBlockConfig):
    """The selective state space of Mamba (Gu & Dao)."""

    kind: Literal["mamba"] = "mamba"
    dt_init: Literal["uniform", "log_uniform"] = Field(
        "log_uniform", description="distribution of the initial step sizes between dt_min and dt_max. log_uniform: the released "
        "code's, and the default, because the released models were trained from it; uniform: the paper's section 3.6, whose mean "
        "step is 0.05 instead of 0.02"
    )  # fmt: skip
    dt_min: float = Field(1e-3, gt=0, description="smallest initial step size; 0.001 in the paper and in the released code")
    dt_max: float = Field(1e-1, gt=0, description="largest initial step size; 0.1 in the paper and in the released code")
    dt_floor: float = Field(1e-4, gt=0, description="initial step sizes are raised to this at least; the released code's, and not "
                            "in the paper: it changes nothing unless dt_min is smaller")  # fmt: skip
    discretization: Literal["euler", "zoh"] = Field("euler", description="of the input matrix; euler is what was released")

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
        # the decay's exponent 1, the input term 2, the step 2, the output 2
        costs, inner = self.skeleton_costs(d_model, EXP_FLOPS + 7), self.expand * d_model
        saved = (
            # softplus saves its input; of A, the exponential and its negative
            SavedTensor("step sizes before softplus", inner, "float32", in_recurrence="graph"),
            SavedTensor("A", 2 * inner * self.d_state, "float32", per_token=False),
        )
        return replace(costs, saved=(*costs.saved, *saved))
