"""The delta rule: a matrix state that replaces what a key recalls by its new value, without a gate or with one per head."""

from baton.kernels.delta_rule.op import delta_rule

__all__ = ["delta_rule"]
