"""Mamba-3's recurrence as a sequential loop over time: the definition.

Shape suffixes: B batch, T time, H heads, N d_state, P head_dim, R pairs of states that turn.
"""

import torch
from torch import Tensor


def mamba3_reference(
    x: Tensor, B: Tensor, C: Tensor, dt: Tensor, g: Tensor, lam: Tensor, theta: Tensor, B_bias: Tensor, C_bias: Tensor, D: Tensor,
    *, pos: Tensor | None = None, initial_state: dict[str, Tensor] | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """h_t = e^g R (h_{t-1} + (1 - lam) dt k_{t-1} x_{t-1}^T) + lam dt k_t x_t^T, y_t = h_t^T q_t + D x_t, in the promoted dtype,
    with k = B + B_bias, q = C + C_bias, and R turning pair r of states by -dt theta_r (Lahoti et al. 2026, "Mamba-3").

    h_{t-1} and k_{t-1} are replaced by 0 where pos == 0. The State is {h, k, x}, the last two of the last token. Shapes as in
    `op.mamba3`; nothing is checked. Gradients are plain autograd, which keeps a state per token.
    """
    heads = x.shape[2]
    k_BTHN = B.repeat_interleave(heads // B.shape[2], 2) + B_bias
    q_BTHN = C.repeat_interleave(heads // C.shape[2], 2) + C_bias
    if initial_state is None:
        h_BHNP = x.new_zeros(*x[:, 0].shape[:2], B.shape[3], x.shape[3], dtype=k_BTHN.dtype)
        last_k_BHN, last_x_BHP = torch.zeros_like(k_BTHN[:, 0]), torch.zeros_like(x[:, 0])
    else:
        h_BHNP, last_k_BHN, last_x_BHP = initial_state["h"], initial_state["k"], initial_state["x"]
    y_BTHP = []
    for t in range(x.shape[1]):
        if pos is not None:
            starts_B = (pos[:, t] == 0)[:, None, None]
            h_BHNP, last_k_BHN = h_BHNP.masked_fill(starts_B[..., None], 0.0), last_k_BHN.masked_fill(starts_B, 0.0)
        before_BH, own_BH = (1 - lam[:, t]) * dt[:, t], lam[:, t] * dt[:, t]
        h_BHNP = h_BHNP + before_BH[..., None, None] * last_k_BHN[..., None] * last_x_BHP[:, :, None]
        angle_BHR = dt[:, t, :, None] * theta[:, t, None]
        last_k_BHN, last_x_BHP = k_BTHN[:, t], x[:, t]
        h_BHNP = g[:, t, :, None, None].exp() * turned_states(h_BHNP, angle_BHR)
        h_BHNP = h_BHNP + own_BH[..., None, None] * last_k_BHN[..., None] * last_x_BHP[:, :, None]
        y_BTHP.append((q_BTHN[:, t, :, :, None] * h_BHNP).sum(2) + D[:, None] * last_x_BHP)
    return torch.stack(y_BTHP, dim=1), {"h": h_BHNP, "k": last_k_BHN, "x": last_x_BHP}


def turned_states(h_BHNP: Tensor, angle_BHR: Tensor) -> Tensor:
    """States 2 r and 2 r + 1 as the complex number h_{2 r} + i h_{2 r + 1}, times exp(-i angle_r); the other states as they are."""
    pairs = angle_BHR.shape[-1]
    re, im = h_BHNP[:, :, : 2 * pairs].unflatten(2, (pairs, 2)).unbind(3)
    cos, sin = angle_BHR.cos()[..., None], angle_BHR.sin()[..., None]
    turned = torch.stack((re * cos + im * sin, im * cos - re * sin), dim=3).flatten(2, 3)
    return torch.cat((turned, h_BHNP[:, :, 2 * pairs :]), dim=2)
