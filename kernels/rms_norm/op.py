"""RMSNorm: the public functions, which select an implementation.

Arithmetic is in the weight's dtype, float32; inputs are converted on load and the result is rounded once. On a GPU one launch does
all of it, so that no intermediate tensor is written to memory.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.kernels.errors import KernelError, expect_tensor
from baton.kernels.rms_norm.triton_launch import rms_norm_triton, split_rms_norm_triton, use_triton

_KERNEL = "rms_norm"


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, silu: bool = False, dtype: torch.dtype | None = None) -> Tensor:
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang & Sennrich 2019).

    Args:
        x: [..., width], float32, bfloat16, float16, or float64 with a weight of float64.
        weight: [width], float32 or float64: the dtype of the computation.
        eps: added to the mean of squares.
        silu: normalise silu(x) instead of x; on a GPU silu is computed in float32 on load and never written to memory.
        dtype: of the result; None: the weight's.

    Returns:
        y, [..., width], with exact gradients to x, in its dtype, and to the weight.

    Raises:
        KernelError: the weight's shape or device does not match x's last dimension.
    """
    _check(x, weight)
    dtype = dtype or weight.dtype
    if use_triton(x, weight):
        return rms_norm_triton(x, weight, eps, dtype, silu=silu)[1]
    return _plain(F.silu(x) if silu else x, weight, eps, dtype)


def fused_add_rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, added: Tensor | None = None, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """x + added, for what else reads it, and y as `rms_norm` of that: on a GPU the sum is made on the way into the norm, and the
    cotangents of both are added on the way out, where what was added gets its own in its own type.

    A residual stream is read by a norm and by the sum behind the sub-block. Sums by themselves would read and write it once more in
    either direction. What reads y, a projection, keeps it for its own gradient. So on a GPU the norm keeps that too, and not the
    stream: what was normalised is y / weight, where a weight nearer to 0 than 2^-60 counts as 2^-60. The gradients have y's
    rounding then, less than that of y's own cotangent.

    Args, raises: as `rms_norm`. added: as x, in its dtype or a less precise one; None: nothing is.
    """
    _check(x, weight)
    if added is not None:
        expect_tensor(_KERNEL, "added", added, ("...", "width"), tuple(x.shape), x.device)
    dtype = dtype or weight.dtype
    if use_triton(x, weight):
        return rms_norm_triton(x, weight, eps, dtype, added, from_y=True)
    x = x if added is None else x + added.to(x.dtype)
    return x, _plain(x, weight, eps, dtype)


def split_rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    width: int,
    sum_over_ranks: Callable[[Tensor], Tensor],
    silu: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`rms_norm` of rows whose features are split over ranks. On a GPU a pass is two launches and the sum between them.

    Args:
        x: [..., this rank's features]; weight: of these. As in `rms_norm`, silu and dtype too.
        width: features of all ranks together.
        sum_over_ranks: maps one number per row, [rows], to their sums over all ranks; it may work in place. Its backward sums the
            gradient over all ranks too, for every rank's y depends on the sum.

    Returns, raises: as `rms_norm`.
    """
    _check(x, weight)
    dtype = dtype or weight.dtype
    if use_triton(x, weight):
        return split_rms_norm_triton(x, weight, eps, dtype, width, sum_over_ranks, silu=silu)
    x = (F.silu(x) if silu else x).to(weight.dtype)
    squares = sum_over_ranks(x.square().sum(-1).flatten()).view(*x.shape[:-1], 1)
    return (x * torch.rsqrt(squares / width + eps) * weight).to(dtype)


def _check(x: Tensor, weight: Tensor) -> None:
    if not isinstance(x, Tensor) or not x.dim():
        raise KernelError(f"{_KERNEL}: x is a {type(x).__name__}, expected a tensor of shape (..., width)")
    expect_tensor(_KERNEL, "weight", weight, ("width",), (x.shape[-1],), x.device)


def _plain(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    return F.rms_norm(x.to(weight.dtype), x.shape[-1:], weight, eps).to(dtype)
