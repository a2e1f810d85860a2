"""Triton kernels of the delta rule with a decay per key channel, for `baton.kernels.delta_rule`."""
