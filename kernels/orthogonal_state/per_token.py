"""The orthogonal state recurrence token by token with a head's slots in registers, in Triton: a step, and the forward pass.

The one thing to know: slots of encoding and similarity do not see each other, so a program has a few slots of a head, and what is
summed over slots (outputs, gradients of values and steps) is left in parts, one per program. Decoding sums over all slots in every
step, so there a program has them all. Always with projection; states and arithmetic are float32.

Instructions are what these kernels are short of, and most that are not products move sums between lanes. So slots are rows of
several tensors, PARTS of d each: their products are added within a lane, and few lanes are left to be summed over.

Shape suffixes: B batch, T time, H heads, D values (d), M slots (m), P parts of M, C borders. "Parts" are tuples of PARTS tensors,
slots [BM, BD / PARTS] and vectors [BD / PARTS].
"""

import triton
import triton.language as tl

DEC, ENC, SIM = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
# Below every square of a norm, since forgetting is at most down to SMALLEST_GATE; slots that do not exist are zeros and stay so.
SMALLEST_SQUARE = tl.constexpr(1e-12)


@triton.jit
def read(pointer, at, apart, inside, PARTS: tl.constexpr, WHOLE: tl.constexpr):
    """Parts of float32 at pointer + at, apart from one another; 0 where they are not inside."""
    # masks cost instructions, and what is behind them registers to be zeroed
    parts = ()
    for i in tl.static_range(PARTS):
        if WHOLE:
            parts += (tl.load(pointer + i * apart + at),)
        else:
            parts += (tl.load(pointer + i * apart + at, mask=inside[i], other=0.0),)
    return parts


@triton.jit
def write(pointer, at, apart, parts, inside, PARTS: tl.constexpr, WHOLE: tl.constexpr):
    """The other way round, in the type of what the pointer points to."""
    for i in tl.static_range(PARTS):
        if WHOLE:
            tl.store(pointer + i * apart + at, parts[i].to(pointer.dtype.element_ty))
        else:
            tl.store(pointer + i * apart + at, parts[i].to(pointer.dtype.element_ty), mask=inside[i])


@triton.jit
def over_d(x, y, PARTS: tl.constexpr):
    """Sums over d of the products of parts of slots and of slots or a vector, [BM]."""
    total = x[0] * y[0]
    for i in tl.static_range(1, PARTS):
        total += x[i] * y[i]
    return tl.sum(total, len(total.shape) - 1)


@triton.jit
def two_sums(x, y, N: tl.constexpr):
    """Over slots, of N tensors [BM] each: two of [N]."""
    both = ()
    for n in tl.static_range(N):
        both += (x[n], y[n])
    return tl.split(tl.reshape(tl.sum(stacked(both, 2 * N), 0), [N, 2]))


@triton.jit
def spread(vector, PARTS: tl.constexpr):
    """A vector's parts beside slots', [1, BD / PARTS]."""
    parts = ()
    for i in tl.static_range(PARTS):
        parts += (vector[i][None, :],)
    return parts


