"""Window attention on a GPU: the joint attention of `eidetic_attention` with a window alone.

Visibility is a matter of distances, so there are no masks, and keys outside a token's window or document are not read.

The kernels do not know of sinks. A sink has no value, so it only adds to the sum of exponentials: outputs are scaled by the share
that it leaves. The gradient of a score is its weight times the difference of dy v and dy y, with sinks as without; so the kernels
of the backward pass need nothing but the scaled outputs and the larger sum.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from baton.kernels.common.attention_tails import concat_tail, new_tails, seen_after, with_positive_scale
from baton.kernels.common.elementwise import LOG2_E
from baton.kernels.compile import launch_configs
from baton.kernels.eidetic_attention.joint_attention_launch import (
    Visibility,
    history_attention,
    history_attention_backward,
    joint_attention,
)
from baton.kernels.eidetic_attention.launch_config import KERNEL, LaunchConfig, default_launch_config, shape_of
from baton.kernels.protocol import State

SHORT = 16
"""With fewer tokens, as in decoding, PyTorch's attention is used: a kernel is compiled for each number of tail rows."""


def window_attention_triton(
    q: Tensor, k: Tensor, v: Tensor, *, window: int | None, pos: Tensor | None, state: State, scale: float,
    sinks: Tensor | None = None, soft_cap: float | None = None, fresh: bool = False, config: LaunchConfig | None = None,
    need_final_state: bool = True,
) -> tuple[Tensor, State]:  # fmt: skip
    """As `op.window_attention`, which checks the arguments. fresh: nothing has been read, so there is no tail before the keys."""
    length, before, seen = q.shape[1], state["k"].shape[1], state["seen"]
    config = config or _launch_config(q, k, window)
    # rows beyond the tail are not visible
    limit = _limit(q, pos, None if fresh else seen.clamp(max=before))
    if window is not None:
        limit = limit.clamp(max=window - 1)
    keys, values = (k, v) if fresh else (concat_tail(state[name], x) for name, x in (("k", k), ("v", v)))
    limit, of_q = limit.contiguous(), (q, keys.to(q.dtype), values.to(q.dtype))
    if sinks is None:
        y = joint_attention(*of_q, Visibility(limit), window=window, scale=scale, soft_cap=soft_cap, config=config)
    else:
        q, scale = with_positive_scale(q, scale)
        y = _WithSinks.apply(sinks, q, *of_q[1:], limit, scale, soft_cap, config)
    if not need_final_state:
        return y, {}
    rows, seen = before + length if window is None else before, seen_after(length, pos, seen)
    if window is not None:
        seen = seen.clamp(max=rows)  # clamped to the tail's length, as in `chunked`
    if fresh and length < rows:
        keys, values = (concat_tail(state[name], x) for name, x in (("k", k), ("v", v)))
    return y, {**new_tails({"k": keys, "v": values}, {"k": rows, "v": rows}, seen), "seen": seen}


def full_attention_triton(
    q: Tensor, k: Tensor, v: Tensor, pos: Tensor | None, sinks: Tensor | None = None, *, scale: float,
    soft_cap: float | None = None, config: LaunchConfig | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As `op.full_attention_forward`, which checks the arguments."""
    config = config or _launch_config(q, k, None)
    options: dict[str, Any] = {"scale": scale, "soft_cap": soft_cap, "config": config}
    y, lse = history_attention(q, k.to(q.dtype), v.to(q.dtype), _whole_limit(q, k, pos), **options)
    return (y, lse) if sinks is None else _add_sinks(y, lse, sinks)


def full_attention_backward_triton(
    q: Tensor, k: Tensor, v: Tensor, pos: Tensor | None, y: Tensor, lse: Tensor, dy: Tensor, sinks: Tensor | None = None, *,
    scale: float, soft_cap: float | None = None, config: LaunchConfig | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """As `op.full_attention_backward`."""
    config, limit = config or _launch_config(q, k, None), _whole_limit(q, k, pos)
    options: dict[str, Any] = {"scale": scale, "soft_cap": soft_cap, "config": config}
    dq, dk, dv = history_attention_backward(q, k.to(q.dtype), v.to(q.dtype), limit, y, lse, dy.to(q.dtype), **options)
    return dq, dk.to(k.dtype), dv.to(v.dtype), *(() if sinks is None else (_sink_gradients(y, lse, dy, sinks),))


class _WithSinks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, sinks: Tensor, q: Tensor, k: Tensor, v: Tensor, limit: Tensor, scale: float, soft_cap: float | None,
        config: LaunchConfig,
    ) -> Tensor:  # fmt: skip
        ctx.options = {"scale": scale, "soft_cap": soft_cap, "config": config}
        y, lse = _add_sinks(*history_attention(q, k, v, limit, **ctx.options), sinks)
        ctx.save_for_backward(sinks, q, k, v, limit, y, lse)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        sinks, q, k, v, limit, y, lse = ctx.saved_tensors
        found = history_attention_backward(q, k, v, limit, y, lse, dy, **ctx.options)
        return _sink_gradients(y, lse, dy, sinks), *found, *(None,) * 4


def _add_sinks(y: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs [B, T, H, K], in place, and logarithms to base 2 of the sums [B, H, T], with sinks [B, T, H] from those without."""
    total = torch.logaddexp2(lse, LOG2_E * sinks.transpose(1, 2).to(lse.dtype))
    return y.mul_(torch.exp2(lse - total).transpose(1, 2).unsqueeze(-1)), total


def _sink_gradients(y: Tensor, lse: Tensor, dy: Tensor, sinks: Tensor) -> Tensor:
    """Of y and lse with sinks: a sink has no value, so what its weight w changes is the share of the others, -w dy y."""
    weights = torch.exp2(LOG2_E * sinks.to(lse.dtype) - lse.transpose(1, 2))
    return (-weights * (dy.to(lse.dtype) * y).sum(-1)).to(sinks.dtype)


def _launch_config(q: Tensor, k: Tensor, window: int | None) -> LaunchConfig:
    batch, length, heads, dim = q.shape
    sizes = {"batch": batch, "tokens": length, "heads": heads, "groups": k.shape[2], "dim": dim, "window": window or length}
    whole = window is None
    return launch_configs.choose(KERNEL, default_launch_config(dim, whole=whole), q.device, shape_of(dim, whole=whole), sizes)


def _whole_limit(q: Tensor, k: Tensor, pos: Tensor | None) -> Tensor:
    """The limits of queries that are the last tokens of the keys, all of which were read."""
    before = torch.full((q.shape[0],), k.shape[1] - q.shape[1], dtype=torch.int32, device=q.device)
    return _limit(q, pos, before).contiguous()


def _limit(q: Tensor, pos: Tensor | None, before: Tensor | None) -> Tensor:
    """The largest distance that each query sees, int32 [B, T]. before: [B], rows read before the first query; None: none."""
    batch, length = q.shape[:2]
    limit = torch.arange(length, dtype=torch.int32, device=q.device)
    limit = limit.expand(batch, -1) if before is None else limit + before[:, None].to(torch.int32)
    return limit if pos is None else torch.minimum(limit, pos.to(torch.int32))
