"""Short causal depthwise convolution: a few taps per channel, whose state is the tail of inputs before a piece."""

from baton.kernels.short_conv.op import Activation, short_conv

__all__ = ["Activation", "short_conv"]
