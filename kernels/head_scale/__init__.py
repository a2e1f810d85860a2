"""Each head's vector times a number of its own."""

from baton.kernels.head_scale.op import head_scale

__all__ = ["head_scale"]
