"""The real-gated linear recurrent unit of Griffin and Hawk."""

from baton.kernels.rg_lru.op import rg_lru

__all__ = ["rg_lru"]
