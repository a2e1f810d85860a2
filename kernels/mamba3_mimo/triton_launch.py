"""Inputs and outputs of Mamba-3's heads with several of them, on a GPU: launches the kernels of `triton_kernels`; their gradients.

Only the arguments are kept for the backward pass. A program has a run of tokens of one head, so that it sums the gradients of the
head's parameters over them; the sums of runs are added in their order.

Shape suffixes: B batch, T time, H heads, J inputs and outputs of a head, D head_dim.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from baton.kernels.common import launch_utils
from baton.kernels.common.launch_utils import LazyModule
from baton.kernels.compile.aot import on_gpu

_kernels = LazyModule("baton.kernels.mamba3_mimo.triton_kernels")

MOST_INPUTS = 4
"""Of a head. Kernels are unrolled over every two of them, and of eight they would compile for minutes: what has more is computed by
PyTorch's operators."""
_RUN = 128  # tokens of a program that sums over them
_ENTRIES, _ENTRIES_OF_RUNS = 1024, 512  # at once


def use_triton(x: Tensor, mimo: Tensor) -> bool:
    """Whether these kernels apply: on a GPU, computing in float32, with few inputs. mimo: parameters, [H, J, D]."""
    return on_gpu(x) and mimo.dtype == torch.float32 and mimo.shape[1] <= MOST_INPUTS


def inputs_triton(x: Tensor, scale: Tensor, mimo_x: Tensor) -> Tensor:
    """v_j = scale x mimo_x_j, rounded once, to x's dtype.

    Args:
        x: [B, T, H, D], which may be columns of wider rows.
        scale: float32 [B, T, H].
        mimo_x: float32 [H, J, D].

    Returns:
        v, [B, T, J, H, D].
    """
    v: Tensor = _MimoInputs.apply(x, scale, mimo_x)
    return v


def output_triton(
    read: Tensor, x: Tensor, scale: Tensor, mimo_x: Tensor, decay: Tensor, after: Tensor, D: Tensor, own: Tensor,
    later: Tensor | None, first: Tensor | None,
) -> Tensor:  # fmt: skip
    """In x's dtype, with v_{t,j} = x_t mimo_x_j,

        y_{t,i} = decay_t (read_{t-1,i} + scale_{t-1} sum_{j>i} later_{t-1,ij} v_{t-1,j})
                  + after_t sum_j own_{t,ij} v_{t,j} + D v_{t,i}

    Args:
        read: what each token's next one reads, without what its later inputs write, [B, T, J, H, D].
        x, scale, mimo_x: as `inputs_triton`'s.
        decay, after: float32 [B, T, H].
        D: float32 [H].
        own: float32 [B, T, H, J, J].
        later: of the pairs i < j, row after row, float32 [B, T, H, J (J - 1) / 2]. None: of one input.
        first: what the first token reads, float32 [B, J, H, D]. None: nothing.

    Returns:
        y, [B, T, J, H, D].
    """
    y: Tensor = _MimoOutput.apply(read, x, scale, mimo_x, decay, after, D, own, later, first)
    return y


def gated_sum_triton(y: Tensor, z: Tensor, mimo_z: Tensor, mimo_o: Tensor, dtype: torch.dtype) -> Tensor:
    """As `ranks.gated_sum`."""
    found: Tensor = _GatedSum.apply(y, z, mimo_z, mimo_o, dtype)
    return found


