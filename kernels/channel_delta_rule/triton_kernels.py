"""The delta rule with a decay per key channel (Kimi Delta Attention), in Triton: what differs from the kernels of the delta rule
and of gated linear attention.

Shape suffixes as in `gated_linear_attention.triton_kernels`: X is d_key, Y d_value.

With u, the values that tokens write, the rule is gated linear attention: its kernels compute the output, and the products from
which the WY representation is made (Kimi Team 2025, "Kimi Linear", section 3). A token reads the state twice, with its query for
the output and with its key for what it replaces. So the gradients along x are those of gated linear attention with two query heads
per head: q with dy, and the key with -beta dr, where dr is the gradient of u / beta (see `delta_rule.wy_backward_kernels`). They
include those of the log-decays.

If ALTERNATE, each token reads once, with its query: those at even places for what they replace, with a beta of 1, those at odd
places for the output (`generalized_delta_rule.chunk_launch`). Then one tensor has what all read of the state that enters. Chunks
begin at even places; v and dy have the tokens at odd places alone, those at even ones are zeros.

The walks over chunks read keys and queries with their decays to or from the chunk's ends, in which documents' starts are zeros
(`channel_prepare_kernel`). Of decays they know one number per channel and chunk.
"""

import triton
import triton.language as tl

from baton.kernels.common.triton_prefetch import LOG2_E
from baton.kernels.delta_rule.triangular_inverse import invert_unit_lower, store_inverse
from baton.kernels.delta_rule.wy_backward_kernels import dot_tf32
from baton.kernels.delta_rule.wy_forward_kernels import apply_inverse
from baton.kernels.gated_linear_attention.triton_common import (
    CHANNEL,
    LEAST,
    NEAR,
    NEAREST,
    causal_mask,
    chunk_decay,
    decay_from_start,
    decay_to_end,
    dot,
    joined_pairs,
    last_position,
    load_gate_sums,
    load_positions,
    load_state_block,
    load_tokens,
    round_operand,
    split_token,
    store_tokens,
)


