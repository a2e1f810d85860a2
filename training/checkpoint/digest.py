"""A checksum of a tensor that does not depend on how it is split: the digests of boxes, at their offsets, add up to the
whole's.

Modulo 2^64 it is the sum over elements of bits * product over dimensions of multiplier(dimension, index), with odd
multipliers. So a change of one element, in any number of bits, always changes it, and equal tensors have equal checksums in
any layout.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

CHUNK = 1 << 20
"""Elements looked at together: 24 bytes of memory for each."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# splitmix64's constants, as int64: Steele, Lea & Flood, "Fast splittable pseudorandom number generators", 2014
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


@torch.no_grad()
def box_digest(data: Tensor, offset: tuple[int, ...]) -> int:
    """Digest of a box at `offset` of a whole tensor, on a CPU: 0 to 2^64 - 1. `combine_digests` adds them up."""
    if data.numel() == 0:
        return 0
    whole, offset = (data, offset) if data.dim() else (data.view(1), (0,))
    bits = whole.detach().contiguous().view(_BITS[data.element_size()])
    columns = bits.shape[-1]
    rows = bits.reshape(-1, columns)
    last = _multipliers(len(offset) - 1, offset[-1], columns)
    step = max(1, CHUNK // columns)
    parts = [(rows[i : i + step].to(torch.int64) * last).sum(dim=1) for i in range(0, len(rows), step)]
    found = torch.cat(parts).view(bits.shape[:-1])
    for dim in range(len(offset) - 2, -1, -1):
        found = (found * _multipliers(dim, offset[dim], found.shape[-1])).sum(dim=-1)
    return int(found) & 0xFFFF_FFFF_FFFF_FFFF


def rows_digest(data: np.ndarray, places: Sequence[int]) -> int:
    """Digest of rows int64 [N, .., ..] anywhere in a whole tensor: the sum of box_digest(row[None], (place, 0, 0)).

    In NumPy, on one core and without temporary arrays of the rows' size: a step may wait for it, and to wake PyTorch's threads for
    so few numbers takes longer than they do.
    """
    found = data @ _multipliers(2, 0, data.shape[2]).numpy() @ _multipliers(1, 0, data.shape[1]).numpy()
    return int(found @ _mixed(0, torch.tensor(places, dtype=torch.int64)).numpy()) & 0xFFFF_FFFF_FFFF_FFFF


def combine_digests(parts: list[int]) -> str:
    """Checksum of a whole tensor from its boxes' digests, 16 hexadecimal digits."""
    return f"{sum(parts) & 0xFFFF_FFFF_FFFF_FFFF:016x}"


@lru_cache(maxsize=64)
def _multipliers(dim: int, first: int, count: int) -> Tensor:
    """Of the indexes from `first` on."""
    return _mixed(dim, torch.arange(first, first + count, dtype=torch.int64))


def _mixed(dim: int, indexes: Tensor) -> Tensor:
    """Odd pseudo-random int64 numbers, a function of dimension and index."""
    x = (indexes + (dim + 1) * 0x1_0000_0000_0000) * _GOLDEN
    x = (x ^ _shifted(x, 30)) * _MIX
    x = (x ^ _shifted(x, 27)) * _MIX_2
    return (x ^ _shifted(x, 31)) | 1


def _shifted(x: Tensor, by: int) -> Tensor:
    """x as an unsigned number, shifted right."""
    return (x >> by) & ((1 << (64 - by)) - 1)
