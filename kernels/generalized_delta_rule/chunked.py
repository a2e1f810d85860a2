"""The generalized delta rule in chunks of tokens in batched PyTorch, on any device.

Shape suffixes: B batch, H heads, L tokens of a chunk, K d_key, V d_value, G readers per token. Within a chunk heads come before
time, and L is a power of two: tokens that are added have zeros everywhere, so they leave the state as it is.

Let u_i = S_{i-1}^T a_i be what token i reads with a. Then the state after token i is

    S_i = decay_i S + sum_{j <= i} decay_ij (b_j u_j^T + k_j v_j^T),

that of gated linear attention with two keys per token, and decays of the keys' channels (`ChannelDecay`). Every u depends linearly
on earlier ones, so together they solve one unit lower triangular system per chunk, whose right-hand side has the entering state:
the WY representation of Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule over Sequence Length", for a
transition that is diagonal plus low rank. Exponents are sums of log-decays, never differences: none is positive, and nothing is
divided by a decay.

a_i reads the state before token i's decay, so it is a second query of token i - 1, beside r_{i-1}. Across a document's start there
is nothing to read, and a is 0 there.
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from baton.kernels.common.autocast import without_autocast
from baton.kernels.common.chunked_autograd import run_chunked, state_dtype
from baton.kernels.common.launch_utils import next_power_of_2
from baton.kernels.gated_linear_attention.chunk_math import ChannelDecay, extended, extended_positions, heads_first
from baton.kernels.protocol import Inputs, State

CHUNK = 64
"""Tokens per chunk. The fastest of 16, 32, 64 and 128 on one core, forwards and backwards, for 8 heads of 64 channels."""


def generalized_delta_rule_chunked(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    g: Tensor,
    *,
    scale: float,
    pos: Tensor | None,
    initial_state: Tensor | None,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """As `op.generalized_delta_rule`, which checks the arguments; `chunk` is the number of tokens per chunk."""
    inputs = (r, k, v, a, b, g)
    dtype = state_dtype(*inputs)
    if initial_state is None:
        initial_state = k.new_zeros(*v.shape[::2], k.shape[3], v.shape[3], dtype=dtype)
    step = partial(_step, scale=scale, dtype=dtype)
    o, state = run_chunked(step, inputs, len(inputs), pos=pos, state={"S": initial_state}, chunk=chunk)
    return o, state["S"]


def generalized_delta_rule_transition(
    k: Tensor, v: Tensor, a: Tensor, b: Tensor, g: Tensor, *, pos: Tensor | None, chunk: int = CHUNK
) -> tuple[Tensor, Tensor]:
    """The transition of a span, S -> M S + add: M [batch, heads, d_key, d_key] and add, without a gradient.

    Arguments as in `op.generalized_delta_rule`; they are not checked. Both are computed in one pass: add is the result for a zero
    state, and a column of M the result for a unit state without values.
    """
    dtype = state_dtype(k, v, a, b, g)
    batch, length, heads, d_value = v.shape
    d_key = k.shape[3]
    identity_KK = torch.eye(d_key, dtype=dtype, device=k.device)
    S_BHKX = torch.cat((identity_KK.new_zeros(d_key, d_value), identity_KK), dim=1).expand(batch, heads, -1, -1)
    with torch.no_grad(), without_autocast(k):
        for begin in range(0, length, chunk):
            piece = slice(begin, begin + chunk)
            v_BLHX = pad(v[:, piece], (0, d_key))
            where = None if pos is None else pos[:, piece]
            S_BHKX = _solve(None, k[:, piece], v_BLHX, a[:, piece], b[:, piece], g[:, piece], where, S_BHKX, dtype).leaving()
    add_BHKV, M_BHKK = S_BHKX.split((d_value, d_key), dim=3)
    return M_BHKK.contiguous(), add_BHKV.contiguous()


class _Solved(NamedTuple):
    """A chunk with what its tokens write, decay_ij (b_j u_j^T + k_j v_j^T), and the state that enters it.

    k, b [B, H, L, K]; v, u [B, H, L, V]; S [B, H, K, V]; scores: of r with k and with b, [B, H, L, L] each, None without r.
    """

    k: Tensor
    v: Tensor
    b: Tensor
    u: Tensor
    S: Tensor
    decay: ChannelDecay
    scores: tuple[Tensor, Tensor] | None

    def read(self, r_BHLK: Tensor) -> Tensor:
        """S_i^T r_i, [B, H, L, V]. r: that of `scores`."""
        assert self.scores is not None
        of_k, of_b = self.scores
        return of_k @ self.v + of_b @ self.u + (self.decay.since * r_BHLK) @ self.S

    def leaving(self) -> Tensor:
        """The state after the last token."""
        return self.decay.write_keys(self.k, self.v, self.S) + (self.decay.until * self.b).transpose(2, 3) @ self.u


def _step(inputs: Inputs, pos: Tensor | None, state: State, *, scale: float, dtype: torch.dtype) -> tuple[Tensor, State]:
    r, k, v, a, b, g = inputs
    length = r.shape[1]
    r_BHLK = scale * heads_first(extended(r, next_power_of_2(length)), dtype)
    chunk = _solve(r_BHLK, k, v, a, b, g, pos, state["S"], dtype)
    return chunk.read(r_BHLK)[:, :, :length].transpose(1, 2).to(r.dtype), {"S": chunk.leaving()}


def _solve(
    r_BHLK: Tensor | None,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    g: Tensor,
    pos: Tensor | None,
    S_BHKV: Tensor,
    dtype: torch.dtype,
) -> _Solved:
    """u_i = (decay_{i-1} S + sum_{j < i} decay_{i-1,j} (b_j u_j^T + k_j v_j^T))^T a_i, for all tokens of a chunk at once."""
    if pos is not None:
        a = a.masked_fill((pos == 0)[:, :, None, None], 0.0)
    length = next_power_of_2(k.shape[1])
    k_BHLK, v_BHLV, a_BHLK, b_BHLK, g_BHLK = (heads_first(extended(x, length), dtype) for x in (k, v, a, b, g))
    decay = ChannelDecay(g_BHLK, extended_positions(pos, length))
    early_BHLK = pad(a_BHLK[:, :, 1:], (0, 0, 0, 1))  # the last row reads nothing
    readers_BHLGK = torch.stack((early_BHLK,) if r_BHLK is None else (early_BHLK, r_BHLK), dim=3)
    of_k, of_b = (decay.key_scores(readers_BHLGK, keys).unbind(3) for keys in (k_BHLK, b_BHLK))

    def late(rows_BHLX: Tensor) -> Tensor:
        """Row i - 1 in row i, and 0 in the first."""
        return pad(rows_BHLX[:, :, :-1], (0, 0, 1, 0))

    entering_BHLK = torch.cat((a_BHLK[:, :, :1], a_BHLK[:, :, 1:] * decay.since[:, :, :-1]), dim=2)
    known_BHLV = late(of_k[0]) @ v_BHLV + entering_BHLK @ S_BHKV
    # of this matrix the solve reads what is below the diagonal, and takes the diagonal to be 1
    u_BHLV = torch.linalg.solve_triangular(-late(of_b[0]), known_BHLV, upper=False, unitriangular=True)
    scores = None if r_BHLK is None else (of_k[1], of_b[1])
    return _Solved(k_BHLK, v_BHLV, b_BHLK, u_BHLV, S_BHKV, decay, scores)
