"""The softmax cross-entropy of logits that lie on several ranks, row by row; `op` says what is computed."""

from baton.kernels.cross_entropy.op import Partial, gradient, partial_sums

__all__ = ["Partial", "gradient", "partial_sums"]
