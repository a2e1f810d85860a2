"""What a diagonal scan's Triton kernels make of one token: its decay and what it takes in.

The one thing to know: here, and in the gradients of it in `backward`, is where Mamba and Longhorn differ. Arithmetic is fp32; a
token that does not exist (behind the end of its piece) is loaded as zeros and changes nothing.

Shape suffixes, in all of this folder's kernels: B batch, T time, D channels, N d_state, P pieces, C chunks of BORDER tokens. A
program's block is [BN, BD] forwards and [BD, BN] backwards.
"""

import triton
import triton.language as tl

from baton.kernels.rows import LOG2_E, load_row, sigmoid

MAMBA, LONGHORN = tl.constexpr(0), tl.constexpr(1)
LN_2 = tl.constexpr(0.6931471805599453)
FORGET = tl.constexpr(1e38)  # a step so long that Mamba forgets everything
LEAST_RATE = tl.constexpr(-1e-30)  # a rate is negative; times FORGET it must not be 0


@triton.jit
def softplus(x):
    """max(x, 0) + log(1 + e) with e = exp(-|x|), of which no digit is lost where e is small: the logarithm is e times a polynomial
    (interpolated in Chebyshev's nodes of [0, 1], 2.2e-7 off; tl.log2 takes twice the instructions)."""
    e = tl.exp2(-tl.abs(x) * LOG2_E)
    ratio = 0.0434939004 - 0.00837115292 * e
    ratio = ratio * e - 0.106850028
    ratio = ratio * e + 0.176874772
    ratio = ratio * e - 0.244747743
    ratio = ratio * e + 0.332719296
    ratio = ratio * e - 0.499971747
    return tl.maximum(x, 0.0) + e * (ratio * e + 0.999999762)


@triton.jit
def activated(KIND: tl.constexpr, ACTIVATE: tl.constexpr, raw):
    """The step size (softplus, Mamba) or beta (sigmoid, Longhorn), and its derivative."""
    if not ACTIVATE:
        return raw, tl.full(raw.shape, 1.0, tl.float32)
    elif KIND == MAMBA:
        return softplus(raw), sigmoid(raw)
    else:
        gate = sigmoid(raw)
        return gate, gate * (1.0 - gate)


@triton.jit
def rates_of(A):
    """A, of which none is 0."""
    return tl.minimum(A, LEAST_RATE)


@triton.jit
def coefficients(KIND: tl.constexpr, step, square, present, fresh):
    """Per channel: what is taken in of in x, and what `decay_of` reads.

    The latter are other numbers than the former (a factor of log2(e), a sign), so that what is taken in is used for nothing but the
    product with x. Then the compiler forms the product before it moves it to the lanes of a block, and not x as soon as it comes.

    present: the token exists; one that does not changes nothing. fresh: a document starts with it.
    """
    if KIND == MAMBA:
        taken = tl.where(present, step, 0.0)
        return taken, tl.where(fresh, FORGET, taken * LOG2_E), taken
    else:
        floor = 1.0 / (1.0 + step * square)
        taken = tl.where(present, step * floor, 0.0)
        return taken, tl.where(fresh, 0.0, -taken), tl.where(fresh, 0.0, tl.where(present, floor, 1.0))


@triton.jit
def decay_of(KIND: tl.constexpr, rates, first, second, others):
    """A block's decays of one token: exp(step A), or 1 / (1 + beta |k|^2) + eps (|k|^2 - k_n^2), which is 1 - eps k_n^2 without a
    subtraction. first and second are the coefficients of channels, others is of states; they broadcast to the block."""
    if KIND == MAMBA:
        return tl.exp2(first * rates)
    else:
        return tl.clamp(second - first * others, 0.0, 1.0)  # of one instruction


@triton.jit
def shared_at(
    t, end, vec_in, query, others, square, pos, inside,
    N: tl.constexpr, KIND: tl.constexpr, HAS_POS: tl.constexpr, EVEN: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """What all channels read of token t: the rows in, query and others [BN], square, and its pos. Zeros of a token that does not
    exist; what a kind or a call has not is not read."""
    present = True if EVEN else t < end
    in_t = load_row(vec_in + t * N, inside, present, FULL, EVEN)
    query_t = load_row(query + t * N, inside, present, FULL, EVEN)
    rest = in_t
    far = 0.0
    pos_t = 1
    if KIND == LONGHORN:
        rest = load_row(others + t * N, inside, present, FULL, EVEN)
        far = tl.load(square + t) if EVEN else tl.load(square + t, mask=present, other=0.0)
    if HAS_POS:
        pos_t = tl.load(pos + t) if EVEN else tl.load(pos + t, mask=present, other=1)
    return in_t, query_t, rest, far, pos_t
