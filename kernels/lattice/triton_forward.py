"""The Lattice recurrence token by token with a head's slots in registers, in Triton: a step, and the forward pass.

The one thing to know: slots of encoding and similarity do not see each other, so a program may have a few slots of a head, and what
is summed over slots (outputs, gradients of values and steps) is then left in parts, one per program. Decoding sums over all slots
in every step, so there a program has them all. States and arithmetic are float32.

PROJECT: slots are put back on the unit sphere after each step. Without it a slot s has a length, and a step reads its direction
s / |s|. A step divides by one length per slot either way, so `over` has one name for both: with projection 1 / |u|, u being what
the step made of s; without it 1 / |s|, at most 1 / SMALLEST_NORM.

Shape suffixes: B batch, T time, H heads, D values (d), M slots (m), P parts of M, C borders; of tensors in parts see
`register_tiles`.
"""

import triton
import triton.language as tl

from baton.kernels.lattice.register_tiles import in_warp, over_d, over_slots, places, read, scaled, spread, stacked, write
from baton.kernels.lattice.variant import SMALLEST_NORM

DEC, ENC, SIM = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
# Below every square of a norm, since forgetting is at most down to SMALLEST_GATE; slots that do not exist are zeros and stay so.
SMALLEST_SQUARE = tl.constexpr(1e-12)
# Of a slot without projection: 1 / |s| is at most 1 / SMALLEST_NORM of `variant`, and a constant there.
LARGEST_INVERSE = tl.constexpr(1 / SMALLEST_NORM)


@triton.jit
def token(
    t, q, k, v, gamma, mu, pos, T, row, m_in, d_in, PARTS: tl.constexpr, BP: tl.constexpr, WHOLE: tl.constexpr,
    EVEN: tl.constexpr, FORGET: tl.constexpr, HAS_POS: tl.constexpr,
):  # fmt: skip
    """What is read of token t: q, k [BM], v in parts, gamma, mu, and whether a document starts with it; one behind the end is the
    last with a step of 0, which changes nothing (EVEN: there is none that matters). row: strides of q, k, v, gamma and mu. WHOLE:
    all m and d are there."""
    inside, t = t < T, tl.minimum(t, T - 1)
    if WHOLE:
        q_t, k_t = tl.load(q + t * row[0]), tl.load(k + t * row[1])
    else:
        q_t = tl.load(q + t * row[0], mask=m_in, other=0.0)
        k_t = tl.load(k + t * row[1], mask=m_in, other=0.0)
    v_t = read(v, t * row[2], BP, d_in, PARTS, WHOLE)
    gamma_t, mu_t = tl.load(gamma + t * row[3]).to(tl.float32), 1.0
    if FORGET:
        mu_t = tl.load(mu + t * row[4]).to(tl.float32)
    if not EVEN:
        gamma_t = tl.where(inside, gamma_t, 0.0)
        mu_t = tl.where(inside, mu_t, 1.0)
    starts = (tl.load(pos + t) == 0) & inside if HAS_POS else False
    return q_t, k_t, v_t, gamma_t, mu_t, starts


@triton.jit
def entered(S, starts, initial, at, apart, inside, PARTS: tl.constexpr):
    """The slots that a token finds where S are left; initial: where those lie that a document starts with."""
    if starts:
        S = read(initial, at, apart, inside, PARTS, False)
    return S


@triton.jit
def direction(S, k_t, v_t, VARIANT: tl.constexpr, PARTS: tl.constexpr, WARPS: tl.constexpr):
    """h in parts; as in `step_loop`, but with the other sign in similarity, as `coefficient`: what they make together has the
    same."""
    h = ()
    if VARIANT == DEC:
        read_k = over_slots(scaled(S, k_t, PARTS), PARTS, WARPS)
    for i in tl.static_range(PARTS):
        if VARIANT == DEC:
            h += (read_k[i] - v_t[i].to(tl.float32),)
        else:
            h += (v_t[i].to(tl.float32),)
    return h


