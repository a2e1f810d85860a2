"""Window attention on a GPU: the fused attention without what B'MOJO adds.

The one thing to know: what a token sees is a distance, so there are no masks, and what lies outside of a token's window or document
is not read.
"""

import torch
from torch import Tensor

from baton.kernels.compile import launch_configs
from baton.kernels.eidetic_attention.joint_attention_launch import KERNEL, LaunchConfig, Seen, joint_attention, shape_of
from baton.kernels.protocol import State
from baton.kernels.window_attention.chunked import history, new_tails, read_so_far

SHORT = 16
"""Tokens below which, as in decoding, torch's products do: a kernel is compiled for each number of rows before the span."""


def window_attention_triton(
    q: Tensor, k: Tensor, v: Tensor, *, window: int | None, pos: Tensor | None, state: State, scale: float, fresh: bool = False,
    config: LaunchConfig | None = None, state_wanted: bool = True,
) -> tuple[Tensor, State]:  # fmt: skip
    """As `op.window_attention`, which checks the arguments. fresh: nothing has been read, and nothing is put before keys."""
    (batch, length, heads, dim), before, seen = q.shape, state["k"].shape[1], state["seen"]
    if config is None:
        sizes = {"batch": batch, "tokens": length, "heads": heads, "groups": k.shape[2], "dim": dim, "window": window or length}
        config = launch_configs.choose(KERNEL, LaunchConfig(), q.device, shape_of(dim), sizes)
    # rows that the tail does not hold cannot be seen
    limit = torch.arange(length, dtype=torch.int32, device=q.device)
    limit = limit.expand(batch, -1) if fresh else limit + seen.clamp(max=before)[:, None].to(torch.int32)
    if pos is not None:
        limit = torch.minimum(limit, pos.to(torch.int32))
    if window is not None:
        limit = limit.clamp(max=window - 1)
    keys, values = (k, v) if fresh else (history(state[name], x) for name, x in (("k", k), ("v", v)))
    near = Seen(limit.contiguous())
    y = joint_attention(q, keys.to(q.dtype), values.to(q.dtype), near, window=window, scale=scale, config=config)
    if not state_wanted:
        return y, {}
    rows, seen = before + length if window is None else before, read_so_far(length, pos, seen)
    if window is not None:
        seen = seen.clamp(max=rows)  # counted no farther than the tail reaches
    if fresh and length < rows:
        keys, values = (history(state[name], x) for name, x in (("k", k), ("v", v)))
    return y, {**new_tails({"k": keys, "v": values}, {"k": rows, "v": rows}, seen), "seen": seen}
