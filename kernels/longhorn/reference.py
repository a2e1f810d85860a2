"""Longhorn as a sequential loop over time, in the diagonal form that is trained and in the exact form that it approximates.

Shape suffixes: B batch, T time, D channels, N d_state.

Gradients come from autograd, so there is no hand-written derivative here. The backward pass keeps a [batch, channels, d_state]
tensor per token: use it for short sequences.
"""

import torch
from torch import Tensor


def longhorn_reference(
    x: Tensor,
    k: Tensor,
    q: Tensor,
    beta: Tensor,
    D: Tensor,
    *,
    pos: Tensor | None = None,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Longhorn (Liu et al. 2024), Algorithm 1, in the promoted dtype. Shapes as in `op.longhorn`; nothing is checked.

        S_t = (1 - eps_t k_t^2) S_{t-1} + eps_t x_t k_t        eps = beta / (1 + beta |k|^2)
        y_t = S_t q_t + D x_t

    The step is written as a change of S_{t-1}, which is accurate where the decay is near 1. S_{t-1} is replaced by 0 where pos ==
    0.
    """
    return _online_recall(x, k, q, beta, D, pos, initial_state, exact=False)


def longhorn_exact_reference(
    x: Tensor,
    k: Tensor,
    q: Tensor,
    beta: Tensor,
    D: Tensor,
    *,
    pos: Tensor | None = None,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Longhorn before its transition is made diagonal: Liu et al. 2024, Theorem 3.1. Shapes as in `op.longhorn`.

        S_t = argmin_S |S - S_{t-1}|^2 + sum_i beta_i (S k_t - x_t)_i^2 = S_{t-1} (I - eps k k^T) + eps x k^T, row by row

    The recall error shrinks by a known factor, x - S_t k = (x - S_{t-1} k) / (1 + beta |k|^2); that of the diagonal form does not.
    """
    return _online_recall(x, k, q, beta, D, pos, initial_state, exact=True)


def _online_recall(
    x: Tensor, k: Tensor, q: Tensor, beta: Tensor, D: Tensor, pos: Tensor | None, initial_state: Tensor | None, exact: bool
) -> tuple[Tensor, Tensor]:
    batch, length, channels = x.shape
    S_BDN = x.new_zeros(batch, channels, k.shape[2]) if initial_state is None else initial_state
    y_BTD = []
    for t in range(length):
        if pos is not None:
            S_BDN = S_BDN.masked_fill((pos[:, t] == 0)[:, None, None], 0.0)
        k_B1N, x_BD1, beta_BD1 = k[:, t, None, :], x[:, t, :, None], beta[:, t, :, None]
        eps_BD1 = beta_BD1 / (1 + beta_BD1 * k_B1N.square().sum(-1, keepdim=True))
        recalled = (S_BDN * k_B1N).sum(-1, keepdim=True) if exact else S_BDN * k_B1N
        S_BDN = S_BDN + eps_BD1 * k_B1N * (x_BD1 - recalled)
        y_BTD.append((S_BDN * q[:, t, None, :]).sum(-1) + D * x[:, t])
    return torch.stack(y_BTD, dim=1), S_BDN