@triton.jit
def coefficient(a, k_t, VARIANT: tl.constexpr):
    """-c, [BM]; see `direction`."""
    if VARIANT == DEC:
        c = -k_t
    elif VARIANT == ENC:
        c = k_t - a
    else:
        c = k_t
    return c


@triton.jit
def turned(S, h, a, weight, mu_t, FORGET: tl.constexpr, PARTS: tl.constexpr):
    """u of slots, in parts: what they are before they are put back on the sphere."""
    U = ()
    for i in tl.static_range(PARTS):
        # h - S a before it is scaled: a large step leaves the difference of two large multiples of S otherwise
        tangent = (h[i][None, :] - S[i] * a[:, None]) * weight[:, None]
        U += (mu_t * S[i] + tangent if FORGET else S[i] + tangent,)
    return U


@triton.jit
def inverse_length(S, PARTS: tl.constexpr):
    """One over slots' lengths, at most LARGEST_INVERSE, [BM]."""
    square = over_d(S, S, PARTS)
    smallest: tl.constexpr = 1.0 / (LARGEST_INVERSE * LARGEST_INVERSE)
    return tl.where(square > smallest, tl.rsqrt(tl.maximum(square, smallest)), LARGEST_INVERSE)


@triton.jit
def moved(S, h, a, over, weight, mu_t, FORGET: tl.constexpr, PROJECT: tl.constexpr, PARTS: tl.constexpr):
    """The slots behind a token, in parts, where `over` is known. weight: of h, [BM]."""
    if PROJECT:
        S = scaled(turned(S, h, a, weight, mu_t, FORGET, PARTS), over, PARTS)
    else:
        S = turned(S, h, a * over, weight, mu_t, FORGET, PARTS)
    return S


@triton.jit
def step(S, row, VARIANT: tl.constexpr, FORGET: tl.constexpr, PROJECT: tl.constexpr, PARTS: tl.constexpr, WARPS: tl.constexpr):
    """The slots behind a token before which they are S; h in parts; a, the product of h and a slot's direction, and over, [BM];
    see `step_loop`."""
    k_t = row[1].to(tl.float32)
    if PROJECT:
        h = direction(S, k_t, row[2], VARIANT, PARTS, WARPS)
        a = over_d(S, spread(h, PARTS), PARTS)
        U = turned(S, h, a, row[3] * coefficient(a, k_t, VARIANT), row[4], FORGET, PARTS)
        over = tl.rsqrt(tl.maximum(over_d(U, U, PARTS), SMALLEST_SQUARE))
        behind = scaled(U, over, PARTS)
    else:
        over = inverse_length(S, PARTS)
        h = direction(S, over * k_t, row[2], VARIANT, PARTS, WARPS)
        a = over * over_d(S, spread(h, PARTS), PARTS)
        weight = row[3] * over * coefficient(a, k_t, VARIANT)
        behind = turned(S, h, a * over, weight, row[4], FORGET, PARTS)
    return behind, h, a, over


