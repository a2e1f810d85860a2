"""Window attention in blocks of queries through torch's fused attention, on any device.

Shape suffixes: B batch, T time, L queries of a block, J keys, H query heads, G key heads, K dim.

Which keys a query sees depends on distances alone. The key j tokens back is visible if j < window, if j <= pos (same document), and
if j is at most `seen`, the number of tokens of the document read before the query: tail rows that were never filled are not keys.
`concat_tail`, `visibility_mask` and others are shared with the eidetic attention.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.kernels.common.chunked_autograd import run_chunked
from baton.kernels.errors import REDUCED_DTYPES
from baton.kernels.protocol import Inputs, State

_BLOCK = 64
_WHOLE_BLOCK = 512


def window_attention_chunked(
    q: Tensor, k: Tensor, v: Tensor, *, window: int | None, pos: Tensor | None, state: State, scale: float,
    chunk: int | None = None, need_final_state: bool = True,
) -> tuple[Tensor, State]:  # fmt: skip
    """As `op.window_attention`, which checks the arguments; chunk: queries per block."""
    if window is None:
        # the State grows, so it is built once, and the blocks are inside one step
        step, length = partial(_whole_step, scale=scale, block=chunk or _WHOLE_BLOCK), q.shape[1]
    else:
        step, length = partial(_window_step, window=window, scale=scale), chunk or max(_BLOCK, window)
    last = None if need_final_state else partial(step, need_final_state=False)
    return run_chunked(step, (q, k, v), 3, pos=pos, state=state, chunk=length, last=last)


def masked_attention(q_BLHK: Tensor, k_BJGK: Tensor, v_BJGK: Tensor, seen_BLJ: Tensor, scale: float) -> Tensor:
    """Softmax attention of each query to the keys in its row of the mask, at least one: [B, L, H, K]."""
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


def _window_step(
    inputs: Inputs, pos: Tensor | None, state: State, *, window: int, scale: float, need_final_state: bool = True
) -> tuple[Tensor, State]:
    q, k, v = inputs
    length, n = q.shape[1], window - 1
    keys, values = concat_tail(state["k"], k), concat_tail(state["v"], v)
    y = masked_attention(
        q, keys.to(q.dtype), values.to(q.dtype), visibility_mask(n, length, 0, window - 1, pos, state["seen"]), scale
    )
    if not need_final_state:
        return y, {}
    # clamped to the tail's length: then a segment that long knows `seen` without the State before it
    seen = seen_after(length, pos, state["seen"]).clamp(max=n)
    return y, {**new_tails({"k": keys, "v": values}, {"k": n, "v": n}, seen), "seen": seen}


def _whole_step(
    inputs: Inputs, pos: Tensor | None, state: State, *, scale: float, block: int, need_final_state: bool = True
) -> tuple[Tensor, State]:
    q, k, v = inputs
    length, n = q.shape[1], state["k"].shape[1]
    keys, values = concat_tail(state["k"], k), concat_tail(state["v"], v)
    outputs = []
    for begin in range(0, length, block):
        end = min(begin + block, length)
        rows = visibility_mask(n + begin, end - begin, 0, None, None if pos is None else pos[:, begin:end], state["seen"] + begin)
        outputs.append(
            masked_attention(q[:, begin:end], keys[:, : n + end].to(q.dtype), values[:, : n + end].to(q.dtype), rows, scale)
        )
    y = torch.cat(outputs, dim=1)
    if not need_final_state:
        return y, {}
    seen = seen_after(length, pos, state["seen"])
    return y, {**new_tails({"k": keys, "v": values}, {"k": n + length, "v": n + length}, seen), "seen": seen}
