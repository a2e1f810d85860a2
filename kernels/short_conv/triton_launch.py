"""Launches of the short convolution's Triton kernels, with their gradient.

Spans depend on shapes and on the `LaunchConfig` alone, so equal calls give equal bits. The input may be a view; only its last
dimension has to be contiguous.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from baton.kernels.common import launch_utils
from baton.kernels.common.launch_utils import LazyModule
from baton.kernels.compile import launch_configs
from baton.kernels.compile.aot import on_gpu
from baton.kernels.shared_gradient import claim, gradients_like
from baton.kernels.short_conv.torch_impl import new_tail

_kernels = LazyModule("baton.kernels.short_conv.triton_kernels")

KERNEL = "short_conv"


@dataclass(frozen=True)
class LaunchConfig:
    """Block sizes of the kernels.

    Attributes:
        block_d: channels of a program, which is one warp; a power of two. Of wider heads a program has one, and more warps.
        block_t: tokens loaded together, one block ahead of the computation.
        span: tokens of a program; a multiple of block_t. Shorter ones are more programs, whose loads hide each other's waiting.
        block_t_backward, span_backward: the same in the backward pass, whose programs have more to compute and more to sum up.
    """

    block_d: int = 128
    block_t: int = 8
    span: int = 64
    block_t_backward: int = 4
    span_backward: int = 128


_DEFAULT = LaunchConfig()

_STEP_CHANNELS = 256
"""Channels of a program that runs one token."""

_WIDEST_HEAD = 256
"""Most channels of a head that is made a unit one, a power of two."""

Unit = tuple[int, float]
"""Channels of a head that is made a unit one, and what is added to the sum of its squares."""


def use_triton(x: Tensor) -> bool:
    """Whether tensors like x are computed by these kernels: on a GPU, in float32."""
    return on_gpu(x) and x.dtype != torch.float64


def short_conv_triton(
    x: Tensor, weight: Tensor, bias: Tensor, *, pos: Tensor | None, tail: Tensor | None, silu: bool, unit: Unit | None = None,
    config: LaunchConfig | None = None, need_tail: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As `op.short_conv`, which checks the arguments; of heads that `fits_in_block`."""
    config, pos = config or _launch_config_for(x, weight), launch_utils.int32_positions(pos)
    config = _with_room(config, weight.shape[1], 0 if unit is None else unit[0])
    inputs = (x, weight, bias, tail)
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in inputs):
        y, leaving = _ShortConv.apply(*inputs, pos, silu, unit, config, need_tail)
        return y, leaving
    return _forward(x, weight, bias, tail, pos, silu, unit, config, need_tail)


