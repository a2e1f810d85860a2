"""Causal softmax attention with rotary positions, over the whole document or a sliding window.

Source: Vaswani et al. 2017; Su et al. 2021 for rotary positions; Ainslie et al. 2023 for grouped-query heads; Beltagy et al. 2020
for the sliding window; Henry et al. 2020 for normalised queries and keys, in Qwen3's form; Qiu et al. 2025 for the
gate of the outputs ("Gated Attention for Large Language Models"), in Qwen3-Next's form; OpenAI 2025, "gpt-oss", for sinks; Gemma
Team 2024, "Gemma 2", section 2, for the soft cap of scores. Heads are split over the tensor group.

Shapes: B batch, T time, M d_model.
"""

from torch import Tensor, nn

from baton.kernels.gate import gated
from baton.kernels.protocol import State
from baton.kernels.rotary import rotary
from baton.kernels.window_attention.recurrence import FullAttention, WindowAttention
from baton.models.forward_context import LOCAL, ForwardContext
from baton.models.mixer import Mixer
from baton.models.norm import HeadRMSNorm
from baton.models.settings.attention import AttentionConfig
from baton.parallel.tensor import ColumnParallelLinear, RowParallelLinear


class Attention(Mixer, settings=AttentionConfig):
    """x [B, T, M], pos [B, T], State {k (rotated), v [B, window - 1, kv_heads, head_dim], seen [B]} -> y [B, T, M], State."""

    config: AttentionConfig
    in_proj: ColumnParallelLinear
    qkv_bias: nn.ParameterDict
    sinks: nn.Parameter
    q_norm: HeadRMSNorm
    k_norm: HeadRMSNorm
    out_proj: RowParallelLinear

    def forward(
        self, x_BTM: Tensor, pos_BT: Tensor, state: State | None, forward_context: ForwardContext = LOCAL
    ) -> tuple[Tensor, State]:
        q, k, v, *gate = self.in_proj(x_BTM, self.in_proj.local_splits)
        if self.config.qkv_bias:
            # added in fp32 and rounded once
            q, k, v = ((x + self.qkv_bias[name]).to(x.dtype) for name, x in (("q", q), ("k", k), ("v", v)))
        q, k, v = (x.unflatten(-1, (-1, self.config.head_dim)) for x in (q, k, v))
        if self.config.qk_norm:
            q, k = self.q_norm(q, q.dtype), self.k_norm(k, k.dtype)
        if self.config.rope_theta is not None:
            rates, magnitude = self.config.rope
            q, k = rotary(q, k, pos_BT, rates, magnitude=magnitude)
        window, has_sinks, cap = self.config.window, self.config.sinks, self.config.score_soft_cap
        if window is None:
            recurrence: WindowAttention = FullAttention(sinks=has_sinks, soft_cap=cap)
        else:
            recurrence = WindowAttention(window, sinks=has_sinks, soft_cap=cap)
        # a logit per head, which every token has
        sinks = (self.sinks.expand(*q.shape[:2], -1),) if has_sinks else ()
        y, state = self.run_recurrence(recurrence, (q, *sinks, k, v), pos_BT, state, forward_context)
        y = y.flatten(2)
        return self.out_proj(gated(y, *gate, activation="sigmoid") if self.config.output_gate else y), state
