"""A gate: what goes through it times an activation of its own number; and activations alone, of a projection's parts."""

from baton.kernels.gate.op import Activation, activated, gated
from baton.kernels.gate.triton import Part

__all__ = ["Activation", "Part", "activated", "gated"]
