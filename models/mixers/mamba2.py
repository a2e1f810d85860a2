"""Mamba-2's mixer: a state space with one decay per head and token, whose input and output vectors all heads share.

Source: Dao & Gu 2024, "Transformers are SSMs: Generalized Models and Efficient Algorithms Through Structured State Space Duality",
section 7; the released code for what the paper leaves out (convolution bias, skip, initial values, gate before the norm). Heads
are split over the tensor group; B and C, one vector each per token, are computed by every rank, their convolution included.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.kernels.gate import gated
from baton.kernels.gated_linear_attention.recurrence import GatedLinearAttention
from baton.kernels.head_scale import head_scale
from baton.kernels.protocol import State, StateSpec
from baton.kernels.short_conv.recurrence import ShortConv
from baton.models import init
from baton.models.mixer import Mixer, MixerContext
from baton.models.norm import SplitRMSNorm
from baton.models.replicated_linear import ReplicatedLinear, replicated_parameter
from baton.models.settings.mamba2 import Mamba2Config

_CONV = ShortConv("silu")


class Mamba2(Mixer, settings=Mamba2Config):
    """S = exp(-A dt) S + B (dt x)^T, y = W RMSNorm((S^T C + D x) silu(z)), dt = softplus(linear + bias), A > 0 per head; x, B, C
    behind a short convolution and silu.

    x [B, T, M], pos [B, T], State {conv_x [B, W - 1, d_inner], conv_bc [B, W - 1, 2 d_state], S [B, heads, d_state, head_dim]}
    -> y [B, T, M], State. Where tensor ranks share the residual stream, the cotangent of conv_bc is a part on each of them.
    """

    def __init__(self, config: Mamba2Config, context: MixerContext) -> None:
        super().__init__()
        self.config, self.compute_dtype = config, context.compute_dtype
        self.d_inner, self.heads = config.expand * context.d_model, config.head_count(context.d_model)
        parts = (("z", self.d_inner), ("x", self.d_inner), ("dt", self.heads))
        self.in_proj = context.column(sum(width for _, width in parts), fused_splits=parts)
        self._widths = [width // context.tensor_size for _, width in parts]
        self.bc_proj = ReplicatedLinear(2 * config.d_state, context)
        initializer = init.linear(config.d_conv)
        self.conv_weight = context.split((self.d_inner, config.d_conv), initializer, decay=True)
        self.conv_bias = context.split((self.d_inner,), initializer, decay=False)
        self.bc_conv_weight = replicated_parameter((2 * config.d_state, config.d_conv), initializer, context, decay=True)
        self.bc_conv_bias = replicated_parameter((2 * config.d_state,), initializer, context, decay=False)
        self.A_log = context.split((self.heads,), init.log_uniform(config.A_init_min, config.A_init_max), decay=False)
        step = init.inverse_softplus_log_uniform(config.dt_min, config.dt_max, config.dt_floor)
        self.dt_bias = context.split((self.heads,), step, decay=False)
        self.D = context.split((self.heads,), init.constant(1.0), decay=False)
        self.norm = SplitRMSNorm(self.d_inner, context)
        self.out_proj = context.output(self.d_inner)

    @property
    def state_specs(self) -> tuple[StateSpec, ...]:
        """The convolutions' last inputs and the state (fp32 whatever the matmuls use)."""
        tail, d_state = self.config.d_conv - 1, self.config.d_state
        return (
            StateSpec("conv_x", (tail, self.d_inner), self.compute_dtype, tp=1, grad=True),
            StateSpec("conv_bc", (tail, 2 * d_state), self.compute_dtype, tp=None, grad=True),
            StateSpec("S", (self.heads, d_state, self.config.head_dim), self.D.dtype, tp=0, grad=True),
        )

    def forward(self, x_BTM: Tensor, pos_BT: Tensor, state: State | None) -> tuple[Tensor, State]:
        z, x, dt = self.in_proj(x_BTM, self._widths)
        tails = (None, None) if state is None else ({"tail": state["conv_x"]}, {"tail": state["conv_bc"]})
        x, conv_x = self.carry(_CONV, (x, self.conv_weight, self.conv_bias), pos_BT, tails[0])
        bc, conv_bc = self.carry(_CONV, (self.bc_proj(x_BTM), self.bc_conv_weight, self.bc_conv_bias), pos_BT, tails[1])
        B, C = self.bc_proj.for_own_heads(bc).unsqueeze(2).chunk(2, dim=-1)
        # the bias is fp32 and is added in fp32: rounding it would move the step sizes in jumps of 3 %
        dt_BTH = F.softplus(dt.to(self.dt_bias.dtype) + self.dt_bias)
        x_BTHP = x.unflatten(2, (-1, self.config.head_dim))
        inputs = (C, B, head_scale(x_BTHP, dt_BTH), -torch.exp(self.A_log) * dt_BTH)
        recurrence = GatedLinearAttention("scalar")
        y_BTHP, leaving = self.carry(recurrence, inputs, pos_BT, None if state is None else {"S": state["S"]})
        y_BTD = (y_BTHP + self.D.unsqueeze(-1) * x_BTHP).flatten(2)
        return self.out_proj(self.norm(gated(y_BTD, z), z.dtype)), {
            "conv_x": conv_x["tail"],
            "conv_bc": conv_bc["tail"],
            **leaving,
        }
