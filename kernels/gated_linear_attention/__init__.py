"""Gated linear attention: a matrix state per head that accumulates k v^T, with a decay per key channel, per value channel or per
head."""

from baton.kernels.gated_linear_attention.op import gated_linear_attention

__all__ = ["gated_linear_attention"]
