"""RMSNorm on a GPU: launches the kernels of `triton_kernels` and defines their gradient."""

from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from baton.kernels.common import launch_utils
from baton.kernels.common.launch_utils import LazyModule
from baton.kernels.compile.aot import on_gpu

_kernels = LazyModule("baton.kernels.rms_norm.triton_kernels")

_ENTRIES = 4096  # of a block of rows
_BLOCKS = 32  # of rows, of a program of the backward pass
_ENTRIES_AHEAD = 16384  # that a program of the backward pass may load ahead, into shared memory


def use_triton(x: Tensor, weight: Tensor) -> bool:
    """Whether these kernels apply: on a GPU, computing in float32."""
    return on_gpu(x) and weight.dtype == torch.float32 and x.dtype != torch.float64


def rms_norm_triton(
    x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, added: Tensor | None = None, *, silu: bool = False,
    from_y: bool = False, blocks: int = _BLOCKS,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As `op.fused_add_rms_norm`, which checks the arguments. silu: of silu(x), with nothing added. from_y: y is kept for the
    backward pass, not what was normalised; not of silu(x). blocks: of rows, of a program backwards."""
    # float16 ends where a small weight's share of y begins
    stream, y = _RMSNorm.apply(x, weight, added, eps, dtype, silu, from_y and dtype != torch.float16, blocks)
    return stream, y


def split_rms_norm_triton(
    x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, width: int, sum_over_ranks: Callable[[Tensor], Tensor], *,
    silu: bool = False, blocks: int = _BLOCKS,
) -> Tensor:  # fmt: skip
    """As `op.split_rms_norm`, which checks the arguments. blocks: of rows, of a program that sums the weight's gradient."""
    y: Tensor = _SplitRMSNorm.apply(x, weight, eps, dtype, width, sum_over_ranks, silu, blocks)
    return y


@cache
def launch_sizes(width: int) -> Mapping[str, int]:
    """Constants of a forward launch for rows of this width."""
    block = launch_utils.next_power_of_2(width)
    # forwards two long rows are no faster than one, which more programs can have
    rows = 1 if block >= _ENTRIES // 2 else _ENTRIES // block
    return MappingProxyType({"D": width, "BR": rows, "BD": block, "num_warps": min(16, max(4, block // 512))})


@cache
def backward_launch_sizes(width: int) -> Mapping[str, int]:
    """Constants of a backward launch for rows of this width."""
    sizes = launch_sizes(width)
    rows = max(1, _ENTRIES // sizes["BD"])
    return MappingProxyType({**sizes, "BR": rows, "AHEAD": min(2, _ENTRIES_AHEAD // (rows * sizes["BD"]))})


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, added: Tensor | None, eps: float, dtype: torch.dtype, silu: bool, from_y: bool,
        blocks: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        # where it lies among others of odd sizes differs from what is compiled beforehand
        x, weight = x.contiguous(), launch_utils.contiguous_aligned(weight)
        stream = x if added is None else torch.empty_like(x)
        ctx.added = None if added is None else added.dtype
        added = x if added is None else added.contiguous()
        sizes, rows = launch_sizes(x.shape[-1]), x.numel() // x.shape[-1]
        y, scale = torch.empty_like(x, dtype=dtype), torch.empty(rows, dtype=torch.float32, device=x.device)
        _kernels.rms_norm_forward_kernel[(-(-rows // sizes["BR"]),)](
            x, added, weight, stream, y, scale, rows, eps, ADD=ctx.added is not None, SILU=silu, FROM_Y=from_y, **sizes
        )
        ctx.save_for_backward(y if from_y else stream, weight, scale)
        ctx.silu, ctx.from_y, ctx.blocks, ctx.dtype = silu, from_y, blocks, x.dtype
        ctx.set_materialize_grads(False)
        return stream, y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dstream: Tensor | None, dy: Tensor | None) -> tuple[Any, ...]:
        if dy is None:
            assert dstream is not None
            return dstream, None, None if ctx.added is None else dstream.to(ctx.added), *(None,) * 5
        x, weight, scale = ctx.saved_tensors
        sizes, rows, dx = backward_launch_sizes(x.shape[-1]), scale.shape[0], torch.empty_like(x, dtype=ctx.dtype)
        programs = -(-rows // (sizes["BR"] * ctx.blocks))
        shares = torch.empty(programs, x.shape[-1], dtype=torch.float32, device=x.device)
        dy = dy.contiguous()
        # of the same type, one gradient does for both
        own = ctx.added is not None and ctx.added != dx.dtype
        dadded = torch.empty_like(dx, dtype=ctx.added) if own else dx
        _kernels.rms_norm_backward_kernel[(programs,)](
            x, weight, scale, dy, dy if dstream is None else dstream.contiguous(), dx, dadded, shares, rows,
            HAS_DSTREAM=dstream is not None, ADD=own, SILU=ctx.silu, FROM_Y=ctx.from_y, BLOCKS=ctx.blocks, **sizes,
        )  # fmt: skip
        dweight = shares.sum(0) if ctx.needs_input_grad[1] else None
        return dx, dweight, None if ctx.added is None else dadded, *(None,) * 5


class _SplitRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, width: int,
        sum_over_ranks: Callable[[Tensor], Tensor], silu: bool, blocks: int,
    ) -> Tensor:  # fmt: skip
        x, weight = x.contiguous(), launch_utils.contiguous_aligned(weight)
        sizes, rows = launch_sizes(x.shape[-1]), x.numel() // x.shape[-1]
        grid = (-(-rows // sizes["BR"]),)
        own, y = torch.empty(rows, dtype=torch.float32, device=x.device), torch.empty_like(x, dtype=dtype)
        _kernels.rms_norm_split_squares_kernel[grid](x, own, rows, SILU=silu, **sizes)
        squares = sum_over_ranks(own)
        _kernels.rms_norm_split_forward_kernel[grid](x, weight, squares, y, rows, float(width), eps, SILU=silu, **sizes)
        ctx.save_for_backward(x, weight, squares)
        ctx.eps, ctx.width, ctx.sum_over_ranks, ctx.silu, ctx.blocks = eps, float(width), sum_over_ranks, silu, blocks
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, weight, squares = ctx.saved_tensors
        sizes, rows, dy, dx = backward_launch_sizes(x.shape[-1]), len(squares), dy.contiguous(), torch.empty_like(x)
        programs = -(-rows // (sizes["BR"] * ctx.blocks))
        shares, own = torch.empty(programs, x.shape[-1], dtype=torch.float32, device=x.device), torch.empty_like(squares)
        given = (rows, ctx.width, ctx.eps)
        _kernels.rms_norm_split_along_kernel[(programs,)](
            x, weight, squares, dy, own, shares, *given, SILU=ctx.silu, BLOCKS=ctx.blocks, **sizes
        )
        along, sizes = ctx.sum_over_ranks(own), launch_sizes(x.shape[-1])
        _kernels.rms_norm_split_backward_kernel[(-(-rows // sizes["BR"]),)](
            x, weight, squares, along, dy, dx, *given, SILU=ctx.silu, **sizes
        )
        return dx, shares.sum(0) if ctx.needs_input_grad[1] else None, *(None,) * 6
