"""The gradient of an embedding lookup."""

from baton.kernels.embedding.op import add_rows
from baton.kernels.embedding.triton_launch import use_triton

__all__ = ["add_rows", "use_triton"]
