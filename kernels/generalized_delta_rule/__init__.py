"""The generalized delta rule: a matrix state whose transition is diagonal plus low rank, as in RWKV-7."""

from baton.kernels.generalized_delta_rule.op import generalized_delta_rule

__all__ = ["generalized_delta_rule"]
