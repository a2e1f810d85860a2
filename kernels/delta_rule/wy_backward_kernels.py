"""Gradients of the WY representation (`wy_forward_kernels`), in Triton.

Shape suffixes as in `gated_linear_attention.triton_kernels`: X is d_key, Y d_value.

dr = (I + A)^-T du is the gradient of the right-hand side. Then dv = beta dr, dA = -dr u^T, and dbeta is dr times the factor of
beta, u / beta, which is not recomputed. Only dr and the gradients of the states require a sequential loop, from the last chunk to
the first; one program per chunk computes all other gradients from them.
"""

import triton
import triton.language as tl

from baton.kernels.delta_rule.wy_forward_kernels import apply_inverse
from baton.kernels.gated_linear_attention.triton_common import (
    NONE,
    chunk_decay,
    decay_from_start,
    decay_to_end,
    dot,
    last_gate_sum,
    last_position,
    load_gate_sums,
    load_positions,
    load_rows,
    load_state_block,
    pairwise_decays,
    round_operand,
    store_rows,
)


@triton.jit
def dot_tf32(a, b, DOT_DTYPE: tl.constexpr):
    """a b of float32 operands, more precise than `dot`."""
    if DOT_DTYPE is None:
        return tl.dot(a, b, input_precision="ieee")
    else:
        return tl.dot(a, b, input_precision="tf32")


