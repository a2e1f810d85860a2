"""Scaling of each head's vector by one number."""

from baton.kernels.head_scale.op import head_scale

__all__ = ["head_scale"]
