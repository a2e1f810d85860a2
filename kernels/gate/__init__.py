"""A gate: what goes through it times an activation of its own number."""

from baton.kernels.gate.op import Activation, gated

__all__ = ["Activation", "gated"]
