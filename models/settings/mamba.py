"""Settings of Mamba."""

from dataclasses import replace
from typing import Literal

from pydantic import Field, model_validator

from baton.models.settings.cost_model import EXP_FLOPS, Footprint, Kept, split
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

    def footprint(self, d_model: int) -> Footprint:
        # the decay's exponent 1, what is added 2, the step 2, the output 2
        skeleton, inner = self.skeleton(d_model, "dt", EXP_FLOPS + 7), self.expand * d_model
        return replace(
            skeleton,
            parameters=(*skeleton.parameters, split("A_log", inner, self.d_state)),
            kept=(
                *skeleton.kept,
                # softplus keeps what goes in; of A, the exponential and its negative
                Kept("step sizes before softplus", inner, "float32", inside="graph"),
                Kept("A", 2 * inner * self.d_state, "float32", once=True),
            ),
        )
