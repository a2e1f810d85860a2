"""Gated activations: x * act(z), elementwise."""

from baton.kernels.gate.op import Activation, gated

__all__ = ["Activation", "gated"]
