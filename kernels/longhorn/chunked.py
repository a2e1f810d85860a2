"""Longhorn in PyTorch, on any device: the decay and input of its recurrence and their gradients.

Shape suffixes: B batch, T time, L time within a chunk, D channels, N d_state.

The decay 1 - eps k_n^2 is computed as a sum of two positive terms: 1 / (1 + beta |k|^2), and eps times the squares of the other
keys, which are summed without k_n. A subtraction would lose all digits, or turn negative, where one key is large. The loop over
chunks, forward and backward, is `baton.kernels.diagonal_scan.chunked`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from baton.kernels.diagonal_scan.chunked import (
    ChunkBuffers,
    RecurrenceTerms,
    diagonal_scan_chunked,
    sum_over_channels,
    sum_over_states,
)


def longhorn_chunked(
    x: Tensor,
    k: Tensor,
    q: Tensor,
    beta: Tensor,
    D: Tensor,
    *,
    pos: Tensor | None,
    initial_state: Tensor | None,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """As `op.longhorn`, which checks the arguments; chunk: tokens per chunk."""
    return diagonal_scan_chunked(LonghornTerms, (x, k, beta), q, D, pos=pos, initial_state=initial_state, chunk=chunk)


class LonghornTerms(RecurrenceTerms):
    """decay = 1 - eps k^2, add = eps x k, eps = beta / (1 + beta |k|^2); time_inputs is x, k, beta. There are no parameters."""

    def __init__(self, buffers: ChunkBuffers, parameters: Sequence[Tensor]) -> None:
        del parameters
        self.diagonal = torch.eye(buffers.d_state, dtype=torch.bool, device=buffers.h_flat.device)

    def compute(self, time_inputs: Sequence[Tensor], decay_LBND: Tensor, add_LBND: Tensor) -> None:
        x_LBD, k_LBN, beta_LBD = time_inputs
        squares_LB1N = k_LBN.square()[:, :, None, :]
        others_LBN1 = squares_LB1N.masked_fill(self.diagonal, 0.0).sum(3, keepdim=True)
        self.floor_LBD = (squares_LB1N.sum(3) * beta_LBD).add_(1.0).reciprocal_()
        self.eps_LBD = beta_LBD * self.floor_LBD
        torch.addcmul(self.floor_LBD[:, :, None, :], self.eps_LBD[:, :, None, :], others_LBN1, out=decay_LBND)
        # the two terms sum to at most 1, but rounded they may exceed it
        decay_LBND.clamp_(max=1.0)
        torch.mul((self.eps_LBD * x_LBD)[:, :, None, :], k_LBN[:, :, :, None], out=add_LBND)

    def gradients(
        self, time_inputs: Sequence[Tensor], decay_LBND: Tensor, h_before_LBND: Tensor, dh_LBND: Tensor
    ) -> tuple[Tensor, ...]:
        """For S = S' + eps k (x - k S'), with deps/dbeta = 1 / (1 + beta |k|^2)^2 and deps/d|k|^2 = -eps^2. Overwrites h_before."""
        x_LBD, k_LBN, _ = time_inputs
        eps_LBD = self.eps_LBD
        dx_LBD = sum_over_states(k_LBN, dh_LBND).mul_(eps_LBD)
        dk_LBN = sum_over_channels(eps_LBD * x_LBD, dh_LBND).neg_()
        # the recall error x - k S' as one term: x and k S' cancel where the state has learned
        recall_error_LBND = torch.addcmul(x_LBD[:, :, None, :], h_before_LBND, k_LBN[:, :, :, None], value=-1, out=h_before_LBND)
        recall_error_LBND.mul_(dh_LBND)
        deps_LBD = sum_over_states(k_LBN, recall_error_LBND)
        dk_LBN.add_(sum_over_channels(eps_LBD, recall_error_LBND), alpha=2)
        dk_LBN.addcmul_(k_LBN, (deps_LBD * eps_LBD.square()).sum(2, keepdim=True), value=-2)
        return dx_LBD, dk_LBN, deps_LBD.mul_(self.floor_LBD.square())
