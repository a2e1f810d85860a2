"""Device functions that the diagonal scan's Triton kernels share: loads, and decay and input of one token.

Mamba's names stand for both recurrences: Longhorn's beta is dt, its k is B, its q is C. Mamba and Longhorn differ only here and in
the gradients of these functions in `triton_backward`. Arithmetic is fp32. A token past the end of its split is loaded as zeros and
changes nothing.

Sizes: DIM channels, DSTATE numbers of state per channel; BLOCK_D and BLOCK_N of a program (powers of two), BLOCK_T tokens.

Layout: a program's block of states is [BLOCK_D, S, BLOCK_N / 4 S, 4]. The compiler gives each lane one row, with four states side
by side in memory. With S = 2, two lanes share their two channels: each holds one half of the states of its own channel and the same
half of the other's. A lane then loads only half of B and C, which relieves the bandwidth of the L1 cache. Element [i, s] belongs to
channel i ^ s.
"""

import triton
import triton.language as tl

from baton.kernels.common.triton_prefetch import LOG2_E, line_pointers, load_row, reciprocal, sigmoid

# MAMBA_ZOH: Mamba with the input held between tokens (zero-order hold) instead of Euler's rule
MAMBA, LONGHORN, MAMBA_ZOH = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
LN_2 = tl.constexpr(0.6931471805599453)
FORGET_ALL = tl.constexpr(1e38)  # a dt so large that the decay is 0
LARGEST_A = tl.constexpr(-1e-30)  # A is negative; FORGET_ALL times A must not be 0


@triton.jit
def softplus(x):
    """max(x, 0) + log(1 + e) with e = exp(-|x|). The logarithm is e times a polynomial, so no digit is lost where e is small
    (Chebyshev nodes on [0, 1], error 2.2e-7; tl.log2 takes twice the instructions).
    """
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
    """softplus (Mamba's dt) or sigmoid (Longhorn's beta), and its derivative."""
    if not ACTIVATE:
        return raw, tl.full(raw.shape, 1.0, tl.float32)
    elif RECURRENCE == LONGHORN:
        gate = sigmoid(raw)
        return gate, gate * (1.0 - gate)
    else:
        return softplus(raw), sigmoid(raw)


@triton.jit
def decay_coefficients(RECURRENCE: tl.constexpr, dt, k_square, exists, starts_document):
    """x_scale [BLOCK_D], the factor of x in the input, and the two coefficients [BLOCK_D] that `decay_block` reads.

    exists: the token exists; otherwise it changes nothing. starts_document: the token is the first of a document.
    """
    if RECURRENCE == MAMBA:
        x_scale = tl.where(exists, dt, 0.0)
        return x_scale, tl.where(starts_document, FORGET_ALL, x_scale), x_scale
    elif RECURRENCE == MAMBA_ZOH:
        x_scale = tl.where(exists, dt, 0.0)
        return x_scale, starts_document, x_scale
    else:
        x_scale = tl.where(exists, dt * reciprocal(1.0 + dt * k_square), 0.0)
        return x_scale, tl.where(starts_document, 0.0, x_scale), tl.where(starts_document, 0.0, 1.0)


@triton.constexpr_function
def bc_row_size(kind, n):
    """Elements of a token's row of `bc`: B, C and, for Longhorn, |k|^2, padded to 16 bytes."""
    return 2 * n + 4 if kind == LONGHORN.value else 2 * n


@triton.constexpr_function
def lanes_per_channel(channels, n):
    """S of the block layout: lanes that share their channels."""
    return 2 if channels >= 32 and n >= 8 else 1


@triton.jit
def swap_lane_pair(v):
    """v [BLOCK_D] with the values of each pair of channels exchanged."""
    return tl.gather(v, tl.arange(0, v.shape[0]) ^ 1, 0)


