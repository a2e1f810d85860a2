"""Rotary position embeddings: the public function, which selects an implementation.

Angles are float64 and only their cosine and sine are rounded: at position 1e6 a float32 angle would be off by 0.06. They are
computed once for the queries and keys of all heads, on a GPU by one kernel, and nothing else in memory is wider than x.
"""

import math
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from baton.kernels.errors import FLOAT_DTYPES, KernelError, expect_dtype, expect_positions, expect_tensor
from baton.kernels.rotary.triton_launch import rotary_triton, use_triton

_KERNEL = "rotary"


def rotary(q: Tensor, k: Tensor, pos: Tensor, rates: Sequence[float], *, magnitude: float = 1.0) -> tuple[Tensor, Tensor]:
    """Queries and keys turned by angles that grow with the position: scores then depend on distances alone.

    Source: Su et al. 2021, "RoFormer", equation 34. Of P rates the pair (i, i + P), as in Llama, is turned by pos * rates[i].
    Channels behind the first 2 P are not rotated (partial rotary positions, as in GPT-NeoX).

    Args:
        q: [B, T, heads, dim], float32, bfloat16, float16 or float64. May be columns of wider rows.
        k: [B, T, key heads, dim], in q's dtype; likewise.
        pos: position of each token in its document, int32 or int64 [B, T].
        rates: radians per position of each pair, at least one and at most dim / 2; `models.rope` has the usual ones.
        magnitude: by which rotated channels are multiplied as well (YaRN's attention factor).

    Returns:
        Both as they are given, computed in float32 (float64 of float64) and rounded once, with exact gradients. On a GPU these are
        columns of one tensor, as a projection's backward pass likes them; differentiating twice is refused there by autograd with a
        RuntimeError.

    Raises:
        KernelError: an argument of another shape, dtype or device than stated, by name; no pairs, or more of them than
            channels.
    """
    if not isinstance(q, Tensor):
        raise KernelError(f"{_KERNEL}: q is a {type(q).__name__}, expected a tensor of shape (batch, T, heads, dim)")
    expect_tensor(_KERNEL, "q", q, ("batch", "T", "heads", "dim"), (-1, -1, -1, -1), q.device)
    batch, length, _, dim = q.shape
    expect_tensor(_KERNEL, "k", k, ("batch", "T", "key heads", "dim"), (batch, length, -1, dim), q.device)
    expect_dtype(_KERNEL, "q", q, FLOAT_DTYPES)
    expect_dtype(_KERNEL, "k", k, (q.dtype,))
    expect_positions(_KERNEL, pos, batch, length, q.device)
    if not 0 < 2 * len(rates) <= dim:
        raise KernelError(f"{_KERNEL}: rates are those of {len(rates)} pairs, expected 1 to {dim // 2} of {dim} channels")
    if use_triton(q):
        return rotary_triton(q, k, pos, _on(tuple(rates), q.device, math.pi / 2), magnitude)
    dtype = torch.promote_types(q.dtype, torch.float32)
    angles_BTP = pos.to(torch.float64).unsqueeze(-1) * _on(tuple(rates), q.device)
    cos, sin = ((magnitude * x).to(dtype) for x in (angles_BTP.cos(), angles_BTP.sin()))
    return _turned(q, cos, sin), _turned(k, cos, sin)


def _turned(x: Tensor, cos_BTP: Tensor, sin_BTP: Tensor) -> Tensor:
    pairs = cos_BTP.shape[-1]
    first, second, rest = x.to(cos_BTP.dtype).split((pairs, pairs, x.shape[-1] - 2 * pairs), dim=-1)
    cos, sin = cos_BTP.unsqueeze(2), sin_BTP.unsqueeze(2)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1).to(x.dtype)


@cache
def _on(rates: tuple[float, ...], device: torch.device, unit: float = 1.0) -> Tensor:
    """The rates in this unit of radians, float64; shared by all layers."""
    return torch.tensor(rates, dtype=torch.float64, device=device) / unit
