"""A norm beside a gate, in either order: the public function, which selects an implementation.

Arithmetic is in the weight's dtype, float32; inputs are converted on load and the result is rounded once. On a GPU one launch per
direction does all of it, and only the arguments and one or two numbers a row are kept for the backward pass. Were norm, gate and
skip launches of their own, rows would be written to memory and read again in float32 between them.
"""

from typing import get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.kernels.errors import KernelError, expect_tensor
from baton.kernels.gate import gated
from baton.kernels.gate.op import Activation
from baton.kernels.gated_norm.triton_launch import gated_norm_triton, use_triton
from baton.kernels.rms_norm import rms_norm

_KERNEL = "gated_norm"


def gated_norm(
    x: Tensor,
    z: Tensor,
    weight: Tensor,
    eps: float,
    *,
    activation: Activation = "silu",
    gate_first: bool = False,
    center: bool = False,
    skip: tuple[Tensor, Tensor] | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """y = norm(x) weight act(z), as in GLA; or, with gate_first, norm((x + D u) act(z)) weight, as in Mamba-2.

    The norm of a row v is v / sqrt(mean(v^2) + eps), or with center that of v - mean(v).

    Args:
        x: [..., rows, d], float32, bfloat16 or float16, or float64 with a weight of float64: `rows` rows of width d a token.
        z: [..., rows d], in any of these dtypes; may be a column view of wider rows.
        weight: [d], for all rows of a token; or [rows, d]. float32 or float64: the dtype of the computation.
        eps: added to the mean of squares.
        activation: as in `baton.kernels.gate.gated`.
        gate_first: whether rows are gated before they are normalised.
        center: whether a row's mean is subtracted; not with gate_first.
        skip: with gate_first: u [..., rows, d], in x's dtype, and D [channels], in the weight's dtype, of which each belongs to
            rows d / channels neighbouring columns of a token. None: no skip.
        dtype: of the result; None: z's.

    Returns:
        y, [..., rows d], with exact gradients to all tensors; on a GPU autograd refuses to differentiate twice with a RuntimeError.

    Raises:
        KernelError: shapes, dtypes or devices do not match; an unknown activation; options that exclude each other.
    """
    _check(x, z, weight, activation, gate_first, center, skip)
    dtype = dtype or z.dtype
    if use_triton(x, z, weight):
        return gated_norm_triton(x, z, weight, eps, dtype, activation=activation, gate_first=gate_first, center=center, skip=skip)
    if gate_first:
        if skip is not None:
            u, scale = skip
            x = x + (u.flatten(-2).unflatten(-1, (len(scale), -1)) * scale[:, None]).view(u.shape)
        x = gated(x.flatten(-2), z).view(x.shape)
        return _normed(x, weight, eps).to(dtype).flatten(-2)
    return gated(_normed(x, weight, eps, center).flatten(-2), z, activation=activation, dtype=dtype)


def _normed(x: Tensor, weight: Tensor, eps: float, center: bool = False) -> Tensor:
    if center:
        normed = F.layer_norm(x.to(weight.dtype), x.shape[-1:], eps=eps)
        return normed * weight
    if weight.dim() == 1:
        return rms_norm(x, weight, eps)
    return rms_norm(x, weight.new_ones(x.shape[-1]), eps) * weight


def _check(
    x: Tensor, z: Tensor, weight: Tensor, activation: str, gate_first: bool, center: bool, skip: tuple[Tensor, Tensor] | None
) -> None:
    if not isinstance(x, Tensor) or x.dim() < 2:
        raise KernelError(f"{_KERNEL}: x is a {type(x).__name__}, expected a tensor of shape (..., rows, d)")
    rows, width = x.shape[-2:]
    axes = tuple(f"x's {n}" for n in range(x.dim() - 2))
    expect_tensor(_KERNEL, "z", z, (*axes, "rows d"), (*x.shape[:-2], rows * width), x.device)
    if isinstance(weight, Tensor) and weight.dim() == 2:
        expect_tensor(_KERNEL, "weight", weight, ("rows", "d"), (rows, width), x.device)
    else:
        expect_tensor(_KERNEL, "weight", weight, ("d",), (width,), x.device)
    if activation not in get_args(Activation):
        raise KernelError(f"{_KERNEL}: activation is {activation!r}, expected one of {get_args(Activation)}")
    if gate_first and (center or activation != "silu"):
        raise KernelError(f"{_KERNEL}: with gate_first neither center nor an activation other than silu is implemented")
    if skip is None:
        return
    if not gate_first:
        raise KernelError(f"{_KERNEL}: a skip goes with gate_first")
    u, scale = skip
    expect_tensor(_KERNEL, "u", u, (*axes, "rows", "d"), tuple(x.shape), x.device)
    if not isinstance(scale, Tensor) or scale.dim() != 1 or not len(scale) or rows * width % len(scale):
        raise KernelError(f"{_KERNEL}: the skip's factors are no tensor [channels] whose length divides rows d = {rows * width}")
