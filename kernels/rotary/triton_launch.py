"""Rotary position embeddings on a GPU: launches the kernel of `triton_kernels` and defines its gradient.

q and k are usually column views of one projection: they are read through their strides, and their gradients are allocated as
adjacent views of one tensor, which the projection's backward uses as one.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from baton.kernels.common import launch_utils
from baton.kernels.common.launch_utils import LazyModule
from baton.kernels.compile.aot import on_gpu
from baton.kernels.shared_gradient import claim, gradients_like

_kernels = LazyModule("baton.kernels.rotary.triton_kernels")

_ENTRIES = 4096  # of a program
_ANGLES = 1024  # of a program


def use_triton(x: Tensor) -> bool:
    """Whether this kernel applies: on a GPU, computing in float32."""
    return on_gpu(x) and x.dtype != torch.float64


def rotary_triton(q: Tensor, k: Tensor, pos: Tensor, quarters: Tensor, magnitude: float) -> tuple[Tensor, Tensor]:
    """As `op.rotary`, which checks the arguments. quarters: rates in quarters of a turn, float64 [pairs]."""
    found: tuple[Tensor, Tensor] = _Rotary.apply(q, k, *launch_angles(pos, quarters, magnitude))
    return found


def launch_angles(pos: Tensor, quarters: Tensor, magnitude: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of pos [B, T] times quarters of a turn, float64 [pairs]; times magnitude, float32 [B, T, pairs]."""
    pairs = len(quarters)
    cos, sin = (torch.empty(*pos.shape, pairs, dtype=torch.float32, device=pos.device) for _ in range(2))
    in_block = launch_utils.next_power_of_2(pairs)
    block = max(1, _ANGLES // in_block)
    _kernels.rotary_angles_kernel[(-(-pos.numel() // block),)](
        pos.contiguous(), quarters, cos, sin, pos.numel(), magnitude, P=pairs, BT=block, BP=in_block, num_warps=4
    )  # fmt: skip
    return cos, sin


@cache
def launch_sizes(heads: int, dim: int, pairs: int) -> Mapping[str, int]:
    """Constants of a launch: all heads of a few tokens per program if they fit."""
    in_block, others = launch_utils.next_power_of_2(pairs), launch_utils.next_power_of_2(max(1, dim - 2 * pairs))
    rows = max(1, _ENTRIES // max(2 * in_block, others))
    block = min(rows, launch_utils.next_power_of_2(heads))
    sizes = {"H": heads, "K": dim, "P": pairs, "BT": rows // block, "BH": block, "BP": in_block, "BR": others, "num_warps": 4}
    return MappingProxyType(sizes)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.places = claim(q, k)
        turned_q, turned_k = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
        for x, y in ((q, turned_q), (k, turned_k)):
            _turn(x, cos, sin, y, back=False)
        return turned_q, turned_k

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor) -> tuple[Any, ...]:
        cos, sin = ctx.saved_tensors
        found = gradients_like(dys, ctx.places, _side_by_side)
        for dy, dx in zip(dys, found, strict=True):
            _turn(dy, cos, sin, dx, back=True)
        return *found, None, None


def _side_by_side(xs: Sequence[Tensor]) -> Sequence[Tensor]:
    """Memory of the shapes of xs [B, T, heads, dim], as columns of one tensor."""
    (batch, length, _, dim), heads = xs[0].shape, [x.shape[2] for x in xs]
    return torch.empty(batch, length, sum(heads), dim, dtype=xs[0].dtype, device=xs[0].device).split(heads, dim=2)


def _turn(x: Tensor, cos: Tensor, sin: Tensor, y: Tensor, *, back: bool) -> None:
    """y becomes x turned, forwards or back."""
    x, (batch, length, heads, dim) = launch_utils.contiguous_last_dim(x), x.shape
    sizes = launch_sizes(heads, dim, cos.shape[-1])
    grid = (-(-length // sizes["BT"]), -(-heads // sizes["BH"]), batch)
    _kernels.rotary_kernel[grid](x, cos, sin, y, length, *launch_utils.strides(x, y), BACK=back, **sizes)
