"""The public function of each head's scale: picks an implementation.

The one thing to know: the product is float32 and rounded once, to x's type: what reads it finds the type that it multiplies. On a
GPU one launch each way does it, and nothing wider than x is in memory.
"""

from torch import Tensor

from baton.kernels.errors import KernelError, expect_tensor
from baton.kernels.head_scale.triton_launch import head_scale_triton, use_triton

_KERNEL = "head_scale"


def head_scale(x: Tensor, scale: Tensor) -> Tensor:
    """y = x * scale, a number for all of a head's vector: Mamba-2's input times its step size.

    Args:
        x: [..., heads, d], float32, bfloat16, float16, or float64 with a scale of float64.
        scale: [..., heads], float32 or float64: what is computed in.

    Returns:
        y, as x, with exact gradients to both.

    Raises:
        KernelError: a scale of another shape or device than x's.
    """
    if not isinstance(x, Tensor) or x.dim() < 2:
        raise KernelError(f"{_KERNEL}: x is a {type(x).__name__}, expected a tensor of shape (..., heads, d)")
    axes = (*(f"x's {n}" for n in range(x.dim() - 2)), "heads")
    expect_tensor(_KERNEL, "scale", scale, axes, tuple(x.shape[:-1]), x.device)
    if use_triton(x, scale):
        return head_scale_triton(x, scale)
    y: Tensor = (x * scale.unsqueeze(-1)).to(x.dtype)
    return y
