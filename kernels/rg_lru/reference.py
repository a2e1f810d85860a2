"""The RG-LRU as one loop over tokens: the definition."""

import torch
from torch import Tensor

LARGEST_LOG = -1e-12
"""Logarithms of decays above this count as this: at 0 the square root has an infinite derivative."""


def rg_lru_reference(
    x: Tensor, log_a: Tensor, *, pos: Tensor | None = None, initial_state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """De et al. 2024 (arXiv:2402.19427), equation 4. As `op.rg_lru`; nothing is checked.

        h_t = a_t h_{t-1} + sqrt(1 - a_t^2) x_t        a = exp(log_a)

    At a document's first token h = x, as in the released code.
    """
    log_a = log_a.clamp(max=LARGEST_LOG)
    h_BD = torch.zeros_like(log_a[:, 0]) if initial_state is None else initial_state
    y_BTD = []
    for t in range(x.shape[1]):
        decay_BD, share_BD = log_a[:, t].exp(), torch.sqrt(-torch.expm1(2 * log_a[:, t]))
        if pos is not None:
            first_B1 = (pos[:, t] == 0)[:, None]
            decay_BD, share_BD = decay_BD.masked_fill(first_B1, 0.0), share_BD.masked_fill(first_B1, 1.0)
        h_BD = decay_BD * h_BD + share_BD * x[:, t]
        y_BTD.append(h_BD)
    return torch.stack(y_BTD, dim=1), h_BD
