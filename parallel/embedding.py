"""Rows of a table that is split over a tensor group, looked up by their ids.

The one thing to know: on a GPU, rows' gradients are added up by `baton.kernels.embedding`, and within `fused_grad_accumulation` in
`.grad` itself: the dense gradient that autograd would make and add is mostly zeros. On a CPU it is autograd's.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from baton.kernels.embedding import add_rows, use_triton
from baton.parallel.linear import accumulates_fused


def embedding(ids: Tensor, parameter: nn.Parameter, first: int | None = None, *, dtype: torch.dtype | None = None) -> Tensor:
    """Args:
        ids: [..] int64.
        parameter: [rows, d_model].
        first: the id of its first row; an id that has none here gives zeros, and no gradient. None: every id has one, from 0 on.
        dtype: of the result; None: the parameter's.

    Returns:
        [.., d_model].
    """
    if use_triton(parameter):
        found: Tensor = _Embedding.apply(ids, parameter, first, dtype)
        return found
    return _rows(ids, parameter, first).to(dtype or parameter.dtype)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, parameter: Tensor, first: int | None, dtype: torch.dtype | None) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.parameter, ctx.first = parameter, first
        return _rows(ids, parameter, first).to(dtype or parameter.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (ids,), parameter = ctx.saved_tensors, ctx.parameter
        adding = accumulates_fused()
        grad = parameter.grad if adding else None
        if grad is None:
            grad = torch.zeros_like(parameter)
        add_rows(grad, _local(ids, ctx.first).flatten(), dy.reshape(-1, dy.shape[-1]))
        if adding:
            parameter.grad = grad
        return None, None if adding else grad, None, None


def _rows(ids: Tensor, parameter: Tensor, first: int | None) -> Tensor:
    local = _local(ids, first)
    if first is None:
        return F.embedding(local, parameter)
    elsewhere = (local < 0) | (local >= len(parameter))
    return F.embedding(local.masked_fill(elsewhere, 0), parameter).masked_fill_(elsewhere[..., None], 0.0)


def _local(ids: Tensor, first: int | None) -> Tensor:
    """Row numbers."""
    return ids - first if first else ids