def short_conv_step_triton(
    x: Tensor, weight: Tensor, bias: Tensor, *, pos: Tensor | None, tail: Tensor, silu: bool, unit: Unit | None = None
) -> tuple[Tensor, Tensor]:
    """`op.short_conv` of one token a sequence, x [batch, 1, channels], without gradients. The new tail is written over the given
    one if that is contiguous."""
    (batch, _, channels), width = x.shape, weight.shape[1]
    rows, tail, pos = launch_utils.contiguous_last_dim(x), tail.contiguous(), launch_utils.int32_positions(pos)
    y, block_d = torch.empty((batch, 1, channels), dtype=x.dtype, device=x.device), _STEP_CHANNELS
    _kernels.short_conv_step_kernel[(-(-channels // block_d), batch)](
        rows, launch_utils.contiguous_aligned(weight), launch_utils.contiguous_aligned(bias), tail, x if pos is None else pos, y,
        rows.stride(0), DIM=channels, W=width, HAS_POS=pos is not None, SILU=silu, EVEN_D=channels % block_d == 0,
        BLOCK_D=block_d, num_warps=4, num_stages=1, **_unit_options(unit),
    )  # fmt: skip
    return y, tail


def shape_of(width: int, element_bytes: int) -> launch_configs.Shape:
    """The table's key."""
    return {"width": width, "element_bytes": element_bytes}


def _launch_config_for(x: Tensor, weight: Tensor) -> LaunchConfig:
    batch, length, channels = x.shape
    sizes = {"batch": batch, "tokens": length, "channels": channels}
    return launch_configs.choose(KERNEL, _DEFAULT, x.device, shape_of(weight.shape[1], x.element_size()), sizes)


def fits_in_block(unit_width: int) -> bool:
    """Whether the kernels make heads of so many channels unit ones: a program has all channels of a head."""
    return unit_width <= _WIDEST_HEAD and unit_width == launch_utils.next_power_of_2(unit_width)


def unit_of_kernels(width: int | None, eps: float) -> Unit | None:
    """What the kernels take of heads of `width` channels; None: there are none, or they have to be made unit ones behind them."""
    return (width, eps) if width is not None and fits_in_block(width) else None


def warps_of(unit: Unit | None, width: int, *, backward: bool) -> int:
    """Warps of a program: its registers hold the inputs of 128 channels for each; backwards, of long filters, of 32, because
    `_with_room` loads 8 tokens or more together."""
    return (1 if unit is None else max(1, unit[0] // 128)) * (4 if backward and width > 5 else 1)


def _unit_options(unit: Unit | None) -> dict[str, Any]:
    width, eps = unit or (0, 0.0)
    return {"UNIT": width, "eps": eps}


@cache
def _with_room(config: LaunchConfig, width: int, unit_width: int) -> LaunchConfig:
    """A block of tokens is at least as long as a token's gradient reaches back; one of channels has whole heads."""
    channels, least = max(config.block_d, unit_width), launch_utils.next_power_of_2(width - 1)
    steps = max(config.block_t, least)
    # of the widest heads the compiler spills where more tokens are loaded together
    back = max(min(config.block_t_backward, 4) if unit_width == _WIDEST_HEAD else config.block_t_backward, least)
    spans = {"span": -(-config.span // steps) * steps, "span_backward": -(-config.span_backward // back) * back}
    return replace(config, block_d=channels, block_t=steps, block_t_backward=back, **spans)


def _grid(x: Tensor, block_d: int, span: int) -> tuple[int, int, int]:
    batch, length, channels = x.shape
    return -(-channels // block_d), batch, -(-length // span)


def _options(
    x: Tensor, width: int, tail: Tensor | None, pos: Tensor | None, silu: bool, unit: Unit | None, block_d: int, block_t: int,
    span: int,
) -> dict[str, Any]:  # fmt: skip
    return {
        **_unit_options(unit),
        "T": x.shape[1],
        "span": span,
        "x_batch": x.stride(0),
        "DIM": x.shape[2],
        "x_row": x.stride(1),
        "W": width,
        "HAS_TAIL": tail is not None,
        "HAS_POS": pos is not None,
        "SILU": silu,
        "EVEN_T": x.shape[1] % block_t == 0,
        "EVEN_D": x.shape[2] % block_d == 0,
        "BLOCK_D": block_d,
        "BLOCK_T": block_t,
        "num_stages": 1,
    }


def _forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    tail: Tensor | None,
    pos: Tensor | None,
    silu: bool,
    unit: Unit | None,
    config: LaunchConfig,
    need_tail: bool,
) -> tuple[Tensor, Tensor]:
    rows, width = launch_utils.contiguous_last_dim(x), weight.shape[1]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _kernels.short_conv_forward_kernel[_grid(x, config.block_d, config.span)](
        rows, launch_utils.contiguous_aligned(weight), launch_utils.contiguous_aligned(bias),
        x if tail is None else tail.contiguous(), x if pos is None else pos, y,
        **_options(rows, width, tail, pos, silu, unit, config.block_d, config.block_t, config.span),
        num_warps=warps_of(unit, width, backward=False),
    )  # fmt: skip
    return y, new_tail(x, tail, width - 1) if need_tail else x.new_empty(x.shape[0], 0, x.shape[2])


class _ShortConv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, tail: Tensor | None, pos: Tensor | None, silu: bool,
        unit: Unit | None, config: LaunchConfig, need_tail: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        ctx.set_materialize_grads(False)  # no zeros for the gradient of an unused tail
        ctx.save_for_backward(x, weight, bias, tail, pos)
        ctx.silu, ctx.unit, ctx.config, ctx.places = silu, unit, config, claim(x)
        return _forward(x, weight, bias, tail, pos, silu, unit, config, need_tail)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dleaving: Tensor | None) -> tuple[Any, ...]:
        x, weight, bias, tail, pos = ctx.saved_tensors
        dy = torch.zeros(x.shape, dtype=x.dtype, device=x.device) if dy is None else dy
        rows, dy, config, width = (
            launch_utils.contiguous_last_dim(x),
            launch_utils.contiguous_last_dim(dy),
            ctx.config,
            weight.shape[1],
        )
        grid = _grid(x, config.block_d, config.span_backward)
        (dx,) = gradients_like((x,), ctx.places)
        dtail = x if tail is None else torch.empty(tail.shape, dtype=tail.dtype, device=x.device)
        sums = torch.empty(grid[1] * grid[2], width + 1, x.shape[2], dtype=torch.float32, device=x.device)
        _kernels.short_conv_backward_kernel[grid](
            rows, launch_utils.contiguous_aligned(weight), launch_utils.contiguous_aligned(bias),
            x if tail is None else tail.contiguous(), x if pos is None else pos, dy,
            x if dleaving is None else dleaving.contiguous(), dx, dtail, sums, dy_batch=dy.stride(0), dy_row=dy.stride(1),
            dx_batch=dx.stride(0), dx_row=dx.stride(1), HAS_DTAIL_OUT=dleaving is not None,
            num_warps=warps_of(ctx.unit, width, backward=True),
            **_options(
                rows, width, tail, pos, ctx.silu, ctx.unit, config.block_d, config.block_t_backward, config.span_backward
            ),
        )  # fmt: skip
        whole = sums.sum(0)
        grads = (dx, whole[:width].t().to(weight.dtype), whole[width].to(bias.dtype), None if tail is None else dtail)
        return (*(grad if want else None for want, grad in zip(ctx.needs_input_grad[:4], grads, strict=True)), *(None,) * 5)
