"""Window attention in blocks of queries through torch's fused attention, on any device.

Which keys a query sees depends on distances alone. The key j tokens back is visible if j < window, if j <= pos (same document), and
if j is at most `seen`, the number of tokens of the document read before the query: tail rows that were never filled are not keys.
"""

from functools import partial

import torch
from torch import Tensor

from baton.kernels.common.attention_tails import concat_tail, masked_attention, new_tails, seen_after, visibility_mask
from baton.kernels.common.chunked_autograd import run_chunked
from baton.kernels.protocol import Inputs, State

_BLOCK = 64
_WHOLE_BLOCK = 512


def window_attention_chunked(
    q: Tensor, k: Tensor, v: Tensor, *, window: int | None, pos: Tensor | None, state: State, scale: float,
    sinks: Tensor | None = None, soft_cap: float | None = None, chunk: int | None = None, need_final_state: bool = True,
) -> tuple[Tensor, State]:  # fmt: skip
    """As `op.window_attention`, which checks the arguments; chunk: queries per block."""
    if window is None:
        # the State grows, so it is built once, and the blocks are inside one step
        step, length = partial(_whole_step, block=chunk or _WHOLE_BLOCK), q.shape[1]
    else:
        step, length = partial(_window_step, window=window), chunk or max(_BLOCK, window)
    step = partial(step, scale=scale, soft_cap=soft_cap)
    last = None if need_final_state else partial(step, need_final_state=False)
    inputs = (q, k, v) if sinks is None else (q, k, v, sinks)
    return run_chunked(step, inputs, len(inputs), pos=pos, state=state, chunk=length, last=last)


def _window_step(
    inputs: Inputs, pos: Tensor | None, state: State, *, window: int, scale: float, soft_cap: float | None,
    need_final_state: bool = True,
) -> tuple[Tensor, State]:  # fmt: skip
    q, k, v, *sinks = inputs
    length, n = q.shape[1], window - 1
    keys, values = concat_tail(state["k"], k), concat_tail(state["v"], v)
    mask = visibility_mask(n, length, 0, window - 1, pos, state["seen"])
    y = masked_attention(q, keys.to(q.dtype), values.to(q.dtype), mask, scale, *sinks, soft_cap=soft_cap)
    if not need_final_state:
        return y, {}
    # clamped to the tail's length: then a segment that long knows `seen` without the State before it
    seen = seen_after(length, pos, state["seen"]).clamp(max=n)
    return y, {**new_tails({"k": keys, "v": values}, {"k": n, "v": n}, seen), "seen": seen}


def _whole_step(
    inputs: Inputs, pos: Tensor | None, state: State, *, scale: float, soft_cap: float | None, block: int,
    need_final_state: bool = True,
) -> tuple[Tensor, State]:  # fmt: skip
    q, k, v, *sinks = inputs
    length, n = q.shape[1], state["k"].shape[1]
    keys, values = concat_tail(state["k"], k), concat_tail(state["v"], v)
    outputs = []
    for begin in range(0, length, block):
        end = min(begin + block, length)
        rows = visibility_mask(n + begin, end - begin, 0, None, None if pos is None else pos[:, begin:end], state["seen"] + begin)
        of_block, *sinks_of_block = (x[:, begin:end] for x in (q, *sinks))
        seen_k, seen_v = (x[:, : n + end].to(q.dtype) for x in (keys, values))
        outputs.append(masked_attention(of_block, seen_k, seen_v, rows, scale, *sinks_of_block, soft_cap=soft_cap))
    y = torch.cat(outputs, dim=1)
    if not need_final_state:
        return y, {}
    seen = seen_after(length, pos, state["seen"])
    return y, {**new_tails({"k": keys, "v": values}, {"k": n + length, "v": n + length}, seen), "seen": seen}
