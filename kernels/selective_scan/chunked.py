"""Selective scan in PyTorch, on any device: the discretization of Mamba (Gu & Dao 2023, equation 4) and its gradients.

Shape suffixes: B batch, T time, L time within a chunk, D channels, N d_state.

The loop over chunks, forward and backward, is `baton.kernels.diagonal_scan.chunked`.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from baton.kernels.common.elementwise import LOG2_E, exp2_
from baton.kernels.diagonal_scan.chunked import (
    ChunkBuffers,
    RecurrenceTerms,
    chunk_length,
    diagonal_scan_chunked,
    sum_over_channels,
    sum_over_states,
)

# Below this |dt A|, d phi / d A of the zero-order hold is a power series: the closed form loses digits to cancellation
_SERIES_BOUND = 0.03
_SERIES = (1 / 2, 1 / 3, 1 / 8, 1 / 30, 1 / 144, 1 / 840, 1 / 5760, 1 / 45360)

__all__ = ["chunk_length", "selective_scan_chunked"]


def selective_scan_chunked(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    *,
    pos: Tensor | None,
    initial_state: Tensor | None,
    zoh: bool,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """As `op.selective_scan`, which checks the arguments; chunk: tokens per chunk."""
    terms = _ZeroOrderHoldTerms if zoh else _EulerTerms
    return diagonal_scan_chunked(terms, (x, dt, B), C, D, (A,), pos=pos, initial_state=initial_state, chunk=chunk)


class _EulerTerms(RecurrenceTerms):
    """decay = exp(dt A), add = dt B x; time_inputs is x, dt, B."""

    def __init__(self, buffers: ChunkBuffers, parameters: Sequence[Tensor]) -> None:
        (self.A,) = parameters
        # not the buffers, which hold this object: a reference cycle would keep them until garbage collection
        self.decay_flat, self.token = buffers.decay_flat, (buffers.batch, buffers.d_state, buffers.channels)
        self.A_ND = self.A.t().to(buffers.dtype).contiguous()
        self.A_log2e_ND = self.A_ND * LOG2_E
        self.dA_ND = torch.zeros_like(self.A_ND)

    def compute(self, time_inputs: Sequence[Tensor], decay_LBND: Tensor, add_LBND: Tensor) -> None:
        x_LBD, dt_LBD, B_LBN = time_inputs
        self._compute_decay(dt_LBD, decay_LBND)
        torch.mul((x_LBD * dt_LBD)[:, :, None, :], B_LBN[:, :, :, None], out=add_LBND)

    def _compute_decay(self, dt_LBD: Tensor, decay_LBND: Tensor) -> None:
        torch.mul(dt_LBD[:, :, None, :], self.A_log2e_ND, out=decay_LBND)
        exp2_(self.decay_flat, decay_LBND.numel())

    def gradients(
        self, time_inputs: Sequence[Tensor], decay_LBND: Tensor, h_before_LBND: Tensor, dh_LBND: Tensor
    ) -> tuple[Tensor, ...]:
        """Overwrites decay and dh."""
        x_LBD, dt_LBD, B_LBN = time_inputs
        dB_LBN = sum_over_channels(x_LBD * dt_LBD, dh_LBND)
        dh_B_LBD = sum_over_states(B_LBN, dh_LBND)
        through_decay_LBND = decay_LBND.mul_(h_before_LBND).mul_(dh_LBND)
        ddt_LBD = torch.mul(through_decay_LBND, self.A_ND, out=dh_LBND).sum(2).addcmul_(x_LBD, dh_B_LBD)
        self.dA_ND += through_decay_LBND.mul_(dt_LBD[:, :, None, :]).sum((0, 1))
        return dh_B_LBD.mul_(dt_LBD), ddt_LBD, dB_LBN

    def parameter_gradients(self) -> tuple[Tensor, ...]:
        return (self.dA_ND.t().to(self.A.dtype),)


class _ZeroOrderHoldTerms(_EulerTerms):
    """As `_EulerTerms`, with add = phi B x, phi = expm1(dt A) / A."""

    def __init__(self, buffers: ChunkBuffers, parameters: Sequence[Tensor]) -> None:
        super().__init__(buffers, parameters)
        self.phi_flat = torch.empty(buffers.chunk * buffers.step, dtype=buffers.dtype, device=self.A.device)

    def _phi(self, tokens: int) -> Tensor:
        """phi of `tokens` tokens, [L, B, N, D]."""
        return self.phi_flat[: tokens * math.prod(self.token)].view(tokens, *self.token)

    def compute(self, time_inputs: Sequence[Tensor], decay_LBND: Tensor, add_LBND: Tensor) -> None:
        x_LBD, dt_LBD, B_LBN = time_inputs
        self._compute_decay(dt_LBD, decay_LBND)
        phi_LBND = self._phi(x_LBD.shape[0])
        torch.mul(dt_LBD[:, :, None, :], self.A_ND, out=phi_LBND)
        phi_LBND.expm1_().div_(self.A_ND)
        torch.mul(x_LBD[:, :, None, :], B_LBN[:, :, :, None], out=add_LBND)
        add_LBND.mul_(phi_LBND)

    def gradients(
        self, time_inputs: Sequence[Tensor], decay_LBND: Tensor, h_before_LBND: Tensor, dh_LBND: Tensor
    ) -> tuple[Tensor, ...]:
        """Overwrites decay, phi and dh."""
        x_LBD, dt_LBD, B_LBN = time_inputs
        A_ND, dt_LB1D = self.A_ND, dt_LBD[:, :, None, :]
        phi_LBND = self._phi(x_LBD.shape[0])
        # d phi / d dt: exp(dt A) also where a document starts, where the decay itself was set to 0
        slope_LBND = (phi_LBND * A_ND).add_(1.0)
        through_decay_LBND = decay_LBND.mul_(h_before_LBND).mul_(dh_LBND)
        ddt_LBD = (through_decay_LBND * A_ND).sum(2).addcmul_(x_LBD, sum_over_states(B_LBN, slope_LBND * dh_LBND))
        dA_ND = through_decay_LBND.mul_(dt_LB1D).sum((0, 1))
        through_phi_LBND = _phi_by_A(dt_LB1D, A_ND, slope_LBND, phi_LBND).mul_(dh_LBND).mul_(B_LBN[:, :, :, None])
        dA_ND += through_phi_LBND.mul_(x_LBD[:, :, None, :]).sum((0, 1))
        self.dA_ND += dA_ND
        dh_LBND.mul_(phi_LBND)
        return sum_over_states(B_LBN, dh_LBND), ddt_LBD, sum_over_channels(x_LBD, dh_LBND)


def _phi_by_A(dt_LB1D: Tensor, A_ND: Tensor, slope_LBND: Tensor, phi_LBND: Tensor) -> Tensor:
    """d phi / d A = (dt exp(dt A) - phi) / A; near dt A = 0, dt^2 sum_k (dt A)^k (k + 1) / (k + 2)!."""
    closed_LBND = (dt_LB1D * slope_LBND).sub_(phi_LBND).div_(A_ND)
    dtA_LBND = dt_LB1D * A_ND
    near_LBND = dtA_LBND > -_SERIES_BOUND
    series_LBND = torch.full_like(dtA_LBND, _SERIES[-1])
    for coefficient in reversed(_SERIES[:-1]):
        series_LBND.mul_(dtA_LBND).add_(coefficient)
    return torch.where(near_LBND, series_LBND.mul_(dt_LB1D).mul_(dt_LB1D), closed_LBND)