@triton.jit
def tokens(
    S, begin, end, q, k, v, gamma, mu, pos, initial, y, borders, at, inside, m, d, m_in, d_in, T, strides,
    D: tl.constexpr, M: tl.constexpr, H: tl.constexpr, VARIANT: tl.constexpr, FORGET: tl.constexpr, PROJECT: tl.constexpr,
    HAS_POS: tl.constexpr, EVEN: tl.constexpr, KEEP: tl.constexpr, STEPS: tl.constexpr, BORDER: tl.constexpr, BD: tl.constexpr,
    PARTS: tl.constexpr, WARPS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """The slots behind the tokens from begin to end, before which they are S; begin: a multiple of STEPS. Pointers are those of
    the program's sequence, head and slots."""
    BP: tl.constexpr = BD // PARTS
    rows = ()
    for s in tl.static_range(STEPS):
        rows += token(begin + s, q, k, v + d, gamma, mu, pos, T, strides, m_in, d_in, PARTS, BP, WHOLE, EVEN, FORGET, HAS_POS)
    for t0 in range(begin, end, STEPS):
        if KEEP and t0 % BORDER == 0:
            write(borders + t0 // BORDER * (D * M), at, BP, S, inside, PARTS, WHOLE)
        next_rows, found = (), ()
        for s in tl.static_range(STEPS):
            t = t0 + STEPS + s
            next_rows += token(t, q, k, v + d, gamma, mu, pos, T, strides, m_in, d_in, PARTS, BP, WHOLE, EVEN, FORGET, HAS_POS)
        for s in tl.static_range(STEPS):
            row = rows[6 * s : 6 * s + 6]
            S = entered(S, row[5], initial, at, BP, inside, PARTS)
            S, _h, _a, _over = step(S, row, VARIANT, FORGET, PROJECT, PARTS, WARPS)
            weighed = scaled(S, row[0].to(tl.float32), PARTS)
            for i in tl.static_range(PARTS):
                found += (tl.sum(weighed[i], 0) if WARPS == 1 else in_warp(weighed[i], WARPS),)
        out = stacked(found, STEPS * PARTS)
        if WARPS > 1:
            out = tl.sum(out, 0)
        column = tl.arange(0, STEPS * PARTS)
        to = y + (t0 + column // PARTS).to(tl.int64) * (H * D) + column % PARTS * BP
        if WHOLE and EVEN:
            tl.store(to[None, :] + d[:, None], out.to(y.dtype.element_ty))
        else:
            exists = (d[:, None] + column % PARTS * BP < D) & (t0 + column // PARTS < T)
            tl.store(to[None, :] + d[:, None], out.to(y.dtype.element_ty), mask=exists)
        rows = next_rows
    return S


@triton.jit
def lattice_forward_kernel(
    q, k, v, gamma, mu, pos, first, loaded, y, borders, last, T,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head, gamma_batch, gamma_row, gamma_head,
    mu_batch, mu_row, mu_head,
    D: tl.constexpr, M: tl.constexpr, H: tl.constexpr, VARIANT: tl.constexpr, FORGET: tl.constexpr, PROJECT: tl.constexpr,
    HAS_POS: tl.constexpr, EVEN: tl.constexpr, KEEP: tl.constexpr, STEPS: tl.constexpr, BORDER: tl.constexpr, BD: tl.constexpr,
    BM: tl.constexpr, PARTS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """What is read, [P, B, T, H, D], slots before each border [B, H, C, M, D] if KEEP, and behind the last token [B, H, M, D].
    first: slots that enter, [B, H, M, D]; loaded: those that documents start with, [H, M, D]."""
    p, bh = tl.program_id(0), tl.program_id(1)
    b, h = (bh // H).to(tl.int64), bh % H
    batch = tl.num_programs(1) // H
    m, d, inside, d_in, m_in = places(p, D, M, BD, BM, PARTS)
    WHOLE: tl.constexpr = D == BD and M % BM == 0
    BP: tl.constexpr = BD // PARTS
    at = m[:, None] * D + d[None, :]
    q += b * q_batch + h * q_head + m
    k += b * k_batch + h * k_head + m
    v += b * v_batch + h * v_head
    gamma += b * gamma_batch + h * gamma_head
    mu += b * mu_batch + h * mu_head
    pos += b * T
    y += ((p * batch + b) * T * H + h) * D
    head = bh.to(tl.int64) * (D * M)
    strides = (q_row, k_row, v_row, gamma_row, mu_row)
    S = read(first + head, at, BP, inside, PARTS, WHOLE)
    borders += bh.to(tl.int64) * tl.cdiv(T, BORDER) * (D * M)
    initial = loaded + h * (D * M)
    S = tokens(
        S, 0, T, q, k, v, gamma, mu, pos, initial, y, borders, at, inside, m, d, m_in, d_in, T, strides, D, M, H, VARIANT, FORGET,
        PROJECT, HAS_POS, EVEN, KEEP, STEPS, BORDER, BD, PARTS, WARPS, WHOLE,
    )  # fmt: skip
    write(last + head, at, BP, S, inside, PARTS, WHOLE)
