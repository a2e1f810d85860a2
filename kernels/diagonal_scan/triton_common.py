"""What a diagonal scan's Triton kernels make of one token: its decay and what it takes in.

The one thing to know: here, and in the gradients of it in `triton_backward`, is where Mamba and Longhorn differ. Arithmetic is
fp32; a token that does not exist (behind the end of its piece) is loaded as zeros and changes nothing.

Shape suffixes, in all of this folder's kernels: B batch, T time, D channels, N d_state, P pieces, C chunks of BORDER tokens.

A program's block of states is [BD, S, BN / 4 S, 4], of which the compiler gives each lane a row, four states side by side in
memory. S = 2 lanes share their channels: a lane has half the states of its own and the same half of the other's, and so reads half
of what all channels share of a token, which is what the way from the cache is for. Channel i ^ s is [i, s].
"""

import triton
import triton.language as tl

from baton.kernels.common.triton_prefetch import LOG2_E, lines_from, load_row, reciprocal, sigmoid

# MAMBA_ZOH: Mamba with the input held between tokens (zero-order hold) instead of Euler's rule
MAMBA, LONGHORN, MAMBA_ZOH = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
LN_2 = tl.constexpr(0.6931471805599453)
FORGET_ALL = tl.constexpr(1e38)  # a step so long that Mamba forgets everything
LARGEST_A = tl.constexpr(-1e-30)  # a rate is negative; times FORGET it must not be 0


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
def activate_dt(RECURRENCE: tl.constexpr, ACTIVATE: tl.constexpr, raw):
    """The step size (softplus, Mamba) or beta (sigmoid, Longhorn), and its derivative."""
    if not ACTIVATE:
        return raw, tl.full(raw.shape, 1.0, tl.float32)
    elif RECURRENCE == LONGHORN:
        gate = sigmoid(raw)
        return gate, gate * (1.0 - gate)
    else:
        return softplus(raw), sigmoid(raw)


@triton.jit
def decay_coefficients(RECURRENCE: tl.constexpr, dt, k_square, exists, starts_document):
    """Per channel: what is taken in of in x, and what `decay_of` reads.

    present: the token exists; one that does not changes nothing. fresh: a document starts with it.
    """
    if RECURRENCE == MAMBA:
        taken = tl.where(exists, dt, 0.0)
        return taken, tl.where(starts_document, FORGET_ALL, taken), taken
    elif RECURRENCE == MAMBA_ZOH:
        taken = tl.where(exists, dt, 0.0)
        return taken, starts_document, taken
    else:
        floor = reciprocal(1.0 + dt * k_square)
        taken = tl.where(exists, dt * floor, 0.0)
        return taken, tl.where(starts_document, 0.0, taken), tl.where(starts_document, 0.0, 1.0)


@triton.constexpr_function
def bc_row_size(kind, n):
    """Of what all channels share of a token: in and query, and of Longhorn square; whole vectors."""
    return 2 * n + 4 if kind == LONGHORN.value else 2 * n


@triton.constexpr_function
def lanes_per_channel(channels, n):
    """How many lanes share their channels, a part of the states each: S."""
    return 2 if channels >= 32 and n >= 8 else 1


@triton.jit
def swap_lane_pair(v):
    """Of channels [BD], what the lane has that shares with this one."""
    return tl.gather(v, tl.arange(0, v.shape[0]) ^ 1, 0)


@triton.jit
def broadcast_channels(v, BLOCK_N: tl.constexpr):
    """Of channels [BD], to go with a block of states: [BD, S, 1, 1]."""
    if lanes_per_channel(v.shape[0], BLOCK_N) == 2:
        return tl.join(v, swap_lane_pair(v))[:, :, None, None]
    else:
        return v[:, None, None, None]


@triton.jit
def decay_block(RECURRENCE: tl.constexpr, A_log2e, first, second, B_t, BLOCK_N: tl.constexpr):
    """A block's decays of one token: exp(step A), rates being A log2(e), or 1 - eps k_n^2, as near to its value as to 1. first and
    second are the coefficients; in_t is of states, Longhorn's key. Of a zero-order hold first says that a document starts."""
    if RECURRENCE == MAMBA:
        return tl.exp2(broadcast_channels(first, BLOCK_N) * A_log2e)
    elif RECURRENCE == MAMBA_ZOH:
        return tl.where(first, 0.0, tl.exp2(broadcast_channels(second, BLOCK_N) * A_log2e))
    else:
        return tl.clamp(second - broadcast_channels(first, BLOCK_N) * (B_t * B_t)[:, None, :, :], 0.0, 1.0)  # of one instruction


