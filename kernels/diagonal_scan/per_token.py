"""What a diagonal scan's Triton kernels do with one token: load it, and make its decay and what it takes in.

The one thing to know: here, and in the gradients of it in `backward`, is where Mamba and Longhorn differ. Arithmetic is fp32; a
token that does not exist (behind the end of its piece) is loaded as zeros and changes nothing.

Shape suffixes, in all of this folder's kernels: B batch, T time, D channels, N d_state, P pieces, C chunks of BORDER tokens; a
program's block is [BD, BN].
"""

import triton
import triton.language as tl

MAMBA, LONGHORN = tl.constexpr(0), tl.constexpr(1)
LOG2_E, LN_2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)
FORGET = tl.constexpr(1e38)  # a step so long that Mamba forgets everything
LEAST_RATE = tl.constexpr(-1e-30)  # a rate is negative; times FORGET it must not be 0


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp2(-x * LOG2_E))


@triton.jit
def softplus(x):
    e = tl.exp2(-tl.abs(x) * LOG2_E)
    # log(1 + e) has no digits where e is small
    log1p = tl.where(e < 0.01, e * (1.0 - e * (0.5 - e * (0.3333333 - e * 0.25))), tl.log2(1.0 + e) * LN_2)
    return tl.maximum(x, 0.0) + log1p


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
def load_rates(KIND: tl.constexpr, A, d, n, inside, N):
    """log2(e) A, [BD, N]; Longhorn has none."""
    if KIND == MAMBA:
        return tl.minimum(tl.load(A + d[:, None] * N + n[None, :], mask=inside, other=-1.0) * LOG2_E, LEAST_RATE)
    else:
        return 0.0


@triton.jit
def coefficients(KIND: tl.constexpr, step, square, present, fresh):
    """Per channel: what is taken in of in x, and what `_decay` reads.

    present: the token exists; one that does not changes nothing. fresh: a document starts with it.
    """
    if KIND == MAMBA:
        taken = tl.where(present, step, 0.0)
        return taken, tl.where(fresh, FORGET, taken), taken
    else:
        floor = 1.0 / (1.0 + step * square)
        taken = tl.where(present, step * floor, 0.0)
        return taken, tl.where(fresh, 0.0, taken), tl.where(fresh, 0.0, tl.where(present, floor, 1.0))


@triton.jit
def decay_of(KIND: tl.constexpr, rates, first, second, others):
    """[BD, N] of one token: exp(step A), or 1 / (1 + beta |k|^2) + eps (|k|^2 - k_n^2), which is 1 - eps k_n^2 without a
    subtraction."""
    if KIND == MAMBA:
        return tl.exp2(first[:, None] * rates)
    else:
        return tl.minimum(second[:, None] + first[:, None] * others[None, :], 1.0)


@triton.jit
def token_at(t, end, EVEN: tl.constexpr, pos, HAS_POS: tl.constexpr):
    """Whether token t exists and whether a document starts with it."""
    present = True if EVEN else t < end
    fresh = False
    if HAS_POS:
        fresh = tl.load(pos + t, mask=t < end, other=1) == 0
    return present, fresh


@triton.jit
def load_channels(base, s, row, d, d_in, present):
    """The channels of the s-th token behind base in fp32, [BD]."""
    return tl.load(base + s * row + d, mask=d_in & present, other=0.0).to(tl.float32)


@triton.jit
def load_vector(base, s, row, n, n_in, present):
    """What all channels of the s-th token behind base share, in fp32, [BN]."""
    return tl.load(base + s * row + n, mask=n_in & present, other=0.0).to(tl.float32)
