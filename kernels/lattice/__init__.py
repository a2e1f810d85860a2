"""Lattice's recurrence: memory slots whose every update is orthogonal to their content, normalized to the unit sphere after each
step.
"""

from baton.kernels.lattice.op import lattice

__all__ = ["lattice"]
