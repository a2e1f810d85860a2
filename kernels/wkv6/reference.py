"""RWKV-6's recurrence as a sequential loop over time: the definition.

Shape suffixes: B batch, T time, H heads, K d_key, V d_value.
"""

import torch
from torch import Tensor


def wkv6_reference(
    r: Tensor, k: Tensor, v: Tensor, g: Tensor, u: Tensor, *, pos: Tensor | None = None, initial_state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """y_t = (S_{t-1} + Diag(u) k_t v_t^T)^T r_t, S_t = Diag(exp(g_t)) S_{t-1} + k_t v_t^T (Peng et al. 2024, "Eagle and Finch:
    RWKV with Matrix-Valued States and Dynamic Recurrence", section 4.2), in the promoted dtype.

    S_{t-1} is replaced by 0 where pos == 0. Shapes as in `op.wkv6`; nothing is checked. Gradients are plain autograd, which keeps a
    state per token.
    """
    S_BHKV = v.new_zeros(*v[:, 0].shape[:2], k.shape[3], v.shape[3]) if initial_state is None else initial_state
    y_BTHV = []
    for t in range(v.shape[1]):
        if pos is not None:
            S_BHKV = S_BHKV.masked_fill((pos[:, t] == 0)[:, None, None, None], 0.0)
        kv_BHKV = k[:, t, :, :, None] * v[:, t, :, None, :]
        y_BTHV.append((r[:, t, :, :, None] * (S_BHKV + u[..., None] * kv_BHKV)).sum(2))
        S_BHKV = g[:, t, :, :, None].exp() * S_BHKV + kv_BHKV
    return torch.stack(y_BTHV, dim=1), S_BHKV
