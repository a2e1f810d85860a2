"""Causal softmax attention with rotary positions: Transformer++, sliding windows, and the attention layers of hybrids.

Source: Vaswani et al. 2017; Su et al. 2021 for the positions; Ainslie et al. 2023 for grouped heads; Beltagy et al. 2020 for the
window. Heads are split over the tensor group.
"""

import torch
from torch import Tensor

from baton.kernels.protocol import State, StateSpec
from baton.kernels.rotary import rotary
from baton.kernels.window_attention.recurrence import WindowAttention
from baton.models.mixer import Mixer, MixerContext
from baton.models.settings.attention import AttentionConfig


class Attention(Mixer, settings=AttentionConfig):
    """x [B, T, M], pos [B, T], State {k (turned), v [B, window - 1, key heads, dim], seen [B]} -> y [B, T, M], State."""

    def __init__(self, config: AttentionConfig, context: MixerContext) -> None:
        super().__init__()
        self.config, self.compute_dtype = config, context.compute_dtype
        heads, self.kv_heads = config.head_counts(context.d_model)
        self.widths = [heads * config.head_dim, self.kv_heads * config.head_dim, self.kv_heads * config.head_dim]
        self.in_proj = context.column(sum(self.widths), fused_splits=zip(("q", "k", "v"), self.widths, strict=True))
        self.out_proj = context.output(self.widths[0])
        self._tensor_size = context.tensor_size

    @property
    def state_specs(self) -> tuple[StateSpec, ...]:
        """Keys and values by head; all of the document's without a window."""
        window = self.config.window
        shape = (0 if window is None else window - 1, self.kv_heads, self.config.head_dim)
        return (
            StateSpec("k", shape, self.compute_dtype, tp=1, grad=True, grows=window is None),
            StateSpec("v", shape, self.compute_dtype, tp=1, grad=True, grows=window is None),
            StateSpec("seen", (), torch.int64, tp=None, grad=False),
        )

    def forward(self, x_BTM: Tensor, pos_BT: Tensor, state: State | None) -> tuple[Tensor, State]:
        widths = [width // self._tensor_size for width in self.widths]
        q, k, v = (x.unflatten(-1, (-1, self.config.head_dim)) for x in self.in_proj(x_BTM, widths))
        if self.config.rope_theta is not None:
            q, k = rotary(q, k, pos_BT, self.config.rope_theta)
        y, state = self.carry(WindowAttention(self.config.window), (q, k, v), pos_BT, state)
        return self.out_proj(y.flatten(2)), state
