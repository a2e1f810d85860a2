"""Settings of Longhorn."""

from typing import Literal

from pydantic import Field

from baton.models.initializers import Constant, Initializer
from baton.models.settings.cost_model import MixerCosts
from baton.models.settings.ssm_block import SSMBlockConfig


class LonghornConfig(SSMBlockConfig):
    """Longhorn (Liu et al. 2024) with the diagonal approximation of its update, as in the paper's models.

    The exact update of theorem 3.1 is not implemented; the paper trains no model with it either. skip=false and beta_bias=false
    give algorithm 1 as printed.
    """

    kind: Literal["longhorn"] = "longhorn"
    beta_bias: bool = Field(
        True,
        description="add a learned bias, initially 0, to beta before the sigmoid; true as in the authors' code, not in algorithm 1",
    )

    @property
    def has_step_bias(self) -> bool:
        return self.beta_bias

    @property
    def step_name(self) -> str:
        return "beta"

    @property
    def state_name(self) -> str:
        return "S"

    @property
    def step_bias_init(self) -> Initializer:
        return Constant(0.0)

    def activation_costs(self, d_model: int) -> MixerCosts:
        # FLOPs per element of the state: decay 2, its clamp 1, input term 2, update 2, output 2
        return self.skeleton_costs(d_model, flops=9)
