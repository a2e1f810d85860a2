"""The orthogonal state recurrence token by token with a head's slots in registers, in Triton: forward and backward.

The one thing to know: slots of encoding and similarity do not see each other, so a program has a few slots of a head, and what is
summed over slots (outputs, gradients of values and steps) is left in parts, one per program. Decoding sums over all slots in every
step, so there a program has them all. Always with projection; states and arithmetic are float32.

Backwards a program goes from border to border, the last first: once forwards, leaving the slots before each group of tokens in
memory of its own, then through the groups, each forwards with the slots of its tokens in registers, and back.

Shape suffixes: B batch, T time, H heads, D values (d), M slots (m), P parts of M, C borders.
"""

import triton
import triton.language as tl

DEC, ENC, SIM = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def token(t, q, k, v, gamma, mu, pos, T, row, m_in, d_in, WHOLE: tl.constexpr, FORGET: tl.constexpr, HAS_POS: tl.constexpr):
    """What is read of token t: q, k [BM], v [BD], gamma, mu, and whether a document starts with it; one behind the end is the last
    with a step of 0, which changes nothing. row: strides of q, k, v, gamma and mu. WHOLE: all m and d are there."""
    inside, t = t < T, tl.minimum(t, T - 1)
    if WHOLE:
        # masks cost instructions, and what is behind them registers to be zeroed
        q_t, k_t, v_t = tl.load(q + t * row[0]), tl.load(k + t * row[1]), tl.load(v + t * row[2])
    else:
        q_t = tl.load(q + t * row[0], mask=m_in, other=0.0)
        k_t = tl.load(k + t * row[1], mask=m_in, other=0.0)
        v_t = tl.load(v + t * row[2], mask=d_in, other=0.0)
    gamma_t = tl.where(inside, tl.load(gamma + t * row[3]).to(tl.float32), 0.0)
    mu_t = tl.where(inside, tl.load(mu + t * row[4]).to(tl.float32), 1.0) if FORGET else 1.0
    starts = (tl.load(pos + t) == 0) & inside if HAS_POS else False
    return q_t, k_t, v_t, gamma_t, mu_t, starts


@triton.jit
def entered(S, starts, initial, inside):
    """The slots that a token finds where S are left; initial: where those lie that a document starts with."""
    if starts:
        S = tl.load(initial, mask=inside, other=0.0)
    return S


@triton.jit
def step(S, row, VARIANT: tl.constexpr, FORGET: tl.constexpr):
    """The slots [BD, BM] behind a token before which they are S; h [BD]; a, c, weight and one over u's norm, [BM]; see `walk`."""
    k_t, v_t = row[1].to(tl.float32), row[2].to(tl.float32)
    if VARIANT == ENC:
        h = v_t
    elif VARIANT == SIM:
        h = -v_t
    else:
        h = tl.sum(S * k_t[None, :], 1) - v_t
    a = tl.sum(S * h[:, None], 0)
    c = a - k_t if VARIANT == ENC else k_t
    weight = -row[3] * c
    # h - S a before it is scaled: a large step leaves the difference of two large multiples of S otherwise
    tangent = (h[:, None] - S * a[None, :]) * weight[None, :]
    U = row[4] * S + tangent if FORGET else S + tangent
    square = tl.sum(U * U, 0)
    # slots that do not exist are zeros and stay so
    over = tl.where(square > 0.0, tl.rsqrt(square), 0.0)
    return U * over[None, :], h, a, c, weight, over


