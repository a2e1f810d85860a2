"""The state of a block of tokens, which decays and accumulates k v^T: shared by gated linear attention and gated slot attention.

The decay from key j to query i > j is exp(g_{j+1} + ... + g_i). The sum is computed from its own terms and never as a difference
of two longer sums. Thus strong gates cause no cancellation, gates of another document have no effect on any bit, and no exponent
is positive.

With a decay per channel, pairs of tokens are not computed one by one (as in the tiles of Yang et al. 2023, section 4.3). Blocks of
1, 2, 4, ... tokens are combined pairwise instead: from a key in the first block to a query in the second, the decay is the decay
from the key to the boundary times the decay from the boundary to the query, both at most 1. Combining two blocks is therefore one
matmul, and a block of L tokens takes log2(L) + 2 exponentials per channel and token. Where a document starts between the two
tokens, one factor is 0.

Shape suffixes: B batch, H heads of keys, values and state, G query heads per head, L tokens of the block, K d_key, V d_value, X the
gate's channels (K, V or 1), N blocks, R tokens of each of them.
"""

from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad


class _Joint(NamedTuple):
    """Decays for combining blocks of R tokens pairwise: from the boundary to the tokens of the second block (since), and from the
    tokens of the first block to the boundary (until), both [B, H, N, R, X]."""

    since: Tensor
    until: Tensor


class _Sums(NamedTuple):
    """Sums of g in N blocks of R tokens, [B, H, N, R, X]: from a block's start to each token, and from after each token to the
    end."""

    since: Tensor
    until: Tensor

    def joined(self) -> "_Sums":
        """The sums for N / 2 blocks of 2 R tokens."""
        since_1, since_2 = _halves(self.since)
        until_1, until_2 = _halves(self.until)
        since = torch.cat((since_1, since_2 + since_1[:, :, :, -1:]), dim=3)
        return _Sums(since, torch.cat((until_1 + since_2[:, :, :, -1:], until_2), dim=3))


class _Documents:
    """Exponentials of sums of g; 0 if a document starts between the two tokens. pos None: no document starts."""

    def __init__(self, pos_BL: Tensor | None) -> None:
        self.pos = pos_BL

    def since(self, sums_BHNRX: Tensor, *, every: int = 1, first: int = 0) -> Tensor:
        """Decay from a block's start to its tokens, for the `first` and every `every`-th of N blocks of R tokens."""
        if self.pos is None:
            return sums_BHNRX.exp()
        rows = sums_BHNRX.shape[3]
        pos_BNR = self.pos.unflatten(1, (-1, rows))[:, first::every]
        return _masked_exp(sums_BHNRX, (pos_BNR > torch.arange(rows, device=pos_BNR.device))[:, None, :, :, None])

    def until(self, sums_BHNRX: Tensor, *, every: int = 1, first: int = 0) -> Tensor:
        """Decay from a block's tokens to its end, for the `first` and every `every`-th of N blocks of R tokens."""
        if self.pos is None:
            return sums_BHNRX.exp()
        rows = sums_BHNRX.shape[3]
        pos_BNR = self.pos.unflatten(1, (-1, rows))[:, first::every]
        behind_R = torch.arange(rows - 1, -1, -1, device=pos_BNR.device)
        return _masked_exp(sums_BHNRX, (behind_R <= pos_BNR[:, :, -1:])[:, None, :, :, None])

    def pairs(self, sums_BHLL: Tensor) -> Tensor:
        """Decay from key j to query i, [B, H, i, j]."""
        at_L = torch.arange(sums_BHLL.shape[2], device=sums_BHLL.device)
        distance_LL = at_L[:, None] - at_L
        visible = distance_LL >= 0
        if self.pos is not None:
            visible = (visible & (distance_LL <= self.pos[:, :, None]))[:, None]
        return _masked_exp(sums_BHLL, visible)


