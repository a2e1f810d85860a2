"""Adjacent column views of one tensor: merged for a single launch, and gradients allocated in the same layout.

A fused projection returns its output as column views of one tensor. If the gradients of these views are adjacent views as well, the
projection treats them as one tensor, so that its backward is one matmul without a concatenation.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def merge_adjacent(xs: Sequence[Tensor]) -> list[tuple[Tensor, list[int]]]:
    """Merge tensors [..., width] that are adjacent columns of one tensor: pairs of a (merged) view and the widths of its parts."""
    found: list[tuple[Tensor, list[int]]] = []
    for x in xs:
        last = found[-1][0] if found else None
        if last is not None and _is_adjacent(last, x):
            found[-1] = last.as_strided((*x.shape[:-1], last.shape[-1] + x.shape[-1]), last.stride()), [*found[-1][1], x.shape[-1]]
        else:
            found.append((x, [x.shape[-1]]))
    return found


def empty_like_adjacent(xs: Sequence[Tensor]) -> list[Tensor]:
    """Uninitialised tensors of the given shapes; tensors that are adjacent in `xs` are adjacent in the result."""
    return [
        part
        for whole, widths in merge_adjacent(xs)
        for part in torch.empty(whole.shape, dtype=whole.dtype, device=whole.device).split(widths, dim=-1)
    ]


def empty_like_heads(xs: Sequence[Tensor]) -> list[Tensor]:
    """As `empty_like_adjacent`, of [..., heads, width] each, whose last two dimensions are columns if heads are side by side."""
    if not all(x.stride(-1) == 1 and x.stride(-2) == x.shape[-1] for x in xs):
        return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in xs]
    made = empty_like_adjacent([x.flatten(-2) for x in xs])
    return [y.unflatten(-1, x.shape[-2:]) for x, y in zip(xs, made, strict=True)]


def _is_adjacent(left: Tensor, right: Tensor) -> bool:
    width, rows = left.shape[-1], left.stride()[:-1]
    return (
        left.untyped_storage()._cdata == right.untyped_storage()._cdata
        and (left.dtype, left.shape[:-1], left.stride()) == (right.dtype, right.shape[:-1], right.stride())
        and right.storage_offset() - left.storage_offset() == width
        and left.stride(-1) == 1
        and min(rows, default=0) >= width + right.shape[-1]
    )
