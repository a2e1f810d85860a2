"""HGRN2's mixer: a linear RNN with a forget gate, whose state is expanded to a matrix per head.

Source: Qin et al. 2024, "HGRN2: Gated Linear RNNs with State Expansion", section 3.2; flash-linear-attention's layer, with which
GSA's paper compares, for what the paper does not specify (silu on the output gate only, RMSNorm over the whole width). The lower
bounds of the forget gates are a setting, or learned by each layer. The paper's are sums of one softmax over all layers, a parameter
that every pipeline stage would have to share. Heads are split over the tensor group.

Shapes: B batch, T time, M d_model, H this rank's heads, V d_value.
"""

import torch
from torch import Tensor, nn

from baton.kernels.gate import forget_gate
from baton.kernels.gated_linear_attention.recurrence import GatedLinearAttention
from baton.kernels.protocol import State
from baton.models.forward_context import LOCAL, ForwardContext
from baton.models.mixer import Mixer
from baton.models.norm import SplitRMSNorm
from baton.models.settings.hgrn2 import HGRN2Config
from baton.parallel.tensor import ColumnParallelLinear, RowParallelLinear


class HGRN2(Mixer, settings=HGRN2Config):
    """S = Diag(a) S + (1 - a) v^T, y = W RMSNorm(S^T silu(q)), a = bound + (1 - bound) sigmoid(f).

    x [B, T, M], pos [B, T], State {S [B, heads, d_key, d_value]} -> y [B, T, M], State.
    """

    config: HGRN2Config
    in_proj: ColumnParallelLinear
    bound: nn.Parameter
    norm: SplitRMSNorm
    out_proj: RowParallelLinear

    def forward(
        self, x_BTM: Tensor, pos_BT: Tensor, state: State | None, forward_context: ForwardContext = LOCAL
    ) -> tuple[Tensor, State]:
        _, d_key, d_value = self.config.head_sizes(self.context.d_model)
        q, f, v = self.in_proj(x_BTM, self.in_proj.local_splits)
        # with learned bounds 1 - bound, without the subtraction
        factor = torch.sigmoid(-self.bound) if self.config.bounds == "learned" else 1 - self.config.lower_bound
        q, k, g = forget_gate(q, f, factor=factor)
        inputs = (*(x.unflatten(2, (-1, d_key)) for x in (q, k)), v.unflatten(2, (-1, d_value)), g.unflatten(2, (-1, d_key)))
        scale = d_key**-0.5 if self.config.scale_queries else 1.0
        recurrence = GatedLinearAttention("key", scale=scale, keep_states=self.context.keep_states)
        o_BTHV, final_state = self.run_recurrence(
            recurrence, inputs, pos_BT, None if state is None else {"S": state["S"]}, forward_context
        )
        return self.out_proj(self.norm(o_BTHV.flatten(2), v.dtype)), final_state
