"""Scaling of each head's vector: the public function, which selects an implementation.

The product is computed in float32 and rounded once, to x's dtype. On a GPU one launch per direction does it, no tensor in memory
is wider than x, and x may be columns of wider rows.
"""

from torch import Tensor

from baton.kernels.errors import KernelError, expect_tensor
from baton.kernels.head_scale.triton_launch import head_scale_triton, use_triton

_KERNEL = "head_scale"


def head_scale(x: Tensor, scale: Tensor) -> Tensor:
    """y = x * scale with one number per head: in Mamba-2, the input times its step size.

    Args:
        x: [..., heads, d], float32, bfloat16, float16, or float64 with a scale of float64.
        scale: [..., heads], float32 or float64: the dtype of the computation.

    Returns:
        y, of x's shape and dtype, with exact gradients to both.

    Raises:
        KernelError: the scale's shape or device does not match x.
    """
    if not isinstance(x, Tensor) or x.dim() < 2:
        raise KernelError(f"{_KERNEL}: x is a {type(x).__name__}, expected a tensor of shape (..., heads, d)")
    axes = (*(f"x's {n}" for n in range(x.dim() - 2)), "heads")
    expect_tensor(_KERNEL, "scale", scale, axes, tuple(x.shape[:-1]), x.device)
    if use_triton(x, scale):
        return head_scale_triton(x, scale)
    y: Tensor = (x * scale.unsqueeze(-1)).to(x.dtype)
    return y