@triton.jit
def halves(x, N: tl.constexpr):
    """N / 2 tensors with a last dimension of 2, of which the n-th has x[n] and x[n + N / 2]."""
    joined = ()
    for n in tl.static_range(N // 2):
        joined += (tl.join(x[n], x[n + N // 2]),)
    return joined


@triton.jit
def stacked(x, N: tl.constexpr):
    """N tensors of one shape as one with a last dimension of N, within each lane; N: 1, 2, 4, 8 or 16."""
    n: tl.constexpr = N
    y = x
    if n >= 16:
        y = halves(y, 16)
    if n >= 8:
        y = halves(y, 8)
    if n >= 4:
        y = halves(y, 4)
    if n >= 2:
        y = halves(y, 2)
    return tl.reshape(y[0], x[0].shape + [N])


@triton.jit
def in_warp(x, WARPS: tl.constexpr):
    """Sums over the slots [BM, BP] of each warp, [WARPS, BP]: where a lane has 4 of d, and rows go first to lanes, then to warps."""
    LANES: tl.constexpr = min(32, max(1, 128 // x.shape[1]))
    ROWS: tl.constexpr = min(LANES, x.shape[0] // WARPS)
    x = tl.reshape(x, [x.shape[0] // (ROWS * WARPS), WARPS, ROWS, x.shape[1]])
    return tl.sum(tl.sum(x, 0), 1)


@triton.jit
def over_slots(parts, PARTS: tl.constexpr, WARPS: tl.constexpr):
    """Sums over slots, parts of a vector: what warps have found is added all at once."""
    found = ()
    for i in tl.static_range(PARTS):
        found += (tl.sum(parts[i], 0) if WARPS == 1 else in_warp(parts[i], WARPS),)
    if WARPS > 1:
        if PARTS == 1:
            found = (tl.sum(found[0], 0),)
        if PARTS == 2:
            found = tl.split(tl.sum(stacked(found, PARTS), 0))
        if PARTS == 4:
            both = tl.split(tl.reshape(tl.sum(stacked(found, PARTS), 0), [found[0].shape[1], 2, 2]))
            found = tl.split(both[0]) + tl.split(both[1])
            found = (found[0], found[2], found[1], found[3])
    return found


@triton.jit
def two_sums(x, y, N: tl.constexpr):
    """Over slots, of N tensors [BM] each: two of [N]."""
    both = ()
    for n in tl.static_range(N):
        both += (x[n], y[n])
    return tl.split(tl.reshape(tl.sum(stacked(both, 2 * N), 0), [N, 2]))


@triton.jit
def spread(vector, PARTS: tl.constexpr):
    """A vector's parts beside slots', [1, BD / PARTS]."""
    parts = ()
    for i in tl.static_range(PARTS):
        parts += (vector[i][None, :],)
    return parts


@triton.jit
def token(
    t, q, k, v, gamma, mu, pos, T, row, m_in, d_in, PARTS: tl.constexpr, BP: tl.constexpr, WHOLE: tl.constexpr,
    EVEN: tl.constexpr, FORGET: tl.constexpr, HAS_POS: tl.constexpr,
):  # fmt: skip
    """What is read of token t: q, k [BM], v in parts, gamma, mu, and whether a document starts with it; one behind the end is the
    last, unless EVEN with a step of 0, which changes nothing. row: strides of q, k, v, gamma and mu. WHOLE: all m and d are there."""
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
    """h in parts; as in `walk`, but with the other sign in similarity, as `coefficient`: what they make together has the same."""
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
def scaled(U, factor, PARTS: tl.constexpr):
    S = ()
    for i in tl.static_range(PARTS):
        S += (U[i] * factor[:, None],)
    return S


@triton.jit
def step(S, row, VARIANT: tl.constexpr, FORGET: tl.constexpr, PARTS: tl.constexpr, WARPS: tl.constexpr):
    """The slots behind a token before which they are S; h in parts; a and one over u's norm, [BM]; see `walk`."""
    k_t = row[1].to(tl.float32)
    h = direction(S, k_t, row[2], VARIANT, PARTS, WARPS)
    a = over_d(S, spread(h, PARTS), PARTS)
    U = turned(S, h, a, row[3] * coefficient(a, k_t, VARIANT), row[4], FORGET, PARTS)
    over = tl.rsqrt(tl.maximum(over_d(U, U, PARTS), SMALLEST_SQUARE))
    return scaled(U, over, PARTS), h, a, over


@triton.jit
def places(p, D: tl.constexpr, M: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, PARTS: tl.constexpr):
    """Of a program's slots: m [BM], d of the first part [BD / PARTS], and of each part which m and d are there, which d, and
    which m."""
    m, d = p * BM + tl.arange(0, BM), tl.arange(0, BD // PARTS)
    inside, d_in = (), ()
    for i in tl.static_range(PARTS):
        d_in += (i * (BD // PARTS) + d < D,)
        inside += (d_in[i][None, :] & (m < M)[:, None],)
    return m, d, inside, d_in, m < M


@triton.jit
def forward_kernel(
    q, k, v, gamma, mu, pos, first, loaded, y, borders, last, T,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head, gamma_batch, gamma_row, gamma_head,
    mu_batch, mu_row, mu_head,
    D: tl.constexpr, M: tl.constexpr, H: tl.constexpr, VARIANT: tl.constexpr, FORGET: tl.constexpr, HAS_POS: tl.constexpr,
    EVEN: tl.constexpr, KEEP: tl.constexpr, STEPS: tl.constexpr, BORDER: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr,
    PARTS: tl.constexpr, WARPS: tl.constexpr,
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
    rows = ()
    for s in tl.static_range(STEPS):
        rows += token(s, q, k, v + d, gamma, mu, pos, T, strides, m_in, d_in, PARTS, BP, WHOLE, EVEN, FORGET, HAS_POS)
    for t0 in range(0, T, STEPS):
        if KEEP and t0 % BORDER == 0:
            write(borders + (bh.to(tl.int64) * tl.cdiv(T, BORDER) + t0 // BORDER) * (D * M), at, BP, S, inside, PARTS, WHOLE)
        next_rows, found = (), ()
        for s in tl.static_range(STEPS):
            t = t0 + STEPS + s
            next_rows += token(t, q, k, v + d, gamma, mu, pos, T, strides, m_in, d_in, PARTS, BP, WHOLE, EVEN, FORGET, HAS_POS)
        for s in tl.static_range(STEPS):
            row = rows[6 * s : 6 * s + 6]
            S = entered(S, row[5], loaded + h * (D * M), at, BP, inside, PARTS)
            S, _h, _a, _over = step(S, row, VARIANT, FORGET, PARTS, WARPS)
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
    write(last + head, at, BP, S, inside, PARTS, WHOLE)
