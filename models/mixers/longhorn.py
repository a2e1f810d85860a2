"""Longhorn's mixer: the closed-form update of online associative recall, in the block of `models.ssm_block`.

Source: Liu et al. 2024, "Longhorn: State Space Models are Amortized Online Learners", section 3 and algorithm 1. Channels are split
over the tensor group.

Differences from the paper:

- The authors' code adds a skip D x to the output and a bias, initially 0, to beta. Algorithm 1 has neither; skip=false and
  beta_bias=false remove them. beta's projection has the rank of Mamba's step sizes; the paper only says that it can be low.
- The exact update of theorem 3.1 is not available as a setting: this mixer, like all models of the paper, uses the diagonal form.
  kernels/longhorn/reference.py defines the exact update, which tests compare with the objective's minimum.

Misprints in the paper: table 4 has +2 <Sk, x> where the sign is minus, and 1_{m x n} for 1_{d x m}; x ~ S^T k is S k; "theorem 6"
is theorem 3.1; table 2's caption gives GLA a state of 1024K, its table and formula 512K.
"""

from torch import Tensor

from baton.kernels.longhorn.recurrence import Longhorn as LonghornScan
from baton.kernels.protocol import Inputs
from baton.models.settings.longhorn import LonghornConfig
from baton.models.ssm_block import SSMBlock


class Longhorn(SSMBlock, settings=LonghornConfig):
    """S = (1 - eps k^2) S + eps x k, y = S q + D x, with eps = beta / (1 + beta |k|^2) and beta = sigmoid(low rank + bias)."""

    config: LonghornConfig

    @property
    def recurrence(self) -> LonghornScan:
        return LonghornScan(gated=True)

    def scan_inputs(
        self, x_BTD: Tensor, beta_BTD: Tensor, k_BTN: Tensor, q_BTN: Tensor, D_D: Tensor, z_BTD: Tensor | None, beta_bias_D: Tensor
    ) -> Inputs:
        assert z_BTD is not None
        return x_BTD, k_BTN, q_BTN, beta_BTD, z_BTD, D_D, beta_bias_D
