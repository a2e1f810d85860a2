"""Window attention on a GPU: the joint attention of `eidetic_attention` with a window alone.

Visibility is a matter of distances, so there are no masks, and keys outside a token's window or document are not read.
"""

import torch
from torch import Tensor

from baton.kernels.common.attention_tails import concat_tail, new_tails, seen_after
from baton.kernels.compile import launch_configs
from baton.kernels.eidetic_attention.joint_attention_launch import KERNEL, LaunchConfig, Visibility, joint_attention, shape_of
from baton.kernels.protocol import State

SHORT = 16
"""With fewer tokens, as in decoding, PyTorch's attention is used: a kernel is compiled for each number of tail rows."""


def window_attention_triton(
    q: Tensor, k: Tensor, v: Tensor, *, window: int | None, pos: Tensor | None, state: State, scale: float, fresh: bool = False,
    config: LaunchConfig | None = None, need_final_state: bool = True,
) -> tuple[Tensor, State]:  # fmt: skip
    """As `op.window_attention`, which checks the arguments. fresh: nothing has been read, so there is no tail before the keys."""
    (batch, length, heads, dim), before, seen = q.shape, state["k"].shape[1], state["seen"]
    if config is None:
        sizes = {"batch": batch, "tokens": length, "heads": heads, "groups": k.shape[2], "dim": dim, "window": window or length}
        config = launch_configs.choose(KERNEL, LaunchConfig(), q.device, shape_of(dim), sizes)
    # rows beyond the tail are not visible
    limit = torch.arange(length, dtype=torch.int32, device=q.device)
    limit = limit.expand(batch, -1) if fresh else limit + seen.clamp(max=before)[:, None].to(torch.int32)
    if pos is not None:
        limit = torch.minimum(limit, pos.to(torch.int32))
    if window is not None:
        limit = limit.clamp(max=window - 1)
    keys, values = (k, v) if fresh else (concat_tail(state[name], x) for name, x in (("k", k), ("v", v)))
    near = Visibility(limit.contiguous())
    y = joint_attention(q, keys.to(q.dtype), values.to(q.dtype), near, window=window, scale=scale, config=config)
    if not need_final_state:
        return y, {}
    rows, seen = before + length if window is None else before, seen_after(length, pos, seen)
    if window is not None:
        seen = seen.clamp(max=rows)  # clamped to the tail's length, as in `chunked`
    if fresh and length < rows:
        keys, values = (concat_tail(state[name], x) for name, x in (("k", k), ("v", v)))
    return y, {**new_tails({"k": keys, "v": values}, {"k": rows, "v": rows}, seen), "seen": seen}
