"""The delta rule: a matrix state that replaces what a key recalls by its new value, without a gate, with one
per head or with one per key channel."""

from baton.kernels.delta_rule.op import delta_rule

__all__ = ["delta_rule"]
