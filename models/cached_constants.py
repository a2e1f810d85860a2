"""Tensors that are the same in every layer and call, made once for each device: small launches cost a GPU's host more than they do.

The one thing to know: all who ask share them, so nobody may write into one, and a mixer asks on its own stream, never one beside
it, which would have to wait for the other. They are no buffers: there is nothing to save or to split, and the bits are the same on
every machine.
"""

from functools import cache

import torch
from torch import Tensor


@cache
def zeros(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[n]: the bias of what has none."""
    return torch.zeros(n, dtype=dtype, device=device)


@cache
def full(n: int, value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[n], all of one value."""
    return torch.full((n,), value, dtype=dtype, device=device)


@cache
def eye(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[rows, columns], 1 on the diagonal."""
    return torch.eye(rows, columns, dtype=dtype, device=device)


@cache
def geometric_weights(n: int, device: torch.device) -> Tensor:
    """[n] in fp32, of sum 1, each half of the one before."""
    weights = 0.5 ** torch.arange(1, n + 1, dtype=torch.float32, device=device)
    return weights / weights.sum()