@triton.jit
def wy_u_backward_kernel(
    q, k, beta, sums, dy, pos, scores, inverse, arriving, dr, cotangents, dfirst, T, chunks, piece, scale,
    q_batch, q_row: tl.constexpr, q_head, k_batch, k_row: tl.constexpr, k_head,
    beta_batch, beta_row: tl.constexpr, beta_head, dy_batch, dy_row: tl.constexpr, dy_head,
    X: tl.constexpr, Y: tl.constexpr, H: tl.constexpr, GATE: tl.constexpr, HAS_POS: tl.constexpr, KEEP: tl.constexpr,
    DOT_DTYPE: tl.constexpr, C: tl.constexpr, BX: tl.constexpr, BY: tl.constexpr,
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
    PLANES: tl.constexpr = 1 if DOT_DTYPE is None else 2
    inverse += (b * H + h) * chunks * PLANES * (C * C)
    cotangents += head * chunks
    dS = tl.load(arriving + of_piece * (X * Y) + where, mask=inside, other=0.0) if KEEP else tl.zeros([BX, BY], tl.float32)
    behind = tl.minimum(chunks, (p + 1) * piece)
    for step in range(behind - p * piece):
        n = tl.cast(behind - 1 - step, tl.int64)
        begin = n * C
        left = T - (behind - 1 - step) * C
        # before the loads: a product waits for stores, too, and so for both at once
        low = round_operand(dS, DOT_DTYPE)
        if KEEP:
            tl.store(cotangents + n * (X * Y) + where, low.to(cotangents.dtype.element_ty), mask=inside)
        k_x = load_rows(k + begin * k_row, i, k_row, x, left, X)
        dy_t = load_rows(dy + begin * dy_row, i, dy_row, y, left, Y)
        read = tl.load(scores + n * (C * C) + square)
        beta_t = tl.load(beta + begin * beta_row + i * beta_row, mask=i < left, other=0.0).to(tl.float32)
        at = load_positions(pos + b * T + begin, i, left, HAS_POS)
        at_last = last_position(pos + b * T + begin, 0, left, C, HAS_POS)
        of_chunk = sums + (b * T + begin) * H + h
        summed = load_gate_sums(of_chunk, i, left, x, H, X, GATE)
        total = last_gate_sum(of_chunk, 0, left, H, GATE, C)
        since, until = decay_from_start(summed, at, C, HAS_POS), decay_to_end(summed, total, at_last, C, HAS_POS)
        du = dot(k_x, low, DOT_DTYPE) * until[:, None]
        du += dot(tl.trans(read), dy_t * scale, DOT_DTYPE)
        dr_t = apply_inverse(inverse + n * PLANES * (C * C), square, du, True, DOT_DTYPE, C)
        # not before: it would take registers that the others need
        q_x = load_rows(q + begin * q_row, i, q_row, x, left, X)
        dS *= chunk_decay(total, at_last, C, HAS_POS)
        dS += dot(tl.trans(q_x), dy_t * (since * scale)[:, None], DOT_DTYPE)
        # added, so that the product is summed up in dS's own registers
        dS += dot(tl.trans(k_x), (since * -beta_t)[:, None] * dr_t, DOT_DTYPE)
        if KEEP:
            store_rows(dr + ((b * T + begin) * H + h) * Y, i, H * Y, y, left, Y, dr_t)
    if KEEP:
        tl.store(dfirst + head + where, dS, mask=inside & (p == 0))
    else:
        tl.store(dfirst + of_piece * (X * Y) + where, dS, mask=inside)


@triton.jit
def chunk_products(a, b, i, left, a_row, b_row, X: tl.constexpr, DOT_DTYPE: tl.constexpr, C: tl.constexpr, BX: tl.constexpr):
    """a b^T of a chunk's tokens, [C, C]; left: the number of tokens from the chunk's start on."""
    found = tl.zeros([C, C], tl.float32)
    for x0 in range(0, X, BX):
        x = x0 + tl.arange(0, BX)
        found += dot(load_rows(a, i, a_row, x, left, X), tl.trans(load_rows(b, i, b_row, x, left, X)), DOT_DTYPE)
    return found


@triton.jit
def wy_dbeta_zero_kernel(
    k, v, beta, sums, pos, u, dr, states, dbeta, T, chunks,
    k_batch, k_row: tl.constexpr, k_head, v_batch, v_row: tl.constexpr, v_head, beta_batch, beta_row: tl.constexpr, beta_head,
    X: tl.constexpr, Y: tl.constexpr, H: tl.constexpr, GATE: tl.constexpr, HAS_POS: tl.constexpr,
    DOT_DTYPE: tl.constexpr, C: tl.constexpr, BX: tl.constexpr, BY: tl.constexpr,
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
        at = load_positions(pos + b * T + begin, i, left, HAS_POS)
        summed = load_gate_sums(sums + of_rows, i, left, i, H, X, GATE)
        since = decay_from_start(summed, at, C, HAS_POS)
        found = chunk_products(k, k, i, left, k_row, k_row, X, DOT_DTYPE, C, BX)
        found *= tl.where(i[:, None] > i[None, :], pairwise_decays(summed, at, C, GATE, HAS_POS), 0.0)
        dbeta_t = tl.zeros([C], tl.float32)
        for y0 in range(0, Y, BY):
            y = y0 + tl.arange(0, BY)
            recalled = tl.zeros([C, BY], tl.float32)
            for x0 in range(0, X, BX):
                x = x0 + tl.arange(0, BX)
                recalled += dot(load_rows(k, i, k_row, x, left, X), load_state_block(states, x, y, X, Y), DOT_DTYPE)
            earlier = dot_tf32(found, load_rows(u + of_rows * Y, i, H * Y, y, left, Y).to(tl.float32), DOT_DTYPE)
            missed = load_rows(v, i, v_row, y, left, Y).to(tl.float32) - since[:, None] * recalled - earlier
            dbeta_t += tl.sum(load_rows(dr + of_rows * Y, i, H * Y, y, left, Y).to(tl.float32) * missed, 1)
        tl.store(dbeta + of_rows + i * H, dbeta_t, mask=nothing)


@triton.jit
def wy_gradients_kernel(
    q, k, beta, sums, dy, pos, u, dr, states, cotangents, dq, dk, dv, dbeta, dg, T, chunks, scale,
    q_batch, q_row: tl.constexpr, q_head, k_batch, k_row: tl.constexpr, k_head,
    beta_batch, beta_row: tl.constexpr, beta_head, dy_batch, dy_row: tl.constexpr, dy_head,
    X: tl.constexpr, Y: tl.constexpr, H: tl.constexpr, GATE: tl.constexpr, HAS_POS: tl.constexpr,
    DOT_DTYPE: tl.constexpr, C: tl.constexpr, BX: tl.constexpr, BY: tl.constexpr,
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
    dy_y, u_y, dr_y = (
        load_rows(dy, i, dy_row, y, left, Y),
        load_rows(u, i, H * Y, y, left, Y),
        load_rows(dr, i, H * Y, y, left, Y),
    )
    # of what is read of each write, and of A but for beta and the decays
    over_writes = tl.zeros([C, C], tl.float32)
    over_keys = tl.zeros([C, C], tl.float32)
    for y0 in range(0, Y, BY):
        if Y > BY:
            y = y0 + tl.arange(0, BY)
            dy_y = load_rows(dy, i, dy_row, y, left, Y)
            u_y, dr_y = load_rows(u, i, H * Y, y, left, Y), load_rows(dr, i, H * Y, y, left, Y)
        over_writes += dot(dy_y, tl.trans(u_y), DOT_DTYPE)
        over_keys += dot(dr_y, tl.trans(u_y), DOT_DTYPE)
        store_rows(dv + of_rows * Y, i, H * Y, y, left, Y, beta_t[:, None] * dr_y.to(tl.float32))
    at = load_positions(pos, i, left, HAS_POS)
    at_last = last_position(pos, 0, left, C, HAS_POS)
    summed = load_gate_sums(sums, i, left, i, H, X, GATE)
    total = last_gate_sum(sums, 0, left, H, GATE, C)
    since, until = decay_from_start(summed, at, C, HAS_POS), decay_to_end(summed, total, at_last, C, HAS_POS)
    decays = pairwise_decays(summed, at, C, GATE, HAS_POS)
    # beta multiplies what u / beta is; where there is no quotient, `wy_dbeta_zero_kernel` comes after this one
    times_beta = tl.sum(tl.where(i[:, None] == i[None, :], over_keys, 0.0), 1)
    tl.store(dbeta + of_rows + i * H, times_beta / tl.where(beta_t == 0.0, 1.0, beta_t), mask=i < left)
    over_keys *= tl.where(i[:, None] > i[None, :], -beta_t[:, None] * decays, 0.0)
    both = round_operand(over_keys + tl.trans(over_keys), DOT_DTYPE)
    if GATE != NONE:
        # what a gate's gradient grows by from a token on to the one before it: of pairs on one side of a gate what the later token
        # brings the earlier one takes away, for every pair is the same number in both sums
        over_keys *= chunk_products(k, k, i, left, k_row, k_row, X, DOT_DTYPE, C, BX)
        flow = tl.sum(over_keys, 1) - tl.sum(over_keys, 0)
    over_writes *= decays * scale
    if GATE != NONE:
        pairs = over_writes * chunk_products(q, k, i, left, q_row, k_row, X, DOT_DTYPE, C, BX)
        flow += tl.sum(pairs, 1) - tl.sum(pairs, 0)
    over_writes = round_operand(over_writes, DOT_DTYPE)
    if GATE != NONE:
        # in all, what reaches the chunk's end of what entered and of what is written
        met, brought = tl.zeros([1], tl.float32), tl.zeros([1], tl.float32)
    for x0 in range(0, X, BX):
        x = x0 + tl.arange(0, BX)
        S, dS = load_state_block(states, x, y, X, Y), load_state_block(cotangents, x, y, X, Y)
        dq_x = tl.zeros([C, BX], tl.float32)
        for y0 in range(0, Y, BY):
            if Y > BY:
                y = y0 + tl.arange(0, BY)
                dy_y, S = load_rows(dy, i, dy_row, y, left, Y), load_state_block(states, x, y, X, Y)
            dq_x += dot(dy_y, tl.trans(S), DOT_DTYPE)
            if GATE != NONE:
                # a product's trace: the elements would take many registers
                over_y = dot(S, tl.trans(load_state_block(cotangents, x, y, X, Y)), DOT_DTYPE)
                trace = tl.sum(tl.where(tl.arange(0, BX)[:, None] == tl.arange(0, BX)[None, :], over_y, 0.0), 1)
                met += tl.sum(trace[None, :], 1)  # of [1, BX]: with a sum over one dimension alone Triton 3.6 fails for sm_100
        k_x, q_x = load_rows(k, i, k_row, x, left, X), load_rows(q, i, q_row, x, left, X)
        dq_x *= (since * scale)[:, None]
        if GATE != NONE:
            flow += tl.sum(q_x * dq_x, 1)
        dq_x += dot(over_writes, k_x, DOT_DTYPE)
        store_rows(dq + of_rows * X, i, H * X, x, left, X, dq_x)
        written = tl.zeros([C, BX], tl.float32)
        recalled = tl.zeros([C, BX], tl.float32)
        for y0 in range(0, Y, BY):
            if Y > BY:
                y = y0 + tl.arange(0, BY)
                u_y, dr_y = load_rows(u, i, H * Y, y, left, Y), load_rows(dr, i, H * Y, y, left, Y)
                S, dS = load_state_block(states, x, y, X, Y), load_state_block(cotangents, x, y, X, Y)
            written += dot(u_y, tl.trans(dS), DOT_DTYPE)
            recalled += dot(dr_y, tl.trans(S), DOT_DTYPE)
        written *= until[:, None]
        recalled *= (since * beta_t)[:, None]
        if GATE != NONE:
            of_token = tl.sum(k_x * written, 1)
            brought += tl.sum(of_token[None, :], 1)
            flow -= of_token + tl.sum(k_x * recalled, 1)
        q_x = load_rows(q, i, q_row, x, left, X)
        dk_x = written - recalled + dot(tl.trans(over_writes), q_x, DOT_DTYPE)
        dk_x += dot(both, k_x, DOT_DTYPE)
        store_rows(dk + of_rows * X, i, H * X, x, left, X, dk_x)
    if GATE != NONE:
        behind = met * chunk_decay(total, at_last, C, HAS_POS) + brought
        grad_g = tl.cumsum(flow, 0, reverse=True) + behind
        tl.store(dg + of_rows + i * H, grad_g, mask=i < left)
