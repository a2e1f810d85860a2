"""Queries and keys of Mamba-3, turned by the angle that has passed since the piece's first token, with exact gradients.

Only differences of angles matter, so each piece and each document counts from 0: what is carried is the state as its last token
sees it, and no angle. Angles are float64, their cosines and sines the dtype of the computation: after 10^6 tokens of 3 radians a
float32 angle would be off by 0.1. Only the inputs are kept for the backward pass, for q and k are as many times wider as heads
share B and C.

Shape suffixes: B batch, T time, C chunks, L tokens of one, G groups, H heads, J inputs and outputs of a head (and the same again),
N d_state, R pairs of states that turn, F any.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from baton.kernels.common.autocast import without_autocast
from baton.kernels.compile.aot import on_gpu

CHUNK = 64
"""Tokens whose sums are computed together."""


def rotated(
    B: Tensor, C: Tensor, dt: Tensor, theta: Tensor, B_bias: Tensor, C_bias: Tensor, pos: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """With k = B + B_bias and q = C + C_bias, both turned by the sum of dt theta: q of each token's next token (0 for the last), q
    of the first token, k, the products q k of each token, and cosine and sine of the last token's angle.

    Args: as `op.mamba3`; dtype: of the computation, and of the results. On a GPU, q and k of all tokens are rounded to B's.
    """
    B, C, B_bias, C_bias = (x.unsqueeze(-2) for x in (B, C, B_bias, C_bias))
    q, first, k, own, _, cos, sin = rotated_of_several(B, C, dt, theta, B_bias, C_bias, pos, dtype)
    return q.squeeze(2), first.squeeze(2), k.squeeze(2), own.squeeze(-1).squeeze(-1), cos, sin


def rotated_of_several(
    B: Tensor, C: Tensor, dt: Tensor, theta: Tensor, B_bias: Tensor, C_bias: Tensor, pos: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor]:
    """As `rotated`, of heads with several k and q, J each, which turn alike.

    Args: B and C [B, T, G, J, N], biases [H, J, N], others as `rotated`'s.

    Returns:
        q of each token's next token [B, T, J, H, N], q of the first [B, H, J, N], k [B, T, J, H, N], the products of each token's q
        with its k [B, T, H, J, J], those of its next token's q with the k behind the one of the same place, 0 for the others (None
        for J = 1), and cosine and sine [B, H, R].
    """
    rounded = B.dtype if on_gpu(B) else dtype
    found: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor] = _Rotated.apply(
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
    """Sum of x [B, T, ...] over the tokens of the same document up to each token, or from it on.

    A matrix product sums in chunks, and the chunks' last tokens (first ones, backwards) are summed likewise: a document's sums have
    nothing of other documents', not even a rounding.
    """
    length, pos_BCL, x_BCLF = x.shape[1], chunked_positions(pos_BT, x), split_into_chunks(x.flatten(2))
    at_L = torch.arange(CHUNK, device=x.device)
    distance_LL = at_L[:, None] - at_L
    seen_BCLL = ((distance_LL >= 0) & (distance_LL <= pos_BCL[..., None])).to(x.dtype)
    with without_autocast(x):
        sums_BCLF = (seen_BCLL.mT if backward else seen_BCLL) @ x_BCLF
    if length > CHUNK:
        arriving_BCF, apart_BCL = arriving_sums(sums_BCLF[:, :, 0 if backward else -1], pos_BCL, backward=backward)
        sums_BCLF = sums_BCLF + arriving_BCF[:, :, None].masked_fill(apart_BCL[..., None], 0.0)
    return sums_BCLF.flatten(1, 2)[:, :length].view(x.shape)


def chunked_positions(pos_BT: Tensor | None, like: Tensor) -> Tensor:
    """Positions in chunks, [B, C, L], of a piece as long as `like` [B, T, ...]. None: it is inside one document."""
    if pos_BT is None:
        pos_BT = torch.arange(1, like.shape[1] + 1, device=like.device)[None]
    return split_into_chunks(pos_BT)


def split_into_chunks(x: Tensor) -> Tensor:
    """[B, T, ...] as [B, C, L, ...], with zeros behind the last token."""
    behind = -x.shape[1] % CHUNK
    x = pad(x, (*(0, 0) * (x.ndim - 2), 0, behind)) if behind else x
    return x.unflatten(1, (-1, CHUNK))


def arriving_sums(edges: Tensor, pos_BCL: Tensor, *, backward: bool) -> tuple[Tensor, Tensor]:
    """What the sums of `sums_in_documents` have of other chunks, from each chunk's own sums at its last token, or backwards at
    its first.

    Args:
        edges: these sums, [B, C, ...].
        pos_BCL: as `chunked_positions`.

    Returns:
        for each chunk [B, C, ...], and to which of its tokens that does not belong, [B, C, L].
    """
    # of a document that reaches n chunks back, n edges
    sums = sums_in_documents(edges, pos_BCL[:, :, 0 if backward else -1] // CHUNK, backward=backward)
    at_L, zeros = torch.arange(CHUNK, device=edges.device), (0, 0) * (edges.ndim - 2)
    if backward:
        return pad(sums[:, 1:], (*zeros, 0, 1)), pad(pos_BCL[:, 1:, 0], (0, 1))[..., None] < CHUNK - at_L
    return pad(sums[:, :-1], (*zeros, 1, 0)), pos_BCL <= at_L


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, B: Tensor, C: Tensor, dt: Tensor, theta: Tensor, B_bias: Tensor, C_bias: Tensor, pos: Tensor | None,
        dtype: torch.dtype, rounded: torch.dtype,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        ctx.save_for_backward(B, C, dt, theta, B_bias, C_bias)
        ctx.pos, ctx.dtype = pos, dtype
        k_BTHJN, q_BTHJN = _of_heads(B, B_bias, dtype), _of_heads(C, C_bias, dtype)
        cos_BTHR, sin_BTHR = _angles(dt, theta, pos, dtype)
        own_BTHJJ = _products(q_BTHJN, k_BTHJN)
        q_BTHJN, k_BTHJN = (turned(x, cos_BTHR[:, :, :, None], sin_BTHR[:, :, :, None]) for x in (q_BTHJN, k_BTHJN))
        next_BTHJN = _of_next(q_BTHJN)
        later_BTHJJ = _products(next_BTHJN, k_BTHJN).triu_(1) if q_BTHJN.shape[3] > 1 else None
        next_BTJHN, k_BTJHN = (x.transpose(2, 3).to(rounded).contiguous() for x in (next_BTHJN, k_BTHJN))
        return (
            *(next_BTJHN, q_BTHJN[:, 0].clone(), k_BTJHN, own_BTHJJ, later_BTHJJ),
            *(cos_BTHR[:, -1].clone(), sin_BTHR[:, -1].clone()),
        )

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dnext: Tensor, dfirst: Tensor, dk: Tensor, down: Tensor, dlater: Tensor | None, dcos: Tensor, dsin: Tensor
    ) -> tuple[Tensor | None, ...]:
        (B, C, dt, theta, B_bias, C_bias), dtype = ctx.saved_tensors, ctx.dtype
        k_BTHJN, q_BTHJN = _of_heads(B, B_bias, dtype), _of_heads(C, C_bias, dtype)
        cos_BTHR, sin_BTHR = _angles(dt, theta, ctx.pos, dtype)
        cos, sin = cos_BTHR[:, :, :, None], sin_BTHR[:, :, :, None]
        dnext, dk = (x.transpose(2, 3).to(dtype) for x in (dnext, dk))
        if dlater is not None:
            dlater = dlater.triu(1)
            dnext = dnext + _sums(dlater, turned(k_BTHJN, cos, sin))
            dk = dk + _sums(dlater.mT, _of_next(turned(q_BTHJN, cos, sin)))
        dq = torch.cat((dfirst[:, None], dnext[:, :-1]), dim=1)
        dq, dk = (turned(x, cos, -sin) for x in (dq, dk))
        dangle_BTHR = (_across(q_BTHJN, dq, cos.shape[-1]) + _across(k_BTHJN, dk, cos.shape[-1])).sum(3)
        dangle_BTHR[:, -1] += cos_BTHR[:, -1] * dsin - sin_BTHR[:, -1] * dcos
        dangle_BTHR = sums_in_documents(dangle_BTHR, ctx.pos, backward=True)
        ddt_BTH = (dangle_BTHR * theta.to(dtype)[:, :, None]).sum(-1)
        dtheta_BTR = (dangle_BTHR * dt.to(dtype)[..., None]).sum(2)
        dq, dk = dq + _sums(down, k_BTHJN), dk + _sums(down.mT, q_BTHJN)
        dB, dC = (x.unflatten(2, (B.shape[2], -1)).sum(3) for x in (dk, dq))
        return (
            *(grad.to(x.dtype) for grad, x in ((dB, B), (dC, C), (ddt_BTH, dt), (dtheta_BTR, theta))),
            *(grad.sum((0, 1)).to(x.dtype) for grad, x in ((dk, B_bias), (dq, C_bias))),
            *(None,) * 3,
        )


def _of_next(x: Tensor) -> Tensor:
    """Each token's next one of x [B, T, ...], 0 for the last."""
    return pad(x[:, 1:], (*(0, 0) * (x.ndim - 2), 0, 1))