class ScalarDecay:
    """A block with one decay per head and token. Without a decay, g_BHL is zeros of [1, 1, L].

    Attributes:
        since: decay of the entering state up to each token, [B, H, L, 1].
        until: decay from each token to the end, [B, H, L, 1].
    """

    def __init__(self, g_BHL: Tensor, pos_BL: Tensor | None) -> None:
        self._g, self._documents = g_BHL, _Documents(pos_BL)
        until_BHL = pad(g_BHL[:, :, 1:], (0, 1)).flip(2).cumsum(2).flip(2)
        self.since = self._documents.since(g_BHL.cumsum(2)[:, :, None, :, None])[:, :, 0]
        self.until = self._documents.until(until_BHL[:, :, None, :, None])[:, :, 0]

    def read(self, q_BHLGK: Tensor, k_BHLK: Tensor, v_BHLV: Tensor, S_BHKV: Tensor) -> Tensor:
        """S_t^T q_t, [B, H, L, G, V], where S_t includes the token's own k v^T. S: the state at the block's start."""
        length, group = q_BHLGK.shape[2:4]
        later_LL = torch.ones(length, length, dtype=self._g.dtype, device=self._g.device).tril(-1)
        pairs_BHLL = self._documents.pairs((self._g[..., None] * later_LL).cumsum(2))
        rows = q_BHLGK.flatten(2, 3)
        scores = (rows @ k_BHLK.transpose(2, 3)).unflatten(2, (length, group)) * pairs_BHLL[:, :, :, None]
        own = (scores.flatten(2, 3) @ v_BHLV).unflatten(2, (length, group))
        return own + self.since[:, :, :, None] * (rows @ S_BHKV).unflatten(2, (length, group))

    def write(self, k_BHLK: Tensor, v_BHLV: Tensor, S_BHKV: Tensor) -> Tensor:
        """The state after the block."""
        return torch.addcmul((self.until * k_BHLK).transpose(2, 3) @ v_BHLV, self.since[:, :, -1:], S_BHKV)


class ChannelDecay:
    """A block with a decay per head, token and channel of the keys (`read_keys`, `write_keys`) or of the values.

    g_BHLX: log-decays; L is a power of two, see `extended`. One object can serve several states with the same decays.

    Attributes:
        since: decay of the entering state up to each token, [B, H, L, X].
        until: decay from each token to the end, [B, H, L, X].
    """

    def __init__(self, g_BHLX: Tensor, pos_BL: Tensor | None) -> None:
        self._documents = _Documents(pos_BL)
        sums = _Sums(g_BHLX.unsqueeze(3), torch.zeros_like(g_BHLX).unsqueeze(3))
        self._to_join: list[_Sums] = []
        while sums.since.shape[2] > 1:
            self._to_join.append(sums)
            sums = sums.joined()
        self.since = self._documents.since(sums.since)[:, :, 0]
        self.until = self._documents.until(sums.until)[:, :, 0]

    @cached_property
    def _joints(self) -> tuple[_Joint, ...]:
        """The decays of each level, from blocks of one token upwards. Only reads need them."""
        return tuple(
            _Joint(
                self._documents.since(_halves(sums.since)[1], every=2, first=1),
                self._documents.until(_halves(sums.until)[0], every=2, first=0),
            )
            for sums in self._to_join
        )

    def key_scores(self, q_BHLGK: Tensor, k_BHLK: Tensor) -> Tensor:
        """q_i^T Diag(decay from j to i) k_j for j <= i, else 0, [B, H, L, G, L], where the decays are along the keys."""
        length, group = q_BHLGK.shape[2:4]
        scores = (q_BHLGK * k_BHLK[:, :, :, None]).sum(-1)[..., None]
        for since, until in self._joints:
            blocks, rows = since.shape[2:4]
            _, q_2 = _halves(q_BHLGK.unflatten(2, (2 * blocks, rows)))
            k_1, _ = _halves(k_BHLK.unflatten(2, (2 * blocks, rows)))
            across = (q_2 * since[:, :, :, :, None]).flatten(3, 4) @ (k_1 * until).transpose(3, 4)
            within_1, within_2 = _halves(scores)
            scores = torch.cat((pad(within_1, (0, rows)), torch.cat((across, within_2), dim=4)), dim=3)
        return scores.reshape(*scores.shape[:2], length, group, length)

    def read_keys(self, q_BHLGK: Tensor, k_BHLK: Tensor, v_BHLV: Tensor, S_BHKV: Tensor) -> Tensor:
        """As `ScalarDecay.read`, where the decays are along the keys."""
        length, group = q_BHLGK.shape[2:4]
        read = self.key_scores(q_BHLGK, k_BHLK).flatten(2, 3) @ v_BHLV
        read = read + (q_BHLGK * self.since[:, :, :, None]).flatten(2, 3) @ S_BHKV
        return read.unflatten(2, (length, group))

    def read_values(self, q_BHLGK: Tensor, k_BHLK: Tensor, v_BHLV: Tensor, S_BHKV: Tensor) -> Tensor:
        """As `ScalarDecay.read`, where the decays are along the values."""
        length, group = q_BHLGK.shape[2:4]
        rows_BHRK = q_BHLGK.flatten(2, 3)
        scores = (rows_BHRK @ k_BHLK.transpose(2, 3)).unflatten(2, (length, group))
        read = scores.diagonal(dim1=2, dim2=4).transpose(2, 3)[..., None] * v_BHLV[:, :, :, None]
        read = read.unsqueeze(3)
        for since, until in self._joints:
            blocks, rows = since.shape[2:4]
            tiles = scores.reshape(*scores.shape[:2], blocks, 2, rows * group, blocks, 2, rows)[:, :, :, 1, :, :, 0]
            v_1, _ = _halves(v_BHLV.unflatten(2, (2 * blocks, rows)))
            across = tiles.diagonal(dim1=2, dim2=4).permute(0, 1, 4, 2, 3) @ (v_1 * until)
            within_1, within_2 = _halves(read)
            read = torch.cat((within_1, within_2 + across.unflatten(3, (rows, group)) * since[:, :, :, :, None]), dim=3)
        return read[:, :, 0] + (rows_BHRK @ S_BHKV).unflatten(2, (length, group)) * self.since[:, :, :, None]

    def write_keys(self, k_BHLK: Tensor, v_BHLV: Tensor, S_BHKV: Tensor) -> Tensor:
        """The state after the block, where the decays are along the keys."""
        return torch.addcmul((self.until * k_BHLK).transpose(2, 3) @ v_BHLV, self.since[:, :, -1, :, None], S_BHKV)

    def write_values(self, k_BHLK: Tensor, v_BHLV: Tensor, S_BHKV: Tensor) -> Tensor:
        """The state after the block, where the decays are along the values."""
        return torch.addcmul(k_BHLK.transpose(2, 3) @ (self.until * v_BHLV), self.since[:, :, -1:], S_BHKV)


