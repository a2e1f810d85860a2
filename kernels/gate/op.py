"""The public function of gates: picks an implementation.

The one thing to know: activation and product are float32 and rounded once, to the type of what reads it. On a GPU one launch each
way does it, nothing between them is in memory, and what is kept for the backward pass are the arguments. On a CPU the last bits
depend on where an element lies.
"""

from collections.abc import Callable
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.kernels.errors import KernelError, expect_tensor
from baton.kernels.gate.triton_launch import gate_triton, use_triton

Activation = Literal["silu", "gelu"]

_KERNEL = "gated"
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu": F.gelu}


def gated(x: Tensor, z: Tensor, *, activation: Activation = "silu", dtype: torch.dtype | None = None) -> Tensor:
    """x act(z), element by element.

    Args:
        x: [..., d], float32, bfloat16, float16 or float64.
        z: as x's shape, in any of these types. Both may be columns of wider rows.
        activation: "silu", z sigmoid(z), or "gelu", z Phi(z).
        dtype: of the result; None: x's.

    Returns:
        [..., d], with exact gradients to both; differentiating twice is refused by autograd with a RuntimeError on a GPU.

    Raises:
        KernelError: z of another shape or device than x's, another activation.
    """
    if not isinstance(x, Tensor) or x.dim() < 1:
        raise KernelError(f"{_KERNEL}: x is a {type(x).__name__}, expected a tensor of shape (..., d)")
    expect_tensor(_KERNEL, "z", z, tuple(f"x's {n}" for n in range(x.dim())), tuple(x.shape), x.device)
    if activation not in get_args(Activation):
        raise KernelError(f"{_KERNEL}: activation is {activation!r}, expected one of {get_args(Activation)}")
    if use_triton(x, z):
        return gate_triton(x, z, gelu=activation == "gelu", dtype=dtype or x.dtype)
    precise = torch.promote_types(torch.promote_types(x.dtype, z.dtype), torch.float32)
    return (x.to(precise) * _ACTIVATIONS[activation](z.to(precise))).to(dtype or x.dtype)
