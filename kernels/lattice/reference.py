"""Lattice's recurrence as a sequential loop over time: the reference that every other implementation is tested against.

Gradients come from autograd, so there is no hand-written derivative here. The backward pass keeps several [batch, heads, d, m]
tensors per token: use it for short sequences.
"""

import torch
from torch import Tensor

from baton.kernels.lattice.variant import MIN_GATE, MIN_NORM, UpdateRule


def lattice_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gamma: Tensor,
    S0: Tensor,
    *,
    mu: Tensor | None = None,
    tau: Tensor | None = None,
    rule: UpdateRule,
    pos: Tensor | None = None,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Lattice (Karami & Mirrokni 2025), equations 7, 10 and 12 to 18, in the promoted dtype. Shapes as in `op.lattice`; nothing is
    checked.
    """
    batch, length, _, _ = q.shape
    if rule.project:
        S0 = S0 / _norms(S0)
    loaded = S0.expand(batch, *S0.shape)
    S = loaded if initial_state is None else initial_state
    ys = []
    for t in range(length):
        starts = torch.zeros(batch, dtype=torch.bool, device=q.device) if pos is None else pos[:, t] == 0
        S = torch.where(starts[:, None, None, None], loaded, S)
        if t == 0 and rule.project:
            S = S / _norms(S)
        q_t, k_t, v_t = q[:, t, :, None, :], k[:, t, :, None, :], v[:, t, :, :, None]
        gamma_t = gamma[:, t, :, None, None]

        rho = torch.ones_like(_norms(S)) if rule.project else _norms(S).clamp(min=MIN_NORM)
        Phi = S / rho
        if rule.variant == "dec":
            h, c = (Phi * k_t).sum(-1, keepdim=True) - v_t, k_t
        elif rule.variant == "enc":
            h, c = v_t, (Phi * v_t).sum(-2, keepdim=True) - k_t
        else:
            h, c = -v_t, k_t
        alpha = -gamma_t * c
        orthogonal = h - Phi * (Phi * h).sum(-2, keepdim=True)
        if mu is not None:
            mu_t = mu[:, t, :, None, None]
            S = (mu_t.clamp(min=MIN_GATE) if rule.project else mu_t) * S
        S = S + alpha / rho * orthogonal
        if tau is not None:
            S = _thresholded(S, tau[:, t, :, None, None], rule.project)
        if rule.project:
            S = S / _norms(S)
        ys.append((S * q_t).sum(-1))
    return torch.stack(ys, dim=1), S


def _norms(S: Tensor) -> Tensor:
    return torch.linalg.vector_norm(S, dim=-2, keepdim=True)


def _thresholded(U: Tensor, tau: Tensor, project: bool) -> Tensor:
    """Equation 18. With projection, a slot that would vanish keeps its largest entry, as 1 or -1."""
    # tau = 0 is the identity, also at U = 0
    shrunk = torch.where((U.abs() > tau) | (tau == 0), U - tau * torch.sign(U), 0.0)
    if not project:
        return shrunk
    largest = torch.zeros_like(U).scatter(-2, U.abs().argmax(-2, keepdim=True), 1.0)
    return torch.where((U.abs() <= tau).all(-2, keepdim=True), torch.sign(U.detach()) * largest, shrunk)
