"""Mamba-2's mixer: a state space model with one decay per head and token, and with B and C shared by all heads or by
groups of them.

Source: Dao & Gu 2024, "Transformers are SSMs: Generalized Models and Efficient Algorithms Through Structured State Space Duality",
section 7; the released code for what the paper does not specify (convolution bias, skip, initial values, gate before the norm).
Heads are split over the tensor group. Of one group every rank computes B and C, which are one vector each per token, and their
convolution; several groups are split like the heads that share them.

Shapes: B batch, T time, M d_model, H this rank's heads, G its groups, N d_state, P head_dim, D H * P, W d_conv.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from baton.kernels.gated_linear_attention.recurrence import GatedLinearAttention
from baton.kernels.head_scale import head_scale
from baton.kernels.protocol import State
from baton.kernels.short_conv.recurrence import ShortConv
from baton.models.forward_context import LOCAL, ForwardContext
from baton.models.mixer import Mixer
from baton.models.norm import SplitRMSNorm
from baton.models.replicated_linear import ReplicatedLinear
from baton.models.settings.mamba2 import Mamba2Config
from baton.parallel.tensor import ColumnParallelLinear, RowParallelLinear

_CONV = ShortConv("silu")


class Mamba2(Mixer, settings=Mamba2Config):
    """S = exp(-A dt) S + B (dt x)^T, y = W RMSNorm((S^T C + D x) silu(z)), dt = softplus(linear + bias), A > 0 per head; x, B and C
    pass a short convolution and silu.

    x [B, T, M], pos [B, T], State {conv_x [B, W - 1, d_inner], conv_bc [B, W - 1, 2 n_groups d_state], S [B, heads, d_state,
    head_dim]} -> y [B, T, M], State. With sequence parallelism and one group, each tensor rank has only a part of the gradient of
    conv_bc.
    """

    config: Mamba2Config
    in_proj: ColumnParallelLinear
    bc_proj: ReplicatedLinear
    conv_weight: nn.Parameter
    conv_bias: nn.Parameter
    bc_conv_weight: nn.Parameter
    bc_conv_bias: nn.Parameter
    A_log: nn.Parameter
    dt_bias: nn.Parameter
    D: nn.Parameter
    norm: SplitRMSNorm
    out_proj: RowParallelLinear

    def forward(
        self, x_BTM: Tensor, pos_BT: Tensor, state: State | None, forward_context: ForwardContext = LOCAL
    ) -> tuple[Tensor, State]:
        several = self.config.n_groups > 1
        if several:
            z, x, dt, bc = self.in_proj(x_BTM, self.in_proj.local_splits)
        else:
            x_BTM, z, x, dt = self.in_proj(x_BTM, self.in_proj.local_splits, return_input=True)
            bc = self.bc_proj(x_BTM)
        tails = (None, None) if state is None else ({"conv": state["conv_x"]}, {"conv": state["conv_bc"]})
        x, conv_x = self.run_recurrence(_CONV, (x, self.conv_weight, self.conv_bias), pos_BT, tails[0], forward_context)
        bc, conv_bc = self.run_recurrence(_CONV, (bc, self.bc_conv_weight, self.bc_conv_bias), pos_BT, tails[1], forward_context)
        bc = bc if several else self.bc_proj.for_own_heads(bc)
        B_BTGN, C_BTGN = bc.unflatten(2, (-1, 2, self.config.d_state)).unbind(3)
        # the bias is added in fp32: in bf16 its rounding would change the step sizes in steps of 3 %
        dt_BTH = F.softplus(dt.to(self.dt_bias.dtype) + self.dt_bias)
        x_BTHP = x.unflatten(2, (-1, self.config.head_dim))
        inputs = (C_BTGN, B_BTGN, head_scale(x_BTHP, dt_BTH), -torch.exp(self.A_log) * dt_BTH)
        recurrence = GatedLinearAttention("scalar", keep_states=self.context.keep_states)
        y_BTHP, final_state = self.run_recurrence(
            recurrence, inputs, pos_BT, None if state is None else {"S": state["S"]}, forward_context
        )
        return self.out_proj(self.norm.of_gated(y_BTHP.flatten(2), z, skip=(x, self.D))), {
            "conv_x": conv_x["conv"],
            "conv_bc": conv_bc["conv"],
            **final_state,
        }
