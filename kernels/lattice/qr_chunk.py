"""Encoding and similarity with projection, a chunk at a time: only work of the chunk's size and the slots' in the loop over tokens.

The one thing to know: what such a token writes, h = v or -v, does not depend on the state. So within a chunk every slot stays in
the span of the h and of what entered, and is known by its coordinates there: one for each direction of an orthonormal basis of the
h, and one along the direction in which the entering slot leaves their span. The basis, and what the h are in it, is known before a
state arrives; then `step_loop` runs on the coordinates as it would on the slots, and d appears in a few products per chunk.

The basis has to be orthonormal. In coordinates along the h themselves, where one Gram matrix is all that is needed, a few tokens
of equal values (a repeated word) make the coordinates as large as one likes, and float32 is NaN within 16 tokens of ordinary size.

Backwards the basis is a constant, not a function of the h: so the gradients of the h have a part outside their span, which is a
combination of the outputs' cotangents. No factorisation is differentiated, and repeated values need no care.

With N = batch x heads: slots [N, d, m], basis [N, d, K], K = min(L, d); coordinates [N, K + 1, m]. Else as in `step_loop`.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from baton.kernels.lattice.step_loop import Tokens, Walk, written
from baton.kernels.lattice.variant import Rule, norms


class Span(NamedTuple):
    """An orthonormal basis [N, d, K] of a chunk's h, and the h in it [L, N, K + 1, 1], 0 in the last coordinate."""

    basis: Tensor
    h: Tensor


@torch.no_grad()
def span_of(rule: Rule, v: Tensor) -> Span:
    """Of a chunk's values, [L, N, d, 1]."""
    basis, h = torch.linalg.qr(written(rule, v).squeeze(3).permute(1, 2, 0))
    return Span(basis.contiguous(), torch.nn.functional.pad(h.permute(2, 0, 1), (0, 1)).unsqueeze(3).contiguous())


def run_span(rule: Rule, span: Span, tokens: Tokens, S: Tensor) -> tuple[Tensor, Tensor]:
    """A chunk of tokens, shaped as `step_loop` says, in which no document starts (at its first token, `S` is what is loaded there).

    S: entering slots [N, d, m], of norm 1. Their gradient's part along them means nothing.

    Returns:
        what is read, [L, N, d, 1], and the leaving slots, of norm 1, with exact gradients to tokens and S.
    """
    return _Span.apply(rule, span, *tokens[:5], S)


class _Span(Function):
    @staticmethod
    def forward(ctx: Any, rule: Rule, span: Span, *tensors: Any) -> tuple[Tensor, Tensor]:
        q, k, _, gamma, mu, S = tensors
        basis = span.basis
        rest, leaving = torch.zeros_like(S), S.new_zeros(len(S), 1, S.shape[2])
        if basis.shape[2] < basis.shape[1]:
            # twice: where hardly anything leaves the span, what is left the first time is rounding, mostly inside it
            rest = _without(basis, _without(basis, S))
            leaving = norms(rest)
            rest /= leaving.clamp(min=torch.finfo(rest.dtype).tiny)
        ctx.walk = walk = Walk(rule, None, span.h, k, gamma, mu, None, torch.cat([basis.mT @ S, leaving], dim=1))
        y = basis @ _last((walk.states[1:, :, :-1] @ q.mT).squeeze(3)) + rest @ _last((walk.states[1:, :, -1:] * q).squeeze(2))
        S = torch.baddbmm(rest * walk.states[-1, :, -1:], basis, walk.states[-1, :, :-1])
        norm = norms(S)
        S /= norm
        ctx.save_for_backward(basis, rest, q, S, norm)
        return _first(y).contiguous().unsqueeze(3), S

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dS: Tensor) -> tuple[Any, ...]:
        basis, rest, q, S, norm = ctx.saved_tensors
        walk = ctx.walk
        dS = torch.addcmul(dS, S, (S * dS).sum(1, keepdim=True), value=-1).div_(norm)
        dy_columns = _last(dy.squeeze(3))
        dy_basis = _first(basis.mT @ dy_columns).unsqueeze(3).expand(-1, -1, -1, q.shape[3])
        dread = torch.cat([dy_basis, _first(rest.mT @ dy_columns).unsqueeze(2)], dim=2)
        found = walk.back(dread, q, torch.cat([basis.mT @ dS, (rest * dS).sum(1, keepdim=True)], dim=1))

        # Outside the span, a step's cotangent is the later dy and dS, scaled by the steps between, and a multiple of `rest`: what
        # those steps took away of it along their slots.
        factor = torch.addcmul(torch.ones_like(walk.gamma) if walk.mu is None else walk.mu, walk.weight, walk.a, value=-1)
        factor /= walk.norm
        share = walk.weight / walk.norm
        through = _products(factor)
        reads = through * q
        along = -(through * (walk.states[1:, :, -1:] * found.radial)).sum(1)
        dh_dy = (share.unsqueeze(1) * reads).sum((3, 4)).permute(2, 1, 0)
        dh_outside = dy_columns @ dh_dy + dS @ _last((share * through[:, -1]).squeeze(2))
        dh_rest = walk.states[:-1, :, -1:] * found.a + share * along
        dh = _without(basis, dh_outside) + rest @ _last(dh_rest.squeeze(2)) + basis @ _last(found.h[:, :, :-1].squeeze(3))
        dS_outside = dS * (factor[0] * through[0, -1]) + dy_columns @ (factor[0] * reads[0]).squeeze(2).transpose(0, 1)
        dS = _without(basis, dS_outside) + rest * (factor[0] * along[0]) + basis @ found.S[:, :-1]

        dq = (walk.states[1:] * dread).sum(2, keepdim=True)
        return None, None, dq, found.k, written(walk.rule, _first(dh).unsqueeze(3)), found.gamma, found.mu, dS


def _products(factor: Tensor) -> Tensor:
    """[t, s] of [L, L, ...]: the product of factor over t + 1 ... s, 0 where s < t. Without a division, a factor may be 0."""
    through = factor.new_zeros(len(factor), *factor.shape)
    through[-1, -1] = 1.0
    for t in reversed(range(len(factor) - 1)):
        torch.mul(through[t + 1, t + 1 :], factor[t + 1], out=through[t, t + 1 :])
        through[t, t] = 1.0
    return through


def _without(basis: Tensor, x: Tensor) -> Tensor:
    """x less its projection on the basis."""
    return torch.baddbmm(x, basis, basis.mT @ x, alpha=-1)


def _last(x: Tensor) -> Tensor:
    """[L, N, ...] with time last."""
    return x.movedim(0, -1)


def _first(x: Tensor) -> Tensor:
    """[N, ..., L] with time first."""
    return x.movedim(-1, 0)