@triton.jit
def broadcast_channels(v, BLOCK_N: tl.constexpr):
    """v [BLOCK_D] as [BLOCK_D, S, 1, 1], to be combined with a block of states."""
    if lanes_per_channel(v.shape[0], BLOCK_N) == 2:
        return tl.join(v, swap_lane_pair(v))[:, :, None, None]
    else:
        return v[:, None, None, None]


@triton.jit
def decay_block(RECURRENCE: tl.constexpr, A_log2e, first, second, B_t, BLOCK_N: tl.constexpr):
    """Decays of a block for one token: exp(dt A), or 1 - eps k_n^2 for Longhorn, accurate where it is near 1.

    first, second: from `decay_coefficients`; for MAMBA_ZOH first is whether a document starts. B_t: of the states, Longhorn's key.
    """
    if RECURRENCE == MAMBA:
        return tl.exp2(broadcast_channels(first, BLOCK_N) * A_log2e)
    elif RECURRENCE == MAMBA_ZOH:
        return tl.where(first, 0.0, tl.exp2(broadcast_channels(second, BLOCK_N) * A_log2e))
    else:
        return tl.clamp(second - broadcast_channels(first, BLOCK_N) * (B_t * B_t)[:, None, :, :], 0.0, 1.0)  # one instruction


@triton.jit
def zoh_terms(A_log2e, dt, BLOCK_N: tl.constexpr):
    """The zero-order hold of a block for one token: exp(dt A); phi = (exp(dt A) - 1) / A, the factor of B x; and
    d phi / d A = (dt exp(dt A) - phi) / A.

    The differences cancel where dt A is near 0. There, with x = dt A, phi = dt (1 + x p) and d phi / d A = dt^2 (1 + x p - p),
    where p = sum_k x^k / (k + 2)! is cut after 8 terms (relative error below 1e-8).
    """
    size = broadcast_channels(dt, BLOCK_N)
    exponent = size * A_log2e
    exp_dtA = tl.exp2(exponent)
    x = tl.maximum(exponent * LN_2, -1.0)  # the series is not used below -0.5
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
    """The input term of a block for one token, x_scale B x or phi B x. x_t: of channels; B_t: of states."""
    if RECURRENCE == MAMBA_ZOH:
        _, phi, _ = zoh_terms(A_log2e, w, BLOCK_N)
        return broadcast_channels(x_t, BLOCK_N) * phi * B_t[:, None, :, :]
    else:
        return broadcast_channels(w * x_t, BLOCK_N) * B_t[:, None, :, :]


@triton.jit
def sum_over_states(x):
    """The sum over a block's states, [BLOCK_D]."""
    sums = tl.sum(tl.sum(x, 3), 2)
    if x.shape[1] == 2:
        own, other = tl.split(sums)
        return own + swap_lane_pair(other)
    else:
        return tl.sum(sums, 1)


@triton.jit
def state_block(block, DIM: tl.constexpr, DSTATE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr):
    """Indices of a program's block: channels [BLOCK_D] and whether they exist, states [BLOCK_D, BLOCK_N / 4 S, 4], and for the
    elements [BLOCK_D, S, BLOCK_N / 4 S, 4] whether they exist and their offsets in a [DIM, DSTATE] tensor.
    """
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
    """Offsets of a block's elements in a program's scratch memory. Elements that lanes load together are adjacent."""
    S: tl.constexpr = lanes_per_channel(BLOCK_D, BLOCK_N)
    QUADS: tl.constexpr = BLOCK_N // (4 * S)
    quad = tl.arange(0, S)[None, :, None, None] * QUADS + tl.arange(0, QUADS)[None, None, :, None]
    return 4 * (quad * BLOCK_D + tl.arange(0, BLOCK_D)[:, None, None, None]) + tl.arange(0, 4)[None, None, None, :]


@triton.jit
def load_states(base, state_offset, inside, DSTATE: tl.constexpr, EVEN_D: tl.constexpr, OTHER: tl.constexpr = 0.0):
    """Load a block of states. EVEN_D: all elements exist.

    The hint on multiples of 16 bytes, not what is known of the pointer, makes the compiler load a lane's states four at a time and
    keep a channel in its own lane.
    """
    at = base + state_offset
    if DSTATE % 4 == 0:
        at = tl.multiple_of(at, (1, 1, 1, 16))
    return tl.load(at) if EVEN_D else tl.load(at, mask=inside, other=OTHER)


