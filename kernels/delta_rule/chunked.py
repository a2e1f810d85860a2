"""The delta rule in chunks of tokens in batched PyTorch, on any device: the CPU implementation.

Shape suffixes: B batch, H heads, L tokens of a chunk, K d_key, V d_value. Within a chunk heads come before time. Queries
and keys may have one head for all, which broadcasts: what is computed of keys alone is then computed once.

Within a chunk the state after token i is decay_i S + sum_j decay_ij k_j u_j^T, where u_j is what token j writes: beta_j times the
difference between v_j and what the state before it recalls. Each u depends linearly on the earlier ones, so together they solve one
unit lower triangular system of the chunk's size (the WY representation and UT transform of Yang et al. 2024, section 3; with
decays, Yang, Kautz & Hatamizadeh 2025, section 3.3; with decays of channels, Kimi Team 2025, section 3). The entering state is part
of the right-hand side, so there is one solve per chunk. Exponents are sums of log-decays, never differences: none is positive, and
nothing is divided by a decay. With decays of channels they are those of gated linear attention (`chunk_math`), as is all that
follows from u.
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from baton.kernels.common.autocast import without_autocast
from baton.kernels.common.chunked_autograd import run_chunked, state_dtype
from baton.kernels.common.launch_utils import next_power_of_2
from baton.kernels.gated_linear_attention.chunk_math import ChannelDecay, extended, extended_positions
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
            v_BLHX = pad(v[:, piece], (0, d_key))
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

    def read(self, q_BHLK: Tensor) -> Tensor:
        """S_i^T q_i, [B, H, L, V]."""
        scores_BHLL = q_BHLK @ self.k.transpose(2, 3) * self.decay
        return self.entering_decay * (q_BHLK @ self.S) + scores_BHLL @ self.u

    def leaving(self) -> Tensor:
        """The state after the last token."""
        kept_BHLK = self.k * self.decay[:, :, -1, :, None]
        return self.entering_decay[:, :, -1:] * self.S + kept_BHLK.transpose(2, 3) @ self.u


class _SolvedByChannel(NamedTuple):
    """As `_Solved`, with decays of the keys' channels. k, u and what reads have the decay's number of tokens, a power of two."""

    k: Tensor
    u: Tensor
    decay: ChannelDecay
    S: Tensor

    def read(self, q_BHLK: Tensor) -> Tensor:
        length, wide = q_BHLK.shape[2], self.u.shape[2]
        q_BHLK = pad(q_BHLK, (0, 0, 0, wide - length)).expand(-1, self.u.shape[1], -1, -1)
        return self.decay.read_keys(q_BHLK.unsqueeze(3), self.k, self.u, self.S)[:, :, :length, 0]

    def leaving(self) -> Tensor:
        return self.decay.write_keys(self.k, self.u, self.S)


def _step(inputs: Inputs, pos: Tensor | None, state: State, *, scale: float, dtype: torch.dtype) -> tuple[Tensor, State]:
    q, k, v, beta, *gate = inputs
    chunk = _solve(k, v, beta, gate[0] if gate else None, pos, state["S"], dtype)
    o_BHLV = chunk.read(scale * q.transpose(1, 2).to(dtype))
    return o_BHLV.transpose(1, 2).to(q.dtype), {"S": chunk.leaving()}


def _solve(
    k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, pos: Tensor | None, S_BHKV: Tensor, dtype: torch.dtype
) -> _Solved | _SolvedByChannel:
    """u_i = beta_i (v_i - (decay_i S + sum_{j < i} decay_ij k_j u_j^T)^T k_i), for all tokens of a chunk at once."""
    if g is not None and g.ndim == 4:
        return _solve_by_channel(k, v, beta, g, pos, S_BHKV, dtype)
    k_BHLK, v_BHLV, beta_BHL1 = _heads_first(k, v, beta, dtype)
    decay_BHLL, entering_decay_BHL1 = _decays(k.shape[1], None if g is None else g.transpose(1, 2).to(dtype), pos, k_BHLK)
    missed_BHLV = v_BHLV - entering_decay_BHL1 * (k_BHLK @ S_BHKV)
    u_BHLV = _written(decay_BHLL * (k_BHLK @ k_BHLK.transpose(2, 3)), missed_BHLV, beta_BHL1)
    return _Solved(k_BHLK, u_BHLV, decay_BHLL, entering_decay_BHL1, S_BHKV)


def _solve_by_channel(
    k: Tensor, v: Tensor, beta: Tensor, g: Tensor, pos: Tensor | None, S_BHKV: Tensor, dtype: torch.dtype
) -> _SolvedByChannel:
    # tokens that are added write nothing, for their beta is 0, and leave the state as it is
    length = next_power_of_2(k.shape[1])
    k, v, beta, g = (extended(x, length) for x in (k, v, beta, g))
    decay = ChannelDecay(g.transpose(1, 2).to(dtype), extended_positions(pos, length))
    k_BHLK, v_BHLV, beta_BHL1 = _heads_first(k, v, beta, dtype)
    k_BHLK = k_BHLK.expand(-1, v.shape[2], -1, -1)
    missed_BHLV = v_BHLV - (decay.since * k_BHLK) @ S_BHKV
    u_BHLV = _written(decay.key_scores(k_BHLK.unsqueeze(3), k_BHLK)[:, :, :, 0], missed_BHLV, beta_BHL1)
    return _SolvedByChannel(k_BHLK, u_BHLV, decay, S_BHKV)


def _heads_first(k: Tensor, v: Tensor, beta: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """k [B, H, L, K], v [B, H, L, V], beta [B, H, L, 1]."""
    return k.transpose(1, 2).to(dtype), v.transpose(1, 2).to(dtype), beta.transpose(1, 2).to(dtype).unsqueeze(3)


def _written(recalled_BHLL: Tensor, missed_BHLV: Tensor, beta_BHL1: Tensor) -> Tensor:
    """u [B, H, L, V]. recalled: what key i reads of what was written with key j, k_i^T (decay_ij k_j)."""
    # of this matrix the solve reads what is below the diagonal, and takes the diagonal to be 1
    return torch.linalg.solve_triangular(beta_BHL1 * recalled_BHLL, beta_BHL1 * missed_BHLV, upper=False, unitriangular=True)


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
