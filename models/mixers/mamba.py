"""Mamba's mixer: a selective state space model, in the block of `models.ssm_block`.

Source: Gu & Dao 2023, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", section 3 and appendix. Channels are
split over the tensor group.

Differences from the paper:

- The released code adds a bias to the convolution and a skip D x to the output; algorithm 2 has neither. skip=false removes D x.
- The released code draws the initial step sizes log-uniformly, with a floor of 1e-4; section 3.6 draws them uniformly from
  [0.001, 0.1]. dt_init=uniform is the paper's.
- The input matrix is discretized by Euler's rule, as in the released code; discretization=zoh is equation 4.
- projection_norm_eps normalizes the step sizes' low-rank code, B and C, as FalconMamba (Zuo et al. 2024) does.

A misprint in the paper: table 8 gives a random initial value as A ~ exp(N(0, 1)). A must be negative, so it is -exp(N(0, 1)).

Shapes: B batch, T time, D this rank's channels (d_inner), N d_state.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from baton.kernels.protocol import Inputs
from baton.kernels.selective_scan.recurrence import SelectiveScan
from baton.models.norm import unweighted
from baton.models.settings.mamba import MambaConfig
from baton.models.ssm_block import SSMBlock


class Mamba(SSMBlock, settings=MambaConfig):
    """h = exp(dt A) h + dt B x, y = <C, h> + D x, with dt = softplus(low rank + dt_bias) and A = -exp(A_log)."""

    config: MambaConfig

    A_log: nn.Parameter

    @property
    def recurrence(self) -> SelectiveScan:
        return SelectiveScan(self.config.discretization, gated=True)

    def shared_inputs(self, projected: Tensor) -> Sequence[Tensor]:
        parts, eps = super().shared_inputs(projected), self.config.projection_norm_eps
        if eps is None:
            return parts
        precise = torch.promote_types(projected.dtype, torch.float32)
        return [unweighted(x, eps, precise=precise, dtype=projected.dtype) for x in parts]

    def scan_inputs(
        self, x_BTD: Tensor, dt_BTD: Tensor, B_BTN: Tensor, C_BTN: Tensor, D_D: Tensor, z_BTD: Tensor, dt_bias_D: Tensor
    ) -> Inputs:
        return x_BTD, dt_BTD, B_BTN, C_BTN, z_BTD, -torch.exp(self.A_log), D_D, dt_bias_D
