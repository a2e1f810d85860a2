"""Longhorn as one sequential loop over time, in the diagonal form that is trained and in the exact one it approximates.

The one thing to know: gradients are plain autograd, so this file holds no derivative that could be wrong. It keeps a
[batch, channels, d_state] tensor per token for the backward pass; use it for short sequences.

Shape suffixes: B batch, T time, D channels, N d_state.
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
    """Longhorn (Liu et al. 2024), Algorithm 1, in the promoted dtype; shapes as in `op.longhorn`, nothing is checked.

        S_t = (1 - eps_t k_t^2) S_{t-1} + eps_t x_t k_t        eps = beta / (1 + beta |k|^2)
        y_t = S_t q_t + D x_t

    written as a step from S_{t-1} (accurate where the decay is near 1), with S_{t-1} replaced by 0 where pos == 0.
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
    """The same before its transition is made diagonal: Liu et al. 2024, Theorem 3.1. Shapes as in `op.longhorn`.

        S_t = argmin_S |S - S_{t-1}|^2 + sum_i beta_i (S k_t - x_t)_i^2 = S_{t-1} (I - eps k k^T) + eps x k^T, row by row

    Its residual shrinks by exactly x - S_t k = (x - S_{t-1} k) / (1 + beta |k|^2); the diagonal form's does not.
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
