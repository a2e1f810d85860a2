"""Triton functions for the decay between two tokens of a chunk and for loading and multiplying a chunk's tokens, for
`triton_kernels` and the delta rule.

Shape suffixes as in `triton_kernels`.

The decay from key j to query i is the product of the decay from j to a token between them and the decay from that token to i.
Blocks of 8, 16, ... tokens are therefore combined pairwise at the token between them with one matmul each, whose factors are at
most 1. Within a block of 2^NEAR = 8 tokens the reference token is one of the 8, so a factor may exceed 1; decays are clamped to at
least 2^LEAST, so that factors do not overflow. Where decays are known to have a higher bound, such a block may be a whole chunk:
one matmul instead of one for every size. Of other decays `widest_block` finds how large it may be in the channels of a program;
most gates forget little, and then it is the chunk.

Cumulative sums of gates start at a chunk's beginning, and the decay between two tokens is computed from their difference. The sums
are float32 if matmuls are in bfloat16, and float64 otherwise, so that the difference loses no digits.
"""

import triton
import triton.language as tl

from baton.kernels.gated_linear_attention import launch_args

NONE, SCALAR, CHANNEL = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
LEAST = tl.constexpr(-24.0)  # log2 of a channel's decay: what is left of a token is nothing to float32, and 2^(4 * 24) is finite
NEAR = tl.constexpr(launch_args.NEAR)
NEAREST = tl.constexpr(1 << launch_args.NEAR)
# log2 of the largest factor of a block that is wider than NEAREST: products of what is multiplied by it stay finite, and of what is
# divided by it keep their digits, for operands of at least 2^-62 whose products are at most 2^62
WIDEST = tl.constexpr(64.0)


@triton.jit
def dot(a, b, DOT_DTYPE: tl.constexpr):
    """a b, of what is rounded to DOT_DTYPE, or in float32."""
    if DOT_DTYPE is None:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a.to(DOT_DTYPE), b.to(DOT_DTYPE))


@triton.jit
def round_operand(x, DOT_DTYPE: tl.constexpr):
    """x as `dot` reads it."""
    return x if DOT_DTYPE is None else x.to(DOT_DTYPE)


@triton.jit
def dot_split(a, b, DOT_DTYPE: tl.constexpr):
    """a b, of a rounded to DOT_DTYPE and b to twice as many digits, as the sum of two."""
    high = b.to(DOT_DTYPE)
    low = (b - high.to(tl.float32)).to(DOT_DTYPE)
    return tl.dot(a.to(DOT_DTYPE), low, tl.dot(a.to(DOT_DTYPE), high))


@triton.jit
def reverse_cumsum(x, C: tl.constexpr, DOT_DTYPE: tl.constexpr):
    """Of [C, BX] the sum from each token to the last, without rounding: three parts of eight bits hold a float32."""
    i = tl.arange(0, C)
    which = i[:, None] <= i[None, :]
    if DOT_DTYPE is None:
        return tl.dot(which.to(tl.float32), x, input_precision="ieee")
    else:
        ones = which.to(tl.bfloat16)
        high = x.to(tl.bfloat16)
        rest = x - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        return tl.dot(ones, low, tl.dot(ones, middle, tl.dot(ones, high)))


@triton.jit
def load_tokens(base, t, row, x, T, X: tl.constexpr):
    """Tokens t, columns x, [C, BX]; zeros outside the tensor."""
    inside = (t < T)[:, None] & (x < X)[None, :]
    return tl.load(base + t[:, None].to(tl.int64) * row + x[None, :], mask=inside, other=0.0)


@triton.jit
def store_tokens(to, t, row, x, T, X: tl.constexpr, value):
    """Stores a tile as `load_tokens` loads it."""
    inside = (t < T)[:, None] & (x < X)[None, :]
    tl.store(to + t[:, None].to(tl.int64) * row + x[None, :], value.to(to.dtype.element_ty), mask=inside)


@triton.jit
def load_rows(base, i, row, x, left, X: tl.constexpr):
    """As `load_tokens`, of tokens i of a chunk that begins at base, with `left` tokens from there on: by offsets of 32 bits, which
    take fewer registers."""
    inside = (i < left)[:, None] & (x < X)[None, :]
    return tl.load(base + (i[:, None] * row + x[None, :]), mask=inside, other=0.0)


@triton.jit
def store_rows(to, i, row, x, left, X: tl.constexpr, value):
    """Stores a tile as `load_rows` loads it."""
    inside = (i < left)[:, None] & (x < X)[None, :]
    tl.store(to + (i[:, None] * row + x[None, :]), value.to(to.dtype.element_ty), mask=inside)


@triton.jit
def load_state_block(base, x, y, X: tl.constexpr, Y: tl.constexpr):
    """A block [BX, BY] of a state [X, Y]; zeros outside."""
    return tl.load(base + x[:, None] * Y + y[None, :], mask=(x < X)[:, None] & (y < Y)[None, :], other=0.0)


@triton.jit
def load_positions(pos, t, T, HAS_POS: tl.constexpr):
    """Positions of tokens t in their documents; after the last token its document continues."""
    if HAS_POS:
        known = tl.minimum(t, T - 1)
        return tl.load(pos + known) + (t - known)
    else:
        return t * 0


