"""The inverse of a unit lower triangular matrix within a program, for the delta rule's Triton kernels.

Blocks of 16 rows on the diagonal are inverted by substitution, with one column per lane. The inverses of two neighbouring blocks
give that of the block of twice the size that they are in,

    [a 0; b c]^-1 = [a^-1 0; -c^-1 b a^-1 c^-1],

until one block is left. The matrix itself lies in memory, from which a lane reads what others have computed; its inverse stays in
registers.
"""

import triton
import triton.language as tl


@triton.jit
def tf32_parts(x):
    """x, float32, as the sum of two that tensor cores read as TF32: x rounded to 11 bits, and the rest."""
    high = ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return high, x - high


@triton.jit
def dot_fp32(a, b, DOT_DTYPE: tl.constexpr):
    """a b in float32 precision, whatever the precision of other products. As `input_precision="tf32x3"`, but in half the
    instructions: that also looks for NaN in every sum."""
    if DOT_DTYPE is None:
        return tl.dot(a, b, input_precision="ieee")
    else:
        a_high, a_low = tf32_parts(a)
        b_high, b_low = tf32_parts(b)
        small = tl.dot(a_high, b_low, tl.dot(a_low, b_high, input_precision="tf32"), input_precision="tf32")
        return tl.dot(a_high, b_high, small, input_precision="tf32")


@triton.jit
def invert_rows(A, C: tl.constexpr):
    """The inverses of I + A's blocks of 16 rows on the diagonal, [C / 16, 16, 16]. A: in memory, see `invert_unit_lower`."""
    column = tl.arange(0, C)
    first = column // 16 * 16
    block = A + first * (C + 1)
    rows = ()
    for s in tl.static_range(16):
        row = tl.where(column - first == s, 1.0, 0.0)
        for j in tl.static_range(0, s, 4):
            # four numbers of A in one load: 0 and 2, 1 and 3
            even, odd = tl.split(tl.reshape(tl.load(block[:, None] + (s * C + j + tl.arange(0, 4))[None, :]), [C, 2, 2]))
            A_0, A_2 = tl.split(even)
            A_1, A_3 = tl.split(odd)
            row -= A_0 * rows[j]
            if j + 1 < s:
                row -= A_1 * rows[j + 1]
            if j + 2 < s:
                row -= A_2 * rows[j + 2]
            if j + 3 < s:
                row -= A_3 * rows[j + 3]
        rows += (row,)
    return tl.permute(tl.reshape(stack(rows), [C // 16, 16, 16]), [0, 2, 1])


@triton.jit
def stack(rows):
    """2^n tensors [C] as one, [C, 2, .., 2], whose last n dimensions are the bits of a tensor's number, the highest first."""
    HALF: tl.constexpr = len(rows) // 2
    if HALF == 0:
        return rows[0]
    else:
        pairs = ()
        for s in tl.static_range(HALF):
            pairs += (tl.join(rows[s], rows[s + HALF]),)
        return stack(pairs)


@triton.jit
def join_blocks(inverses, A, DOT_DTYPE: tl.constexpr, C: tl.constexpr):
    """(I + A)^-1, [1, C, C], from the inverses of blocks on the diagonal, [2 N, S, S]."""
    if inverses.shape[0] == 1:
        return inverses
    else:
        N: tl.constexpr = inverses.shape[0] // 2
        S: tl.constexpr = inverses.shape[1]
        i = tl.arange(0, S)
        first, second = tl.split(tl.permute(tl.reshape(inverses, [N, 2, S, S]), [0, 2, 3, 1]))
        below = A + S * C + (i[:, None] * C + i[None, :])
        if N == 1:
            product = dot_fp32(tl.load(below), tl.reshape(first, [S, S]), DOT_DTYPE)
            product = tl.reshape(dot_fp32(tl.reshape(second, [S, S]), product, DOT_DTYPE), [1, S, S])
        else:
            pair = (tl.arange(0, N) * (2 * S * (C + 1)))[:, None, None]
            product = dot_fp32(second, dot_fp32(tl.load(below[None, :, :] + pair), first, DOT_DTYPE), DOT_DTYPE)
        left, right = tl.join(first, -product), tl.join(tl.zeros([N, S, S], tl.float32), second)
        joined = tl.reshape(tl.permute(tl.join(left, right), [0, 3, 1, 4, 2]), [N, 2 * S, 2 * S])
        return join_blocks(joined, A, DOT_DTYPE, C)


@triton.jit
def invert_unit_lower(A, DOT_DTYPE: tl.constexpr, C: tl.constexpr):
    """(I + A)^-1, float32 [C, C]. A: the part below the diagonal of what lies in memory, float32 [C, C]; all lanes have stored it.
    C: a power of two, at least 16."""
    return tl.reshape(join_blocks(invert_rows(A, C), A, DOT_DTYPE, C), [C, C])


@triton.jit
def store_inverse(to, inverse, DOT_DTYPE: tl.constexpr, C: tl.constexpr):
    """Stores an inverse [C, C] as it is; or as two planes [2, C, C] of DOT_DTYPE, what is rounded and then the rest. All lanes have
    read what lies there."""
    i = tl.arange(0, C)
    square = i[:, None] * C + i[None, :]
    if DOT_DTYPE is None:
        tl.store(to + square, inverse)
    else:
        high = inverse.to(DOT_DTYPE)
        tl.store(to + square, high)
        tl.store(to + C * C + square, (inverse - high.to(tl.float32)).to(DOT_DTYPE))
