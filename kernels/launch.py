"""What all launches of Triton kernels do with their arguments: kernels know one stride per tensor at most, the others must follow.

The one thing to know: positions come as slices of a whole sequence's, in int32 already, so nothing would copy them by chance.
"""

from functools import cache

import torch
from torch import Tensor


def in_rows(x: Tensor) -> Tensor:
    """x, or a copy of it whose last dimension is contiguous; kernels are given the other strides."""
    return x if x.stride(-1) == 1 else x.contiguous()


def strides(**tensors: Tensor | None) -> dict[str, int]:
    """Of tensors [B, T, H, ...] by name: NAME_batch, NAME_row, NAME_head, of batch, token and head; 0 for what is not there."""
    found: dict[str, int] = {}
    for name, x in tensors.items():
        batch, row, head = _names(name)
        found[batch], found[row], found[head] = (0, 0, 0) if x is None else x.stride()[:3]
    return found


@cache
def _names(name: str) -> tuple[str, str, str]:
    return f"{name}_batch", f"{name}_row", f"{name}_head"


def positions(pos: Tensor | None) -> Tensor | None:
    """int32 [B, T], contiguous, of positions as callers have them."""
    return None if pos is None else pos.to(torch.int32).contiguous()


def aligned(x: Tensor) -> Tensor:
    """x, or a copy of it, contiguous and where kernels may read 16 bytes at once."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()
