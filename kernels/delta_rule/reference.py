"""The delta rule as a sequential loop over time, with a gate per head or per key channel and without one: the definition.

Shape suffixes: B batch, H heads, K d_key, V d_value.

Gradients are plain autograd. It keeps a [batch, heads, d_key, d_value] tensor per token for the backward pass; use it for short
sequences.
"""

import torch
from torch import Tensor


def delta_rule_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None = None,
    *,
    scale: float | None = None,
    pos: Tensor | None = None,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The delta rule in the promoted dtype; shapes as in `op.delta_rule`, nothing is checked.

        S' = exp(g_t) S_{t-1}                     0 where pos == 0; exp(g_t) = 1 without a gate, Diag(exp(g_t)) of channels
        S_t = S' + beta_t k_t (v_t - S'^T k_t)^T  = (I - beta_t k_t k_t^T) S' + beta_t k_t v_t^T
        o_t = scale S_t^T q_t

    Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule", section 2.2; with g: Yang, Kautz & Hatamizadeh
    2025, "Gated Delta Networks", equation 10, whose state is the transpose of this one; with g of channels: Kimi Team 2025, "Kimi
    Linear", section 3. A head of keys and queries is that of v's heads / key heads consecutive ones.
    """
    scale = k.shape[3] ** -0.5 if scale is None else scale
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], dim=2) for x in (q, k))
    S_BHKV = k.new_zeros(k.shape[0], *k.shape[2:], v.shape[3]) if initial_state is None else initial_state
    o_BTHV = []
    for t in range(k.shape[1]):
        if pos is not None:
            S_BHKV = S_BHKV.masked_fill((pos[:, t] == 0)[:, None, None, None], 0.0)
        if g is not None:
            decay_BHK1 = g[:, t, ..., None].exp()
            S_BHKV = (decay_BHK1 if g.ndim == 4 else decay_BHK1[..., None]) * S_BHKV
        k_BHK1, beta_BH1 = k[:, t, :, :, None], beta[:, t, :, None]
        recalled_BHV = (S_BHKV * k_BHK1).sum(2)
        S_BHKV = S_BHKV + k_BHK1 * (beta_BH1 * (v[:, t] - recalled_BHV))[:, :, None, :]
        o_BTHV.append(scale * (S_BHKV * q[:, t, :, :, None]).sum(2))
    return torch.stack(o_BTHV, dim=1), S_BHKV
