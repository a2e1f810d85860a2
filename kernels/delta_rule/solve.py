"""What the delta rule adds to gated linear attention, in Triton: each token's u, what it really writes.

The one thing to know: with u known the delta rule is gated linear attention with one gate per token and u for values, and the
kernels of `baton.kernels.gated_linear_attention.sides` do all of it. In a chunk u solves (I + A) u = beta (v - decay S^T k), and A
is what is below the diagonal of beta decay k k^T (see `chunked`). The inverse is made row by row in blocks of 16 tokens, and then
block by block; it depends on keys and gates alone, so only two products of a chunk wait for the state. Where keys are much
alike u is far smaller than what it is the difference of, so what the inverse is multiplied with keeps more than bfloat16's digits.

Shape suffixes as in `sides`: X is d_key, Y d_value.
"""

import triton
import triton.language as tl

from baton.kernels.gated_linear_attention.decays import (
    NONE,
    block_of,
    decays_between,
    last_of,
    leave_rows,
    positions_of,
    product,
    rows_of,
    since_begin,
    sums_at,
    until_end,
    whole_of,
)


@triton.jit
def exact(a, b, LOW: tl.constexpr):
    """a b in float32, whatever the products' precision is."""
    if LOW is None:
        return tl.dot(a, b, input_precision="ieee")
    else:
        return tl.dot(a, b, input_precision="tf32x3")


@triton.jit
def solution(inverse, x, LOW: tl.constexpr):
    """inverse x, of more digits than `product`."""
    if LOW is None:
        return tl.dot(inverse, x, input_precision="ieee")
    else:
        return tl.dot(inverse, x, input_precision="tf32")


@triton.jit
def overlaps(k, beta, summed, at, t, T, k_row, beta_row, X: tl.constexpr, GATE: tl.constexpr, HAS_POS: tl.constexpr,
             LOW: tl.constexpr, C: tl.constexpr, BX: tl.constexpr):  # fmt: skip
    """Below the diagonal, what is left of token j at i and k_i k_j; and beta [C]."""
    i = tl.arange(0, C)
    found = tl.zeros([C, C], tl.float32)
    for x0 in range(0, X, BX):
        k_x = rows_of(k, t, k_row, x0 + tl.arange(0, BX), T, X)
        found += product(k_x, tl.trans(k_x), LOW)
    decays = decays_between(summed, at, C, GATE, HAS_POS)
    beta_t = tl.load(beta + t.to(tl.int64) * beta_row, mask=t < T, other=0.0).to(tl.float32)
    return tl.where(i[:, None] > i[None, :], decays, 0.0), found, beta_t


@triton.jit
def overlaps_of_rows(k, beta, sums, pos, first, n, T, k_row, beta_row, H, X: tl.constexpr, GATE: tl.constexpr,
                     HAS_POS: tl.constexpr, LOW: tl.constexpr, C: tl.constexpr, BX: tl.constexpr):  # fmt: skip
    """A's 16 rows from `first` on, [16, C]."""
    i, j = first + tl.arange(0, 16), tl.arange(0, C)
    t_i, t_j = n * C + i, n * C + j
    found = tl.zeros([16, C], tl.float32)
    for x0 in range(0, X, BX):
        x = x0 + tl.arange(0, BX)
        found += product(rows_of(k, t_i, k_row, x, T, X), tl.trans(rows_of(k, t_j, k_row, x, T, X)), LOW)
    seen = i[:, None] > j[None, :]
    if HAS_POS:
        seen &= i[:, None] - j[None, :] <= positions_of(pos, t_i, T, HAS_POS)[:, None]
    if GATE != NONE:
        sums_i, sums_j = sums_at(sums, t_i, T, j, H, X, GATE), sums_at(sums, t_j, T, j, H, X, GATE)
        found *= tl.exp2(tl.where(seen, sums_i[:, None] - sums_j[None, :], 0.0).to(tl.float32))
    beta_i = tl.load(beta + t_i.to(tl.int64) * beta_row, mask=t_i < T, other=0.0).to(tl.float32)
    return tl.where(seen, beta_i[:, None] * found, 0.0)


