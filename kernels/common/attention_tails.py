"""Attention over a tail of earlier keys and values followed by a span's own: what window attention and B'MOJO's share.

Shape suffixes: B batch, L queries, J rows of tail and span, H query heads, G key heads, K dim.

A tail has a fixed number of rows, the last ones before the span. Rows that are not of the last token's document are 0 and are not
seen: `seen`, the number of tokens of the document that were read before the span, says how many are.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.kernels.common.explicit_attention import explicit_attention
from baton.kernels.errors import REDUCED_DTYPES
from baton.kernels.protocol import State


def masked_attention(
    q_BLHK: Tensor, k_BJGK: Tensor, v_BJGK: Tensor, seen_BLJ: Tensor, scale: float, sinks_BLH: Tensor | None = None, *,
    soft_cap: float | None = None,
) -> Tensor:  # fmt: skip
    """Softmax attention of each query to the keys in its row of the mask, at least one: [B, L, H, K]. sinks: logits that take a
    share of the softmax and have no value. soft_cap: of the scores."""
    if sinks_BLH is not None or soft_cap is not None:
        return explicit_attention(q_BLHK, k_BJGK, v_BJGK, seen_BLJ, scale, sinks_BLH, soft_cap)
    groups, dtype = q_BLHK.shape[2] // k_BJGK.shape[2], q_BLHK.dtype
    if q_BLHK.device.type == "cpu" and dtype in REDUCED_DTYPES:
        # on a CPU the fused kernel would round the weights and be no faster
        q_BLHK, k_BJGK, v_BJGK = q_BLHK.float(), k_BJGK.float(), v_BJGK.float()
    y_BHLK = F.scaled_dot_product_attention(
        q_BLHK.transpose(1, 2),
        k_BJGK.transpose(1, 2),
        v_BJGK.transpose(1, 2),
        attn_mask=seen_BLJ[:, None],
        scale=scale,
        enable_gqa=groups > 1,
    )
    return y_BHLK.transpose(1, 2).to(dtype)


def with_positive_scale(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """Queries and a scale of the scores above 0 that give the same scores: kernels take the maximum of unscaled scores."""
    return (q, scale) if scale > 0 else (q * (-1 if scale < 0 else 0), abs(scale) or 1.0)


def concat_tail(tail: Tensor, rows: Tensor) -> Tensor:
    """A tail [B, n, ...] followed by rows [B, L, ...]: [B, n + L, ...]."""
    return rows if tail.shape[1] == 0 else torch.cat((tail.to(rows.dtype), rows), dim=1)


def visibility_mask(n: int, length: int, nearest: int, farthest: int | None, pos: Tensor | None, seen: Tensor) -> Tensor:
    """[B, L, n + L]: whether query i sees row r of tail and segment, by its distance back, n + i - r.

    n: rows of the tail. nearest, farthest: the distances that count (farthest None: all). pos: [B, L] or None. seen: int64 [B],
    tokens of the document read before this segment.
    """
    at_L = torch.arange(length, device=seen.device)
    distance_LJ = n + at_L[:, None] - torch.arange(n + length, device=seen.device)
    near_LJ = distance_LJ >= nearest
    if farthest is not None:
        near_LJ &= distance_LJ <= farthest
    limit_BL = at_L + seen[:, None]
    if pos is not None:
        limit_BL = torch.minimum(limit_BL, pos)
    return near_LJ & (distance_LJ <= limit_BL[:, :, None])


def seen_after(length: int, pos: Tensor | None, seen: Tensor) -> Tensor:
    """`seen` after a segment: int64 [B]."""
    seen = seen + length
    return seen if pos is None else torch.minimum(seen, pos[:, -1].to(torch.int64) + 1)


def last_queries(limit: Tensor, before: int, rows: int, size: int) -> Tensor:
    """For each block of `size` rows, the number of queries up to the last one that sees the first of them, and up to the last one
    that sees any of them: int32 [B, 2, blocks]. limit: [B, T], of queries after `before` rows; it rises by at most 1 from query to
    query."""
    at = torch.arange(limit.shape[1], dtype=torch.int32, device=limit.device)
    first_of_blocks = torch.arange(0, rows, size, dtype=torch.int32, device=limit.device)
    first_rows = at + before - limit  # that a query sees, in ascending order
    wanted = torch.stack((first_of_blocks, first_of_blocks + (size - 1))).repeat(len(limit), 1, 1)
    return torch.searchsorted(first_rows, wanted.flatten(1), right=True, out_int32=True).view(wanted.shape)


def new_tails(rows_BJ: State, sizes: dict[str, int], seen: Tensor) -> State:
    """The last `sizes` rows of each tensor, zeroed where they are not of the last token's document: a State holds nothing of
    another document.
    """
    farthest = max(sizes.values())
    others_BJ = torch.arange(farthest, 0, -1, device=seen.device) > seen[:, None]
    tails = {}
    for name, x_BJ in rows_BJ.items():
        n = sizes[name]
        mask = others_BJ[:, farthest - n :].view(len(others_BJ), n, *[1] * (x_BJ.dim() - 2))
        tails[name] = x_BJ[:, x_BJ.shape[1] - n :].masked_fill(mask, 0.0)
    return tails
