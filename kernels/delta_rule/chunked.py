"""The delta rule in chunks of tokens in batched PyTorch, on any device: the CPU implementation.

Shape suffixes: B batch, H heads, L tokens of a chunk, K d_key, V d_value. Within a chunk heads come before time. Queries
and keys may have one head for all, which broadcasts: what is computed of keys alone is then computed once.

Within a chunk the state after token i is decay_i S + sum_j decay_ij k_j u_j^T, where u_j is what token j writes: beta_j times the
difference between v_j and what the state before it recalls. Each u depends linearly on the earlier ones, so together they solve one
unit lower triangular system of the chunk's size (the WY representation and UT transform of Yang et al. 2024, section 3; with
decays, Yang, Kautz & Hatamizadeh 2025, section 3.3). The entering state is part of the right-hand side, so there is one solve per
chunk. Exponents are sums of log-decays, never differences: none is positive, and nothing is divided by a decay.
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from baton.kernels.common.autocast import without_autocast
from baton.kernels.common.chunked_autograd import run_chunked, state_dtype
from baton.kernels.protocol import Inputs, State

CHUNK = 64
"""Tokens per chunk. Of 16, 32, 64 and 128 the fastest or within a sixth of it on one core, forwards and backwards, for d_key 64 and
128 and 4 to 16 heads in all; and at 64 half as many states are kept for the backward pass as at 32."""


def delta_rule_chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    *,
    scale: float,
    pos: Tensor | None,
    initial_state: Tensor | None,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """As `op.delta_rule`, which checks the arguments; `chunk` is the number of tokens per chunk."""
    inputs = (q, k, v, beta) if g is None else (q, k, v, beta, g)
    dtype = state_dtype(*inputs)
    if initial_state is None:
        initial_state = k.new_zeros(*v.shape[::2], k.shape[3], v.shape[3], dtype=dtype)
    step = partial(_step, scale=scale, dtype=dtype)
    y, state = run_chunked(step, inputs, len(inputs), pos=pos, state={"S": initial_state}, chunk=chunk)
    return y, state["S"]


def delta_rule_transition(
    k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, *, pos: Tensor | None, chunk: int = CHUNK
) -> tuple[Tensor, Tensor]:
    """The transition of a span, S -> M S + add: M [batch, heads, d_key, d_key] and add, without a gradient.

    Arguments as in `op.delta_rule`; they are not checked. Both are computed in one pass: add is the result for a zero state, and a
    column of M the result for a unit state without values, so the values are padded with zeros and the state with I.
    """
    dtype = state_dtype(k, v, beta) if g is None else state_dtype(k, v, beta, g)
    batch, length, heads, d_value = v.shape
    d_key = k.shape[3]
    identity_KK = torch.eye(d_key, dtype=dtype, device=k.device)
    S_BHKX = torch.cat((identity_KK.new_zeros(d_key, d_value), identity_KK), dim=1).expand(batch, heads, -1, -1)
    with torch.no_grad(), without_autocast(k):
        for begin in range(0, length, chunk):
            piece = slice(begin, begin + chunk)
            v_BLHX = torch.nn.functional.pad(v[:, piece], (0, d_key))
            gate = None if g is None else g[:, piece]
            where = None if pos is None else pos[:, piece]
            S_BHKX = _solve(k[:, piece], v_BLHX, beta[:, piece], gate, where, S_BHKX, dtype).leaving()
    add_BHKV, M_BHKK = S_BHKX.split((d_value, d_key), dim=3)
    return M_BHKK.contiguous(), add_BHKV.contiguous()


class _Solved(NamedTuple):
    """A chunk with its solved values u.

    k [B, H, L, K]; u [B, H, L, V], the value that each token writes; decay [B, H, L, L], from token j's write to token i's state;
    entering_decay [B, H, L, 1], from the entering state to token i's; S [B, H, K, V], the entering state.
    """

    k: Tensor
    u: Tensor
    decay: Tensor
    entering_decay: Tensor
    S: Tensor

    def leaving(self) -> Tensor:
        """The state after the last token."""
        kept_BHLK = self.k * self.decay[:, :, -1, :, None]
        return self.entering_decay[:, :, -1:] * self.S + kept_BHLK.transpose(2, 3) @ self.u


def _step(inputs: Inputs, pos: Tensor | None, state: State, *, scale: float, dtype: torch.dtype) -> tuple[Tensor, State]:
    q, k, v, beta, *gate = inputs
    chunk = _solve(k, v, beta, gate[0] if gate else None, pos, state["S"], dtype)
    q_BHLK = scale * q.transpose(1, 2).to(dtype)
    scores_BHLL = q_BHLK @ chunk.k.transpose(2, 3) * chunk.decay
    o_BHLV = chunk.entering_decay * (q_BHLK @ chunk.S) + scores_BHLL @ chunk.u
    return o_BHLV.transpose(1, 2).to(q.dtype), {"S": chunk.leaving()}


def _solve(k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, pos: Tensor | None, S_BHKV: Tensor, dtype: torch.dtype) -> _Solved:
    """u_i = beta_i (v_i - (decay_i S + sum_{j < i} decay_ij k_j u_j^T)^T k_i), for all tokens of a chunk at once."""
    k_BHLK, v_BHLV = k.transpose(1, 2).to(dtype), v.transpose(1, 2).to(dtype)
    beta_BHL1 = beta.transpose(1, 2).to(dtype).unsqueeze(3)
    decay_BHLL, entering_decay_BHL1 = _decays(k.shape[1], None if g is None else g.transpose(1, 2).to(dtype), pos, k_BHLK)
    missed_BHLV = v_BHLV - entering_decay_BHL1 * (k_BHLK @ S_BHKV)
    # of this matrix the solve reads what is below the diagonal, and takes the diagonal to be 1
    overlaps_BHLL = beta_BHL1 * decay_BHLL * (k_BHLK @ k_BHLK.transpose(2, 3))
    u_BHLV = torch.linalg.solve_triangular(overlaps_BHLL, beta_BHL1 * missed_BHLV, upper=False, unitriangular=True)
    return _Solved(k_BHLK, u_BHLV, decay_BHLL, entering_decay_BHL1, S_BHKV)


def _decays(length: int, g_BHL: Tensor | None, pos: Tensor | None, like: Tensor) -> tuple[Tensor, Tensor]:
    """decay_ij = exp(g_{j+1} + .. + g_i) for token j's write seen by token i, exp(g_0 + .. + g_i) for the entering state.

    The entering state is what a token -1 wrote. All is 0 across a document's start, and [1, 1, ...] or [batch, 1, ...] where all
    heads share it.
    """
    readers_L1 = torch.arange(length, device=like.device)[:, None]
    writers_W = torch.arange(-1, length, device=like.device)
    distance_LW = readers_L1 - writers_W
    visible = (distance_LW >= 0)[None, None]
    if pos is not None:
        visible = visible & (distance_LW <= pos[:, None, :, None])
    if g_BHL is None:
        decay = visible.to(like.dtype)
    else:
        # each sum is computed from its own terms: a difference of two sums would lose digits where decays are strong, and
        # earlier documents would change the bits of later ones. It is a matmul because cumsum is not deterministic on GPUs
        behind_BHLW = g_BHL.unsqueeze(3).expand(-1, -1, -1, length + 1).masked_fill(distance_LW <= 0, 0.0)
        sums_LL = (distance_LW[:, 1:] >= 0).to(like.dtype)
        decay = (sums_LL @ behind_BHLW).masked_fill(~visible, -torch.inf).exp()
    return decay[..., 1:], decay[..., :1]
