"""Root-mean-square normalisation of rows; `op` says what it computes."""

from baton.kernels.rms_norm.op import rms_norm, rms_norm_beside

__all__ = ["rms_norm", "rms_norm_beside"]
