"""The mixer of plain linear attention: no decay, no gate.

Source: Katharopoulos et al. 2020, "Transformers are RNNs: Fast Autoregressive Transformers with Linear Attention", section 3.4 and
equations 16 to 20. Heads are split over the tensor group. The sum of keys, by which the paper divides, is the last column of the
State: values get a further component that is always 1. With normalization=rms outputs are normalized instead, as in the papers that
have linear attention for a baseline.

Shapes: B batch, T time, M d_model, H this rank's heads, V d_value.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.kernels.gated_linear_attention.recurrence import GatedLinearAttention
from baton.kernels.protocol import State
from baton.models.feature_map import FEATURE_MAPS
from baton.models.forward_context import LOCAL, ForwardContext
from baton.models.mixer import Mixer
from baton.models.norm import HeadRMSNorm
from baton.models.settings.linear_attention import PlainLinearAttentionConfig
from baton.parallel.tensor import ColumnParallelLinear, RowParallelLinear

_EPS = 1e-6  # added to the sum of weights, as in the authors' code: with relu it may be 0


class LinearAttention(Mixer, settings=PlainLinearAttentionConfig):
    """S = S + phi(k) v^T, z = z + phi(k), y = W (S^T phi(q) / (z^T phi(q) + 1e-6)); or y = W RMSNorm(S^T phi(q)).

    x [B, T, M], pos [B, T], State {S [B, heads, d_key, d_value + 1], z its last column} -> y [B, T, M], State.
    """

    config: PlainLinearAttentionConfig
    in_proj: ColumnParallelLinear
    norm: HeadRMSNorm
    out_proj: RowParallelLinear

    def forward(
        self, x_BTM: Tensor, pos_BT: Tensor, state: State | None, forward_context: ForwardContext = LOCAL
    ) -> tuple[Tensor, State]:
        _, d_key, d_value = self.config.head_sizes(self.context.d_model)
        q, k, v = self.in_proj(x_BTM, self.in_proj.local_splits)
        q, k = (FEATURE_MAPS[self.config.feature_map](x).unflatten(2, (-1, d_key)) for x in (q, k))
        v_BTHV, dtype = v.unflatten(2, (-1, d_value)), v.dtype
        if self.config.summed:
            v_BTHV = F.pad(v_BTHV, (0, 1), value=1.0)
        initial = None if state is None else {"S": state["S"]}
        recurrence = GatedLinearAttention("none", keep_states=self.context.keep_states)
        o_BTHV, final_state = self.run_recurrence(recurrence, (q, k, v_BTHV), pos_BT, initial, forward_context)
        if self.config.summed:
            o_BTHV = o_BTHV.to(torch.promote_types(dtype, torch.float32))
            y_BTHV = o_BTHV[..., :-1] / (o_BTHV[..., -1:] + _EPS)
        else:
            y_BTHV = self.norm(o_BTHV, dtype)
        return self.out_proj(y_BTHV.flatten(2).to(dtype)), final_state
