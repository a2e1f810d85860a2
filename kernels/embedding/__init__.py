"""The gradient of rows that were looked up by their ids; `op` says what it computes."""

from baton.kernels.embedding.op import add_rows
from baton.kernels.embedding.triton_launch import use_triton

__all__ = ["add_rows", "use_triton"]
