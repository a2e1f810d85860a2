"""Gated activations: the public function, which selects an implementation.

Activation and product are computed in float32 and rounded once, to the dtype of the result. On a GPU one launch per direction does
it without intermediate tensors, and only the arguments are kept for the backward pass. On a CPU the last bits depend on an
element's position in memory.
"""

from collections.abc import Callable
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.kernels.errors import KernelError, expect_tensor
from baton.kernels.gate.triton_launch import gate_triton, use_triton

Activation = Literal["silu", "gelu", "sigmoid"]

_KERNEL = "gated"
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
    if not isinstance(x, Tensor) or x.dim() < 1:
        raise KernelError(f"{_KERNEL}: x is a {type(x).__name__}, expected a tensor of shape (..., d)")
    expect_tensor(_KERNEL, "z", z, tuple(f"x's {n}" for n in range(x.dim())), tuple(x.shape), x.device)
    if activation not in get_args(Activation):
        raise KernelError(f"{_KERNEL}: activation is {activation!r}, expected one of {get_args(Activation)}")
    if use_triton(x, z):
        return gate_triton(x, z, activation=activation, dtype=dtype or x.dtype)
    precise = torch.promote_types(torch.promote_types(x.dtype, z.dtype), torch.float32)
    return (x.to(precise) * _ACTIVATIONS[activation](z.to(precise))).to(dtype or x.dtype)
