"""Vocabulary-parallel embedding lookup.

On a GPU the gradient's rows are added by `baton.kernels.embedding`, and within `fused_grad_accumulation` in `.grad` itself: the
dense gradient that autograd would make is mostly zeros. On a CPU the gradient is autograd's.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from baton.kernels.embedding import add_rows, use_triton
from baton.parallel.linear import accumulates_fused, take_outdated


def embedding(ids: Tensor, parameter: nn.Parameter, first: int | None = None, *, dtype: torch.dtype | None = None) -> Tensor:
    """Rows of a vocabulary-parallel embedding.

    Args:
        ids: [..] int64.
        parameter: [rows, d_model].
        first: id of the parameter's first row. An id outside gives zeros and no gradient. None: all ids are inside, from 0.
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
        outdated = take_outdated(parameter)  # also where there is no gradient: what is made here counts
        if grad is None:
            grad = torch.zeros_like(parameter)
        elif outdated:
            grad.zero_()
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
