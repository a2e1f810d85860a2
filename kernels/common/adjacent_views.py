"""Neighbouring columns of one tensor: what one launch takes together, and gradients that lie as what they are gradients of.

The one thing to know: a projection whose output is given in parts takes gradients that are neighbours for the gradient of one.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def merge_adjacent(xs: Sequence[Tensor]) -> list[tuple[Tensor, list[int]]]:
    """Of xs [..., width] those that follow each other in the rows of one tensor as one, and their widths."""
    found: list[tuple[Tensor, list[int]]] = []
    for x in xs:
        last = found[-1][0] if found else None
        if last is not None and _is_adjacent(last, x):
            found[-1] = last.as_strided((*x.shape[:-1], last.shape[-1] + x.shape[-1]), last.stride()), [*found[-1][1], x.shape[-1]]
        else:
            found.append((x, [x.shape[-1]]))
    return found


def empty_like_adjacent(xs: Sequence[Tensor]) -> list[Tensor]:
    """Memory for as many numbers; in rows that neighbours have together and to themselves."""
    return [
        part
        for whole, widths in merge_adjacent(xs)
        for part in torch.empty(whole.shape, dtype=whole.dtype, device=whole.device).split(widths, dim=-1)
    ]


def _is_adjacent(left: Tensor, right: Tensor) -> bool:
    width, rows = left.shape[-1], left.stride()[:-1]
    return (
        left.untyped_storage()._cdata == right.untyped_storage()._cdata
        and (left.dtype, left.shape[:-1], left.stride()) == (right.dtype, right.shape[:-1], right.stride())
        and right.storage_offset() - left.storage_offset() == width
        and left.stride(-1) == 1
        and min(rows, default=0) >= width + right.shape[-1]
    )
