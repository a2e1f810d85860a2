"""Rotary position embeddings on a GPU: launches the Triton kernel of `triton_kernels` and gives it a gradient.

The one thing to know: q and k are mostly columns of one projection, so they are read as they lie, and their gradients are columns
of one tensor, which the projection takes for the gradient of one.
"""

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from baton.kernels.common import launch_utils
from baton.kernels.common.launch_utils import LazyModule
from baton.kernels.compile.aot import on_gpu

_kernels = LazyModule("baton.kernels.rotary.triton_kernels")

_ENTRIES = 4096  # of a program


def use_triton(x: Tensor) -> bool:
    """Whether this kernel computes it: on a GPU, in float32."""
    return on_gpu(x) and x.dtype != torch.float64


def rotary_triton(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """As `op.rotary`, which checks the arguments. cos, sin: of the angles, float32 [B, T, dim / 2]."""
    found: tuple[Tensor, Tensor] = _Rotary.apply(q, k, cos.contiguous(), sin.contiguous())
    return found


@cache
def launch_sizes(heads: int, dim: int) -> Mapping[str, int]:
    """A launch's, for so many heads of so many numbers: all heads of a few tokens where there is room."""
    pairs = launch_utils.next_power_of_2(dim // 2)
    rows = max(1, _ENTRIES // (2 * pairs))
    block = min(rows, launch_utils.next_power_of_2(heads))
    return MappingProxyType({"H": heads, "K": dim, "BT": rows // block, "BH": block, "BP": pairs, "num_warps": 4})


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        turned_q, turned_k = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
        for x, y in ((q, turned_q), (k, turned_k)):
            _turn(x, cos, sin, y, back=False)
        return turned_q, turned_k

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor) -> tuple[Any, ...]:
        (cos, sin), (batch, length, _, dim) = ctx.saved_tensors, dys[0].shape
        heads = [dy.shape[2] for dy in dys]
        found = torch.empty(batch, length, sum(heads), dim, dtype=dys[0].dtype, device=cos.device).split(heads, dim=2)
        for dy, dx in zip(dys, found, strict=True):
            _turn(dy, cos, sin, dx, back=True)
        return *found, None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor, y: Tensor, *, back: bool) -> None:
    """y becomes x turned, forwards or back."""
    x, (batch, length, heads, dim) = launch_utils.contiguous_last_dim(x), x.shape
    sizes = launch_sizes(heads, dim)
    grid = (-(-length // sizes["BT"]), -(-heads // sizes["BH"]), batch)
    _kernels.rotary_kernel[grid](x, cos, sin, y, length, *launch_utils.strides(x, y), BACK=back, **sizes)
