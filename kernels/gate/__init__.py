"""Gated activations, x * act(z), and forget gates, elementwise."""

from baton.kernels.gate.op import Activation, forget_gate, gated, log_sigmoid

__all__ = ["Activation", "forget_gate", "gated", "log_sigmoid"]
