"""Softmax cross-entropy of logits that are split over tensor-parallel ranks."""

from baton.kernels.cross_entropy.op import Partial, gradient, partial_sums

__all__ = ["Partial", "gradient", "partial_sums"]
