"""Root-mean-square normalisation of rows; `op` says what it computes."""

from baton.kernels.rms_norm.op import fused_add_rms_norm, rms_norm, split_rms_norm

__all__ = ["fused_add_rms_norm", "rms_norm", "split_rms_norm"]
