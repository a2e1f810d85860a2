"""What the delta rule adds to gated linear attention, in Triton: each token's u, what it really writes.

The one thing to know: with u known the delta rule is gated linear attention with one gate per token and u for values, so the
output is read by the kernels of `baton.kernels.gated_linear_attention.sides`. In a chunk u solves (I + A) u = beta (v - decay S^T
k), and A is what is below the diagonal of beta decay k k^T (see `chunked`). The inverse is made row by row in blocks of 16 tokens,
and then block by block; it depends on keys and gates alone, so only two products of a chunk wait for the state. Where keys are much
alike u is far smaller than what it is the difference of, so what the inverse is multiplied with keeps more than bfloat16's digits.

Backwards, dr = (I + A)^-T du is the right-hand side's cotangent. So dv = beta dr, dA = -dr u^T, and beta's own is dr times what
beta multiplies, u / beta, without making that again. Row strides are known when a kernel is compiled: addresses of a tile's rows
then differ by constants, and take few registers.

A long sequence of few heads is walked in pieces at once. What a piece does to the state is S -> M S + add, and M is what it makes of
a unit state without values: so all pieces are walked with as many more columns, `fold_kernel` goes from piece to piece, and they are
walked again from what enters each. Cotangents go back by M^T.

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
    rounded,
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
def finer(a, b, LOW: tl.constexpr):
    """a b of float32, of more digits than `product`."""
    if LOW is None:
        return tl.dot(a, b, input_precision="ieee")
    else:
        return tl.dot(a, b, input_precision="tf32")


@triton.jit
def solved(inverse, square, x, TRANSPOSED: tl.constexpr, LOW: tl.constexpr, C: tl.constexpr):
    """inverse x, of twice LOW's digits. inverse: a chunk's, as `inverse_kernel` leaves it; square: where its elements lie."""
    if LOW is None:
        whole = tl.load(inverse + square)
        return tl.dot(tl.trans(whole) if TRANSPOSED else whole, x, input_precision="ieee")
    else:
        high, low = tl.load(inverse + square), tl.load(inverse + C * C + square)
        if TRANSPOSED:
            high, low = tl.trans(high), tl.trans(low)
        x_high = x.to(LOW)
        x_low = (x - x_high.to(tl.float32)).to(LOW)
        return tl.dot(high, x_high, tl.dot(low, x_high, tl.dot(high, x_low)))


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
    k, beta, sums, pos, out, T, chunks, k_batch, k_row: tl.constexpr, k_head, beta_batch, beta_row: tl.constexpr, beta_head,
    X: tl.constexpr, H: tl.constexpr, GATE: tl.constexpr, HAS_POS: tl.constexpr, LOW: tl.constexpr,
    C: tl.constexpr, BX: tl.constexpr,
):  # fmt: skip
    """(I + A)^-1 of each chunk: float32 [B, H, N, 1, C, C]; or of LOW [B, H, N, 2, C, C], what is rounded and then the rest, which
    tensor cores, unlike float32, also read transposed. A first lies where its inverse will, in float32: tiles are small and depend
    on each other, so a program has a warp or two and many programs hide each other's waiting."""
    n, bh = tl.program_id(0), tl.program_id(1)
    b, h = (bh // H).to(tl.int64), bh % H
    i, row = tl.arange(0, C), tl.arange(0, 16)
    PLANES: tl.constexpr = 1 if LOW is None else 2
    left_at = out + ((b * H + h) * chunks + n) * PLANES * (C * C)
    to = left_at.to(tl.pointer_type(tl.float32))
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
    if LOW is not None:
        tl.debug_barrier()
        # both parts of an element take the room that it had
        everywhere = i[:, None] * C + i[None, :]
        whole = tl.load(to + everywhere)
        high = whole.to(LOW)
        tl.debug_barrier()
        tl.store(left_at + everywhere, high)
        tl.store(left_at + C * C + everywhere, (whole - high.to(tl.float32)).to(LOW))


@triton.jit
def writes_kernel(
    k, v, beta, sums, pos, inverse, first, u, states, last, T, chunks, piece,
    k_batch, k_row: tl.constexpr, k_head, v_batch, v_row: tl.constexpr, v_head, beta_batch, beta_row: tl.constexpr, beta_head,
    X: tl.constexpr, Y: tl.constexpr, H: tl.constexpr, GATE: tl.constexpr, HAS_POS: tl.constexpr, HAS_FIRST: tl.constexpr,
    KEEP: tl.constexpr, LOW: tl.constexpr, C: tl.constexpr, BX: tl.constexpr, BY: tl.constexpr,
):  # fmt: skip
    """Of P pieces of so many chunks; first: what enters each, [B, H, P, X, Y]. If KEEP, u [B, T, H, Y], the state before each chunk
    [B, H, N, X, Y] and behind the last one; else what each piece does to the state, add and M, last [B, H, P, X, Y + X], whose first
    is not read. BX holds all of X."""
    y, bh, p = tl.program_id(0) * BY + tl.arange(0, BY), tl.program_id(1), tl.program_id(2)
    b, h = (bh // H).to(tl.int64), bh % H
    x, i = tl.arange(0, BX), tl.arange(0, C)
    where = x[:, None] * Y + y[None, :]
    inside = (x < X)[:, None] & (y < Y)[None, :]
    square = i[:, None] * C + i[None, :]
    head = (b * H + h) * (X * Y)
    of_piece = (b * H + h) * tl.num_programs(2) + p
    k += b * k_batch + h * k_head
    v += b * v_batch + h * v_head
    beta += b * beta_batch + h * beta_head
    PLANES: tl.constexpr = 1 if LOW is None else 2
    inverse += (b * H + h) * chunks * PLANES * (C * C)
    states += head * chunks
    if KEEP:
        S = tl.load(first + of_piece * (X * Y) + where, mask=inside, other=0.0) if HAS_FIRST else tl.zeros([BX, BY], tl.float32)
    else:
        S = tl.where(x[:, None] == y[None, :] - Y, 1.0, 0.0)
    for step in range(p * piece, tl.minimum(chunks, (p + 1) * piece)):
        n = tl.cast(step, tl.int64)
        begin, left = n * C, T - step * C
        k_x = rows_of(k + begin * k_row, i, k_row, x, left, X)
        v_t = rows_of(v + begin * v_row, i, v_row, y, left, Y)
        beta_t = tl.load(beta + begin * beta_row + i * beta_row, mask=i < left, other=0.0).to(tl.float32)
        at = positions_of(pos + b * T + begin, i, left, HAS_POS)
        at_last = last_of(at, C)
        summed = sums_at(sums + (b * T + begin) * H + h, i, left, x, H, X, GATE)
        total = last_of(summed, C)
        since, until = since_begin(summed, at, C, HAS_POS), until_end(summed, total, at_last, C, HAS_POS)
        low = rounded(S, LOW)
        if KEEP:
            tl.store(states + n * (X * Y) + where, low.to(states.dtype.element_ty), mask=inside)
        missed = v_t - since[:, None] * product(k_x, low, LOW)
        u_t = solved(inverse + n * PLANES * (C * C), square, beta_t[:, None] * missed, False, LOW, C)
        S *= whole_of(total, at_last, C, HAS_POS)
        S += product(tl.trans(k_x), until[:, None] * u_t, LOW)
        if KEEP:
            leave_rows(u + ((b * T + begin) * H + h) * Y, i, H * Y, y, left, Y, u_t)
    if KEEP:
        tl.store(last + head + where, S, mask=inside & (p == tl.num_programs(2) - 1))
    else:
        to = last + of_piece * (X * (Y + X)) + x[:, None] * (Y + X) + y[None, :]
        tl.store(to, S, mask=(x < X)[:, None] & (y < Y + X)[None, :])


@triton.jit
def writes_backward_kernel(
    q, k, beta, sums, dy, pos, scores, inverse, arriving, dr, cotangents, dfirst, T, chunks, piece, scale,
    q_batch, q_row: tl.constexpr, q_head, k_batch, k_row: tl.constexpr, k_head,
    beta_batch, beta_row: tl.constexpr, beta_head, dy_batch, dy_row: tl.constexpr, dy_head,
    X: tl.constexpr, Y: tl.constexpr, H: tl.constexpr, GATE: tl.constexpr, HAS_POS: tl.constexpr, KEEP: tl.constexpr,
    LOW: tl.constexpr, C: tl.constexpr, BX: tl.constexpr, BY: tl.constexpr,
):  # fmt: skip
    """Cotangents, of P pieces of so many chunks; arriving: of what leaves each, [B, H, P, X, Y]. If KEEP, of the right-hand side,
    dr [B, T, H, Y], of the state behind each chunk [B, H, N, X, Y] and of the first, dfirst [B, H, X, Y]; else of what enters each
    piece with nothing arriving, dfirst [B, H, P, X, Y]. scores: of q and k. What multiplies tokens multiplies the rows of dy, du and
    dr, so that q and k are multiplied as they lie."""
    y, bh, p = tl.program_id(0) * BY + tl.arange(0, BY), tl.program_id(1), tl.program_id(2)
    b, h = (bh // H).to(tl.int64), bh % H
    x, i = tl.arange(0, BX), tl.arange(0, C)
    where = x[:, None] * Y + y[None, :]
    inside = (x < X)[:, None] & (y < Y)[None, :]
    square = i[:, None] * C + i[None, :]
    head = (b * H + h) * (X * Y)
    of_piece = (b * H + h) * tl.num_programs(2) + p
    q += b * q_batch + h * q_head
    k += b * k_batch + h * k_head
    beta += b * beta_batch + h * beta_head
    dy += b * dy_batch + h * dy_head
    scores += (b * H + h) * chunks * (C * C)
    PLANES: tl.constexpr = 1 if LOW is None else 2
    inverse += (b * H + h) * chunks * PLANES * (C * C)
    cotangents += head * chunks
    dS = tl.load(arriving + of_piece * (X * Y) + where, mask=inside, other=0.0) if KEEP else tl.zeros([BX, BY], tl.float32)
    behind = tl.minimum(chunks, (p + 1) * piece)
    for step in range(behind - p * piece):
        n = tl.cast(behind - 1 - step, tl.int64)
        begin = n * C
        left = T - (behind - 1 - step) * C
        k_x = rows_of(k + begin * k_row, i, k_row, x, left, X)
        dy_t = rows_of(dy + begin * dy_row, i, dy_row, y, left, Y)
        read = tl.load(scores + n * (C * C) + square)
        beta_t = tl.load(beta + begin * beta_row + i * beta_row, mask=i < left, other=0.0).to(tl.float32)
        at = positions_of(pos + b * T + begin, i, left, HAS_POS)
        at_last = last_of(at, C)
        summed = sums_at(sums + (b * T + begin) * H + h, i, left, x, H, X, GATE)
        total = last_of(summed, C)
        since, until = since_begin(summed, at, C, HAS_POS), until_end(summed, total, at_last, C, HAS_POS)
        low = rounded(dS, LOW)
        if KEEP:
            tl.store(cotangents + n * (X * Y) + where, low.to(cotangents.dtype.element_ty), mask=inside)
        du = product(k_x, low, LOW) * until[:, None]
        du += product(tl.trans(read), dy_t * scale, LOW)
        dr_t = solved(inverse + n * PLANES * (C * C), square, du, True, LOW, C)
        # not before: it would take registers that the others need
        q_x = rows_of(q + begin * q_row, i, q_row, x, left, X)
        dS *= whole_of(total, at_last, C, HAS_POS)
        dS += product(tl.trans(q_x), dy_t * (since * scale)[:, None], LOW)
        dS -= product(tl.trans(k_x), (since * beta_t)[:, None] * dr_t, LOW)
        if KEEP:
            leave_rows(dr + ((b * T + begin) * H + h) * Y, i, H * Y, y, left, Y, dr_t)
    if KEEP:
        tl.store(dfirst + head + where, dS, mask=inside & (p == 0))
    else:
        tl.store(dfirst + of_piece * (X * Y) + where, dS, mask=inside)


@triton.jit
def fold_kernel(
    effects, adds, first, arriving, pieces, X: tl.constexpr, Y: tl.constexpr, WIDTH: tl.constexpr, HAS_FIRST: tl.constexpr,
    BACKWARDS: tl.constexpr, BX: tl.constexpr, BY: tl.constexpr,
):  # fmt: skip
    """What enters each piece, arriving [B, H, P, X, Y], by effects [B, H, P, X, Y + X] as `writes_kernel` leaves them; or, if
    BACKWARDS, the cotangents of what leaves each. adds: what a piece adds, [B, H, P, X, WIDTH], in its first Y columns; first: what
    enters the first piece, [B, H, X, Y], or leaves the last. In float32, and exact where M is the unit matrix."""
    y, bh = tl.program_id(0) * BY + tl.arange(0, BY), tl.program_id(1).to(tl.int64)
    i = tl.arange(0, BX)
    first += bh * (X * Y)
    effects += bh * pieces * (X * (Y + X)) + Y
    adds += bh * pieces * (X * WIDTH)
    arriving += bh * pieces * (X * Y)
    for x0 in range(0, X, BX):
        x = x0 + i
        inside = (x < X)[:, None] & (y < Y)[None, :]
        where = x[:, None] * Y + y[None, :]
        S = tl.load(first + where, mask=inside, other=0.0) if HAS_FIRST else tl.zeros([BX, BY], tl.float32)
        tl.store(arriving + (pieces - 1 if BACKWARDS else 0) * (X * Y) + where, S, mask=inside)
    for step in range(pieces - 1):
        n = pieces - 1 - step if BACKWARDS else step
        to = arriving + (n - 1 if BACKWARDS else n + 1) * (X * Y)
        # what other lanes have stored
        tl.debug_barrier()
        for x0 in range(0, X, BX):
            x = x0 + i
            inside = (x < X)[:, None] & (y < Y)[None, :]
            S = tl.load(adds + n * (X * WIDTH) + x[:, None] * WIDTH + y[None, :], mask=inside, other=0.0)
            for z0 in range(0, X, BX):
                z = z0 + i
                rows, columns = (z[None, :], x[:, None]) if BACKWARDS else (x[:, None], z[None, :])
                M = tl.load(effects + n * (X * (Y + X)) + rows * (Y + X) + columns, mask=(rows < X) & (columns < X), other=0.0)
                entering = arriving + n * (X * Y) + z[:, None] * Y + y[None, :]
                S += tl.dot(M, tl.load(entering, mask=(z < X)[:, None] & (y < Y)[None, :], other=0.0), input_precision="ieee")
            tl.store(to + x[:, None] * Y + y[None, :], S, mask=inside)


@triton.jit
def overlaps(a, b, i, left, a_row, b_row, X: tl.constexpr, LOW: tl.constexpr, C: tl.constexpr, BX: tl.constexpr):
    """a b^T of a chunk's tokens, [C, C]; so many of them are left."""
    found = tl.zeros([C, C], tl.float32)
    for x0 in range(0, X, BX):
        x = x0 + tl.arange(0, BX)
        found += product(rows_of(a, i, a_row, x, left, X), tl.trans(rows_of(b, i, b_row, x, left, X)), LOW)
    return found


@triton.jit
def dbeta_of_zeros_kernel(
    k, v, beta, sums, pos, u, dr, states, dbeta, T, chunks,
    k_batch, k_row: tl.constexpr, k_head, v_batch, v_row: tl.constexpr, v_head, beta_batch, beta_row: tl.constexpr, beta_head,
    X: tl.constexpr, Y: tl.constexpr, H: tl.constexpr, GATE: tl.constexpr, HAS_POS: tl.constexpr,
    LOW: tl.constexpr, C: tl.constexpr, BX: tl.constexpr, BY: tl.constexpr,
):  # fmt: skip
    """dbeta [B, T, H] of tokens whose beta is 0, so that u says nothing of what beta multiplies: that is made again of v, the state
    that entered and u. Chunks without such a token have nothing to do."""
    n, bh = tl.program_id(0), tl.program_id(1)
    b, h = (bh // H).to(tl.int64), bh % H
    i, begin, left = tl.arange(0, C), (n * C).to(tl.int64), T - n * C
    of_rows = (b * T + begin) * H + h
    beta_t = tl.load(beta + b * beta_batch + h * beta_head + (begin + i) * beta_row, mask=i < left, other=1.0)
    nothing = beta_t.to(tl.float32) == 0.0
    if tl.sum(nothing.to(tl.int32), 0) > 0:
        k += b * k_batch + h * k_head + begin * k_row
        v += b * v_batch + h * v_head + begin * v_row
        states += ((b * H + h) * chunks + n) * (X * Y)
        at = positions_of(pos + b * T + begin, i, left, HAS_POS)
        summed = sums_at(sums + of_rows, i, left, i, H, X, GATE)
        since = since_begin(summed, at, C, HAS_POS)
        found = overlaps(k, k, i, left, k_row, k_row, X, LOW, C, BX)
        found *= tl.where(i[:, None] > i[None, :], decays_between(summed, at, C, GATE, HAS_POS), 0.0)
        dbeta_t = tl.zeros([C], tl.float32)
        for y0 in range(0, Y, BY):
            y = y0 + tl.arange(0, BY)
            recalled = tl.zeros([C, BY], tl.float32)
            for x0 in range(0, X, BX):
                x = x0 + tl.arange(0, BX)
                recalled += product(rows_of(k, i, k_row, x, left, X), block_of(states, x, y, X, Y), LOW)
            earlier = finer(found, rows_of(u + of_rows * Y, i, H * Y, y, left, Y).to(tl.float32), LOW)
            missed = rows_of(v, i, v_row, y, left, Y).to(tl.float32) - since[:, None] * recalled - earlier
            dbeta_t += tl.sum(rows_of(dr + of_rows * Y, i, H * Y, y, left, Y).to(tl.float32) * missed, 1)
        tl.store(dbeta + of_rows + i * H, dbeta_t, mask=nothing)


@triton.jit
def gradients_kernel(
    q, k, beta, sums, dy, pos, u, dr, states, cotangents, dq, dk, dv, dbeta, dg, T, chunks, scale,
    q_batch, q_row: tl.constexpr, q_head, k_batch, k_row: tl.constexpr, k_head,
    beta_batch, beta_row: tl.constexpr, beta_head, dy_batch, dy_row: tl.constexpr, dy_head,
    X: tl.constexpr, Y: tl.constexpr, H: tl.constexpr, GATE: tl.constexpr, HAS_POS: tl.constexpr,
    LOW: tl.constexpr, C: tl.constexpr, BX: tl.constexpr, BY: tl.constexpr,
):  # fmt: skip
    """All of a chunk's gradients at once, for they read the same states, keys and writes: dq, dk [B, T, H, X], dv [B, T, H, Y],
    dbeta [B, T, H] and, of a SCALAR, dg [B, T, H]."""
    n, bh = tl.program_id(0), tl.program_id(1)
    b, h = (bh // H).to(tl.int64), bh % H
    i, begin, left = tl.arange(0, C), (n * C).to(tl.int64), T - n * C
    of_rows, of_chunk = (b * T + begin) * H + h, (b * H + h) * chunks + n
    q += b * q_batch + h * q_head + begin * q_row
    k += b * k_batch + h * k_head + begin * k_row
    beta += b * beta_batch + h * beta_head + begin * beta_row
    dy += b * dy_batch + h * dy_head + begin * dy_row
    pos += b * T + begin
    sums += of_rows
    u += of_rows * Y
    dr += of_rows * Y
    states += of_chunk * (X * Y)
    cotangents += of_chunk * (X * Y)
    beta_t = tl.load(beta + i * beta_row, mask=i < left, other=0.0).to(tl.float32)
    y = tl.arange(0, BY)
    dy_y, u_y, dr_y = rows_of(dy, i, dy_row, y, left, Y), rows_of(u, i, H * Y, y, left, Y), rows_of(dr, i, H * Y, y, left, Y)
    # of what is read of each write, and of A but for beta and the decays
    over_writes = tl.zeros([C, C], tl.float32)
    over_keys = tl.zeros([C, C], tl.float32)
    for y0 in range(0, Y, BY):
        if Y > BY:
            y = y0 + tl.arange(0, BY)
            dy_y = rows_of(dy, i, dy_row, y, left, Y)
            u_y, dr_y = rows_of(u, i, H * Y, y, left, Y), rows_of(dr, i, H * Y, y, left, Y)
        over_writes += product(dy_y, tl.trans(u_y), LOW)
        over_keys += product(dr_y, tl.trans(u_y), LOW)
        leave_rows(dv + of_rows * Y, i, H * Y, y, left, Y, beta_t[:, None] * dr_y.to(tl.float32))
    at = positions_of(pos, i, left, HAS_POS)
    at_last = last_of(at, C)
    summed = sums_at(sums, i, left, i, H, X, GATE)
    total = last_of(summed, C)
    since, until = since_begin(summed, at, C, HAS_POS), until_end(summed, total, at_last, C, HAS_POS)
    decays = decays_between(summed, at, C, GATE, HAS_POS)
    times_beta = tl.sum(tl.where(i[:, None] == i[None, :], over_keys, 0.0), 1)
    over_writes *= decays * scale
    if GATE != NONE:
        # what a gate's gradient grows by from a token on to the one before it: of pairs on one side of a gate what the later token
        # brings the earlier one takes away, for every pair is the same number in both sums
        pairs = over_writes * overlaps(q, k, i, left, q_row, k_row, X, LOW, C, BX)
    over_writes = rounded(over_writes, LOW)
    over_keys *= tl.where(i[:, None] > i[None, :], -beta_t[:, None] * decays, 0.0)
    both = rounded(over_keys + tl.trans(over_keys), LOW)
    if GATE != NONE:
        pairs += over_keys * overlaps(k, k, i, left, k_row, k_row, X, LOW, C, BX)
        flow = tl.sum(pairs, 1) - tl.sum(pairs, 0)
        # in all, what reaches the chunk's end of what entered and of what is written
        met = tl.zeros([BX], tl.float32)
        brought = tl.zeros([C], tl.float32)
    for x0 in range(0, X, BX):
        x = x0 + tl.arange(0, BX)
        S, dS = block_of(states, x, y, X, Y), block_of(cotangents, x, y, X, Y)
        k_x, q_x = rows_of(k, i, k_row, x, left, X), rows_of(q, i, q_row, x, left, X)
        dq_x = tl.zeros([C, BX], tl.float32)
        for y0 in range(0, Y, BY):
            if Y > BY:
                y = y0 + tl.arange(0, BY)
                dy_y, S = rows_of(dy, i, dy_row, y, left, Y), block_of(states, x, y, X, Y)
            dq_x += product(dy_y, tl.trans(S), LOW)
        dq_x *= (since * scale)[:, None]
        if GATE != NONE:
            flow += tl.sum(q_x * dq_x, 1)
        dq_x += product(over_writes, k_x, LOW)
        leave_rows(dq + of_rows * X, i, H * X, x, left, X, dq_x)
        written = tl.zeros([C, BX], tl.float32)
        recalled = tl.zeros([C, BX], tl.float32)
        for y0 in range(0, Y, BY):
            if Y > BY:
                y = y0 + tl.arange(0, BY)
                u_y, dr_y = rows_of(u, i, H * Y, y, left, Y), rows_of(dr, i, H * Y, y, left, Y)
                S, dS = block_of(states, x, y, X, Y), block_of(cotangents, x, y, X, Y)
            written += product(u_y, tl.trans(dS), LOW)
            recalled += product(dr_y, tl.trans(S), LOW)
            if GATE != NONE:
                # a product's trace: the elements would take many registers
                over_y = product(S, tl.trans(dS), LOW)
                met += tl.sum(tl.where(tl.arange(0, BX)[:, None] == tl.arange(0, BX)[None, :], over_y, 0.0), 1)
        written *= until[:, None]
        recalled *= (since * beta_t)[:, None]
        if GATE != NONE:
            of_token = tl.sum(k_x * written, 1)
            brought += of_token
            flow -= of_token + tl.sum(k_x * recalled, 1)
        dk_x = written - recalled + product(tl.trans(over_writes), q_x, LOW)
        dk_x += product(both, k_x, LOW)
        leave_rows(dk + of_rows * X, i, H * X, x, left, X, dk_x)
    to = of_rows + i * H
    if GATE != NONE:
        # of [1, BX]: with a sum over one dimension alone Triton 3.6 fails for sm_100
        behind = tl.sum(met[None, :], 1) * whole_of(total, at_last, C, HAS_POS) + tl.sum(brought[None, :], 1)
        grad_g = tl.cumsum(flow, 0, reverse=True) + behind
        tl.store(dg + to, grad_g, mask=i < left)
    # beta multiplies what u / beta is; where there is no quotient, `dbeta_of_zeros_kernel` comes after this one
    dbeta_t = times_beta / tl.where(beta_t == 0.0, 1.0, beta_t)
    tl.store(dbeta + to, dbeta_t, mask=i < left)