@triton.jit
def store_states(base, state_offset, h, inside, DSTATE: tl.constexpr, EVEN_D: tl.constexpr):
    """Store a block of states; see `load_states`."""
    at = base + state_offset
    if DSTATE % 4 == 0:
        at = tl.multiple_of(at, (1, 1, 1, 16))
    if EVEN_D:
        tl.store(at, h)
    else:
        tl.store(at, h, mask=inside)


@triton.jit
def load_A(A, state_offset, inside, DSTATE: tl.constexpr, RECURRENCE: tl.constexpr, EVEN_D: tl.constexpr):
    """A log2(e), kept away from 0, and a block of zeros.

    Longhorn has no A and passes zeros: the compiler derives the layout of a block in the warp from how one is loaded, so one is
    loaded.
    """
    if RECURRENCE == LONGHORN:
        zero_block = load_states(A, state_offset, inside, DSTATE, EVEN_D)
        return 0.0, zero_block
    else:
        A_log2e = tl.minimum(load_states(A, state_offset, inside, DSTATE, EVEN_D, -1.0) * LOG2_E, LARGEST_A)
        return A_log2e, tl.zeros(A_log2e.shape, tl.float32)


@triton.jit
def load_bc(
    t, end, bc, n, BLOCK_N: tl.constexpr, LOAD_C: tl.constexpr, RECURRENCE: tl.constexpr, EVEN_T: tl.constexpr,
):  # fmt: skip
    """B and C [BLOCK_D, BLOCK_N / 4 S, 4] of token t, and |k|^2 for Longhorn; zeros where the token does not exist. C only if
    LOAD_C.

    bc: as `diagonal_scan_pack_bc_kernel` stores it, with BLOCK_N states per row.
    """
    exists = True if EVEN_T else t < end
    row = bc + t * bc_row_size(RECURRENCE, BLOCK_N)
    B_t = load_row(row + n, True, exists, True, EVEN_T)
    C_t = load_row(row + (BLOCK_N + n), True, exists, True, EVEN_T) if LOAD_C else B_t
    k_square = load_row(row + 2 * BLOCK_N, True, exists, True, EVEN_T) if RECURRENCE == LONGHORN else 0.0
    return B_t, C_t, k_square


@triton.jit
def bc_cache_lines(bc, tokens, BLOCK_N: tl.constexpr, RECURRENCE: tl.constexpr, TOKENS: tl.constexpr):
    """Pointers, one a lane, to the cache lines of `bc` that the first TOKENS of `tokens` tokens lie in."""
    return line_pointers(
        bc, tl.minimum(tokens, TOKENS) * bc_row_size(RECURRENCE, BLOCK_N), TOKENS * bc_row_size(RECURRENCE, BLOCK_N)
    )


@triton.jit
def load_positions(t0, end, pos, BLOCK_T: tl.constexpr, HAS_POS: tl.constexpr, EVEN_T: tl.constexpr):
    """pos of BLOCK_T tokens from t0 on; 1 past the end."""
    if HAS_POS:
        t = t0 + tl.arange(0, BLOCK_T)
        return tl.load(pos + t) if EVEN_T else tl.load(pos + t, mask=t < end, other=1)
    else:
        return 0


@triton.jit
def document_start_bits(positions, BLOCK_T: tl.constexpr, HAS_POS: tl.constexpr):
    """A bit per token, set where a document starts."""
    return tl.sum(tl.where(positions == 0, 1 << tl.arange(0, BLOCK_T), 0), 0) if HAS_POS else 0


@triton.jit
def is_document_start(bits, s, HAS_POS: tl.constexpr):
    return (bits >> s) & 1 == 1 if HAS_POS else False
