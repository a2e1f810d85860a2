"""A norm beside a gate on a GPU: launches the kernels of `triton_kernels` and defines their gradient."""

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
from baton.kernels.shared_gradient import claim, gradients_like

_kernels = LazyModule("baton.kernels.gated_norm.triton_kernels")
_gates = LazyModule("baton.kernels.gate.triton_kernels")

_ENTRIES = 4096  # of a block of tokens
_BLOCKS = 32  # of tokens, at most, of a program of the backward pass
_PROGRAMS = 512  # of the backward pass, at least, where there are so many blocks
_BLOCKS_AHEAD, _BYTES_AHEAD = 2, 16384  # of each tensor, that a program backwards may load ahead, into shared memory


def use_triton(x: Tensor, z: Tensor, weight: Tensor) -> bool:
    """Whether these kernels apply: on a GPU, computing in float32."""
    return on_gpu(x) and weight.dtype == torch.float32 and torch.float64 not in (x.dtype, z.dtype)


def gated_norm_triton(
    x: Tensor, z: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, *, activation: str = "silu", gate_first: bool = False,
    center: bool = False, skip: tuple[Tensor, Tensor] | None = None, most_blocks: int = _BLOCKS,
) -> Tensor:  # fmt: skip
    """As `op.gated_norm`, which checks the arguments. most_blocks: of tokens, of a program backwards."""
    options = {"KIND": getattr(_gates, activation.upper()).value, "GATE_FIRST": gate_first, "CENTER": center}
    y: Tensor = _GatedNorm.apply(x, z, weight, *(skip or (None, None)), eps, dtype, options, most_blocks)
    return y


@cache
def launch_sizes(width: int) -> Mapping[str, int]:
    """Constants of a forward launch for rows of this width."""
    block = max(16, launch_utils.next_power_of_2(width))
    return MappingProxyType({"D": width, "BR": max(1, _ENTRIES // block), "BD": block, "num_warps": min(16, max(4, block // 512))})


@cache
def backward_launch_sizes(width: int, itemsize: int = 2) -> Mapping[str, int]:
    """Constants of a backward launch for rows of this width. itemsize: most bytes of an element that is loaded."""
    sizes = launch_sizes(width)
    return MappingProxyType({**sizes, "AHEAD": min(_BLOCKS_AHEAD, _BYTES_AHEAD // (sizes["BR"] * sizes["BD"] * itemsize))})


def blocks_of_program(tokens: int, rows: int, block: int, most: int) -> int:
    """How many blocks of tokens a program of the backward pass has, of so many tokens with so many rows each. Fewer, where there
    would be few programs; on any GPU the same, for the sums' order depends on it."""
    return max(1, min(most, -(-tokens // block) * rows // _PROGRAMS))


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, z: Tensor, weight: Tensor, u: Tensor | None, factors: Tensor | None, eps: float, dtype: torch.dtype,
        options: dict[str, Any], most_blocks: int,
    ) -> Tensor:  # fmt: skip
        heads, width = x.shape[-2:]
        ctx.channel = 0 if factors is None else heads * width // len(factors)
        ctx.options = {**options, "PER_ROW": weight.dim() == 2, "CHANNEL": ctx.channel}
        ctx.most_blocks, ctx.places = most_blocks, claim(z)
        y = torch.empty(z.shape, dtype=dtype, device=x.device)
        x_rows, z_rows, u_rows = (launch_utils.as_rows(of, heads * width) for of in (x, z, x if u is None else u))
        tokens, sizes = len(x_rows), launch_sizes(width)
        scale = torch.empty(tokens, heads, dtype=torch.float32, device=x.device)
        mean = torch.empty_like(scale) if options["CENTER"] else scale
        ctx.save_for_backward(x, z, weight, u, factors, scale, mean)
        _kernels.gated_norm_forward_kernel[(-(-tokens // sizes["BR"]), heads)](
            x_rows, z_rows, u_rows, *_aligned(weight, factors), y, scale, mean, tokens, eps,
            *(of.stride(0) for of in (x_rows, z_rows, u_rows)), heads, **ctx.options, **sizes,
        )  # fmt: skip
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, z, weight, u, factors, scale, mean = ctx.saved_tensors
        heads, width = x.shape[-2:]
        x_rows, z_rows, u_rows, dy_rows = (launch_utils.as_rows(of, heads * width) for of in (x, z, x if u is None else u, dy))
        tokens, sizes = (
            len(x_rows),
            backward_launch_sizes(width, max(of.element_size() for of in (x, z, dy, x if u is None else u))),
        )
        blocks = blocks_of_program(tokens, heads, sizes["BR"], ctx.most_blocks)
        programs = -(-tokens // (sizes["BR"] * blocks))
        dx, (dz,) = torch.empty(x.shape, dtype=x.dtype, device=x.device), gradients_like((z,), ctx.places)
        dz_rows = dz.view(tokens, heads * width)
        du = dx if u is None else torch.empty(u.shape, dtype=u.dtype, device=x.device)
        share = torch.empty(programs, heads, width, dtype=torch.float32, device=x.device)
        skip_share = share if u is None else torch.empty_like(share)
        _kernels.gated_norm_backward_kernel[(programs, heads)](
            x_rows, z_rows, u_rows, *_aligned(weight, factors), scale, mean, dy_rows, dx, dz_rows, du, share, skip_share, tokens,
            blocks, *(of.stride(0) for of in (x_rows, z_rows, u_rows, dy_rows, dz_rows)), heads, **ctx.options, **sizes,
        )  # fmt: skip
        dweight = share.sum(0) if weight.dim() == 2 else share.sum((0, 1))
        if u is None:
            return dx, dz, dweight, *(None,) * 6
        return dx, dz, dweight, du, skip_share.sum(0).view(-1, ctx.channel).sum(1), *(None,) * 4


def _aligned(weight: Tensor, factors: Tensor | None) -> tuple[Tensor, Tensor]:
    """For the kernels, which were compiled for aligned ones; the weight stands for factors that there are not."""
    weight = launch_utils.contiguous_aligned(weight)
    return weight, weight if factors is None else launch_utils.contiguous_aligned(factors)