@triton.jit
def last_position(pos, begin, T, C: tl.constexpr, HAS_POS: tl.constexpr):
    """That of the last of C tokens from `begin` on, as `load_positions` has it: loaded, because a sum over the tokens would have a
    walk's warps wait for each other in every step."""
    if HAS_POS:
        last = begin + C - 1
        known = tl.minimum(last, T - 1)
        found = tl.load(pos + known) + (last - known)
    else:
        found = 0
    return found


@triton.jit
def load_gate_sums(sums, t, T, x, H, X: tl.constexpr, GATE: tl.constexpr):
    """The gates' sums from the chunk's begin through tokens t, [C, BX] or, of a SCALAR, [C]; behind the last token its own."""
    known = tl.minimum(t, T - 1).to(tl.int64)
    if GATE == CHANNEL:
        return tl.load(sums + known[:, None] * (H * X) + x[None, :], mask=(x < X)[None, :], other=0.0)
    elif GATE == SCALAR:
        return tl.load(sums + known * H)
    else:
        return tl.zeros([t.shape[0]], tl.float32)


@triton.jit
def last_gate_sum(sums, begin, T, H, GATE: tl.constexpr, C: tl.constexpr):
    """That of the last of C tokens from `begin` on, as `load_gate_sums` has it; not of channels."""
    if GATE == SCALAR:
        found = tl.load(sums + tl.minimum(begin + C - 1, T - 1).to(tl.int64) * H)
    else:
        found = tl.full((), 0.0, tl.float32)
    return found


@triton.jit
def decay_from_start(summed, at, C: tl.constexpr, HAS_POS: tl.constexpr):
    """The decay from the start of the chunk to each of its tokens, [C, BX] or [C]. at: their positions."""
    left_of = tl.exp2(summed.to(tl.float32))
    if HAS_POS:
        inside = at > tl.arange(0, C)
        left_of = tl.where(inside[:, None] if len(summed.shape) == 2 else inside, left_of, 0.0)
    return left_of


@triton.jit
def decay_to_end(summed, total, at_last, C: tl.constexpr, HAS_POS: tl.constexpr):
    """The decay from each token to the end of the chunk, [C, BX] or [C]. total: the sum of all gates; at_last: the last token's
    position."""
    left_of = tl.exp2((total - summed).to(tl.float32))
    if HAS_POS:
        inside = C - 1 - tl.arange(0, C) <= at_last
        left_of = tl.where(inside[:, None] if len(summed.shape) == 2 else inside, left_of, 0.0)
    return left_of


@triton.jit
def chunk_decay(total, at_last, C: tl.constexpr, HAS_POS: tl.constexpr):
    """The decay over the whole chunk; 0 if a document starts in it."""
    left_of = tl.exp2(total.to(tl.float32))
    return tl.where(at_last > C - 1, left_of, 0.0) if HAS_POS else left_of


@triton.jit
def causal_mask(at, C: tl.constexpr, HAS_POS: tl.constexpr):
    """Which keys a query attends to, its own included."""
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    return (i >= j) & (i - j <= at[:, None]) if HAS_POS else i >= j


@triton.jit
def joined_pairs(low, high, C: tl.constexpr):
    """Which pairs of tokens, [C, C], in either order, are of the same block of `high` tokens, but not of the same one of `low`;
    powers of two and at least NEAREST, or 0 for low."""
    block = tl.arange(0, C) // NEAREST * NEAREST  # so that the compiler sees that neighbours are alike, and loads them together
    differing = block[:, None] ^ block[None, :]
    return (differing >= low) & (differing < high)


@triton.jit
def split_token(level, C: tl.constexpr):
    """At which token of a chunk the block of 2^(level + 1) tokens that each is of is joined: the last of its first half."""
    return ((tl.arange(0, C) >> (level + 1)) * 2 + 1 << level) - 1


@triton.jit
def widest_block(here, first, T, x, H, X: tl.constexpr, NEAR: tl.constexpr, LEVELS: tl.constexpr, C: tl.constexpr):
    """log2 of the tokens of the largest blocks, at least 2^NEAR and at most 2^LEVELS, in which the sums of gates of every channel x
    differ by at most WIDEST from that at the `split_token`. here: the sums; first: the chunk's first token."""
    if NEAR == LEVELS:
        return NEAR
    else:
        summed = load_gate_sums(here, first + tl.arange(0, C), T, x, H, X, CHANNEL)
        widest = tl.full([C, x.shape[0]], LEVELS, tl.int32)
        for level in tl.static_range(LEVELS, NEAR, -1):
            apart = summed - load_gate_sums(here, first + split_token(level - 1, C), T, x, H, X, CHANNEL)
            widest = tl.where(tl.abs(apart) <= WIDEST, widest, level - 1)
        return tl.min(widest)


@triton.jit
def pairwise_decays(summed, at, C: tl.constexpr, GATE: tl.constexpr, HAS_POS: tl.constexpr):
    """With one gate per token: the decay from token j to token i, [C, C]; 1 on the diagonal."""
    seen = causal_mask(at, C, HAS_POS)
    if GATE == SCALAR:
        apart = tl.where(seen, summed[:, None] - summed[None, :], 0.0).to(tl.float32)
        return tl.where(seen, tl.exp2(apart), 0.0)
    else:
        return tl.where(seen, 1.0, 0.0)
