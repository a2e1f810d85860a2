"""A time-invariant state space model with a complex diagonal, S4D."""

from baton.kernels.s4d.op import s4d

__all__ = ["s4d"]
