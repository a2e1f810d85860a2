"""Lattice's recurrence: slots whose every change is orthogonal to what they hold, put back on the unit sphere after each step."""

from baton.kernels.orthogonal_state.op import orthogonal_state

__all__ = ["orthogonal_state"]
