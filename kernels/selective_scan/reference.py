"""Selective scan as a sequential loop over time: the reference that every other implementation is tested against.

Shape suffixes: B batch, T time, D channels, N d_state.

Gradients come from autograd, so there is no hand-written derivative here. The backward pass keeps a [batch, channels, d_state]
tensor per token: use it for short sequences.
"""

import torch
from torch import Tensor


def selective_scan_reference(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    *,
    pos: Tensor | None = None,
    initial_state: Tensor | None = None,
    discretization: str = "euler",
) -> tuple[Tensor, Tensor]:
    """Mamba (Gu & Dao 2023), equations 2 and 4, in the promoted dtype. Shapes as in `op.selective_scan`; nothing is checked.

        h_t = exp(dt_t A) h_{t-1} + phi_t B_t x_t       phi = dt (Euler) or expm1(dt A) / A (zero-order hold)
        y_t = <C_t, h_t> + D x_t

    exp(...) is replaced by 0 where pos == 0: the first token of a document sees no state, its input term is unchanged.
    """
    batch, length, channels = x.shape
    h_BDN = x.new_zeros(batch, channels, A.shape[1]) if initial_state is None else initial_state
    y_BTD = []
    for t in range(length):
        dt_BD1 = dt[:, t, :, None]
        decay_BDN = torch.exp(dt_BD1 * A)
        if pos is not None:
            decay_BDN = decay_BDN.masked_fill((pos[:, t] == 0)[:, None, None], 0.0)
        phi_BDN = torch.expm1(dt_BD1 * A) / A if discretization == "zoh" else dt_BD1
        h_BDN = decay_BDN * h_BDN + phi_BDN * B[:, t, None, :] * x[:, t, :, None]
        y_BTD.append((h_BDN * C[:, t, None, :]).sum(-1) + D * x[:, t])
    return torch.stack(y_BTD, dim=1), h_BDN
