"""Constant tensors that all layers and calls share, cached per device: launching the kernels that build them costs more than the
kernels.

Never write into one. Request them on the mixer's own stream: a side stream would have to wait for the stream that built the tensor.
They are not buffers, because there is nothing to save or to split, and their bits are the same on every machine.
"""

from functools import cache

import torch
from torch import Tensor


@cache
def zeros(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[n] zeros: the bias of a convolution that has none."""
    return torch.zeros(n, dtype=dtype, device=device)


@cache
def full(n: int, value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[n], every element `value`."""
    return torch.full((n,), value, dtype=dtype, device=device)


@cache
def taps_of_difference(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[n, 2], taps 1 and -1: a convolution of width 2 that subtracts a token from the one before it."""
    return torch.tensor([1.0, -1.0], dtype=dtype, device=device).repeat(n, 1)


@cache
def eye(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[rows, columns], 1 on the diagonal."""
    return torch.eye(rows, columns, dtype=dtype, device=device)


@cache
def geometric_weights(n: int, device: torch.device) -> Tensor:
    """[n] in fp32 with sum 1, each element half of the one before."""
    weights = 0.5 ** torch.arange(1, n + 1, dtype=torch.float32, device=device)
    return weights / weights.sum()
