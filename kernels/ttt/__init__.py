"""Test-time training layers: the State is a linear model or an MLP that gradient steps train while the sequence is read."""

from baton.kernels.ttt.op import ttt

__all__ = ["ttt"]
