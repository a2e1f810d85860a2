"""Mamba's mixer: gated selective state space with a short convolution.

Channels (d_inner) are split over the tensor group, so the convolution and the scan need no communication; the step sizes and
the matrices B and C mix all channels and are summed over the group (x_proj, row parallel). Source: Gu & Dao, "Mamba", section 3.4
and appendix; the released code for what the paper leaves out (convolution bias, skip, initial values).

Shapes: B batch, T time, M d_model, D this rank's channels, N d_state, R dt_rank, W d_conv.
"""

import torch
import torch.nn.functional as F
from megatron.core import ModelParallelConfig
from torch import Tensor, nn

from baton.kernels.protocol import Leaf, State
from baton.kernels.selective_scan.op import selective_scan
from baton.kernels.short_conv.op import short_conv
from baton.models import init
from baton.models.config import MambaConfig
from baton.parallel.layout import Init, ParameterLayout, declare, layout_of
from baton.parallel.tensor import ColumnParallelLinear, RowParallelLinear, copy_to_tensor_group, require_divisible


class Mamba(nn.Module):
    """x [B, T, M], pos [B, T], State {conv [B, W-1, D], scan [B, D, N]} -> y [B, T, M], State."""

    def __init__(
        self, d_model: int, n_layers: int, config: MambaConfig, megatron: ModelParallelConfig, compute_dtype: torch.dtype
    ) -> None:
        super().__init__()
        tensor_size = megatron.tensor_model_parallel_size
        d_inner = config.expand * d_model
        require_divisible("model.mixer.expand * model.d_model", d_inner, tensor_size)
        self.config = config
        self.dt_rank = config.dt_rank or -(-d_model // 16)
        self.compute_dtype = compute_dtype

        def channels(shape: tuple[int, ...], fill: Init, decay: bool) -> nn.Parameter:
            layout = ParameterLayout(shape, fill, split=0, decay=decay)
            return declare(nn.Parameter(torch.empty(layout.local_shape(tensor_size))), layout)

        self.in_proj = ColumnParallelLinear(
            d_model,
            2 * d_inner,
            init.linear(d_model),
            megatron,
            compute_dtype=compute_dtype,
            parts=(("x", d_inner), ("z", d_inner)),
        )
        self.conv_weight = channels((d_inner, config.d_conv), init.linear(config.d_conv), decay=True)
        self.conv_bias = channels((d_inner,), init.linear(config.d_conv), decay=False)
        self.x_proj = RowParallelLinear(
            d_inner, self.dt_rank + 2 * config.d_state, init.linear(d_inner), megatron, compute_dtype=compute_dtype
        )
        # every rank's channels use the same rho, B and C: copy_to_tensor_group below sums their gradient once for all three
        self.dt_proj = ColumnParallelLinear(
            self.dt_rank, d_inner, init.linear(self.dt_rank), megatron, compute_dtype=compute_dtype, own_input=True
        )
        step_size = init.inverse_softplus_log_uniform(config.dt_min, config.dt_max, config.dt_floor)
        self.dt_bias = channels((d_inner,), step_size, decay=False)
        self.A_log = channels((d_inner, config.d_state), init.log_arange, decay=False)
        self.D = channels((d_inner,), init.constant(1.0), decay=False)
        self.out_proj = RowParallelLinear(
            d_inner, d_model, init.linear(d_inner, scale=n_layers**-0.5), megatron, compute_dtype=compute_dtype
        )

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """What is carried per sequence: the convolution's last inputs and the scan's state (fp32 whatever the matmuls use)."""
        d_inner, d_state = layout_of(self.A_log).shape
        return (
            Leaf("conv", (self.config.d_conv - 1, d_inner), self.compute_dtype, tp=1, grad=True),
            Leaf("scan", (d_inner, d_state), self.A_log.dtype, tp=0, grad=True),
        )

    def forward(self, x_BTM: Tensor, pos_BT: Tensor, state: State | None) -> tuple[Tensor, State]:
        x_BTD, z_BTD = self.in_proj(x_BTM).chunk(2, dim=-1)
        u_BTD, tail = short_conv(
            x_BTD,
            self.conv_weight,
            self.conv_bias,
            pos=pos_BT,
            tail=None if state is None else state["conv"],
            activation="silu",
        )
        projected = copy_to_tensor_group(self.x_proj(u_BTD))
        rho_BTR, B_BTN, C_BTN = projected.split([self.dt_rank, self.config.d_state, self.config.d_state], dim=-1)
        # the bias is fp32 and is added in fp32: rounding it would move the step sizes in jumps of 3 %
        delta_BTD = F.softplus(self.dt_proj(rho_BTR).to(self.dt_bias.dtype) + self.dt_bias)
        y_BTD, scan = selective_scan(
            u_BTD,
            delta_BTD,
            -torch.exp(self.A_log),
            B_BTN,
            C_BTN,
            self.D,
            pos=pos_BT,
            initial_state=None if state is None else state["scan"],
            discretization=self.config.discretization,
        )
        gated = y_BTD.to(delta_BTD.dtype) * F.silu(z_BTD.to(delta_BTD.dtype))
        return self.out_proj(gated), {"conv": tail, "scan": scan}
