"""RetNet's mixer: multi-scale retention, which is linear attention with rotary positions and a fixed decay per head.

Source: Sun et al. 2023, "Retentive Network: A Successor to Transformer for Large Language Models", section 2.3. The norm is RMSNorm
instead of the paper's group norm, as in flash-linear-attention's layer, with which GSA's paper compares. Heads are split over the
tensor group.

Shapes: B batch, T time, M d_model, H this rank's heads, V d_value.
"""

import torch
from torch import Tensor

from baton.kernels.gated_linear_attention.recurrence import GatedLinearAttention
from baton.kernels.protocol import State
from baton.kernels.rotary import rotary
from baton.models.feature_map import FEATURE_MAPS
from baton.models.forward_context import LOCAL, ForwardContext
from baton.models.mixer import Mixer
from baton.models.norm import HeadRMSNorm
from baton.models.rope import rope_rates
from baton.models.settings.retnet import RetNetConfig
from baton.parallel.tensor import ColumnParallelLinear, RowParallelLinear


class RetNet(Mixer, settings=RetNetConfig):
    """S = a S + k v^T, y = W (RMSNorm(S^T q / sqrt(d_key)) silu(W_g x)), q and k rotated by position, a = 1 - 2^-(5 + head).

    x [B, T, M], pos [B, T], State {S [B, heads, d_key, d_value]} -> y [B, T, M], State. Keys enter the state rotated.
    """

    config: RetNetConfig
    in_proj: ColumnParallelLinear
    norm: HeadRMSNorm
    out_proj: RowParallelLinear

    def log_decay(self, like: Tensor) -> Tensor:
        """The log decay g of this rank's heads, [heads], fp32, on the device of `like`."""
        size = self.context.tensor_size
        count = self.config.head_sizes(self.context.d_model).heads // size
        first = count * self.in_proj.tp_group.rank() if size > 1 else 0
        heads = torch.arange(first, first + count, dtype=self.norm.weight.dtype, device=like.device)
        return torch.log1p(-torch.exp2(-self.config.decay_exponent - heads))

    def forward(
        self, x_BTM: Tensor, pos_BT: Tensor, state: State | None, forward_context: ForwardContext = LOCAL
    ) -> tuple[Tensor, State]:
        _, d_key, d_value = self.config.head_sizes(self.context.d_model)
        q, k, v, *gate = self.in_proj(x_BTM, self.in_proj.local_splits)
        q, k = (FEATURE_MAPS[self.config.feature_map](x).unflatten(2, (-1, d_key)) for x in (q, k))
        inputs = (
            *rotary(q, k, pos_BT, rope_rates(self.config.rope_theta, d_key)),
            v.unflatten(2, (-1, d_value)),
            self.log_decay(x_BTM).expand(*x_BTM.shape[:2], -1),
        )
        recurrence = GatedLinearAttention("scalar", scale=d_key**-0.5, keep_states=self.context.keep_states)
        o_BTHV, final_state = self.run_recurrence(
            recurrence, inputs, pos_BT, None if state is None else {"S": state["S"]}, forward_context
        )
        y_BTV = self.norm.gated(o_BTHV, *gate) if self.config.output_gate else self.norm(o_BTHV, v.dtype).flatten(2)
        return self.out_proj(y_BTV), final_state
