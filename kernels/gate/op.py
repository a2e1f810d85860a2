"""Gated activations and forget gates: the public functions, which select an implementation.

Everything is computed in float32 and rounded once, to the dtype of the result. On a GPU one launch per direction does it without
intermediate tensors, and only the arguments are kept for the backward pass. On a CPU the last bits depend on an element's position
in memory.
"""

from collections.abc import Callable
from functools import reduce
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.kernels.errors import KernelError, expect_tensor
from baton.kernels.gate.triton_launch import forget_gate_triton, gate_triton, log_sigmoid_triton, use_triton

Activation = Literal["silu", "gelu", "sigmoid"]

_KERNEL = "gated"
_LARGEST_FACTOR = 1 - 2.0**-24
"""The largest factor of a forget gate that has a lower bound, float32's largest number below 1. With 1 the gate would round to 0
where its logit is far below 0, and its logarithm and gradients would not be finite."""
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu": F.gelu, "sigmoid": torch.sigmoid}


def gated(x: Tensor, z: Tensor, *, activation: Activation = "silu", dtype: torch.dtype | None = None) -> Tensor:
    """y = x * act(z), elementwise.

    Args:
        x: [..., d], float32, bfloat16, float16 or float64.
        z: as x's shape, in any of these dtypes. Both may be column views of wider rows.
        activation: "silu", z sigmoid(z); "gelu", z Phi(z); or "sigmoid".
        dtype: of the result; None: x's.

    Returns:
        [..., d], with exact gradients to both; on a GPU autograd refuses to differentiate twice with a RuntimeError.

    Raises:
        KernelError: z has another shape or device than x; an unknown activation.
    """
    _expect_rows(_KERNEL, "x", x)
    _expect_like(_KERNEL, "z", z, "x", x)
    if activation not in get_args(Activation):
        raise KernelError(f"{_KERNEL}: activation is {activation!r}, expected one of {get_args(Activation)}")
    if use_triton(x, z):
        return gate_triton(x, z, activation=activation, dtype=dtype or x.dtype)
    precise = _precise(x, z)
    return (x.to(precise) * _ACTIVATIONS[activation](z.to(precise))).to(dtype or x.dtype)


def log_sigmoid(x: Tensor, *, bias: Tensor | None = None, divisor: float = 1.0) -> Tensor:
    """y = log(sigmoid(x + bias)) / divisor, elementwise: the log decays of GLA.

    Args:
        x: [..., d], float32, bfloat16, float16 or float64. It may be a column view of wider rows.
        bias: [d], float32 or float64; None: 0.
        divisor: above 0; GLA's gate_logit_normalizer.

    Returns:
        [..., d] in float32, or float64 where x or bias is, with exact gradients to both. No digit is lost where y is near 0. On a
        GPU autograd refuses to differentiate twice with a RuntimeError.

    Raises:
        KernelError: x is no tensor of rows; bias has another shape or device; divisor is not above 0.
    """
    kernel = "log_sigmoid"
    _expect_rows(kernel, "x", x)
    if bias is not None:
        expect_tensor(kernel, "bias", bias, ("d",), (x.shape[-1],), x.device)
    if not divisor > 0:
        raise KernelError(f"{kernel}: divisor is {divisor!r}, expected a number above 0")
    if use_triton(x, bias):
        return log_sigmoid_triton(x, bias=bias, divisor=divisor)
    logits = x.to(_precise(x, bias))
    return F.logsigmoid(logits if bias is None else logits + bias) / divisor


def forget_gate(q: Tensor, f: Tensor, *, factor: Tensor | float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """silu(q), k = factor sigmoid(-f) and g = log(1 - k), elementwise: HGRN2's queries, keys and log decays.

    A forget gate 1 - k has the lower bound 1 - factor. k is not computed by subtraction, which loses precision for gates near 1.
    Both come from one function because their logits are neighbours in a projection's output, and so, on a GPU, are the gradients.

    Args:
        q, f: [..., d], float32, bfloat16, float16 or float64. Both may be column views of wider rows.
        factor: 1 - bound, above 0 and at most 1: a number, or [d] in float32 or float64, one per channel. Between 1 - 2^-24 and 1,
            and 1 of a channel, are computed as 1 - 2^-24, so that g and gradients are finite.

    Returns:
        silu(q) and k in q's dtype, g in float32 (float64 where f or factor is), each [..., d], with exact gradients to q, f and a
        factor per channel. No digit is lost where g is near 0. On a GPU autograd refuses to differentiate twice with a
        RuntimeError.

    Raises:
        KernelError: f or factor has another shape or device; a factor is not in (0, 1].
    """
    kernel = "forget_gate"
    _expect_rows(kernel, "q", q)
    _expect_like(kernel, "f", f, "q", q)
    if isinstance(factor, Tensor):
        expect_tensor(kernel, "factor", factor, ("d",), (q.shape[-1],), q.device)
    elif not 0 < factor <= 1:
        raise KernelError(f"{kernel}: factor is {factor!r}, expected a number in (0, 1]")
    elif factor < 1:
        factor = min(factor, _LARGEST_FACTOR)
    per_channel = factor if isinstance(factor, Tensor) else None
    if use_triton(q, f, per_channel):
        return forget_gate_triton(q, f, factor=factor)
    f = f.to(_precise(f, per_channel))
    if isinstance(factor, Tensor):
        factor = factor - (factor.detach() - _LARGEST_FACTOR).clamp(min=0)
    k = factor * torch.sigmoid(-f)
    # without a bound 1 - k may underflow to 0, where only logsigmoid gives the logarithm
    g = F.logsigmoid(f) if per_channel is None and factor == 1 else torch.log1p(-k)
    return F.silu(q), k.to(q.dtype), g


def _expect_rows(kernel: str, name: str, x: object) -> None:
    if not isinstance(x, Tensor) or x.dim() < 1:
        raise KernelError(f"{kernel}: {name} is a {type(x).__name__}, expected a tensor of shape (..., d)")


def _expect_like(kernel: str, name: str, z: object, other: str, x: Tensor) -> None:
    expect_tensor(kernel, name, z, tuple(f"{other}'s {n}" for n in range(x.dim())), tuple(x.shape), x.device)


def _precise(*xs: Tensor | None) -> torch.dtype:
    """In which they are computed with."""
    return reduce(torch.promote_types, (x.dtype for x in xs if x is not None), torch.float32)
