"""mLSTM as a sequential loop over time: the definition.

Shape suffixes: B batch, T time, H heads, K d_key, V d_value.
"""

import torch
from torch import Tensor


def mlstm_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    g: Tensor,
    *,
    scale: float = 1.0,
    pos: Tensor | None = None,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """C_t = exp(g_t) C_{t-1} + exp(i_t) k_t v_t^T, n_t = exp(g_t) n_{t-1} + exp(i_t) k_t, h_t = C_t^T q_t / max(|n_t^T q_t|, 1)
    with scale q for q (Beck et al. 2024, "xLSTM: Extended Long Short-Term Memory", equations 19 to 27), in the promoted dtype.

    The state is C with n as a further column, which are replaced by 0 where pos == 0. Shapes as in `op.mlstm`; nothing is checked.
    Gradients are plain autograd, which keeps a state per token.
    """
    d_value = v.shape[3]
    C_BHKV = v.new_zeros(*k[:, 0].shape, d_value) if initial_state is None else initial_state[..., :d_value]
    n_BHK = v.new_zeros(k[:, 0].shape) if initial_state is None else initial_state[..., d_value]
    h_BTHV = []
    for t in range(v.shape[1]):
        if pos is not None:
            starts_B = pos[:, t] == 0
            C_BHKV = C_BHKV.masked_fill(starts_B[:, None, None, None], 0.0)
            n_BHK = n_BHK.masked_fill(starts_B[:, None, None], 0.0)
        forget_BH1, k_BHK = g[:, t, :, None].exp(), i[:, t, :, None].exp() * k[:, t]
        C_BHKV = forget_BH1[..., None] * C_BHKV + k_BHK[..., None] * v[:, t, :, None, :]
        n_BHK = forget_BH1 * n_BHK + k_BHK
        q_BHK = scale * q[:, t].to(C_BHKV.dtype)
        normalizer_BH1 = (q_BHK * n_BHK).sum(-1, keepdim=True).abs().clamp(min=1.0)
        h_BTHV.append((q_BHK[..., None] * C_BHKV).sum(2) / normalizer_BH1)
    return torch.stack(h_BTHV, dim=1), torch.cat((C_BHKV, n_BHK[..., None]), dim=-1)