def heads_first(x_BLHX: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, H, L, X] in `dtype`."""
    return x_BLHX.transpose(1, 2).to(dtype)


def grouped(q_BLHX: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """Queries by the head they read, [B, H, L, G, K] in `dtype`."""
    return q_BLHX.unflatten(2, (heads, -1)).transpose(1, 2).to(dtype)


def ungrouped(y_BHLGV: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, L, query heads, V] in `dtype`."""
    return y_BHLGV.transpose(1, 2).flatten(2, 3).to(dtype)


def extended(x_BLX: Tensor, length: int) -> Tensor:
    """[batch, L, ...] padded with zeros to `length`. Padding tokens have no decay and add nothing, so they do not affect the
    state."""
    more = length - x_BLX.shape[1]
    return pad(x_BLX, (*(0, 0) * (x_BLX.ndim - 2), 0, more)) if more else x_BLX


def extended_positions(pos_BL: Tensor | None, length: int) -> Tensor | None:
    """pos [batch, L] extended to `length`, as if the last document continued."""
    if pos_BL is None or length == pos_BL.shape[1]:
        return pos_BL
    on = torch.arange(1, 1 + length - pos_BL.shape[1], dtype=pos_BL.dtype, device=pos_BL.device)
    return torch.cat((pos_BL, pos_BL[:, -1:] + on), dim=1)


def _halves(x_BHNR: Tensor) -> tuple[Tensor, ...]:
    """The first and the second of every two blocks of [B, H, N, ...]."""
    return x_BHNR.unflatten(2, (-1, 2)).unbind(3)


def _masked_exp(sums: Tensor, visible: Tensor) -> Tensor:
    # masked before exp, so that neither a value nor a gradient can be 0 times infinity
    return sums.masked_fill(~visible, -torch.inf).exp()
