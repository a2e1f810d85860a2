"""Settings of Longhorn."""

from typing import Literal

from pydantic import Field

from baton.models.initializers import Constant, Initializer
from baton.models.settings.cost_model import MixerCosts
from baton.models.settings.ssm_block import SSMBlockConfig


class LonghornConfig(SSMBlockConfig):
    """The online learner of Longhorn (Liu et al.), in the diagonal form that the paper's models use.

    The exact update of theorem 3.1 cannot be chosen: no kernel computes it. The paper trains no model with it either.
    skip=false and beta_bias=false give algorithm 1 as printed.
    """

    kind: Literal["longhorn"] = "longhorn"
    beta_bias: bool = Field(True, description="add a learned bias, 0 at first, to beta before the sigmoid; true as in the authors' "
                            "code, algorithm 1 has none")  # fmt: skip

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
        # the decay 2, its limit 1, the input term 2, the step 2, the output 2
        return self.skeleton_costs(d_model, flops=9)
