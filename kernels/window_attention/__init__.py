"""Softmax attention over a sliding window or the whole document. Its State is the keys and values that later tokens can see."""

from baton.kernels.window_attention.op import window_attention

__all__ = ["window_attention"]
