"""Norms of gated rows, and gated norms; `op` says what they compute."""

from baton.kernels.gated_norm.op import gated_norm

__all__ = ["gated_norm"]
