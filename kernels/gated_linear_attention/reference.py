"""Gated linear attention as a sequential loop over time: the definition.

Shape suffixes: B batch, T time, H heads of k, v, g and the state, G query heads per head, K d_key, V d_value.

Gradients are plain autograd. It keeps a [batch, heads, d_key, d_value] tensor per token for the backward pass; use it for short
sequences.
"""

from typing import Literal

import torch
from torch import Tensor

Gate = Literal["key", "value", "scalar", "none"]
"""What has a log-decay: each key channel, each value channel, each head ("scalar"), or nothing."""


def gla_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    *,
    gate: Gate,
    scale: float = 1.0,
    pos: Tensor | None = None,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """S_t = a_t S_{t-1} + k_t v_t^T, y_t = scale S_t^T q_t (Yang et al. 2023, section 4.1), in the promoted dtype.

    a_t = exp(g_t) multiplies the rows of S (gate "key"), its columns ("value"), all of it ("scalar"), or is 1 ("none"); S_{t-1} is
    replaced by 0 where pos == 0. Query head h reads the state of head h // (query heads / heads); a head of keys, and of queries if
    there are fewer than v's, is that of heads / key heads consecutive ones. Shapes as in `op.gated_linear_attention`; nothing is
    checked.
    """
    batch, length, heads, d_value = v.shape
    q, k = (x.repeat_interleave(max(1, heads // x.shape[2]), dim=2) for x in (q, k))
    q_BTHGK = q.unflatten(2, (heads, -1))
    S_BHKV = v.new_zeros(batch, heads, k.shape[3], d_value) if initial_state is None else initial_state
    y_BTHV = []
    for t in range(length):
        if pos is not None:
            S_BHKV = S_BHKV.masked_fill((pos[:, t] == 0)[:, None, None, None], 0.0)
        if g is not None:
            S_BHKV = along_state(g[:, t], gate).exp() * S_BHKV
        S_BHKV = S_BHKV + k[:, t, :, :, None] * v[:, t, :, None, :]
        y_BTHV.append(scale * torch.einsum("bhgk,bhkv->bhgv", q_BTHGK[:, t].to(S_BHKV.dtype), S_BHKV).flatten(1, 2))
    return torch.stack(y_BTHV, dim=1), S_BHKV


def along_state(x: Tensor, gate: Gate) -> Tensor:
    """A gate's tensor of one token, [B, H, K], [B, H, V] or [B, H], such that it broadcasts against the state."""
    if gate == "key":
        return x[..., None]
    if gate == "value":
        return x[..., None, :]
    return x[..., None, None]
