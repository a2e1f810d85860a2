"""RWKV-6's recurrence: gated linear attention that reads the state before the token is written, and a bonus for the token."""

from baton.kernels.wkv6.op import wkv6

__all__ = ["wkv6"]
