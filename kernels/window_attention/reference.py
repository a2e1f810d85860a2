"""Window attention as a loop over tokens: the reference that every other implementation is tested against.

Shape suffixes: B batch, T time, H query heads, G key heads, K dim.

Gradients come from autograd, so there is no hand-written derivative here.
"""

import torch
from torch import Tensor

from baton.kernels.protocol import State


def window_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int | None,
    pos: Tensor | None,
    state: State | None,
    scale: float,
    sinks: Tensor | None = None,
    soft_cap: float | None = None,
) -> tuple[Tensor, State]:
    """As `op.window_attention`; nothing is checked."""
    batch, length, heads = q.shape[:3]
    lanes = []
    for b in range(batch):
        keys = list(k.new_zeros(0, *k.shape[2:])) if state is None else list(state["k"][b])
        values = list(v.new_zeros(0, *v.shape[2:])) if state is None else list(state["v"][b])
        seen = 0 if state is None else int(state["seen"][b])
        first = max(0, len(keys) - seen)
        keys, values = keys[first:], values[first:]
        outputs = []
        for t in range(length):
            keys, values, seen = [*keys, k[b, t]], [*values, v[b, t]], seen + 1
            if pos is not None:  # forget what is not of this document
                seen = min(seen, int(pos[b, t]) + 1)
                keys, values = keys[-seen:], values[-seen:]
            reach = len(keys) if window is None else min(window, len(keys))
            # [H, reach, K]: each key head serves a group of query heads
            K = torch.stack(keys[len(keys) - reach :], dim=1).repeat_interleave(heads // k.shape[2], dim=0)
            V = torch.stack(values[len(values) - reach :], dim=1).repeat_interleave(heads // k.shape[2], dim=0)
            scores = scale * torch.einsum("hk,hjk->hj", q[b, t], K)
            if soft_cap is not None:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            if sinks is not None:  # one more key, of this logit, whose value is 0
                scores = torch.cat((scores, sinks[b, t, :, None]), dim=-1)
            weights = torch.softmax(scores, dim=-1)[:, :reach]
            outputs.append(torch.einsum("hj,hjk->hk", weights, V))
        lanes.append((torch.stack(outputs), keys, values, seen))
    size = length if window is None else window - 1
    if window is None and state is not None:
        size += state["k"].shape[1]
    tail = {
        "k": torch.stack([_last(keys, size, k) for _, keys, _, _ in lanes]),
        "v": torch.stack([_last(values, size, v) for _, _, values, _ in lanes]),
        "seen": torch.tensor([seen if window is None else min(seen, window - 1) for *_, seen in lanes]),
    }
    return torch.stack([y for y, *_ in lanes]), tail


def _last(rows: list[Tensor], size: int, like: Tensor) -> Tensor:
    """The last `size` rows, padded with zeros in front."""
    rows = rows[len(rows) - min(size, len(rows)) :]
    padding = [like.new_zeros(like.shape[2:])] * (size - len(rows))
    return torch.stack([*padding, *rows]) if size else like.new_zeros(0, *like.shape[2:])
