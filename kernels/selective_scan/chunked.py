"""The selective scan in vectorised PyTorch, on any device: what runs on a CPU.

The one thing to know: the walk over chunks, forwards and backwards, is `baton.kernels.diagonal_scan.chunked`; this file holds what
is Mamba's own, the discretisation of a chunk (Gu & Dao 2023, equation 4) and its gradients.

Shape suffixes: B batch, T time, L time within a chunk, D channels, N d_state.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from baton.kernels.common.elementwise import LOG2_E, exp2_
from baton.kernels.diagonal_scan.chunked import Buffers, Generator, chunk_length, diagonal_scan, over_channels, over_states

# Below this |delta A|, d phi / d A of the zero-order hold is a power series: the closed form cancels
_SERIES_BOUND = 0.03
_SERIES = (1 / 2, 1 / 3, 1 / 8, 1 / 30, 1 / 144, 1 / 840, 1 / 5760, 1 / 45360)

__all__ = ["chunk_length", "selective_scan_chunked"]


def selective_scan_chunked(
    u: Tensor,
    delta: Tensor,
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
    """As `op.selective_scan`, which checks the arguments; `chunk` is the number of tokens per chunk."""
    kind = _ZeroOrderHold if zoh else _Euler
    return diagonal_scan(kind, (u, delta, B), C, D, (A,), pos=pos, initial_state=initial_state, chunk=chunk)


class _Euler(Generator):
    """decay = exp(delta A), add = delta B u; along is u, delta, B."""

    def __init__(self, buffers: Buffers, parameters: Sequence[Tensor]) -> None:
        (self.A,) = parameters
        # not the buffers themselves, which hold this generator: a cycle would keep them until the garbage collector comes
        self.decay_flat, self.token = buffers.decay_flat, (buffers.batch, buffers.d_state, buffers.channels)
        self.A_ND = self.A.t().to(buffers.dtype).contiguous()
        self.A_log2e_ND = self.A_ND * LOG2_E
        self.dA_ND = torch.zeros_like(self.A_ND)

    def fill(self, along: Sequence[Tensor], decay_LBND: Tensor, add_LBND: Tensor) -> None:
        u_LBD, delta_LBD, B_LBN = along
        self._fill_decay(delta_LBD, decay_LBND)
        torch.mul((u_LBD * delta_LBD)[:, :, None, :], B_LBN[:, :, :, None], out=add_LBND)

    def _fill_decay(self, delta_LBD: Tensor, decay_LBND: Tensor) -> None:
        torch.mul(delta_LBD[:, :, None, :], self.A_log2e_ND, out=decay_LBND)
        exp2_(self.decay_flat, decay_LBND.numel())

    def gradients(self, along: Sequence[Tensor], decay_LBND: Tensor, h_before_LBND: Tensor, lam_LBND: Tensor) -> tuple[Tensor, ...]:
        """Overwrites decay and lam."""
        u_LBD, delta_LBD, B_LBN = along
        dB_LBN = over_channels(u_LBD * delta_LBD, lam_LBND)
        along_B_LBD = over_states(B_LBN, lam_LBND)
        through_decay_LBND = decay_LBND.mul_(h_before_LBND).mul_(lam_LBND)
        ddelta_LBD = torch.mul(through_decay_LBND, self.A_ND, out=lam_LBND).sum(2).addcmul_(u_LBD, along_B_LBD)
        self.dA_ND += through_decay_LBND.mul_(delta_LBD[:, :, None, :]).sum((0, 1))
        return along_B_LBD.mul_(delta_LBD), ddelta_LBD, dB_LBN

    def parameter_gradients(self) -> tuple[Tensor, ...]:
        return (self.dA_ND.t().to(self.A.dtype),)


class _ZeroOrderHold(_Euler):
    """As `_Euler` with add = phi B u, phi = expm1(delta A) / A."""

    def __init__(self, buffers: Buffers, parameters: Sequence[Tensor]) -> None:
        super().__init__(buffers, parameters)
        self.phi_flat = torch.empty(buffers.chunk * buffers.step, dtype=buffers.dtype, device=self.A.device)

    def _phi(self, tokens: int) -> Tensor:
        """phi of `tokens` tokens, [L, B, N, D]."""
        return self.phi_flat[: tokens * math.prod(self.token)].view(tokens, *self.token)

    def fill(self, along: Sequence[Tensor], decay_LBND: Tensor, add_LBND: Tensor) -> None:
        u_LBD, delta_LBD, B_LBN = along
        self._fill_decay(delta_LBD, decay_LBND)
        phi_LBND = self._phi(u_LBD.shape[0])
        torch.mul(delta_LBD[:, :, None, :], self.A_ND, out=phi_LBND)
        phi_LBND.expm1_().div_(self.A_ND)
        torch.mul(u_LBD[:, :, None, :], B_LBN[:, :, :, None], out=add_LBND)
        add_LBND.mul_(phi_LBND)

    def gradients(self, along: Sequence[Tensor], decay_LBND: Tensor, h_before_LBND: Tensor, lam_LBND: Tensor) -> tuple[Tensor, ...]:
        """Overwrites decay, phi and lam."""
        u_LBD, delta_LBD, B_LBN = along
        A_ND, delta_LB1D = self.A_ND, delta_LBD[:, :, None, :]
        phi_LBND = self._phi(u_LBD.shape[0])
        # d phi / d delta: exp(delta A) also where a document starts, where the decay itself was set to 0
        slope_LBND = (phi_LBND * A_ND).add_(1.0)
        through_decay_LBND = decay_LBND.mul_(h_before_LBND).mul_(lam_LBND)
        ddelta_LBD = (through_decay_LBND * A_ND).sum(2).addcmul_(u_LBD, over_states(B_LBN, slope_LBND * lam_LBND))
        dA_ND = through_decay_LBND.mul_(delta_LB1D).sum((0, 1))
        through_phi_LBND = _phi_by_A(delta_LB1D, A_ND, slope_LBND, phi_LBND).mul_(lam_LBND).mul_(B_LBN[:, :, :, None])
        dA_ND += through_phi_LBND.mul_(u_LBD[:, :, None, :]).sum((0, 1))
        self.dA_ND += dA_ND
        lam_LBND.mul_(phi_LBND)
        return over_states(B_LBN, lam_LBND), ddelta_LBD, over_channels(u_LBD, lam_LBND)


def _phi_by_A(delta_LB1D: Tensor, A_ND: Tensor, slope_LBND: Tensor, phi_LBND: Tensor) -> Tensor:
    """d phi / d A = (delta exp(x) - phi) / A with x = delta A; near x = 0, delta^2 sum_k x^k (k + 1) / (k + 2)!."""
    closed_LBND = (delta_LB1D * slope_LBND).sub_(phi_LBND).div_(A_ND)
    x_LBND = delta_LB1D * A_ND
    near_LBND = x_LBND > -_SERIES_BOUND
    series_LBND = torch.full_like(x_LBND, _SERIES[-1])
    for coefficient in reversed(_SERIES[:-1]):
        series_LBND.mul_(x_LBND).add_(coefficient)
    return torch.where(near_LBND, series_LBND.mul_(delta_LB1D).mul_(delta_LB1D), closed_LBND)
