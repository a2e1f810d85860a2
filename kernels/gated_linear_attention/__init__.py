"""Gated linear attention: a matrix per head that decays, by key channel, by value channel or as a whole, and takes in k v^T."""

from baton.kernels.gated_linear_attention.op import gated_linear_attention

__all__ = ["gated_linear_attention"]
