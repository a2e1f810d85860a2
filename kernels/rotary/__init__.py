"""Rotary position embeddings: queries and keys turned by their positions in the document."""

from baton.kernels.rotary.op import rotary

__all__ = ["rotary"]
