"""The gradients of `wy_forward_kernels`, in Triton.

The one thing to know: dr = (I + A)^-T du is the right-hand side's cotangent. So dv = beta dr, dA = -dr u^T, and beta's own is dr
times what beta multiplies, u / beta, without making that again. Only dr and the states' cotangents are walked for, from the last
chunk to the first; a program for each chunk makes all else of them.

Shape suffixes as in `gated_linear_attention.triton_kernels`: X is d_key, Y d_value.
"""

import triton
import triton.language as tl

from baton.kernels.delta_rule.wy_forward_kernels import solved
from baton.kernels.gated_linear_attention.triton_common import (
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
def finer(a, b, LOW: tl.constexpr):
    """a b of float32, of more digits than `product`."""
    if LOW is None:
        return tl.dot(a, b, input_precision="ieee")
    else:
        return tl.dot(a, b, input_precision="tf32")


@triton.jit
def wy_u_backward_kernel(
    q, k, beta, sums, dy, pos, scores, inverse, arriving, dr, cotangents, dfirst, T, chunks, piece, scale,
    q_batch, q_row: tl.constexpr, q_head, k_batch, k_row: tl.constexpr, k_head,
    beta_batch, beta_row: tl.constexpr, beta_head, dy_batch, dy_row: tl.constexpr, dy_head,
    X: tl.constexpr, Y: tl.constexpr, H: tl.constexpr, GATE: tl.constexpr, HAS_POS: tl.constexpr, KEEP: tl.constexpr,
    LOW: tl.constexpr, C: tl.constexpr, BX: tl.constexpr, BY: tl.constexpr,
):  # fmt: skip
    """Cotangents, of P pieces of so many chunks; arriving: of what leaves each, [B, H, P, X, Y]. If KEEP, of the right-hand side,
    dr [B, T, H, Y], of the state behind each chunk [B, H, N, X, Y] and of the first, dfirst [B, H, X, Y]; else of what enters each
    piece with nothing arriving, dfirst [B, H, P, X, Y]. scores: of q and k. What multiplies tokens multiplies the rows of dy, du
    and dr, so that q and k are multiplied as they lie."""
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
def overlaps(a, b, i, left, a_row, b_row, X: tl.constexpr, LOW: tl.constexpr, C: tl.constexpr, BX: tl.constexpr):
    """a b^T of a chunk's tokens, [C, C]; so many of them are left."""
    found = tl.zeros([C, C], tl.float32)
    for x0 in range(0, X, BX):
        x = x0 + tl.arange(0, BX)
        found += product(rows_of(a, i, a_row, x, left, X), tl.trans(rows_of(b, i, b_row, x, left, X)), LOW)
    return found


@triton.jit
def wy_dbeta_zero_kernel(
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
def wy_gradients_kernel(
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
    # beta multiplies what u / beta is; where there is no quotient, `wy_dbeta_zero_kernel` comes after this one
    dbeta_t = times_beta / tl.where(beta_t == 0.0, 1.0, beta_t)
    tl.store(dbeta + to, dbeta_t, mask=i < left)