def launch_sizes(heads: int, inputs: int, width: int, *, over_runs: bool) -> dict[str, int]:
    """Constants of the launches. over_runs: of those that sum over tokens."""
    block = launch_utils.next_power_of_2(width)
    sizes = {"H": heads, "J": inputs, "D": width, "BD": block, "num_warps": 4}
    if over_runs:
        return sizes | {"BT": min(_RUN, max(1, _ENTRIES_OF_RUNS // block)), "RUN": _RUN}
    return sizes | {"BT": max(1, _ENTRIES // block)}


class _MimoInputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, mimo_x: Tensor) -> Tensor:
        scale, mimo_x = scale.contiguous(), mimo_x.contiguous()
        grid, sizes = _launch(x, mimo_x, over_runs=False)
        (batch, length, heads, width), rows = x.shape, _rows(x)
        v = torch.empty(batch, length, mimo_x.shape[1], heads, width, dtype=x.dtype, device=x.device)
        _kernels.mimo_inputs_kernel[grid](rows, scale, mimo_x, v, length, rows.stride(0), **sizes)
        # x and not its rows: as columns of a projection it takes no memory of its own
        ctx.save_for_backward(x, scale, mimo_x)
        return v

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dv: Tensor) -> tuple[Tensor, ...]:
        x, scale, mimo_x = ctx.saved_tensors
        grid, sizes = _launch(x, mimo_x, over_runs=True)
        rows, dx, dscale = _rows(x), _empty(x), torch.empty_like(scale)
        of_runs = _of_runs(grid, mimo_x)
        _kernels.mimo_inputs_backward_kernel[grid](
            rows, scale, mimo_x, dv.contiguous(), dx, dscale, of_runs, x.shape[1], rows.stride(0), **sizes
        )
        return dx, dscale, of_runs.sum((0, 1))


class _MimoOutput(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, read: Tensor, x: Tensor, scale: Tensor, mimo_x: Tensor, decay: Tensor, after: Tensor, D: Tensor, own: Tensor,
        later: Tensor | None, first: Tensor | None,
    ) -> Tensor:  # fmt: skip
        read, scale, mimo_x, decay, after, D, own = (of.contiguous() for of in (read, scale, mimo_x, decay, after, D, own))
        later, first = (None if of is None else of.contiguous() for of in (later, first))
        grid, sizes = _launch(x, mimo_x, over_runs=False)
        rows, y = _rows(x), torch.empty(read.shape, dtype=x.dtype, device=x.device)
        _kernels.mimo_output_kernel[grid](
            read, rows, scale, mimo_x, decay, after, D, own, _or(later, own), _or(first, decay), y, x.shape[1], rows.stride(0),
            HAS_FIRST=first is not None, **sizes,
        )  # fmt: skip
        ctx.save_for_backward(read, x, scale, mimo_x, decay, after, D, own, later, first)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        read, x, scale, mimo_x, decay, after, D, own, later, first = ctx.saved_tensors
        grid, sizes = _launch(x, mimo_x, over_runs=True)
        rows, dx, of_runs, of_tokens = _rows(x), _empty(x), _of_runs(grid, mimo_x), torch.empty_like(decay)
        dread, dscale, ddecay, dafter, down = (torch.empty_like(of) for of in (read, scale, decay, after, own))
        dlater, dfirst = (None if of is None else torch.empty_like(of) for of in (later, first))
        _kernels.mimo_output_backward_kernel[grid](
            read, rows, scale, mimo_x, decay, after, D, own, _or(later, own), _or(first, decay), dy.contiguous(), dread, dx, dscale,
            of_runs, ddecay, dafter, of_tokens, down, _or(dlater, down), _or(dfirst, ddecay), x.shape[1], rows.stride(0),
            HAS_FIRST=first is not None, **sizes,
        )  # fmt: skip
        return dread, dx, dscale, of_runs.sum((0, 1)), ddecay, dafter, of_tokens.sum((0, 1)), down, dlater, dfirst


class _GatedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, z: Tensor, mimo_z: Tensor, mimo_o: Tensor, dtype: torch.dtype) -> Tensor:
        y, mimo_z, mimo_o = y.contiguous(), mimo_z.contiguous(), mimo_o.contiguous()
        grid, sizes = _launch(z, mimo_z, over_runs=False)
        rows, total = _rows(z), torch.empty(z.shape, dtype=dtype, device=z.device)
        _kernels.gated_sum_kernel[grid](y, rows, mimo_z, mimo_o, total, z.shape[1], rows.stride(0), **sizes)
        ctx.save_for_backward(y, z, mimo_z, mimo_o)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dtotal: Tensor) -> tuple[Tensor | None, ...]:
        y, z, mimo_z, mimo_o = ctx.saved_tensors
        grid, sizes = _launch(z, mimo_z, over_runs=True)
        rows, of_total, dy, dz = _rows(z), _rows(dtotal), torch.empty_like(y), _empty(z)
        of_runs = _of_runs(grid, mimo_z.unsqueeze(1).expand(-1, 2, -1, -1))
        _kernels.gated_sum_backward_kernel[grid](
            y, rows, mimo_z, mimo_o, of_total, dy, dz, of_runs, z.shape[1], rows.stride(0), of_total.stride(0), **sizes
        )
        return dy, dz, *of_runs.sum((0, 1)).unbind(1), None


def _launch(x: Tensor, mimo: Tensor, *, over_runs: bool) -> tuple[tuple[int, int], dict[str, int]]:
    """Grid and constants for x [B, T, H, D] and parameters [H, J, D]."""
    batch, length, heads, width = x.shape
    sizes = launch_sizes(heads, mimo.shape[1], width, over_runs=over_runs)
    return (heads * -(-length // sizes["RUN" if over_runs else "BT"]), batch), sizes


def _rows(x: Tensor) -> Tensor:
    return launch_utils.as_rows(x, x.shape[2] * x.shape[3])


def _empty(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _of_runs(grid: tuple[int, int], parameter: Tensor) -> Tensor:
    """Room for what each program has of a parameter's gradient, [B, runs, H, ...]."""
    return parameter.new_empty(grid[1], grid[0] // len(parameter), *parameter.shape)


def _or(x: Tensor | None, other: Tensor) -> Tensor:
    """A pointer in place of an absent tensor, which is not read."""
    return other if x is None else x
