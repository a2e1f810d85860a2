"""The mixer of gated linear attention (GLA): linear attention with a decay per key channel and a gated output.

Source: Yang et al. 2023, "Gated Linear Attention Transformers with Hardware-Efficient Training", section 4.4. Where the released
code differs from the paper, this follows the code: RMSNorm instead of LayerNorm, no bias in the output gate, scores divided by
sqrt(d_key). Heads are split over the tensor group; every rank computes the low-rank projection of the decays.

Shapes: B batch, T time, M d_model, H this rank's heads, V d_value, R gate_low_rank_dim.
"""

from torch import Tensor, nn

from baton.kernels.gate import log_sigmoid
from baton.kernels.gated_linear_attention.recurrence import GatedLinearAttention
from baton.kernels.protocol import State
from baton.models.feature_map import FEATURE_MAPS
from baton.models.forward_context import LOCAL, ForwardContext
from baton.models.mixer import Mixer
from baton.models.norm import HeadRMSNorm
from baton.models.replicated_linear import ReplicatedLinear
from baton.models.settings.gla import GLAConfig
from baton.parallel.tensor import ColumnParallelLinear, RowParallelLinear


class GLA(Mixer, settings=GLAConfig):
    """S = Diag(a) S + k v^T, y = W (RMSNorm(S^T q / sqrt(d_key)) silu(W_g x)), a = sigmoid(low rank + bias)^(1 / normalizer).

    x [B, T, M], pos [B, T], State {S [B, heads, d_key, d_value]} -> y [B, T, M], State.
    """

    config: GLAConfig
    in_proj: ColumnParallelLinear
    code_proj: ReplicatedLinear
    decay_proj: ColumnParallelLinear
    decay_bias: nn.Parameter
    norm: HeadRMSNorm
    out_proj: RowParallelLinear

    def forward(
        self, x_BTM: Tensor, pos_BT: Tensor, state: State | None, forward_context: ForwardContext = LOCAL
    ) -> tuple[Tensor, State]:
        _, d_key, d_value = self.config.head_sizes(self.context.d_model)
        x_BTM, q, k, v, *gate = self.in_proj(x_BTM, self.in_proj.local_splits, return_input=True)
        code_BTR = self.code_proj.for_own_heads(self.code_proj(x_BTM))
        # fp32 from the bias on, and in the log domain: bf16 has no values between 0.996 and 1
        g = log_sigmoid(self.decay_proj(code_BTR), bias=self.decay_bias, divisor=self.config.gate_logit_normalizer)
        inputs = (
            FEATURE_MAPS[self.config.feature_map](q).unflatten(2, (-1, d_key)),
            FEATURE_MAPS[self.config.feature_map](k).unflatten(2, (-1, d_key)),
            v.unflatten(2, (-1, d_value)),
            g.unflatten(2, (-1, d_key)),
        )
        recurrence = GatedLinearAttention("key", scale=d_key**-0.5, keep_states=self.context.keep_states)
        o_BTHV, final_state = self.run_recurrence(
            recurrence, inputs, pos_BT, None if state is None else {"S": state["S"]}, forward_context
        )
        y_BTV = self.norm.gated(o_BTHV, *gate) if self.config.output_gate else self.norm(o_BTHV, v.dtype).flatten(2)
        return self.out_proj(y_BTV), final_state
