"""Gated activations and forget gates on a GPU: launches the kernels of `triton_kernels` and defines their gradients.

If x and z, or q and f, are adjacent column views of one tensor, so are their gradients (`baton.kernels.common.adjacent_views`).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from baton.kernels.common import launch_utils
from baton.kernels.common.adjacent_views import empty_like_adjacent, merge_adjacent
from baton.kernels.common.launch_utils import LazyModule
from baton.kernels.compile.aot import on_gpu
from baton.kernels.shared_gradient import claim, gradients_like

_kernels = LazyModule("baton.kernels.gate.triton_kernels")

_COLUMNS = 1024  # of a program
_ENTRIES = 4096
_TILE_COLUMNS = 128  # of a program that sums over its rows


def use_triton(x: Tensor, *others: Tensor | None) -> bool:
    """Whether these kernels apply: on a GPU, computing in float32."""
    return on_gpu(x) and not any(of is not None and of.dtype == torch.float64 for of in (x, *others))


def gate_triton(x: Tensor, z: Tensor, *, activation: str, dtype: torch.dtype) -> Tensor:
    """As `op.gated`, which checks the arguments."""
    y: Tensor = _Gate.apply(x, z, getattr(_kernels, activation.upper()).value, dtype)
    return y


def log_sigmoid_triton(x: Tensor, *, bias: Tensor | None, divisor: float) -> Tensor:
    """As `op.log_sigmoid`, which checks the arguments."""
    y: Tensor = _LogSigmoid.apply(x, bias, divisor)
    return y


def forget_gate_triton(q: Tensor, f: Tensor, *, factor: Tensor | float) -> tuple[Tensor, Tensor, Tensor]:
    """As `op.forget_gate`, which checks the arguments."""
    per_channel, number = (factor, 1.0) if isinstance(factor, Tensor) else (None, float(factor))
    found: tuple[Tensor, Tensor, Tensor] = _ForgetGate.apply(q, f, per_channel, number)
    return found


def activate_columns(*xs: Tensor, logs: float | None = None) -> tuple[Tensor, ...]:
    """silu(x) of each of xs [..., width], in its dtype; or log(sigmoid(x)) / logs in float32, of which no digit is lost.

    Without a gradient. Neighbouring columns of one tensor are one launch, and what is made of them is again; else copies are made
    of what is not in rows.
    """
    made = list[Tensor]()
    for x, widths in merge_adjacent(xs):
        rows = launch_utils.as_rows(x, x.shape[-1])
        y = torch.empty(rows.shape, dtype=x.dtype if logs is None else torch.float32, device=x.device)
        grid, sizes = _launch(rows)
        _kernels.gate_activation_kernel[grid](rows, y, len(rows), logs or 1.0, rows.stride(0), LOGS=logs is not None, **sizes)
        made += y.view(x.shape).split(widths, dim=-1)
    return tuple(made)


def launch_sizes(width: int) -> dict[str, int]:
    """Constants of a launch for rows of this width."""
    columns = min(_COLUMNS, launch_utils.next_power_of_2(width))
    return {"D": width, "BR": max(1, _ENTRIES // columns), "BD": columns, "num_warps": 4}


def tile_sizes(width: int) -> dict[str, int]:
    """Constants of a launch for rows of this width, whose blocks are tall: sums over their rows are few."""
    columns = min(_TILE_COLUMNS, launch_utils.next_power_of_2(width))
    return {"D": width, "BR": _ENTRIES // columns, "BD": columns, "num_warps": 8}


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, z: Tensor, kind: int, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x, z)
        ctx.kind, ctx.places = kind, claim(x, z)
        y = torch.empty(x.shape, dtype=dtype, device=x.device)
        x, z = launch_utils.as_rows(x, x.shape[-1]), launch_utils.as_rows(z, z.shape[-1])
        grid, sizes = _launch(x)
        _kernels.gate_forward_kernel[grid](x, z, y, len(x), x.stride(0), z.stride(0), KIND=kind, **sizes)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, z = ctx.saved_tensors
        shape, (x, z, dy) = x.shape, (launch_utils.as_rows(of, of.shape[-1]) for of in (x, z, dy))
        dx, dz = gradients_like((x, z), ctx.places, _side_by_side)
        grid, sizes = _launch(x)
        _kernels.gate_backward_kernel[grid](
            x, z, dy, dx, dz, len(x), *(of.stride(0) for of in (x, z, dy, dx, dz)), KIND=ctx.kind, **sizes
        )
        return dx.view(shape), dz.view(shape), None, None


class _LogSigmoid(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, divisor: float) -> Tensor:
        # x and not its rows: as columns of a fused projection it takes no memory of its own
        ctx.save_for_backward(x, bias)
        ctx.divisor = divisor
        y = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        rows = launch_utils.as_rows(x, x.shape[-1])
        programs, _, sizes = _tiles(rows)
        _kernels.gate_log_sigmoid_forward_kernel[programs](
            rows, _per_channel(bias, y), y, len(rows), divisor, rows.stride(0), BIASED=bias is not None, **sizes
        )
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, bias = ctx.saved_tensors
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        rows, dy = (launch_utils.as_rows(of, of.shape[-1]) for of in (x, dy))
        programs, blocks, sizes = _tiles(rows)
        shares = dy if bias is None else torch.empty(blocks, x.shape[-1], dtype=torch.float32, device=x.device)
        _kernels.gate_log_sigmoid_backward_kernel[programs](
            rows, _per_channel(bias, dy), dy, dx, shares, len(rows), ctx.divisor, rows.stride(0), dy.stride(0),
            BIASED=bias is not None, **sizes,
        )  # fmt: skip
        return dx, None if bias is None else shares.sum(0).to(bias.dtype), None


class _ForgetGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, f: Tensor, factor: Tensor | None, number: float) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(q, f, factor)
        ctx.number, ctx.places = number, claim(q, f)
        y, k, g = (torch.empty(q.shape, dtype=dtype, device=q.device) for dtype in (q.dtype, q.dtype, torch.float32))
        q, f = (launch_utils.as_rows(of, of.shape[-1]) for of in (q, f))
        programs, _, sizes = _tiles(q)
        _kernels.gate_forget_forward_kernel[programs](
            q, f, _per_channel(factor, g), y, k, g, len(q), number, q.stride(0), f.stride(0),
            FACTOR=_factor_kind(factor, number), **sizes,
        )  # fmt: skip
        return y, k, g

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dk: Tensor, dg: Tensor) -> tuple[Any, ...]:
        q, f, factor = ctx.saved_tensors
        shape, (q, f, dy, dk, dg) = q.shape, (launch_utils.as_rows(of, of.shape[-1]) for of in (q, f, dy, dk, dg))
        dq, df = gradients_like((q, f), ctx.places, _side_by_side)
        programs, blocks, sizes = _tiles(q)
        shares = dg if factor is None else torch.empty(blocks, shape[-1], dtype=torch.float32, device=q.device)
        _kernels.gate_forget_backward_kernel[programs](
            q, f, _per_channel(factor, dg), dy, dk, dg, dq, df, shares, len(q), ctx.number,
            *(of.stride(0) for of in (q, f, dy, dk, dg, dq, df)), FACTOR=_factor_kind(factor, ctx.number), **sizes,
        )  # fmt: skip
        return dq.view(shape), df.view(shape), None if factor is None else shares.sum(0).to(factor.dtype), None


def _per_channel(x: Tensor | None, instead: Tensor) -> Tensor:
    """For the kernels, which were compiled for aligned ones; another float32 tensor stands for what there is not."""
    return instead if x is None else launch_utils.contiguous_aligned(x.float())


def _factor_kind(factor: Tensor | None, number: float) -> int:
    kind: int = (_kernels.PER_CHANNEL if factor is not None else _kernels.NONE if number == 1 else _kernels.NUMBER).value
    return kind


def _side_by_side(xs: Sequence[Tensor]) -> Sequence[Tensor]:
    """Memory for gradients of xs, whichever comes first."""
    order = sorted(range(len(xs)), key=lambda n: xs[n].storage_offset())
    made = dict(zip(order, empty_like_adjacent([xs[n] for n in order]), strict=True))
    return [made[n] for n in range(len(xs))]


def _launch(x: Tensor) -> tuple[tuple[int, int], dict[str, int]]:
    sizes = launch_sizes(x.shape[1])
    return (-(-len(x) // sizes["BR"]), -(-x.shape[1] // sizes["BD"])), sizes


def _tiles(x: Tensor) -> tuple[tuple[int], int, dict[str, int]]:
    """Programs, blocks of rows among them, and constants."""
    sizes = tile_sizes(x.shape[1])
    blocks = -(-len(x) // sizes["BR"])
    return (blocks * -(-x.shape[1] // sizes["BD"]),), blocks, sizes
