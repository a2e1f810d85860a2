"""Short causal depthwise convolution: a few taps per channel. Its State is the last inputs of the previous segment."""

from baton.kernels.short_conv.op import Activation, short_conv

__all__ = ["Activation", "short_conv"]