@triton.jit
def zoh_terms(A_log2e, dt, BLOCK_N: tl.constexpr):
    """A block of a zero-order hold over one token's step: exp(step A); phi = (exp(step A) - 1) / A, the factor of in x; and
    d phi / d A = (step exp(step A) - phi) / A.

    Where step A is near 0 these differences cancel. There, with x = step A, phi = step (1 + x p) and d phi / d A = step^2 (1 + x p
    - p), p = sum_k x^k / (k + 2)!, of which 8 terms are kept: the rest is less than 1e-8 of it.
    """
    size = broadcast_channels(dt, BLOCK_N)
    exponent = size * A_log2e
    exp_dtA = tl.exp2(exponent)
    x = tl.maximum(exponent * LN_2, -1.0)  # further from 0 the sum is not used
    p = 2.48015873e-5 + 2.75573192e-6 * x
    p = p * x + 1.98412698e-4
    p = p * x + 1.38888889e-3
    p = p * x + 8.33333333e-3
    p = p * x + 4.16666667e-2
    p = p * x + 1.66666667e-1
    p = p * x + 0.5
    ratio = 1.0 + x * p
    inverse = -LOG2_E * reciprocal(-A_log2e)
    near = x > -0.5
    phi = tl.where(near, size * ratio, (exp_dtA - 1.0) * inverse)
    return exp_dtA, phi, tl.where(near, size * size * (ratio - p), (size * exp_dtA - phi) * inverse)


@triton.jit
def input_block(RECURRENCE: tl.constexpr, A_log2e, w, x_t, B_t, BLOCK_N: tl.constexpr):
    """What a block of states takes in with one token. w: the first of `coefficients`; x_t: of channels; in_t: of states."""
    if RECURRENCE == MAMBA_ZOH:
        _, phi, _ = zoh_terms(A_log2e, w, BLOCK_N)
        return broadcast_channels(x_t, BLOCK_N) * phi * B_t[:, None, :, :]
    else:
        return broadcast_channels(w * x_t, BLOCK_N) * B_t[:, None, :, :]


@triton.jit
def sum_over_states(x):
    """The sum over a block's states, [BD]."""
    sums = tl.sum(tl.sum(x, 3), 2)
    if x.shape[1] == 2:
        own, other = tl.split(sums)
        return own + swap_lane_pair(other)
    else:
        return tl.sum(sums, 1)


@triton.jit
def state_block(block, DIM: tl.constexpr, DSTATE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr):
    """Of a block of channels: channels [BD], which of them exist, states [BD, BN / 4 S, 4], which elements [BD, S, BN / 4 S, 4]
    exist, and where they lie in a [D, N] tensor."""
    S: tl.constexpr = lanes_per_channel(BLOCK_D, BLOCK_N)
    QUADS: tl.constexpr = BLOCK_N // (4 * S)
    lane = tl.arange(0, BLOCK_D)
    n = 4 * (tl.arange(0, QUADS)[None, :, None] + (lane % S * QUADS)[:, None, None]) + tl.arange(0, 4)[None, None, :]
    d = block * BLOCK_D + (lane[:, None] ^ tl.arange(0, S)[None, :])
    inside = (d < DIM)[:, :, None, None] & (n < DSTATE)[:, None, :, :]
    own = block * BLOCK_D + lane
    return own, own < DIM, n, inside, d[:, :, None, None] * DSTATE + n[:, None, :, :]


@triton.jit
def scratch_offsets(BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr):
    """Where a block lies in memory of a program's own: what lanes load together is side by side."""
    S: tl.constexpr = lanes_per_channel(BLOCK_D, BLOCK_N)
    QUADS: tl.constexpr = BLOCK_N // (4 * S)
    quad = tl.arange(0, S)[None, :, None, None] * QUADS + tl.arange(0, QUADS)[None, None, :, None]
    return 4 * (quad * BLOCK_D + tl.arange(0, BLOCK_D)[:, None, None, None]) + tl.arange(0, 4)[None, None, None, :]


