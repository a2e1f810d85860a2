"""Mamba-3's recurrence with several inputs and outputs per head as a sequential loop over time: the definition.

Shape suffixes: B batch, T time, H heads, J inputs and outputs of a head, N d_state, P head_dim.
"""

import torch
from torch import Tensor

from baton.kernels.mamba3.reference import turned_states


def mamba3_mimo_reference(
    x: Tensor, B: Tensor, C: Tensor, dt: Tensor, g: Tensor, lam: Tensor, theta: Tensor, B_bias: Tensor, C_bias: Tensor, D: Tensor,
    mimo_x: Tensor, *, pos: Tensor | None = None, initial_state: dict[str, Tensor] | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """h_t = e^g R (h_{t-1} + (1 - lam) dt W_{t-1}) + lam dt W_t with W_t = sum_j k_{t,j} v_{t,j}^T and v_{t,j} = x_t mimo_x_j, and
    y_{t,j} = h_t^T q_{t,j} + D v_{t,j}, in the promoted dtype, with k = B + B_bias, q = C + C_bias, and R turning pair r of states
    by -dt theta_r (Lahoti et al. 2026, "Mamba-3").

    h_{t-1} and k_{t-1} are replaced by 0 where pos == 0. The State is {h, k, x}: k and v of the last token. Shapes as in
    `op.mamba3_mimo`; nothing is checked. Gradients are plain autograd, which keeps a state per token.
    """
    heads = x.shape[2]
    k_BTHJN = B.repeat_interleave(heads // B.shape[2], 2) + B_bias
    q_BTHJN = C.repeat_interleave(heads // C.shape[2], 2) + C_bias
    v_BTHJP = x[:, :, :, None] * mimo_x
    if initial_state is None:
        h_BHNP = v_BTHJP.new_zeros(*x[:, 0].shape[:2], B.shape[4], x.shape[3])
        last_k_BHJN, last_v_BHJP = torch.zeros_like(k_BTHJN[:, 0]), torch.zeros_like(v_BTHJP[:, 0])
    else:
        h_BHNP, last_k_BHJN, last_v_BHJP = initial_state["h"], initial_state["k"], initial_state["x"]
    y_BTJHP = []
    for t in range(x.shape[1]):
        if pos is not None:
            starts_B = (pos[:, t] == 0)[:, None, None, None]
            h_BHNP, last_k_BHJN = h_BHNP.masked_fill(starts_B, 0.0), last_k_BHJN.masked_fill(starts_B, 0.0)
        before_BH, own_BH = (1 - lam[:, t]) * dt[:, t], lam[:, t] * dt[:, t]
        h_BHNP = h_BHNP + before_BH[..., None, None] * torch.einsum("bhjn,bhjp->bhnp", last_k_BHJN, last_v_BHJP)
        last_k_BHJN, last_v_BHJP = k_BTHJN[:, t], v_BTHJP[:, t]
        h_BHNP = g[:, t, :, None, None].exp() * turned_states(h_BHNP, dt[:, t, :, None] * theta[:, t, None])
        h_BHNP = h_BHNP + own_BH[..., None, None] * torch.einsum("bhjn,bhjp->bhnp", last_k_BHJN, last_v_BHJP)
        y_BHJP = torch.einsum("bhjn,bhnp->bhjp", q_BTHJN[:, t], h_BHNP) + D[:, None, None] * last_v_BHJP
        y_BTJHP.append(y_BHJP.transpose(1, 2))
    return torch.stack(y_BTJHP, dim=1), {"h": h_BHNP, "k": last_k_BHJN, "x": last_v_BHJP}
