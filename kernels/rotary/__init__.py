"""Rotary position embeddings of queries and keys."""

from baton.kernels.rotary.op import rotary

__all__ = ["rotary"]
