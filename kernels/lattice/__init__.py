"""Lattice's recurrence: slots whose every change is orthogonal to what they hold, put back on the unit sphere after each step."""

from baton.kernels.lattice.op import lattice

__all__ = ["lattice"]
