"""Gated activations on a GPU: launches the kernels of `triton_kernels` and defines their gradient.

If x and z are adjacent column views of one tensor, so are their gradients (`baton.kernels.common.adjacent_views`).
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from baton.kernels.common import launch_utils
from baton.kernels.common.adjacent_views import empty_like_adjacent, merge_adjacent
from baton.kernels.common.launch_utils import LazyModule
from baton.kernels.compile.aot import on_gpu

_kernels = LazyModule("baton.kernels.gate.triton_kernels")

_COLUMNS = 1024  # of a program
_ENTRIES = 4096


def use_triton(x: Tensor, z: Tensor) -> bool:
    """Whether these kernels apply: on a GPU, computing in float32."""
    return on_gpu(x) and torch.float64 not in (x.dtype, z.dtype)


def gate_triton(x: Tensor, z: Tensor, *, activation: str, dtype: torch.dtype) -> Tensor:
    """As `op.gated`, which checks the arguments."""
    y: Tensor = _Gate.apply(x, z, getattr(_kernels, activation.upper()).value, dtype)
    return y


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


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, z: Tensor, kind: int, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x, z)
        ctx.kind = kind
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
        dx, dz = _gradients(x, z)
        grid, sizes = _launch(x)
        _kernels.gate_backward_kernel[grid](
            x, z, dy, dx, dz, len(x), *(of.stride(0) for of in (x, z, dy, dx, dz)), KIND=ctx.kind, **sizes
        )
        return dx.view(shape), dz.view(shape), None, None


def _gradients(x: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """Memory for them, whichever comes first."""
    turned = z.storage_offset() < x.storage_offset()
    left, right = empty_like_adjacent((z, x) if turned else (x, z))
    return (right, left) if turned else (left, right)


def _launch(x: Tensor) -> tuple[tuple[int, int], dict[str, int]]:
    sizes = launch_sizes(x.shape[1])
    return (-(-len(x) // sizes["BR"]), -(-x.shape[1] // sizes["BD"])), sizes
