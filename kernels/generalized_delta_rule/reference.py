"""The generalized delta rule as a sequential loop over time: the definition.

Shape suffixes: B batch, H heads, K d_key, V d_value.

Gradients are plain autograd. It keeps a [batch, heads, d_key, d_value] tensor per token for the backward pass; use it for short
sequences.
"""

import torch
from torch import Tensor


def generalized_delta_rule_reference(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    g: Tensor,
    *,
    scale: float = 1.0,
    pos: Tensor | None = None,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As `op.generalized_delta_rule`, in the promoted dtype; nothing is checked.

        S_t = Diag(exp(g_t)) S_{t-1} + b_t (S_{t-1}^T a_t)^T + k_t v_t^T        S_{t-1} = 0 where pos == 0
        o_t = scale S_t^T r_t

    Peng et al. 2025, "RWKV-7 'Goose' with Expressive Dynamic State Evolution", equations 2 and 17, transposed: that paper's state
    is [d_value, d_key], S_t = S_{t-1} (diag(w_t) + a_t^T b_t) + v_t^T k_t with row vectors.
    """
    S_BHKV = k.new_zeros(k.shape[0], *k.shape[2:], v.shape[3]) if initial_state is None else initial_state
    o_BTHV = []
    for t in range(k.shape[1]):
        if pos is not None:
            S_BHKV = S_BHKV.masked_fill((pos[:, t] == 0)[:, None, None, None], 0.0)
        read_BH1V = (a[:, t, ..., None] * S_BHKV).sum(2, keepdim=True)
        written_BHKV = b[:, t, ..., None] * read_BH1V + k[:, t, ..., None] * v[:, t, :, None]
        S_BHKV = g[:, t, ..., None].exp() * S_BHKV + written_BHKV
        o_BTHV.append(scale * (S_BHKV * r[:, t, ..., None]).sum(2))
    return torch.stack(o_BTHV, dim=1), S_BHKV