@triton.jit
def forward_kernel(
    q, k, v, gamma, mu, pos, first, loaded, y, borders, last, T,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head, gamma_batch, gamma_row, gamma_head,
    mu_batch, mu_row, mu_head,
    D: tl.constexpr, M: tl.constexpr, H: tl.constexpr, VARIANT: tl.constexpr, FORGET: tl.constexpr, HAS_POS: tl.constexpr,
    KEEP: tl.constexpr, STEPS: tl.constexpr, BORDER: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """What is read, [P, B, T, H, D], slots before each border [B, H, C, D, M] if KEEP, and behind the last token [B, H, D, M].
    first: slots that enter, [B, H, D, M]; loaded: those that documents start with, [H, D, M]."""
    p, bh = tl.program_id(0), tl.program_id(1)
    b, h = (bh // H).to(tl.int64), bh % H
    batch = tl.num_programs(1) // H
    d, m = tl.arange(0, BD), p * BM + tl.arange(0, BM)
    d_in, m_in = d < D, m < M
    inside, at = d_in[:, None] & m_in[None, :], d[:, None] * M + m[None, :]
    WHOLE: tl.constexpr = D == BD and M % BM == 0
    q += b * q_batch + h * q_head + m
    k += b * k_batch + h * k_head + m
    v += b * v_batch + h * v_head + d
    gamma += b * gamma_batch + h * gamma_head
    mu += b * mu_batch + h * mu_head
    pos += b * T
    y += ((p * batch + b) * T * H + h) * D + d
    strides = (q_row, k_row, v_row, gamma_row, mu_row)
    S = tl.load(first + bh.to(tl.int64) * (D * M) + at, mask=inside, other=0.0)
    rows = ()
    for s in tl.static_range(STEPS):
        rows += token(s, q, k, v, gamma, mu, pos, T, strides, m_in, d_in, WHOLE, FORGET, HAS_POS)
    for t0 in range(0, T, STEPS):
        if KEEP and t0 % BORDER == 0:
            to = borders + (bh.to(tl.int64) * tl.cdiv(T, BORDER) + t0 // BORDER) * (D * M)
            tl.store(to + at, S, mask=inside)
        next_rows = ()
        for s in tl.static_range(STEPS):
            next_rows += token(t0 + STEPS + s, q, k, v, gamma, mu, pos, T, strides, m_in, d_in, WHOLE, FORGET, HAS_POS)
        for s in tl.static_range(STEPS):
            row = rows[6 * s : 6 * s + 6]
            S = entered(S, row[5], loaded + h * (D * M) + at, inside)
            S, _h, _a, _c, _weight, _over = step(S, row, VARIANT, FORGET)
            read = tl.sum(S * row[0].to(tl.float32)[None, :], 1)
            tl.store(y + tl.cast(t0 + s, tl.int64) * (H * D), read.to(y.dtype.element_ty), mask=d_in & (t0 + s < T))
        rows = next_rows
    tl.store(last + bh.to(tl.int64) * (D * M) + at, S, mask=inside)


@triton.jit
def backward_kernel(
    q, k, v, gamma, mu, pos, loaded, borders, dy, arriving, states, dq, dk, dv, dgamma, dmu, dfirst, dloaded, T,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head, gamma_batch, gamma_row, gamma_head,
    mu_batch, mu_row, mu_head, dy_batch, dy_row, dy_head,
    D: tl.constexpr, M: tl.constexpr, H: tl.constexpr, VARIANT: tl.constexpr, FORGET: tl.constexpr, HAS_POS: tl.constexpr,
    STEPS: tl.constexpr, BORDER: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Gradients: dq, dk [B, T, H, M]; of each part of the slots dv [P, B, T, H, D], dgamma and dmu [P, B, T, H]; of the slots that
    entered, [B, H, D, M], and, added to zeros, of those that documents started with. states: memory of the programs' own,
    [programs, BORDER / STEPS, BD, BM]."""
    p, bh = tl.program_id(0), tl.program_id(1)
    b, h = (bh // H).to(tl.int64), bh % H
    batch = tl.num_programs(1) // H
    d, m = tl.arange(0, BD), p * BM + tl.arange(0, BM)
    d_in, m_in = d < D, m < M
    inside, at = d_in[:, None] & m_in[None, :], d[:, None] * M + m[None, :]
    WHOLE: tl.constexpr = D == BD and M % BM == 0
    own = d[:, None] * BM + tl.arange(0, BM)[None, :]
    BLOCKS: tl.constexpr = BORDER // STEPS
    states += (bh.to(tl.int64) * tl.num_programs(0) + p) * (BLOCKS * BD * BM)
    q += b * q_batch + h * q_head + m
    k += b * k_batch + h * k_head + m
    v += b * v_batch + h * v_head + d
    dy += b * dy_batch + h * dy_head + d
    gamma += b * gamma_batch + h * gamma_head
    mu += b * mu_batch + h * mu_head
    pos += b * T
    of_token = b * T * H + h
    of_part = (p * batch + b) * T * H + h
    strides = (q_row, k_row, v_row, gamma_row, mu_row)
    head = bh.to(tl.int64) * (D * M)
    dS = tl.load(arriving + head + at, mask=inside, other=0.0)
    initial = loaded + h * (D * M) + at
    grad_loaded = dloaded + head + at
    chunks = tl.cdiv(T, BORDER)
    for n in range(chunks):
        c0 = (chunks - 1 - n) * BORDER
        S = tl.load(borders + (bh.to(tl.int64) * chunks + (chunks - 1 - n)) * (D * M) + at, mask=inside, other=0.0)
        # what the memory held is read by every thread before it is written anew, and the other way round below
        tl.debug_barrier()
        for j in range(BLOCKS):
            tl.store(states + j * (BD * BM) + own, S)
            if j < BLOCKS - 1:
                for s in tl.static_range(STEPS):
                    t = c0 + j * STEPS + s
                    row = token(t, q, k, v, gamma, mu, pos, T, strides, m_in, d_in, WHOLE, FORGET, HAS_POS)
                    S = entered(S, row[5], initial, inside)
                    S, _h, _a, _c, _weight, _over = step(S, row, VARIANT, FORGET)
        tl.debug_barrier()
        for k_block in range(BLOCKS):
            j = BLOCKS - 1 - k_block
            S = tl.load(states + j * (BD * BM) + own)
            left, found = (), ()
            for s in tl.static_range(STEPS):
                row = token(c0 + j * STEPS + s, q, k, v, gamma, mu, pos, T, strides, m_in, d_in, WHOLE, FORGET, HAS_POS)
                S, h_t, a, c, weight, over = step(entered(S, row[5], initial, inside), row, VARIANT, FORGET)
                left += (S,)
                found += (h_t, a, c, weight, over) + row
            for s in tl.static_range(STEPS - 1, -1, -1):
                t = c0 + j * STEPS + s
                h_t, a, c, weight, over = found[11 * s : 11 * s + 5]
                q_t, k_t, _v_t, gamma_t, mu_t, starts = found[11 * s + 5 : 11 * s + 11]
                # read anew, so that registers hold one state a token
                before = entered(tl.load(states + j * (BD * BM) + own) if s == 0 else left[s - 1], starts, initial, inside)
                S = left[s]
                dy_t = tl.load(dy + tl.cast(t, tl.int64) * dy_row, mask=d_in & (t < T), other=0.0).to(tl.float32)
                dq_t = tl.sum(S * dy_t[:, None], 0)
                dU = dS + dy_t[:, None] * q_t.to(tl.float32)[None, :]
                dU = (dU - S * tl.sum(S * dU, 0)[None, :]) * over[None, :]
                along = tl.sum(dU * before, 0)
                dweight = tl.sum(dU * h_t[:, None], 0) - a * along
                da = -weight * along
                dc = -gamma_t * dweight
                if VARIANT == ENC:
                    da += dc
                dh = tl.sum(dU * weight[None, :] + before * da[None, :], 1)
                dS = dU * ((mu_t if FORGET else 1.0) - weight * a)[None, :] + h_t[:, None] * da[None, :]
                if VARIANT == DEC:
                    dc += tl.sum(dh[:, None] * before, 0)
                    dS += dh[:, None] * k_t.to(tl.float32)[None, :]
                here, exists = tl.cast(t, tl.int64) * H, t < T
                dk_t = -dc if VARIANT == ENC else dc
                dv_t = dh if VARIANT == ENC else -dh
                tl.store(dq + (of_token + here) * M + m, dq_t.to(dq.dtype.element_ty), mask=m_in & exists)
                tl.store(dk + (of_token + here) * M + m, dk_t.to(dk.dtype.element_ty), mask=m_in & exists)
                tl.store(dv + (of_part + here) * D + d, dv_t.to(dv.dtype.element_ty), mask=d_in & exists)
                tl.store(dgamma + of_part + here, -tl.sum(c * dweight, 0), mask=exists)
                if FORGET:
                    tl.store(dmu + of_part + here, tl.sum(along, 0), mask=exists)
                if starts:
                    # rare, so the sum waits in memory
                    tl.store(grad_loaded, tl.load(grad_loaded, mask=inside, other=0.0) + dS, mask=inside)
                    dS = dS * 0.0
        # the last states are read before the next chunk's are written
        tl.debug_barrier()
    tl.store(dfirst + head + at, dS, mask=inside)
