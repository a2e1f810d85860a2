"""Window attention in blocks of queries through torch's fused attention, on any device.

The one thing to know: which key a query may see is a matter of distances alone. The key j tokens back is seen iff j < window,
j <= pos (it is of the same document) and j <= how much of the document has been read since the query's piece began (`seen`): a row
of the tail that was never filled is no key. `history` and `visible` are shared with the eidetic attention.

Shape suffixes: B batch, T time, L queries of a block, J keys, H query heads, G key heads, K dim.
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
    chunk: int | None = None, state_wanted: bool = True,
) -> tuple[Tensor, State]:  # fmt: skip
    """As `op.window_attention`, which checks the arguments; chunk: queries per block."""
    if window is None:
        # the state grows, so it is kept once, and the blocks are within one step
        step, length = partial(_whole_step, scale=scale, block=chunk or _WHOLE_BLOCK), q.shape[1]
    else:
        step, length = partial(_window_step, window=window, scale=scale), chunk or max(_BLOCK, window)
    last = None if state_wanted else partial(step, state_wanted=False)
    return run_chunked(step, (q, k, v), 3, pos=pos, state=state, chunk=length, last=last)


def attend(q_BLHK: Tensor, k_BJGK: Tensor, v_BJGK: Tensor, seen_BLJ: Tensor, scale: float) -> Tensor:
    """Softmax attention of each query to the keys it sees, at least one: [B, L, H, K]."""
    groups, dtype = q_BLHK.shape[2] // k_BJGK.shape[2], q_BLHK.dtype
    if q_BLHK.device.type == "cpu" and dtype in REDUCED_DTYPES:
        # there the fused kernel would round the weights, and be no faster
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


def history(tail: Tensor, rows: Tensor) -> Tensor:
    """A tail [B, n, ...] and what follows it, [B, n + L, ...]."""
    return rows if tail.shape[1] == 0 else torch.cat((tail.to(rows.dtype), rows), dim=1)


def visible(n: int, length: int, nearest: int, farthest: int | None, pos: Tensor | None, seen: Tensor) -> Tensor:
    """[B, L, n + L]: whether query i sees row r of a history with a tail of n rows, by its distance back, n + i - r.

    nearest, farthest: the distances that count (None: all). pos: [B, L] or None. seen: int64 [B], tokens of the document read
    before this piece.
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


def read_so_far(length: int, pos: Tensor | None, seen: Tensor) -> Tensor:
    """`seen` after a piece: int64 [B]."""
    seen = seen + length
    return seen if pos is None else torch.minimum(seen, pos[:, -1].to(torch.int64) + 1)


def new_tails(rows_BJ: State, sizes: dict[str, int], seen: Tensor) -> State:
    """The last rows of histories, sizes of each, zero where they are not of the last token's document: a State holds nothing of
    another one."""
    farthest = max(sizes.values())
    others_BJ = torch.arange(farthest, 0, -1, device=seen.device) > seen[:, None]
    tails = {}
    for name, x_BJ in rows_BJ.items():
        n = sizes[name]
        mask = others_BJ[:, farthest - n :].view(len(others_BJ), n, *[1] * (x_BJ.dim() - 2))
        tails[name] = x_BJ[:, x_BJ.shape[1] - n :].masked_fill(mask, 0.0)
    return tails


def _window_step(
    inputs: Inputs, pos: Tensor | None, state: State, *, window: int, scale: float, state_wanted: bool = True
) -> tuple[Tensor, State]:
    q, k, v = inputs
    length, n = q.shape[1], window - 1
    keys, values = history(state["k"], k), history(state["v"], v)
    y = attend(q, keys.to(q.dtype), values.to(q.dtype), visible(n, length, 0, window - 1, pos, state["seen"]), scale)
    if not state_wanted:
        return y, {}
    # counted no farther than the tail reaches: then a piece of that length knows it without what was before
    seen = read_so_far(length, pos, state["seen"]).clamp(max=n)
    return y, {**new_tails({"k": keys, "v": values}, {"k": n, "v": n}, seen), "seen": seen}


def _whole_step(
    inputs: Inputs, pos: Tensor | None, state: State, *, scale: float, block: int, state_wanted: bool = True
) -> tuple[Tensor, State]:
    q, k, v = inputs
    length, n = q.shape[1], state["k"].shape[1]
    keys, values = history(state["k"], k), history(state["v"], v)
    outputs = []
    for begin in range(0, length, block):
        end = min(begin + block, length)
        rows = visible(n + begin, end - begin, 0, None, None if pos is None else pos[:, begin:end], state["seen"] + begin)
        outputs.append(attend(q[:, begin:end], keys[:, : n + end].to(q.dtype), values[:, : n + end].to(q.dtype), rows, scale))
    y = torch.cat(outputs, dim=1)
    if not state_wanted:
        return y, {}
    seen = read_so_far(length, pos, state["seen"])
    return y, {**new_tails({"k": keys, "v": values}, {"k": n + length, "v": n + length}, seen), "seen": seen}
