"""A token of the generalized delta rule as two of the channel delta rule, and all gradients of a chunk of such tokens, in Triton.
See `chunk_launch` for what the two are.

Shape suffixes: T time, H heads, X d_key, Y d_value; rows are tokens and heads.
"""

import triton
import triton.language as tl

from baton.kernels.common.triton_prefetch import LOG2_E
from baton.kernels.gated_linear_attention.triton_common import (
    CHANNEL,
    causal_mask,
    chunk_decay,
    decay_from_start,
    decay_to_end,
    dot,
    last_position,
    load_gate_sums,
    load_positions,
    load_state_block,
    load_tokens,
    reverse_cumsum,
    round_operand,
    store_tokens,
)


@triton.jit
def pair_prepare_kernel(
    r, k, a, b, g, pos, readers, keys, sums, read, written, whole, T, scale,
    r_batch, r_row, r_head, k_batch, k_row, k_head, a_batch, a_row, a_head, b_batch, b_row, b_head, g_batch, g_row, g_head,
    X: tl.constexpr, H: tl.constexpr, HAS_POS: tl.constexpr, C: tl.constexpr, BX: tl.constexpr,
):  # fmt: skip
    """Of the first of two tokens and of the second, [B, 2 T, H, X]: readers, -exp(-g) a and r; keys, b and k; the gates' sums from
    each chunk's begin, of g and 0; and, as `channel_delta_rule.triton_kernels.channel_prepare_kernel`, what readers read of the
    state that enters a chunk, r with the scale, and what of keys reaches its end. Of a chunk whole, [B, H, N, X]. C: its tokens,
    each of which becomes two."""
    n, bh = tl.program_id(0), tl.program_id(2)
    batch, h = (bh // H).to(tl.int64), bh % H
    t, x = n * C + tl.arange(0, C), tl.program_id(1) * BX + tl.arange(0, BX)
    first = batch * T * (2 * H * X) + h * X
    second, row = first + H * X, 2 * H * X
    g_x = load_tokens(g + batch * g_batch + h * g_head, t, g_row, x, T, X).to(tl.float32)
    summed = tl.cumsum((g_x * LOG2_E).to(sums.dtype.element_ty), 0)
    store_tokens(sums + first, t, row, x, T, X, summed)
    store_tokens(sums + second, t, row, x, T, X, summed)
    # of a pair's two tokens the places in the chunk and in the document are twice those of one, or that and 1
    at = load_positions(pos + batch * T, t, T, HAS_POS)
    since = decay_from_start(summed, at, C, HAS_POS)
    a_x = -tl.exp(-g_x) * load_tokens(a + batch * a_batch + h * a_head, t, a_row, x, T, X).to(tl.float32)
    store_tokens(readers + first, t, row, x, T, X, a_x)
    store_tokens(read + first, t, row, x, T, X, a_x * since)
    r_x = load_tokens(r + batch * r_batch + h * r_head, t, r_row, x, T, X).to(tl.float32)
    store_tokens(readers + second, t, row, x, T, X, r_x)
    store_tokens(read + second, t, row, x, T, X, r_x * since * scale)
    total = tl.sum(tl.where((tl.arange(0, C) == C - 1)[:, None], summed, 0.0), 0)
    at_last = last_position(pos + batch * T, n * C, T, C, HAS_POS)
    until = decay_to_end(summed, total[None, :], at_last, C, HAS_POS)
    b_x = load_tokens(b + batch * b_batch + h * b_head, t, b_row, x, T, X)
    store_tokens(keys + first, t, row, x, T, X, b_x)
    store_tokens(written + first, t, row, x, T, X, b_x * until)
    k_x = load_tokens(k + batch * k_batch + h * k_head, t, k_row, x, T, X)
    store_tokens(keys + second, t, row, x, T, X, k_x)
    store_tokens(written + second, t, row, x, T, X, k_x * until)
    left = chunk_decay(total, at_last, C, HAS_POS)
    tl.store(whole + ((batch * H + h) * tl.num_programs(0) + n) * X + x, left, mask=x < X)


@triton.jit
def pair_gradients_kernel(
    readers, keys, sums, u, dmissed, do, g, pos, states, cotangents, dr, dk, da, db, dg, dv, T, chunks, scale,
    do_batch, do_row, do_head, g_batch, g_row, g_head,
    X: tl.constexpr, Y: tl.constexpr, H: tl.constexpr, HAS_POS: tl.constexpr, DOT_DTYPE: tl.constexpr, C: tl.constexpr,
    BX: tl.constexpr, BY: tl.constexpr,
):  # fmt: skip
    """Gradients of r, k, a, b and g, [B, T, H, X], and of v, [B, T, H, Y], from a chunk's tokens and its states.

    readers, keys, sums: of `pair_prepare_kernel`; u and dmissed [B, 2 T, H, Y], cotangents: of the walks of
    `channel_delta_rule.triton_kernels`, whose pairs of tokens are two of these chunks' tokens. C: of the two.

    As `gated_linear_attention.triton_kernels.gla_chunk_dqk_kernel`, with one block of tokens, the chunk: decays are to and from the
    token in its middle.
    """
    xs, n, bh = tl.program_id(2), tl.program_id(0), tl.program_id(1)
    batch, h = (bh // H).to(tl.int64), bh % H
    i, x = tl.arange(0, C), xs * BX + tl.arange(0, BX)
    begin, left = (n * C).to(tl.int64), 2 * T - n * C
    first, rows = (i % 2 == 0)[:, None], (batch * (2 * T) + begin) * H + h
    # of tokens that are not doubled
    t = n * (C // 2) + i // 2
    of_state = ((batch * H + h) * chunks + n) * (X * Y)
    P = tl.zeros([C, C], tl.float32)
    found, grad_w = tl.zeros([C, BX], tl.float32), tl.zeros([C, BX], tl.float32)
    behind = tl.zeros([BX], tl.float32)
    for y0 in range(0, Y, BY):
        y = y0 + tl.arange(0, BY)
        u_y = load_tokens(u + rows * Y, i, H * Y, y, left, Y)
        dv_y = load_tokens(dmissed + rows * Y, i, H * Y, y, left, Y)
        of_v = (i < left)[:, None] & (y < Y)[None, :]
        do_y = tl.load(
            do + batch * do_batch + h * do_head + t[:, None].to(tl.int64) * do_row + y[None, :],
            mask=of_v & (i % 2 == 1)[:, None],
            other=0.0,
        )
        if xs == 0:
            to = ((batch * T + t) * H + h)[:, None] * Y + y[None, :]
            tl.store(dv + to, dv_y.to(dv.dtype.element_ty), mask=of_v & (i % 2 == 1)[:, None])
        reads = round_operand(tl.where(first, -dv_y.to(tl.float32), do_y.to(tl.float32) * scale), DOT_DTYPE)
        P += dot(reads, tl.trans(u_y), DOT_DTYPE)
        S, dS = load_state_block(states + of_state, x, y, X, Y), load_state_block(cotangents + of_state, x, y, X, Y)
        found += dot(reads, tl.trans(S), DOT_DTYPE)
        grad_w += dot(u_y, tl.trans(dS), DOT_DTYPE)
        behind += tl.sum(S.to(tl.float32) * dS.to(tl.float32), 1)
    at = load_positions(pos + batch * T, t, T, HAS_POS) * 2 + i % 2 if HAS_POS else i
    # the first of two reads before it writes
    seen = causal_mask(at, C, HAS_POS) & ((i[:, None] > i[None, :]) | (i % 2 == 1)[:, None])
    P_low = round_operand(tl.where(seen, P, 0.0), DOT_DTYPE)
    here = sums + rows * X
    summed = load_gate_sums(here, i, left, x, H, X, CHANNEL)
    known = tl.minimum(C // 2 - 1, left - 1)
    middle = tl.load(here + known * (H * X) + x, mask=x < X, other=0.0)
    total = tl.load(here + tl.minimum(C - 1, left - 1) * (H * X) + x, mask=x < X, other=0.0)
    at_last = last_position(pos + batch * T, n * (C // 2), T, C // 2, HAS_POS) * 2 + 1
    w_x = load_tokens(keys + rows * X, i, H * X, x, left, X)
    r_x = load_tokens(readers + rows * X, i, H * X, x, left, X)
    apart = (summed - middle[None, :]).to(tl.float32)
    w_near, r_near = round_operand(w_x * tl.exp2(-apart), DOT_DTYPE), round_operand(r_x * tl.exp2(apart), DOT_DTYPE)
    read = dot(P_low, w_near, DOT_DTYPE)
    found *= decay_from_start(summed, at, C, HAS_POS)
    flow = r_x * found + r_near * read
    found += tl.exp2(apart) * read
    own = found * r_x
    to = ((batch * T + t) * H + h)[:, None] * X + x[None, :]
    inside = (i < left)[:, None] & (x < X)[None, :]
    of_first, of_second = inside & first, inside & (i % 2 == 1)[:, None]
    tl.store(dr + to, found.to(dr.dtype.element_ty), mask=of_second)
    g_x = tl.load(g + batch * g_batch + h * g_head + t[:, None].to(tl.int64) * g_row + x[None, :], mask=of_first, other=0.0)
    tl.store(da + to, (-tl.exp(-g_x.to(tl.float32)) * found).to(da.dtype.element_ty), mask=of_first)
    tl.debug_barrier()
    written = dot(tl.trans(P_low), r_near, DOT_DTYPE)
    grad_w *= decay_to_end(summed, total[None, :], at_last, C, HAS_POS)
    from_state = w_x * grad_w
    behind = behind * chunk_decay(total, at_last, C, HAS_POS) + tl.sum(from_state, 0)
    # every pair is the same number in both, so those on one side of a gate cancel
    flow -= from_state + w_near * written
    grad_w += tl.exp2(-apart) * written
    tl.store(dk + to, grad_w.to(dk.dtype.element_ty), mask=of_second)
    tl.store(db + to, grad_w.to(db.dtype.element_ty), mask=of_first)
    # what reads, exp(-g) a, is computed with g too
    grad_g = reverse_cumsum(flow, C, DOT_DTYPE) + behind[None, :] - own
    tl.store(dg + to, grad_g.to(dg.dtype.element_ty), mask=of_first)
