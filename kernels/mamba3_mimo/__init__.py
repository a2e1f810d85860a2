"""Mamba-3's recurrence with several inputs and outputs per head (MIMO)."""

from baton.kernels.mamba3_mimo.op import mamba3_mimo

__all__ = ["mamba3_mimo"]
