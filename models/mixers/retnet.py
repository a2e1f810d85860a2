"""RetNet's mixer: multi-scale retention, linear attention with rotary positions and a decay fixed per head.

Source: Sun et al. 2023, "Retentive Network: A Successor to Transformer for Large Language Models", section 2.3; flash-linear-
attention's layer, with which GSA's paper compares, for RMSNorm in place of its group norm. Heads are split over the tensor group.
"""

import torch
from torch import Tensor

from baton.kernels.gate import gated
from baton.kernels.gated_linear_attention.recurrence import GatedLinearAttention
from baton.kernels.protocol import State, StateSpec
from baton.kernels.rotary import rotary
from baton.models.feature_map import FEATURE_MAPS
from baton.models.mixer import Mixer, MixerContext
from baton.models.norm import HeadRMSNorm
from baton.models.settings.retnet import RetNetConfig


class RetNet(Mixer, settings=RetNetConfig):
    """S = a S + k v^T, y = W (RMSNorm(S^T q / sqrt(d_key)) silu(W_g x)), q and k turned by position, a = 1 - 2^-(5 + head).

    x [B, T, M], pos [B, T], State {S [B, heads, d_key, d_value]} -> y [B, T, M], State. Keys enter the state turned.
    """

    def __init__(self, config: RetNetConfig, context: MixerContext) -> None:
        super().__init__()
        self.config, self.sizes = config, config.head_sizes(context.d_model)
        heads, d_key, d_value = self.sizes
        parts = (("q", heads * d_key), ("k", heads * d_key), ("v", heads * d_value), ("gate", heads * d_value))
        self.in_proj = context.column(sum(width for _, width in parts), fused_splits=parts)
        self._widths = [width // context.tensor_size for _, width in parts]
        own = heads // context.tensor_size
        first = own * self.in_proj.tp_group.rank() if context.tensor_size > 1 else 0
        self._own_heads = range(first, first + own)
        self.norm = HeadRMSNorm(d_value, context.norm_eps)
        self.out_proj = context.output(heads * d_value)

    @property
    def state_specs(self) -> tuple[StateSpec, ...]:
        """The state, fp32 whatever the matmuls use."""
        return (StateSpec("S", tuple(self.sizes), self.norm.weight.dtype, tp=0, grad=True),)

    def log_decay(self, like: Tensor) -> Tensor:
        """log a of this rank's heads, [heads], on the device of `like`, fp32."""
        heads = torch.arange(self._own_heads.start, self._own_heads.stop, dtype=self.norm.weight.dtype, device=like.device)
        return torch.log1p(-torch.exp2(-self.config.decay_exponent - heads))

    def forward(self, x_BTM: Tensor, pos_BT: Tensor, state: State | None) -> tuple[Tensor, State]:
        _, d_key, d_value = self.sizes
        q, k, v, gate = self.in_proj(x_BTM, self._widths)
        q, k = (FEATURE_MAPS[self.config.feature_map](x).unflatten(2, (-1, d_key)) for x in (q, k))
        inputs = (
            *rotary(q, k, pos_BT, self.config.rope_theta),
            v.unflatten(2, (-1, d_value)),
            self.log_decay(x_BTM).expand(*x_BTM.shape[:2], -1),
        )
        recurrence = GatedLinearAttention("scalar", scale=d_key**-0.5)
        o_BTHV, leaving = self.carry(recurrence, inputs, pos_BT, None if state is None else {"S": state["S"]})
        y_BTV = gated(self.norm(o_BTHV).flatten(2), gate, dtype=gate.dtype)
        return self.out_proj(y_BTV), leaving
