"""Gated linear attention's mixer: linear attention whose keys are forgotten channel by channel, with a gated output.

Source: Yang et al. 2023, "Gated Linear Attention Transformers with Hardware-Efficient Training", section 4.4; the released code for
what differs there (RMSNorm for LayerNorm, no bias in the output gate, scores over sqrt(d_key)). Heads are split over the tensor
group; the low-rank code of the decays is computed by every rank.
"""

import torch.nn.functional as F
from torch import Tensor

from baton.kernels.gate import gated
from baton.kernels.gated_linear_attention.recurrence import GatedLinearAttention
from baton.kernels.protocol import State, StateSpec
from baton.models import init
from baton.models.feature_map import FEATURE_MAPS
from baton.models.mixer import Mixer, MixerContext
from baton.models.norm import HeadRMSNorm
from baton.models.replicated_linear import ReplicatedLinear
from baton.models.settings.gla import GLAConfig
from baton.parallel.tensor import ColumnParallelLinear


class GLA(Mixer, settings=GLAConfig):
    """S = Diag(a) S + k v^T, y = W (RMSNorm(S^T q / sqrt(d_key)) silu(W_g x)), a = sigmoid(low rank + bias)^(1 / normalizer).

    x [B, T, M], pos [B, T], State {S [B, heads, d_key, d_value]} -> y [B, T, M], State.
    """

    def __init__(self, config: GLAConfig, context: MixerContext) -> None:
        super().__init__()
        self.config, self.sizes = config, config.head_sizes(context.d_model)
        heads, d_key, d_value = self.sizes
        parts = (("q", heads * d_key), ("k", heads * d_key), ("v", heads * d_value), ("gate", heads * d_value))
        self.in_proj = context.column(sum(width for _, width in parts), fused_splits=parts)
        self._widths = [width // context.tensor_size for _, width in parts]
        self.code_proj = ReplicatedLinear(config.gate_low_rank_dim, context)
        self.decay_proj = ColumnParallelLinear(
            config.gate_low_rank_dim,
            heads * d_key,
            context.initializer(config.gate_low_rank_dim),
            context.megatron,
            compute_dtype=context.compute_dtype,
            disable_grad_reduce=True,
        )
        self.decay_bias = context.split((heads * d_key,), init.constant(0.0), decay=False)
        self.norm = HeadRMSNorm(d_value, context.norm_eps)
        self.out_proj = context.output(heads * d_value)

    @property
    def state_specs(self) -> tuple[StateSpec, ...]:
        """The state, fp32 whatever the matmuls use."""
        return (StateSpec("S", tuple(self.sizes), self.norm.weight.dtype, tp=0, grad=True),)

    def forward(self, x_BTM: Tensor, pos_BT: Tensor, state: State | None) -> tuple[Tensor, State]:
        _, d_key, d_value = self.sizes
        q, k, v, gate = self.in_proj(x_BTM, self._widths)
        # the bias is added in fp32, and the root taken of the logarithm: in bf16 no decay between 0.996 and 1 exists
        code_BTR = self.code_proj.for_own_heads(self.code_proj(x_BTM))
        logits = self.decay_proj(code_BTR).to(self.decay_bias.dtype) + self.decay_bias
        inputs = (
            FEATURE_MAPS[self.config.feature_map](q).unflatten(2, (-1, d_key)),
            FEATURE_MAPS[self.config.feature_map](k).unflatten(2, (-1, d_key)),
            v.unflatten(2, (-1, d_value)),
            (F.logsigmoid(logits) / self.config.gate_logit_normalizer).unflatten(2, (-1, d_key)),
        )
        recurrence = GatedLinearAttention("key", scale=d_key**-0.5)
        o_BTHV, leaving = self.carry(recurrence, inputs, pos_BT, None if state is None else {"S": state["S"]})
        y_BTV = gated(self.norm(o_BTHV).flatten(2), gate, dtype=gate.dtype)
        return self.out_proj(y_BTV), leaving
