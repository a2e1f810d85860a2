"""Gates and activations on a GPU: launches the Triton kernels of `per_block` and gives them a gradient.

The one thing to know: where x and z are neighbours in the rows of one tensor, so are their gradients, and the projection that made
both takes them for the gradient of one.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from baton.kernels import tiles as table
from baton.kernels.ahead import on_gpu

_COLUMNS = 1024  # of a program
_ENTRIES = 4096


class Part(NamedTuple):
    """Columns of a projection that are activated alike. divisor: of logarithms of sigmoids."""

    width: int
    activation: Literal["silu", "log_sigmoid"]
    divisor: float = 1.0

    def dtype(self, x: Tensor) -> torch.dtype:
        """Of what is made of x: of gates no digit is lost."""
        return x.dtype if self.activation == "silu" else torch.promote_types(x.dtype, torch.float32)


def in_triton(x: Tensor, z: Tensor) -> bool:
    """Whether these kernels compute it: on a GPU, in float32."""
    return on_gpu(x) and torch.float64 not in (x.dtype, z.dtype)


def gated_triton(x: Tensor, z: Tensor, *, gelu: bool, dtype: torch.dtype) -> Tensor:
    """As `op.gated`, which checks the arguments."""
    y: Tensor = _Gate.apply(x, z, gelu, dtype)
    return y


def activated_triton(x: Tensor, parts: Sequence[Part]) -> tuple[Tensor, ...]:
    """As `op.activated`, which checks the arguments."""
    found: tuple[Tensor, ...] = _Activated.apply(x, tuple(parts))
    return found


def sizes_of(width: int) -> dict[str, int]:
    """A launch's, for rows of so many numbers."""
    columns = min(_COLUMNS, table.power_of_two(width))
    return {"D": width, "BR": max(1, _ENTRIES // columns), "BD": columns, "num_warps": 4}


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, z: Tensor, gelu: bool, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x, z)
        ctx.gelu = gelu
        y = torch.empty(x.shape, dtype=dtype, device=x.device)
        x, z = _rows(x), _rows(z)
        grid, sizes = _launch(x)
        _kernels().forward_kernel[grid](x, z, y, len(x), x.stride(0), z.stride(0), GELU=gelu, **sizes)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, z = ctx.saved_tensors
        shape, (x, z, dy) = x.shape, (_rows(of) for of in (x, z, dy))
        dx, dz = _gradients(x, z)
        grid, sizes = _launch(x)
        _kernels().backward_kernel[grid](
            x, z, dy, dx, dz, len(x), *(of.stride(0) for of in (x, z, dy, dx, dz)), GELU=ctx.gelu, **sizes
        )
        return dx.view(shape), dz.view(shape), None, None


class _Activated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, parts: tuple[Part, ...]) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x)
        ctx.parts = parts
        ctx.set_materialize_grads(False)
        rows, made, begin = _rows(x), list[Tensor](), 0
        for part, widths in _runs(parts):
            own = rows[:, begin : begin + sum(widths)]
            y = torch.empty(own.shape, dtype=part.dtype(x), device=x.device)
            grid, sizes = _launch(own)
            _kernels().activate_kernel[grid](
                own, y, len(own), part.divisor, own.stride(0), LOGS=part.activation == "log_sigmoid", **sizes
            )
            made += y.view(*x.shape[:-1], -1).split(widths, dim=-1)
            begin += sum(widths)
        return tuple(made)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        rows = _rows(x)
        dx, begin = torch.empty(rows.shape, dtype=x.dtype, device=x.device), 0
        for part, dy in zip(ctx.parts, dys, strict=True):
            own, found = (of[:, begin : begin + part.width] for of in (rows, dx))
            begin += part.width
            if dy is None:
                found.zero_()
                continue
            dy, (grid, sizes) = _rows(dy), _launch(own)
            _kernels().activate_backward_kernel[grid](
                own, dy, found, len(own), part.divisor, *(of.stride(0) for of in (own, dy, found)),
                LOGS=part.activation == "log_sigmoid", **sizes,
            )  # fmt: skip
        return dx.view(x.shape), None


def _runs(parts: Sequence[Part]) -> list[tuple[Part, list[int]]]:
    """Neighbours that one launch activates: one of them, and their widths."""
    runs: list[tuple[Part, list[int]]] = []
    for part in parts:
        if runs and runs[-1][0][1:] == part[1:]:
            runs[-1][1].append(part.width)
        else:
            runs.append((part, [part.width]))
    return runs


def _rows(x: Tensor) -> Tensor:
    """[rows, d] whose columns are contiguous; a copy where there is no such view."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()


def _gradients(x: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """Memory for them: side by side in rows of their own where x and z are in one tensor's."""
    rows, width = x.shape
    apart = int(z.storage_offset()) - int(x.storage_offset())
    beside = x.untyped_storage().data_ptr() == z.untyped_storage().data_ptr() and abs(apart) == width and x.dtype == z.dtype
    if not beside or not x.stride(0) == z.stride(0) >= 2 * width:
        return torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty_like(
            z, memory_format=torch.contiguous_format
        )
    left, right = torch.empty(rows, 2 * width, dtype=x.dtype, device=x.device).split(width, dim=1)
    return (left, right) if apart > 0 else (right, left)


def _launch(x: Tensor) -> tuple[tuple[int, int], dict[str, int]]:
    sizes = sizes_of(x.shape[1])
    return (-(-len(x) // sizes["BR"]), -(-x.shape[1] // sizes["BD"])), sizes


def _kernels() -> ModuleType:
    """Imported when they are first needed: where there is no GPU there need be no Triton."""
    from baton.kernels.gate import per_block

    return per_block