@triton.jit
def load_states(base, state_offset, inside, DSTATE: tl.constexpr, EVEN_D: tl.constexpr, OTHER: tl.constexpr = 0.0):
    """A block of states; FULL: all of it exists. Where N is a multiple of 4, memory begins at a multiple of 16 bytes: that, and not
    what is known of a pointer, makes a lane's states four at a time, and its channel its own."""
    at = base + state_offset
    if DSTATE % 4 == 0:
        at = tl.multiple_of(at, (1, 1, 1, 16))
    return tl.load(at) if EVEN_D else tl.load(at, mask=inside, other=OTHER)


@triton.jit
def store_states(base, state_offset, h, inside, DSTATE: tl.constexpr, EVEN_D: tl.constexpr):
    """As `load_states`."""
    at = base + state_offset
    if DSTATE % 4 == 0:
        at = tl.multiple_of(at, (1, 1, 1, 16))
    if EVEN_D:
        tl.store(at, h)
    else:
        tl.store(at, h, mask=inside)


@triton.jit
def load_A(A, state_offset, inside, DSTATE: tl.constexpr, RECURRENCE: tl.constexpr, EVEN_D: tl.constexpr):
    """A log2(e), of which none is 0, and a block of zeros. Of Longhorn A are zeros: how a block of states
    lies in a warp the compiler takes from how one is loaded, so one is."""
    if RECURRENCE == LONGHORN:
        zero_block = load_states(A, state_offset, inside, DSTATE, EVEN_D)
        return 0.0, zero_block
    else:
        A_log2e = tl.minimum(load_states(A, state_offset, inside, DSTATE, EVEN_D, -1.0) * LOG2_E, LARGEST_A)
        return A_log2e, tl.zeros(A_log2e.shape, tl.float32)


@triton.jit
def load_bc(
    t, end, bc, n, DSTATE: tl.constexpr, LOAD_C: tl.constexpr, RECURRENCE: tl.constexpr, EVEN_T: tl.constexpr,
):  # fmt: skip
    """What all channels read of token t: in and query [BD, BN / 4 S, 4], and square. Zeros of a token that does not exist; what a
    kind has not, and the query unless QUERY, is not read. rows: as `diagonal_scan_pack_bc_kernel` leaves them, for N states."""
    exists = True if EVEN_T else t < end
    row = bc + t * bc_row_size(RECURRENCE, DSTATE)
    B_t = load_row(row + n, True, exists, True, EVEN_T)
    C_t = load_row(row + (DSTATE + n), True, exists, True, EVEN_T) if LOAD_C else B_t
    k_square = load_row(row + 2 * DSTATE, True, exists, True, EVEN_T) if RECURRENCE == LONGHORN else 0.0
    return B_t, C_t, k_square


@triton.jit
def bc_cache_lines(bc, tokens, DSTATE: tl.constexpr, RECURRENCE: tl.constexpr, TOKENS: tl.constexpr):
    """Lines of what `shared_at` reads of the first TOKENS tokens, of `tokens`: a pointer in each lane."""
    return lines_from(bc, tl.minimum(tokens, TOKENS) * bc_row_size(RECURRENCE, DSTATE), TOKENS * bc_row_size(RECURRENCE, DSTATE))


@triton.jit
def load_positions(t0, end, pos, BLOCK_T: tl.constexpr, HAS_POS: tl.constexpr, EVEN_T: tl.constexpr):
    """Of STEPS tokens from t0 on."""
    if HAS_POS:
        t = t0 + tl.arange(0, BLOCK_T)
        return tl.load(pos + t) if EVEN_T else tl.load(pos + t, mask=t < end, other=1)
    else:
        return 0


@triton.jit
def document_start_bits(positions, BLOCK_T: tl.constexpr, HAS_POS: tl.constexpr):
    """A bit per token, of those that documents start with."""
    return tl.sum(tl.where(positions == 0, 1 << tl.arange(0, BLOCK_T), 0), 0) if HAS_POS else 0


@triton.jit
def is_document_start(bits, s, HAS_POS: tl.constexpr):
    return (bits >> s) & 1 == 1 if HAS_POS else False
