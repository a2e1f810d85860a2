"""Softmax attention over a sliding window or the whole document; its State is the keys and values that it still needs."""

from baton.kernels.window_attention.op import window_attention

__all__ = ["window_attention"]
