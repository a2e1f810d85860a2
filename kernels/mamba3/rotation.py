"""Queries and keys of Mamba-3, turned by the angle that has passed since the piece's first token, with exact gradients.

Only differences of angles matter, so each piece and each document counts from 0: what is carried is the state as its last token
sees it, and no angle. Angles are float64, their cosines and sines the dtype of the computation: after 10^6 tokens of 3 radians a
float32 angle would be off by 0.1. Only the inputs are kept for the backward pass, for q and k are as many times wider as heads
share B and C.

Shape suffixes: B batch, T time, G groups, H heads, N d_state, R pairs of states that turn.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from baton.kernels.compile.aot import on_gpu


def rotated(
    B: Tensor, C: Tensor, dt: Tensor, theta: Tensor, B_bias: Tensor, C_bias: Tensor, pos: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """With k = B + B_bias and q = C + C_bias, both turned by the sum of dt theta: q of each token's next token (0 for the last), q
    of the first token, k, the products q k of each token, and cosine and sine of the last token's angle.

    Args: as `op.mamba3`; dtype: of the computation, and of the results. On a GPU, q and k of all tokens are rounded to B's.
    """
    rounded = B.dtype if on_gpu(B) else dtype
    found: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor] = _Rotated.apply(
        B, C, dt, theta, B_bias, C_bias, pos, dtype, rounded
    )
    return found


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [..., N] with entries 2 r and 2 r + 1 turned by the angle of cos, sin [..., R]; the others as they are."""
    pairs = cos.shape[-1]
    a, b = x[..., : 2 * pairs].unflatten(-1, (pairs, 2)).unbind(-1)
    both = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)
    return torch.cat((both, x[..., 2 * pairs :]), dim=-1)


def sums_in_documents(x: Tensor, pos_BT: Tensor | None, *, backward: bool = False) -> Tensor:
    """Sum of x [B, T, ...] over the tokens of the same document up to each token, or from it on. Sums of 1, 2, 4, ... tokens, so
    that a document's have nothing of others', not even a rounding."""
    n, length = 1, x.shape[1]
    while n < length:
        added = x[:, n:] if backward else x[:, :-n]
        if pos_BT is not None:
            added = added.masked_fill((pos_BT[:, n:] < n).view(*pos_BT[:, n:].shape, *(1,) * (x.dim() - 2)), 0.0)
        x = x + pad(added, (0, 0) * (x.dim() - 2) + ((0, n) if backward else (n, 0)))
        n *= 2
    return x


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, B: Tensor, C: Tensor, dt: Tensor, theta: Tensor, B_bias: Tensor, C_bias: Tensor, pos: Tensor | None,
        dtype: torch.dtype, rounded: torch.dtype,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        ctx.save_for_backward(B, C, dt, theta, B_bias, C_bias)
        ctx.pos, ctx.dtype = pos, dtype
        k_BTHN, q_BTHN = _of_heads(B, B_bias, dtype), _of_heads(C, C_bias, dtype)
        cos_BTHR, sin_BTHR = _angles(dt, theta, pos, dtype)
        own_BTH = (q_BTHN * k_BTHN).sum(-1)
        q_BTHN, k_BTHN = (turned(x, cos_BTHR, sin_BTHR) for x in (q_BTHN, k_BTHN))
        next_BTHN = pad(q_BTHN[:, 1:], (0, 0, 0, 0, 0, 1)).to(rounded)
        return next_BTHN, q_BTHN[:, 0].clone(), k_BTHN.to(rounded), own_BTH, cos_BTHR[:, -1].clone(), sin_BTHR[:, -1].clone()

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dnext: Tensor, dfirst: Tensor, dk: Tensor, down: Tensor, dcos: Tensor, dsin: Tensor
    ) -> tuple[Tensor | None, ...]:
        (B, C, dt, theta, B_bias, C_bias), dtype = ctx.saved_tensors, ctx.dtype
        k_BTHN, q_BTHN = _of_heads(B, B_bias, dtype), _of_heads(C, C_bias, dtype)
        cos_BTHR, sin_BTHR = _angles(dt, theta, ctx.pos, dtype)
        dq = torch.cat((dfirst[:, None], dnext[:, :-1].to(dtype)), dim=1)
        dq, dk = (turned(x, cos_BTHR, -sin_BTHR) for x in (dq, dk.to(dtype)))
        dangle_BTHR = _across(q_BTHN, dq, cos_BTHR.shape[3]) + _across(k_BTHN, dk, cos_BTHR.shape[3])
        dangle_BTHR[:, -1] += cos_BTHR[:, -1] * dsin - sin_BTHR[:, -1] * dcos
        dangle_BTHR = sums_in_documents(dangle_BTHR, ctx.pos, backward=True)
        ddt_BTH = (dangle_BTHR * theta.to(dtype)[:, :, None]).sum(-1)
        dtheta_BTR = (dangle_BTHR * dt.to(dtype)[..., None]).sum(2)
        dq, dk = dq + down[..., None] * k_BTHN, dk + down[..., None] * q_BTHN
        dB, dC = (x.unflatten(2, (B.shape[2], -1)).sum(3) for x in (dk, dq))
        return (
            *(grad.to(x.dtype) for grad, x in ((dB, B), (dC, C), (ddt_BTH, dt), (dtheta_BTR, theta))),
            *(grad.sum((0, 1)).to(x.dtype) for grad, x in ((dk, B_bias), (dq, C_bias))),
            *(None,) * 3,
        )


def _of_heads(x_BTGN: Tensor, bias_HN: Tensor, dtype: torch.dtype) -> Tensor:
    return x_BTGN.to(dtype).repeat_interleave(bias_HN.shape[0] // x_BTGN.shape[2], 2) + bias_HN.to(dtype)


def _angles(dt_BTH: Tensor, theta_BTR: Tensor, pos_BT: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine, [B, T, H, R], of the angles since the piece's first token, that one's own included."""
    angle_BTHR = sums_in_documents(dt_BTH.double()[..., None] * theta_BTR.double()[:, :, None], pos_BT)
    return angle_BTHR.cos().to(dtype), angle_BTHR.sin().to(dtype)


def _across(x: Tensor, dx: Tensor, pairs: int) -> Tensor:
    """The gradient of the angles by which x [..., N] is turned, [..., R]; dx: the gradient of what is turned, turned back."""
    (a, b), (da, db) = (y[..., : 2 * pairs].unflatten(-1, (pairs, 2)).unbind(-1) for y in (x, dx))
    return a * db - b * da