@triton.jit
def load_values(base, n, i, row, y, left, Y: tl.constexpr, ALTERNATE: tl.constexpr, C: tl.constexpr):
    """Tokens i of chunk n of v or dy, columns y; zeros from token `left` on and, if ALTERNATE, at even places."""
    if ALTERNATE:
        inside = ((i % 2 == 1) & (i < left))[:, None] & (y < Y)[None, :]
        return tl.load(base + n * (C // 2) * row + (i // 2)[:, None].to(tl.int64) * row + y[None, :], mask=inside, other=0.0)
    else:
        return load_tokens(base + n * C * row, i, row, y, left, Y)


@triton.jit
def channel_prepare_kernel(
    q, k, g, pos, sums, read_q, read_a, written, whole, T, scale,
    q_batch, q_row, q_head, k_batch, k_row, k_head, g_batch, g_row, g_head,
    X: tl.constexpr, H: tl.constexpr, HAS_POS: tl.constexpr, C: tl.constexpr, BX: tl.constexpr,
):  # fmt: skip
    """Gates' sums from each chunk's begin; what of q, with the scale, and of k, for values that are replaced, is read of the state
    that enters a chunk; what of k reaches the chunk's end, all [B, T, H, X]; and what is left behind a chunk of what entered,
    [B, H, N, X]."""
    n, bh = tl.program_id(0), tl.program_id(2)
    b, h = (bh // H).to(tl.int64), bh % H
    t, x = n * C + tl.arange(0, C), tl.program_id(1) * BX + tl.arange(0, BX)
    to = (b * T * H + h) * X
    gates = tl.maximum(load_tokens(g + b * g_batch + h * g_head, t, g_row, x, T, X).to(tl.float32) * LOG2_E, LEAST)
    summed = tl.cumsum(gates.to(sums.dtype.element_ty), 0)
    store_tokens(sums + to, t, H * X, x, T, X, summed)
    at = load_positions(pos + b * T, t, T, HAS_POS)
    since = decay_from_start(summed, at, C, HAS_POS)
    q_x = load_tokens(q + b * q_batch + h * q_head, t, q_row, x, T, X)
    store_tokens(read_q + to, t, H * X, x, T, X, q_x.to(tl.float32) * since * scale)
    k_x = load_tokens(k + b * k_batch + h * k_head, t, k_row, x, T, X).to(tl.float32)
    store_tokens(read_a + to, t, H * X, x, T, X, k_x * since)
    total = tl.sum(tl.where((tl.arange(0, C) == C - 1)[:, None], summed, 0.0), 0)
    at_last = last_position(pos + b * T, n * C, T, C, HAS_POS)
    store_tokens(written + to, t, H * X, x, T, X, k_x * decay_to_end(summed, total[None, :], at_last, C, HAS_POS))
    left = chunk_decay(total, at_last, C, HAS_POS)
    tl.store(whole + ((b * H + h) * tl.num_programs(0) + n) * X + x, left, mask=x < X)


@triton.jit
def channel_inverse_kernel(
    beta, out, T, chunks, beta_batch, beta_row: tl.constexpr, beta_head,
    H: tl.constexpr, ALTERNATE: tl.constexpr, DOT_DTYPE: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """(I + A)^-1 of each chunk in the place of what token i reads of key j, float32 [B, H, N, C, C]; of DOT_DTYPE two planes, as
    `delta_rule.wy_forward_kernels.wy_inverse_kernel` leaves it."""
    n, bh = tl.program_id(0), tl.program_id(1)
    b, h = (bh // H).to(tl.int64), bh % H
    i = tl.arange(0, C)
    t = n * C + i
    to = out + ((b * H + h) * chunks + n) * (C * C)
    strengths = tl.load(beta + b * beta_batch + h * beta_head + t.to(tl.int64) * beta_row, mask=t < T, other=0.0).to(tl.float32)
    if ALTERNATE:  # the others replace nothing
        strengths = tl.where(t % 2 == 0, strengths, 0.0)
    everywhere = to + i[:, None] * C + i[None, :]
    A = strengths[:, None] * tl.load(everywhere)
    tl.store(everywhere, tl.where(i[:, None] > i[None, :], A, 0.0))
    tl.debug_barrier()
    inverse = invert_unit_lower(to, DOT_DTYPE, C)
    tl.debug_barrier()
    store_inverse(to if DOT_DTYPE is None else to.to(tl.pointer_type(DOT_DTYPE)), inverse, DOT_DTYPE, C)


@triton.jit
def channel_u_kernel(
    read_a, written, whole, v, beta, inverse, first, u, states, last, T, chunks, piece,
    v_batch, v_row: tl.constexpr, v_head, beta_batch, beta_row: tl.constexpr, beta_head,
    X: tl.constexpr, Y: tl.constexpr, H: tl.constexpr, HAS_FIRST: tl.constexpr, KEEP: tl.constexpr,
    ALTERNATE: tl.constexpr, DOT_DTYPE: tl.constexpr, C: tl.constexpr, BX: tl.constexpr, BY: tl.constexpr,
):  # fmt: skip
    """As `delta_rule.wy_forward_kernels.wy_u_kernel`: u, the states and the last one if KEEP, else what each piece does to the
    state."""
    y, bh, p = tl.program_id(0) * BY + tl.arange(0, BY), tl.program_id(1), tl.program_id(2)
    b, h = (bh // H).to(tl.int64), bh % H
    x, i = tl.arange(0, BX), tl.arange(0, C)
    where = x[:, None] * Y + y[None, :]
    inside = (x < X)[:, None] & (y < Y)[None, :]
    square = i[:, None] * C + i[None, :]
    head = (b * H + h) * (X * Y)
    of_piece = (b * H + h) * tl.num_programs(2) + p
    read_a += (b * T * H + h) * X
    written += (b * T * H + h) * X
    whole += (b * H + h) * chunks * X
    v += b * v_batch + h * v_head
    beta += b * beta_batch + h * beta_head
    PLANES: tl.constexpr = 1 if DOT_DTYPE is None else 2
    inverse += (b * H + h) * chunks * PLANES * (C * C)
    states += head * chunks
    if KEEP:
        S = tl.load(first + of_piece * (X * Y) + where, mask=inside, other=0.0) if HAS_FIRST else tl.zeros([BX, BY], tl.float32)
    else:
        S = tl.where(x[:, None] == y[None, :] - Y, 1.0, 0.0)
    for step in range(p * piece, tl.minimum(chunks, (p + 1) * piece)):
        n = tl.cast(step, tl.int64)
        begin, left = n * C, T - step * C
        # before the loads: see `delta_rule.wy_forward_kernels`
        low = round_operand(S, DOT_DTYPE)
        if KEEP:
            tl.store(states + n * (X * Y) + where, low.to(states.dtype.element_ty), mask=inside)
        a_x = load_tokens(read_a + begin * (H * X), i, H * X, x, left, X)
        v_t = load_values(v, n, i, v_row, y, left, Y, ALTERNATE, C).to(tl.float32)
        beta_t = tl.load(beta + begin * beta_row + i * beta_row, mask=i < left, other=0.0).to(tl.float32)
        known = dot(a_x, low, DOT_DTYPE)
        missed = v_t - (tl.where((i % 2 == 0)[:, None], known, 0.0) if ALTERNATE else known)
        u_t = apply_inverse(inverse + n * PLANES * (C * C), square, beta_t[:, None] * missed, False, DOT_DTYPE, C)
        S *= tl.load(whole + n * X + x, mask=x < X, other=0.0)[:, None]
        S += dot(tl.trans(load_tokens(written + begin * (H * X), i, H * X, x, left, X)), u_t, DOT_DTYPE)
        if KEEP:
            store_tokens(u + ((b * T + begin) * H + h) * Y, i, H * Y, y, left, Y, u_t)
    if KEEP:
        tl.store(last + head + where, S, mask=inside & (p == tl.num_programs(2) - 1))
    else:
        to = last + of_piece * (X * (Y + X)) + x[:, None] * (Y + X) + y[None, :]
        tl.store(to, S, mask=(x < X)[:, None] & (y < Y + X)[None, :])


@triton.jit
def channel_u_backward_kernel(
    read_q, read_a, written, whole, beta, dy, scores, inverse, arriving, dr, cotangents, dfirst, T, chunks, piece, scale,
    beta_batch, beta_row: tl.constexpr, beta_head, dy_batch, dy_row: tl.constexpr, dy_head,
    X: tl.constexpr, Y: tl.constexpr, H: tl.constexpr, KEEP: tl.constexpr,
    ALTERNATE: tl.constexpr, DOT_DTYPE: tl.constexpr, C: tl.constexpr, BX: tl.constexpr, BY: tl.constexpr,
):  # fmt: skip
    """As `delta_rule.wy_backward_kernels.wy_u_backward_kernel`: dr [B, T, H, Y] and the cotangents of the state behind each chunk
    and of the first if KEEP, else of what enters each piece with nothing arriving."""
    y, bh, p = tl.program_id(0) * BY + tl.arange(0, BY), tl.program_id(1), tl.program_id(2)
    b, h = (bh // H).to(tl.int64), bh % H
    x, i = tl.arange(0, BX), tl.arange(0, C)
    where = x[:, None] * Y + y[None, :]
    inside = (x < X)[:, None] & (y < Y)[None, :]
    square = i[:, None] * C + i[None, :]
    head = (b * H + h) * (X * Y)
    of_piece = (b * H + h) * tl.num_programs(2) + p
    along_x = (b * T * H + h) * X
    read_q += along_x
    read_a += along_x
    written += along_x
    whole += (b * H + h) * chunks * X
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
        low = round_operand(dS, DOT_DTYPE)
        if KEEP:
            tl.store(cotangents + n * (X * Y) + where, low.to(cotangents.dtype.element_ty), mask=inside)
        dy_t = load_values(dy, n, i, dy_row, y, left, Y, ALTERNATE, C)
        beta_t = tl.load(beta + begin * beta_row + i * beta_row, mask=i < left, other=0.0).to(tl.float32)
        du = dot(load_tokens(written + begin * (H * X), i, H * X, x, left, X), low, DOT_DTYPE)
        du += dot(tl.trans(tl.load(scores + n * (C * C) + square)), dy_t, DOT_DTYPE) * scale
        dr_t = apply_inverse(inverse + n * PLANES * (C * C), square, du, True, DOT_DTYPE, C)
        dS *= tl.load(whole + n * X + x, mask=x < X, other=0.0)[:, None]
        a_x = load_tokens(read_a + begin * (H * X), i, H * X, x, left, X)
        grad_v = beta_t[:, None] * dr_t
        if ALTERNATE:
            dS += dot(tl.trans(a_x), tl.where((i % 2 == 0)[:, None], -grad_v, dy_t.to(tl.float32)), DOT_DTYPE)
        else:
            dS += dot(tl.trans(load_tokens(read_q + begin * (H * X), i, H * X, x, left, X)), dy_t, DOT_DTYPE)
            dS += dot(tl.trans(a_x), -grad_v, DOT_DTYPE)
        if KEEP:
            store_tokens(dr + ((b * T + begin) * H + h) * Y, i, H * Y, y, left, Y, dr_t)
    if KEEP:
        tl.store(dfirst + head + where, dS, mask=inside & (p == 0))
    else:
        tl.store(dfirst + of_piece * (X * Y) + where, dS, mask=inside)


@triton.jit
def channel_pairs_kernel(
    dy, u, dr, beta, pos, pairs, ry, dv, dbeta, T, chunks, scale,
    dy_batch, dy_row, dy_head, beta_batch, beta_row, beta_head,
    Y: tl.constexpr, H: tl.constexpr, HAS_POS: tl.constexpr, DOT_DTYPE: tl.constexpr, C: tl.constexpr, BY: tl.constexpr,
):  # fmt: skip
    """What gated linear attention's gradients are made of, with two query heads: ry [B, T, 2 H, Y], scale dy and -beta dr, and its
    products with u, pairs [B, 2 H, N, C, C]. Then dv [B, T, H, Y] and dbeta [B, T, H], where beta is not 0."""
    n, bh = tl.program_id(0), tl.program_id(1)
    b, h = (bh // H).to(tl.int64), bh % H
    i, begin, left = tl.arange(0, C), (n * C).to(tl.int64), T - n * C
    of_rows = (b * T + begin) * H + h
    dy += b * dy_batch + h * dy_head + begin * dy_row
    beta_t = tl.load(beta + b * beta_batch + h * beta_head + (begin + i) * beta_row, mask=i < left, other=0.0).to(tl.float32)
    over_q = tl.zeros([C, C], tl.float32)
    over_a = tl.zeros([C, C], tl.float32)
    for y0 in range(0, Y, BY):
        y = y0 + tl.arange(0, BY)
        u_y = load_tokens(u + of_rows * Y, i, H * Y, y, left, Y)
        dr_y = load_tokens(dr + of_rows * Y, i, H * Y, y, left, Y)
        dy_y = load_tokens(dy, i, dy_row, y, left, Y)
        over_q += dot(dy_y, tl.trans(u_y), DOT_DTYPE)
        over_a += dot(dr_y, tl.trans(u_y), DOT_DTYPE)
        grad_v = beta_t[:, None] * dr_y.to(tl.float32)
        store_tokens(dv + of_rows * Y, i, H * Y, y, left, Y, grad_v)
        to = ry + of_rows * (2 * Y)
        store_tokens(to, i, 2 * H * Y, y, left, Y, dy_y.to(tl.float32) * scale)
        store_tokens(to + Y, i, 2 * H * Y, y, left, Y, -grad_v)
    square = i[:, None] * C + i[None, :]
    to = pairs + ((b * H + h) * 2 * chunks + n) * (C * C) + square
    seen = causal_mask(load_positions(pos + b * T + begin, i, left, HAS_POS), C, HAS_POS)
    before = seen & (i[:, None] > i[None, :])
    tl.store(to, tl.where(seen, over_q * scale, 0.0).to(pairs.dtype.element_ty))
    tl.store(to + chunks * (C * C), tl.where(before, -beta_t[:, None] * over_a, 0.0).to(pairs.dtype.element_ty))
    # beta multiplies what u / beta is; where there is no quotient, `channel_dbeta_zero_kernel` comes after this one
    times_beta = tl.sum(tl.where(i[:, None] == i[None, :], over_a, 0.0), 1)
    tl.store(dbeta + of_rows + i * H, times_beta / tl.where(beta_t == 0.0, 1.0, beta_t), mask=i < left)


@triton.jit
def channel_dbeta_zero_kernel(
    k, read_a, sums, v, beta, pos, u, dr, states, dbeta, T, chunks,
    k_batch, k_row, k_head, v_batch, v_row, v_head, beta_batch, beta_row, beta_head,
    X: tl.constexpr, Y: tl.constexpr, H: tl.constexpr, HAS_POS: tl.constexpr, DOT_DTYPE: tl.constexpr, LEVELS: tl.constexpr,
    C: tl.constexpr, BX: tl.constexpr, BY: tl.constexpr,
):  # fmt: skip
    """dbeta of tokens whose beta is 0, so that u says nothing of what beta multiplies. Chunks without one have nothing to do;
    others join blocks from NEAREST tokens on, whatever decays allow."""
    n, bh = tl.program_id(0), tl.program_id(1)
    b, h = (bh // H).to(tl.int64), bh % H
    i, begin, left = tl.arange(0, C), (n * C).to(tl.int64), T - n * C
    of_rows = (b * T + begin) * H + h
    beta_t = tl.load(beta + b * beta_batch + h * beta_head + (begin + i) * beta_row, mask=i < left, other=1.0)
    nothing = beta_t.to(tl.float32) == 0.0
    if tl.sum(nothing.to(tl.int32), 0) > 0:
        k += b * k_batch + h * k_head + begin * k_row
        v += b * v_batch + h * v_head + begin * v_row
        here = sums + of_rows * X
        states += ((b * H + h) * chunks + n) * (X * Y)
        found = tl.zeros([C, C], tl.float32)
        for x0 in range(0, X, BX):
            x = x0 + tl.arange(0, BX)
            k_x = load_tokens(k, i, k_row, x, left, X)
            summed = load_gate_sums(here, i, left, x, H, X, CHANNEL)
            apart = (summed - load_gate_sums(here, split_token(NEAR - 1, C), left, x, H, X, CHANNEL)).to(tl.float32)
            found += tl.where(
                joined_pairs(0, NEAREST, C), dot(k_x * tl.exp2(apart), tl.trans(k_x * tl.exp2(-apart)), DOT_DTYPE), 0.0
            )
            for level in tl.static_range(NEAR, LEVELS):
                across = summed - load_gate_sums(here, split_token(level, C), left, x, H, X, CHANNEL)
                k_level = k_x * tl.exp2(-tl.abs(across).to(tl.float32))
                found += tl.where(joined_pairs(1 << level, 2 << level, C), dot(k_level, tl.trans(k_level), DOT_DTYPE), 0.0)
        seen = causal_mask(load_positions(pos + b * T + begin, i, left, HAS_POS), C, HAS_POS) & (i[:, None] > i[None, :])
        found = tl.where(seen, found, 0.0)
        dbeta_t = tl.zeros([C], tl.float32)
        for y0 in range(0, Y, BY):
            y = y0 + tl.arange(0, BY)
            recalled = dot_tf32(found, load_tokens(u + of_rows * Y, i, H * Y, y, left, Y).to(tl.float32), DOT_DTYPE)
            for x0 in range(0, X, BX):
                x = x0 + tl.arange(0, BX)
                a_x = load_tokens(read_a + of_rows * X, i, H * X, x, left, X)
                recalled += dot(a_x, load_state_block(states, x, y, X, Y), DOT_DTYPE)
            missed = load_tokens(v, i, v_row, y, left, Y).to(tl.float32) - recalled
            dbeta_t += tl.sum(load_tokens(dr + of_rows * Y, i, H * Y, y, left, Y).to(tl.float32) * missed, 1)
        tl.store(dbeta + of_rows + i * H, dbeta_t, mask=nothing)
