"""Mamba-3's mixer: a state space model with a trapezoidal rule in time, a state that turns, and normalised B and C with biases.

Source: Lahoti et al. 2026, "Mamba-3: Improved Sequence Modeling using State Space Principles" (arXiv:2603.15569);
mamba_ssm for what the paper does not specify (initial values, the angle's tanh, the decay's floor). A head has one input and one
output, or mimo_rank of each (MIMO). Differences: norms have model.norm_eps, 1e-5 there; pair r of states that turn is 2 r and
2 r + 1, there r and r + d_state / 2 if there are several inputs. Heads are split over the tensor group. Of one group every rank
computes B and C, which are one vector each per token and input; several groups are split like the heads that share them. Every rank
computes the angles, which all heads share.

Shapes: B batch, T time, M d_model, H this rank's heads, G its groups, J inputs and outputs of a head (no dimension if it has one),
N d_state, P head_dim, D H * P, R pairs of states that turn.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from baton.kernels.gate import gated
from baton.kernels.mamba3.recurrence import Mamba3 as Mamba3Recurrence
from baton.kernels.mamba3_mimo.ranks import gated_sum
from baton.kernels.mamba3_mimo.recurrence import Mamba3MIMO
from baton.kernels.protocol import State
from baton.models.forward_context import LOCAL, ForwardContext
from baton.models.mixer import Mixer
from baton.models.norm import HeadRMSNorm, SplitRMSNorm
from baton.models.replicated_linear import ReplicatedLinear
from baton.models.settings.mamba3 import Mamba3Config
from baton.parallel.tensor import ColumnParallelLinear, RowParallelLinear


class Mamba3(Mixer, settings=Mamba3Config):
    """x [B, T, M], pos [B, T], State {h [B, heads, N, P], k [B, heads, J, N], x [B, heads, J, P]} -> y [B, T, M], State.

    With k = RMSNorm(B) + B_bias, q = RMSNorm(C) + C_bias, dt = softplus(linear + dt_bias), A = max(softplus(linear), A_floor),
    shares lam = sigmoid(linear), and R turning pairs of states by -dt pi tanh(linear), per head:

        h_t = exp(-A dt) R (h_{t-1} + (1 - lam) dt k_{t-1} x_{t-1}^T) + lam dt k x^T        y = W ((h_t^T q + D x) silu(z))

    With several inputs k x^T is the sum of k_j v_j^T, v_j = x mimo_x_j, and what W projects the sum of
    mimo_o_j (h_t^T q_j + D v_j) silu(z mimo_z_j).
    """

    config: Mamba3Config
    in_proj: ColumnParallelLinear
    bc_proj: ReplicatedLinear
    angle_proj: ReplicatedLinear
    dt_bias: nn.Parameter
    B_norm: HeadRMSNorm
    C_norm: HeadRMSNorm
    B_bias: nn.Parameter
    C_bias: nn.Parameter
    D: nn.Parameter
    mimo_x: nn.Parameter
    mimo_z: nn.Parameter
    mimo_o: nn.Parameter
    norm: SplitRMSNorm
    out_proj: RowParallelLinear

    def forward(
        self, x_BTM: Tensor, pos_BT: Tensor, state: State | None, forward_context: ForwardContext = LOCAL
    ) -> tuple[Tensor, State]:
        config, precise = self.config, self.dt_bias.dtype
        # with a link the initial State may come from another rank, and the recurrence runs again anyway
        selective = self.context.selective_recompute and forward_context.link is None
        dtype = x_BTM.dtype
        x_BTM, z_BTD, x_BTD, dt_BTH, A_BTH, lam_BTH, *own_bc = self.in_proj(
            x_BTM, self.in_proj.local_splits, return_input=True
        )  # fmt: skip
        bc = own_bc[0] if own_bc else self.bc_proj.for_own_heads(self.bc_proj(x_BTM))
        B_BTGJN, C_BTGJN = bc.unflatten(2, (-1, 2, *config.ranks, config.d_state)).unbind(3)
        angle_BTR = self.angle_proj.for_own_heads(self.angle_proj(x_BTM))
        # biases are added in fp32: in bf16 rounding would change the step sizes in steps of 3 %
        dt_BTH = F.softplus(dt_BTH.to(precise) + self.dt_bias)
        A_BTH = F.softplus(A_BTH.to(precise)).clamp(min=config.A_floor)
        inputs = (
            x_BTD.unflatten(2, (-1, config.head_dim)),
            self.B_norm(B_BTGJN, dtype),
            self.C_norm(C_BTGJN, dtype),
            dt_BTH,
            -A_BTH * dt_BTH,
            torch.sigmoid(lam_BTH.to(precise)),
            math.pi * torch.tanh(angle_BTR.to(precise)),
            self.B_bias,
            self.C_bias,
            self.D,
        )
        if config.ranks:
            of_several = Mamba3MIMO(recompute_activations=selective)
            y_BTJHP, final_state = self.run_recurrence(of_several, (*inputs, self.mimo_x), pos_BT, state, forward_context)
            if config.output_norm:
                y_BTJHP = self.norm(y_BTJHP.flatten(3), precise).view(y_BTJHP.shape)
            z_BTHP = z_BTD.unflatten(2, (-1, config.head_dim))
            y_BTHP = gated_sum(y_BTJHP, z_BTHP, self.mimo_z, self.mimo_o, z_BTD.dtype)
            return self.out_proj(y_BTHP.flatten(2)), final_state
        recurrence = Mamba3Recurrence(recompute_activations=selective)
        y_BTHP, final_state = self.run_recurrence(recurrence, inputs, pos_BT, state, forward_context)
        y_BTD = y_BTHP.flatten(2)
        if config.output_norm:
            return self.out_proj(self.norm.gated(y_BTD, z_BTD)), final_state
        return self.out_proj(gated(y_BTD, z_BTD, dtype=z_BTD.dtype)), final_state