@triton.jit
def inverse_kernel(
    k, beta, sums, pos, out, T, chunks, k_batch, k_row, k_head, beta_batch, beta_row, beta_head,
    X: tl.constexpr, H: tl.constexpr, GATE: tl.constexpr, HAS_POS: tl.constexpr, LOW: tl.constexpr,
    C: tl.constexpr, BX: tl.constexpr,
):  # fmt: skip
    """(I + A)^-1 of each chunk, float32 [B, H, N, C, C]. A first lies where its inverse will: tiles are small and depend on each
    other, so a program has a warp or two and many programs hide each other's waiting."""
    n, bh = tl.program_id(0), tl.program_id(1)
    b, h = (bh // H).to(tl.int64), bh % H
    i, row = tl.arange(0, C), tl.arange(0, 16)
    to = out + ((b * H + h) * chunks + n) * (C * C)
    k += b * k_batch + h * k_head
    beta += b * beta_batch + h * beta_head
    for r in tl.static_range(C // 16):
        A = overlaps_of_rows(
            k, beta, sums + b * T * H + h, pos + b * T, r * 16, n, T, k_row, beta_row, H, X, GATE, HAS_POS, LOW, C, BX
        )
        tl.store(to + (r * 16 + row)[:, None] * C + i[None, :], A)
    # rows of the blocks of 16 tokens on the diagonal, one after the other, all blocks at once: through memory, which alone
    # takes a tile apart
    tl.debug_barrier()
    first = tl.arange(0, C // 16) * 16
    blocks = tl.zeros([C // 16, 16, 16], tl.float32) + tl.where(row[:, None] == row[None, :], 1.0, 0.0)[None, :, :]
    for s in tl.static_range(1, 16):
        before = tl.load(to + (first + s)[:, None] * C + first[:, None] + row[None, :])
        solved = tl.sum(before[:, :, None] * blocks, 1)
        blocks -= tl.where((row == s)[None, :, None], solved[:, None, :], 0.0)
    tl.debug_barrier()
    tl.store(to + (first[:, None] + row[None, :])[:, :, None] * C + (first[:, None] + row[None, :])[:, None, :], blocks)
    # the others by columns from the left: what a tile still needs of A lies in its own row, to its right
    square = row[:, None] * C + row[None, :]
    for r in tl.static_range(1, C // 16):
        for c in tl.static_range(r):
            tl.debug_barrier()
            known = tl.zeros([16, 16], tl.float32)
            for m in tl.static_range(c, r):
                known += exact(tl.load(to + (r * C + m) * 16 + square), tl.load(to + (m * C + c) * 16 + square), LOW)
            solved = exact(tl.load(to + (r * C + r) * 16 + square), known, LOW)
            tl.debug_barrier()
            tl.store(to + (r * C + c) * 16 + square, -solved)


@triton.jit
def writes_kernel(
    k, v, beta, sums, pos, inverse, first, u, states, last, T, chunks,
    k_batch, k_row, k_head, v_batch, v_row, v_head, beta_batch, beta_row, beta_head,
    X: tl.constexpr, Y: tl.constexpr, H: tl.constexpr, GATE: tl.constexpr, HAS_POS: tl.constexpr, HAS_FIRST: tl.constexpr,
    KEEP: tl.constexpr, LOW: tl.constexpr, C: tl.constexpr, BX: tl.constexpr, BY: tl.constexpr,
):  # fmt: skip
    """u [B, T, H, Y], the state before each chunk [B, H, N, X, Y] if KEEP, and behind the last one. BX holds all of X."""
    y, bh = tl.program_id(0) * BY + tl.arange(0, BY), tl.program_id(1)
    b, h = (bh // H).to(tl.int64), bh % H
    x, i = tl.arange(0, BX), tl.arange(0, C)
    where = x[:, None] * Y + y[None, :]
    inside = (x < X)[:, None] & (y < Y)[None, :]
    head = (b * H + h) * (X * Y)
    k += b * k_batch + h * k_head
    v += b * v_batch + h * v_head
    beta += b * beta_batch + h * beta_head
    S = tl.load(first + head + where, mask=inside, other=0.0) if HAS_FIRST else tl.zeros([BX, BY], tl.float32)
    for n in range(chunks):
        t = n * C + i
        at = positions_of(pos + b * T, t, T, HAS_POS)
        at_last = last_of(at, C)
        if KEEP:
            tl.store(states + (head * chunks + tl.cast(n, tl.int64) * (X * Y)) + where, S.to(states.dtype.element_ty), mask=inside)
        k_x = rows_of(k, t, k_row, x, T, X)
        beta_t = tl.load(beta + t.to(tl.int64) * beta_row, mask=t < T, other=0.0).to(tl.float32)
        summed = sums_at(sums + b * T * H + h, t, T, x, H, X, GATE)
        total = last_of(summed, C)
        since, until = since_begin(summed, at, C, HAS_POS), until_end(summed, total, at_last, C, HAS_POS)
        missed = rows_of(v, t, v_row, y, T, Y) - since[:, None] * product(k_x, S, LOW)
        solve = tl.load(inverse + ((b * H + h) * chunks + n) * (C * C) + i[:, None] * C + i[None, :])
        u_t = solution(solve, beta_t[:, None] * missed, LOW)
        leave_rows(u + (b * T * H + h) * Y, t, H * Y, y, T, Y, u_t)
        S *= whole_of(total, at_last, C, HAS_POS)
        S += product(tl.trans(k_x if GATE == NONE and not HAS_POS else k_x * until[:, None]), u_t, LOW)
    tl.store(last + head + where, S, mask=inside)


@triton.jit
def writes_backward_kernel(
    q, k, beta, sums, dy, pos, scores, inverse, arriving, dr, cotangents, dfirst, T, chunks, scale,
    q_batch, q_row, q_head, k_batch, k_row, k_head, beta_batch, beta_row, beta_head, dy_batch, dy_row, dy_head,
    X: tl.constexpr, Y: tl.constexpr, H: tl.constexpr, GATE: tl.constexpr, HAS_POS: tl.constexpr,
    LOW: tl.constexpr, C: tl.constexpr, BX: tl.constexpr, BY: tl.constexpr,
):  # fmt: skip
    """Cotangents: of the right-hand side, dr [B, T, H, Y], of the state behind each chunk [B, H, N, X, Y] and of the first.
    scores: of q and k."""
    y, bh = tl.program_id(0) * BY + tl.arange(0, BY), tl.program_id(1)
    b, h = (bh // H).to(tl.int64), bh % H
    x, i = tl.arange(0, BX), tl.arange(0, C)
    where = x[:, None] * Y + y[None, :]
    inside = (x < X)[:, None] & (y < Y)[None, :]
    square = i[:, None] * C + i[None, :]
    head = (b * H + h) * (X * Y)
    q += b * q_batch + h * q_head
    k += b * k_batch + h * k_head
    beta += b * beta_batch + h * beta_head
    dy += b * dy_batch + h * dy_head
    dS = tl.load(arriving + head + where, mask=inside, other=0.0)
    for step in range(chunks):
        n = tl.cast(chunks - 1 - step, tl.int64)
        t = (chunks - 1 - step) * C + i
        at = positions_of(pos + b * T, t, T, HAS_POS)
        at_last = last_of(at, C)
        tl.store(cotangents + (head * chunks + n * (X * Y)) + where, dS.to(cotangents.dtype.element_ty), mask=inside)
        at_square = ((b * H + h) * chunks + n) * (C * C) + square
        k_x, dy_t = rows_of(k, t, k_row, x, T, X), rows_of(dy, t, dy_row, y, T, Y)
        summed = sums_at(sums + b * T * H + h, t, T, x, H, X, GATE)
        total = last_of(summed, C)
        since, until = since_begin(summed, at, C, HAS_POS), until_end(summed, total, at_last, C, HAS_POS)
        du = product(tl.trans(tl.load(scores + at_square)), dy_t, LOW) * scale
        du += product(k_x * until[:, None], dS, LOW)
        dr_t = solution(tl.trans(tl.load(inverse + at_square)), du, LOW)
        leave_rows(dr + (b * T * H + h) * Y, t, H * Y, y, T, Y, dr_t)
        beta_t = tl.load(beta + t.to(tl.int64) * beta_row, mask=t < T, other=0.0).to(tl.float32)
        dS *= whole_of(total, at_last, C, HAS_POS)
        dS += product(tl.trans(rows_of(q, t, q_row, x, T, X) * (since * scale)[:, None]), dy_t, LOW)
        dS -= product(tl.trans(k_x * (since * beta_t)[:, None]), dr_t, LOW)
    tl.store(dfirst + head + where, dS, mask=inside)


@triton.jit
def solved_kernel(
    k, v, beta, sums, pos, u, dr, states, written, dk, dv, dbeta, dg, T, chunks,
    k_batch, k_row, k_head, v_batch, v_row, v_head, beta_batch, beta_row, beta_head,
    X: tl.constexpr, Y: tl.constexpr, H: tl.constexpr, GATE: tl.constexpr, HAS_POS: tl.constexpr,
    LOW: tl.constexpr, C: tl.constexpr, BX: tl.constexpr, BY: tl.constexpr,
):  # fmt: skip
    """What the right-hand side's cotangent gives: dv [B, T, H, Y], dbeta [B, T, H], its part of dg, and dk [B, T, H, X] as a whole.
    written: of dk what comes of the sum that is read, float32."""
    n, bh = tl.program_id(0), tl.program_id(1)
    b, h = (bh // H).to(tl.int64), bh % H
    t, i = n * C + tl.arange(0, C), tl.arange(0, C)
    at = positions_of(pos + b * T, t, T, HAS_POS)
    k += b * k_batch + h * k_head
    v += b * v_batch + h * v_head
    beta += b * beta_batch + h * beta_head
    summed = sums_at(sums + b * T * H + h, t, T, i, H, X, GATE)
    decays, found, beta_t = overlaps(k, beta, summed, at, t, T, k_row, beta_row, X, GATE, HAS_POS, LOW, C, BX)
    of_state = ((b * H + h) * chunks + n) * (X * Y)
    since = since_begin(summed, at, C, HAS_POS)
    # of A, and of beta and the entering state's decay in the right-hand side
    dA = tl.zeros([C, C], tl.float32)
    dbeta_t = tl.zeros([C], tl.float32)
    times_beta = tl.zeros([C], tl.float32)
    entered = tl.zeros([C], tl.float32)
    for y0 in range(0, Y, BY):
        y = y0 + tl.arange(0, BY)
        dr_y = rows_of(dr + (b * T * H + h) * Y, t, H * Y, y, T, Y)
        u_y = rows_of(u + (b * T * H + h) * Y, t, H * Y, y, T, Y)
        v_y = rows_of(v, t, v_row, y, T, Y)
        recalled = tl.zeros([C, BY], tl.float32)
        for x0 in range(0, X, BX):
            x = x0 + tl.arange(0, BX)
            recalled += product(rows_of(k, t, k_row, x, T, X), block_of(states + of_state, x, y, X, Y), LOW)
        recalled *= since[:, None]
        dA -= product(dr_y, tl.trans(u_y), LOW)
        dbeta_t += tl.sum(dr_y * (v_y - recalled), 1)
        times_beta += tl.sum(dr_y.to(tl.float32) * u_y, 1)
        entered -= tl.sum(dr_y * recalled, 1) * beta_t
        leave_rows(dv + (b * T * H + h) * Y, t, H * Y, y, T, Y, beta_t[:, None] * dr_y)
    weighted = dA * decays
    dbeta_t += tl.sum(weighted * found, 1)
    of_keys = weighted * beta_t[:, None]
    both = of_keys + tl.trans(of_keys)
    for x0 in range(0, X, BX):
        x = x0 + tl.arange(0, BX)
        k_x = rows_of(k, t, k_row, x, T, X)
        dk_x = product(both, k_x, LOW)
        for y0 in range(0, Y, BY):
            y = y0 + tl.arange(0, BY)
            dr_y = rows_of(dr + (b * T * H + h) * Y, t, H * Y, y, T, Y)
            dk_x -= product(dr_y, tl.trans(block_of(states + of_state, x, y, X, Y)), LOW) * (since * beta_t)[:, None]
        dk_x += rows_of(written + (b * T * H + h) * X, t, H * X, x, T, X)
        leave_rows(dk + (b * T * H + h) * X, t, H * X, x, T, X, dk_x)
    to = (b * T * H + h) + t.to(tl.int64) * H
    # beta multiplies what u / beta is; that difference, made again of rounded numbers, serves where there is no quotient
    quotient = times_beta / tl.where(beta_t == 0.0, 1.0, beta_t)
    tl.store(dbeta + to, tl.where(beta_t == 0.0, dbeta_t, quotient), mask=t < T)
    if GATE != NONE:
        # of pairs on one side of a gate what the later token brings the earlier one takes away
        pairs = of_keys * found
        flow = entered + tl.sum(pairs, 1) - tl.sum(pairs, 0)
        tl.store(dg + to, tl.cumsum(flow, 0, reverse=True), mask=t < T)
