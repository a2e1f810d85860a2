"""Mamba-3's recurrence: a trapezoidal rule in time and a state that turns."""

from baton.kernels.mamba3.op import mamba3

__all__ = ["mamba3"]