def _products(q: Tensor, k: Tensor) -> Tensor:
    """Of each of q [..., J, N] with each of k. No matrix product, which is slow for so few rows, and which autocast would round."""
    return torch.stack([(q[..., j : j + 1, :] * k).sum(-1) for j in range(q.shape[-2])], dim=-2)


def _sums(weights: Tensor, x: Tensor) -> Tensor:
    """weights [..., J, J] times x [..., J, N]."""
    return torch.stack([(weights[..., j, :, None] * x).sum(-2) for j in range(weights.shape[-2])], dim=-2)


def _of_heads(x_BTGJN: Tensor, bias_HJN: Tensor, dtype: torch.dtype) -> Tensor:
    return x_BTGJN.to(dtype).repeat_interleave(bias_HJN.shape[0] // x_BTGJN.shape[2], 2) + bias_HJN.to(dtype)


def _angles(dt_BTH: Tensor, theta_BTR: Tensor, pos_BT: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine, [B, T, H, R], of the angles since the piece's first token, that one's own included."""
    angle_BTHR = sums_in_documents(dt_BTH.double()[..., None] * theta_BTR.double()[:, :, None], pos_BT)
    return angle_BTHR.cos().to(dtype), angle_BTHR.sin().to(dtype)


def _across(x: Tensor, dx: Tensor, pairs: int) -> Tensor:
    """The gradient of the angles by which x [..., N] is turned, [..., R]; dx: the gradient of what is turned, turned back."""
    (a, b), (da, db) = (y[..., : 2 * pairs].unflatten(-1, (pairs, 2)).unbind(-1) for y in (x, dx))
    return a * db - b * da
