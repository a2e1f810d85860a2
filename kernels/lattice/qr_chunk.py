"""Encoding and similarity with projection, a chunk at a time, in coordinates of the span of the chunk's values.

Shapes: with N = batch x heads, slots [N, d, m], basis [N, d, K] with K = min(L, d), coordinates [N, K + 1, m]; otherwise as in
`step_loop`.

In these variants a token's h, v or -v, does not depend on the state. Within a chunk every slot therefore stays in the span of the h
and of its initial value, and is known by its coordinates there: one for each vector of an orthonormal basis of the h, and one along
the direction in which the initial slot leaves their span. The basis, and the h in it, are known before the state arrives. Then
`step_loop` runs on the coordinates as it would on the slots, and the dimension d appears in a few products per chunk only.

The basis has to be orthonormal. In coordinates along the h themselves, which need only a Gram matrix, a few tokens with equal
values (a repeated word) make the coordinates arbitrarily large, and float32 gives NaN within 16 ordinary tokens.

In the backward pass the basis is a constant, not a function of the h. The gradients of the h then have a part outside their span,
which is a combination of the outputs' cotangents. No factorization is differentiated, and repeated values need no special case.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from baton.kernels.lattice.step_loop import StepLoop, Tokens, known_h
from baton.kernels.lattice.variant import UpdateRule, slot_norms


class QRBasis(NamedTuple):
    """An orthonormal basis [N, d, K] of a chunk's h, and the h in it [L, N, K + 1, 1], 0 in the last coordinate."""

    basis: Tensor
    h: Tensor


@torch.no_grad()
def qr_basis(rule: UpdateRule, v: Tensor) -> QRBasis:
    """The basis for a chunk's values, [L, N, d, 1]."""
    basis, h = torch.linalg.qr(known_h(rule, v).squeeze(3).permute(1, 2, 0))
    return QRBasis(basis.contiguous(), torch.nn.functional.pad(h.permute(2, 0, 1), (0, 1)).unsqueeze(3).contiguous())


def run_qr_chunk(rule: UpdateRule, qr: QRBasis, tokens: Tokens, S: Tensor) -> tuple[Tensor, Tensor]:
    """Run a chunk of tokens, shaped as in `step_loop`, in which no document starts (if one starts at its first token, S is its
    initial slots).

    S: initial slots [N, d, m], of norm 1. Their gradient's component along them is meaningless.

    Returns:
        y, [L, N, d, 1], and the final slots, of norm 1, with exact gradients to tokens and S.
    """
    return _QRChunk.apply(rule, qr, *tokens[:5], S)


class _QRChunk(Function):
    @staticmethod
    def forward(ctx: Any, rule: UpdateRule, qr: QRBasis, *tensors: Any) -> tuple[Tensor, Tensor]:
        q, k, _, gamma, mu, S = tensors
        basis = qr.basis
        residual, last_coordinate = torch.zeros_like(S), S.new_zeros(len(S), 1, S.shape[2])
        if basis.shape[2] < basis.shape[1]:
            # twice: if the slot lies almost inside the span, the first residual is rounding error, mostly inside the span
            residual = _project_out(basis, _project_out(basis, S))
            last_coordinate = slot_norms(residual)
            residual /= last_coordinate.clamp(min=torch.finfo(residual.dtype).tiny)
        ctx.loop = loop = StepLoop(rule, None, qr.h, k, gamma, mu, None, torch.cat([basis.mT @ S, last_coordinate], dim=1))
        y = basis @ _time_last((loop.states[1:, :, :-1] @ q.mT).squeeze(3)) + residual @ _time_last(
            (loop.states[1:, :, -1:] * q).squeeze(2)
        )
        S = torch.baddbmm(residual * loop.states[-1, :, -1:], basis, loop.states[-1, :, :-1])
        norm = slot_norms(S)
        S /= norm
        ctx.save_for_backward(basis, residual, q, S, norm)
        return _time_first(y).contiguous().unsqueeze(3), S

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dS: Tensor) -> tuple[Any, ...]:
        basis, residual, q, S, norm = ctx.saved_tensors
        loop = ctx.loop
        dS = torch.addcmul(dS, S, (S * dS).sum(1, keepdim=True), value=-1).div_(norm)
        dy_columns = _time_last(dy.squeeze(3))
        dy_basis = _time_first(basis.mT @ dy_columns).unsqueeze(3).expand(-1, -1, -1, q.shape[3])
        dread = torch.cat([dy_basis, _time_first(residual.mT @ dy_columns).unsqueeze(2)], dim=2)
        grads = loop.backward(dread, q, torch.cat([basis.mT @ dS, (residual * dS).sum(1, keepdim=True)], dim=1))

        # Outside the span, the cotangent of h_t is the later dy and dS scaled by the steps between, plus a multiple of `residual`,
        # which is the component along the slots that those steps removed.
        factor = torch.addcmul(torch.ones_like(loop.gamma) if loop.mu is None else loop.mu, loop.weight, loop.a, value=-1)
        factor /= loop.norm
        share = loop.weight / loop.norm
        through = _products(factor)
        reads = through * q
        along = -(through * (loop.states[1:, :, -1:] * grads.radial)).sum(1)
        dh_dy = (share.unsqueeze(1) * reads).sum((3, 4)).permute(2, 1, 0)
        dh_outside = dy_columns @ dh_dy + dS @ _time_last((share * through[:, -1]).squeeze(2))
        dh_rest = loop.states[:-1, :, -1:] * grads.a + share * along
        dh = (
            _project_out(basis, dh_outside)
            + residual @ _time_last(dh_rest.squeeze(2))
            + basis @ _time_last(grads.h[:, :, :-1].squeeze(3))
        )
        dS_outside = dS * (factor[0] * through[0, -1]) + dy_columns @ (factor[0] * reads[0]).squeeze(2).transpose(0, 1)
        dS = _project_out(basis, dS_outside) + residual * (factor[0] * along[0]) + basis @ grads.S[:, :-1]

        dq = (loop.states[1:] * dread).sum(2, keepdim=True)
        return None, None, dq, grads.k, known_h(loop.rule, _time_first(dh).unsqueeze(3)), grads.gamma, grads.mu, dS


def _products(factor: Tensor) -> Tensor:
    """[t, s] of [L, L, ...]: the product of factor over t + 1 ... s, 0 where s < t. No division: a factor may be 0."""
    through = factor.new_zeros(len(factor), *factor.shape)
    through[-1, -1] = 1.0
    for t in reversed(range(len(factor) - 1)):
        torch.mul(through[t + 1, t + 1 :], factor[t + 1], out=through[t, t + 1 :])
        through[t, t] = 1.0
    return through


def _project_out(basis: Tensor, x: Tensor) -> Tensor:
    """x minus its projection on the basis."""
    return torch.baddbmm(x, basis, basis.mT @ x, alpha=-1)


def _time_last(x: Tensor) -> Tensor:
    """[L, N, ...] with time last."""
    return x.movedim(0, -1)


def _time_first(x: Tensor) -> Tensor:
    """[N, ..., L] with time first."""
    return x.movedim(-1, 0)
