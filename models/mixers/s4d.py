"""S4D's mixer: a time-invariant state space model with a complex diagonal, in the block of Mamba.

Source: Gu et al. 2022 (arXiv:2206.11893), "On the Parameterization and Initialization of Diagonal State Space Models". Channels are
split over the tensor group.

Choices:

- The block is Mamba's (projection, short convolution with SiLU, gate, projection), as in the ablations of Mamba's paper, where the
  state space model is an inner layer among others; the setting block has the others of those tables. S4's own block has no
  convolution and no gate.
- B is 1, as in the released code: only the product of B and C matters. The discretization is the zero-order hold.
- A has a real part that is negative by -exp(A_log), and dt = exp(log_dt) is a parameter of each channel.

Shapes: B batch, T time, M d_model, D this rank's channels (d_inner), N pairs of states, W d_conv.
"""

import torch
from torch import Tensor, nn

from baton.kernels.protocol import State
from baton.kernels.s4d import recurrence
from baton.kernels.s4d.chunked import times
from baton.models.forward_context import LOCAL, ForwardContext
from baton.models.mixer import Mixer
from baton.models.settings.s4d import S4DConfig
from baton.models.ssm_block import convolution_of, gated_output, parts_of
from baton.parallel.tensor import ColumnParallelLinear, RowParallelLinear


class S4D(Mixer, settings=S4DConfig):
    """h = exp(dt A) h + (exp(dt A) - 1) / A x, y = W ((2 Re <C, h> + D x) silu(W_z x)), A = -exp(A_log) + i A_imag.

    x [B, T, M], pos [B, T], State {conv [B, W-1, D], h [B, D, N, 2, 1]} -> y [B, T, M], State. The state is h A / (exp(dt A) - 1),
    which has x itself as its input.
    """

    config: S4DConfig
    in_proj: ColumnParallelLinear
    conv_weight: nn.Parameter
    conv_bias: nn.Parameter
    log_dt: nn.Parameter
    A_log: nn.Parameter
    A_imag: nn.Parameter
    C: nn.Parameter
    D: nn.Parameter
    out_proj: RowParallelLinear

    def forward(
        self, x_BTM: Tensor, pos_BT: Tensor, state: State | None, forward_context: ForwardContext = LOCAL
    ) -> tuple[Tensor, State]:
        block = self.config.block
        convolved_BTD, factor_BTD, gate_BTD = parts_of(block, self.in_proj(x_BTM, self.in_proj.local_splits))
        tail = None if state is None else {"conv": state["conv"]}
        conv_inputs = (convolved_BTD, self.conv_weight, self.conv_bias)
        x_BTD, tail = self.run_recurrence(convolution_of(block), conv_inputs, pos_BT, tail, forward_context)
        if factor_BTD is not None:
            x_BTD = x_BTD * factor_BTD
        initial = None if state is None else {"h": state["h"]}
        inputs = (x_BTD, *self._discretized())
        y_BTD, h = self.run_recurrence(recurrence.S4D(), inputs, pos_BT, initial, forward_context)
        y_BTD = y_BTD + self.D * x_BTD
        return self.out_proj(gated_output(block, y_BTD, gate_BTD, x_BTD.dtype)), {**tail, **h}

    def _discretized(self) -> tuple[Tensor, Tensor, Tensor]:
        """dt Re A and dt Im A, [D, N], and C (exp(dt A) - 1) / A, [D, N, 2]."""
        dt_D1, re_DN = self.log_dt.exp()[:, None], -self.A_log.exp()
        log_decay_DN, angle_DN = dt_D1 * re_DN, dt_D1 * self.A_imag
        # exp - 1 without cancellation: cos - 1 = -2 sin^2 of half the angle
        size_DN = torch.expm1(log_decay_DN)
        held_re_DN = size_DN * angle_DN.cos() - 2 * (angle_DN / 2).sin().square()
        held_DN2 = torch.stack((held_re_DN, (size_DN + 1) * angle_DN.sin()), dim=-1)
        inverse_DN2 = torch.stack((re_DN, -self.A_imag), dim=-1) / (re_DN.square() + self.A_imag.square())[..., None]
        return log_decay_DN, angle_DN, times(self.C, times(held_DN2, inverse_DN2))
