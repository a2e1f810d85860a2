"""Gated linear attention in chunks, in Triton: forward and backward, for every gate.

Shape suffixes: B batch, T time, H heads of the state, Q query heads (G = Q / H of each), X and Y the state's sizes, N chunks of C.

Forward and backward are derivatives of one sum, L = scale sum_i rx_i^T S_i ry_i, where the state S_i = Diag(a_i) S_{i-1} + wx_i
wy_i^T decays along x. For a decay along the keys rx is q, wx is k, wy is v and ry is dy. The output that is read with rx is dL/dry,
and the one that is read with ry is dL/drx; their gradients are the other derivatives. Two kernels therefore compute everything:
`gla_chunk_o_kernel` the derivatives along y and `gla_chunk_dqk_kernel` those along x. For a decay along the values x and y are
exchanged.
"""

import triton
import triton.language as tl

from baton.kernels.common.triton_prefetch import LOG2_E
from baton.kernels.gate.triton_kernels import activation
from baton.kernels.gated_linear_attention.triton_common import (
    CHANNEL,
    LEAST,
    SCALAR,
    causal_mask,
    chunk_decay,
    decay_from_start,
    decay_to_end,
    dot,
    dot_split,
    joined_pairs,
    last_gate_sum,
    last_position,
    load_gate_sums,
    load_positions,
    load_state_block,
    load_tokens,
    pairwise_decays,
    reverse_cumsum,
    round_operand,
    split_token,
    store_tokens,
    widest_block,
)


@triton.jit
def gla_prepare_kernel(
    r, w, g, pos, sums, read, written, whole, T, scale, r_batch, r_row, r_head, w_batch, w_row, w_head, g_batch, g_row, g_head,
    X: tl.constexpr, H: tl.constexpr, G: tl.constexpr, GATE: tl.constexpr, HAS_POS: tl.constexpr, READ: tl.constexpr,
    WRITE: tl.constexpr, C: tl.constexpr, BX: tl.constexpr,
):  # fmt: skip
    """Gates' sums, [B, T, H, X] or, of a SCALAR, [B, T, H]. Of channels also what is left behind a chunk of what entered,
    [B, H, N, X], what of r is read of the state that enters a chunk, [B, T, Q, X], if READ, and what of w reaches the chunk's end,
    [B, T, H, X], if WRITE."""
    n, bh = tl.program_id(0), tl.program_id(2)
    b, h = (bh // H).to(tl.int64), bh % H
    t, x = n * C + tl.arange(0, C), tl.program_id(1) * BX + tl.arange(0, BX)
    g += b * g_batch + h * g_head
    if GATE == SCALAR:
        gates = tl.load(g + t.to(tl.int64) * g_row, mask=t < T, other=0.0).to(tl.float32) * LOG2_E
        summed = tl.cumsum(gates.to(sums.dtype.element_ty), 0)
        tl.store(sums + b * T * H + h + t.to(tl.int64) * H, summed, mask=t < T)
    else:
        gates = tl.maximum(load_tokens(g, t, g_row, x, T, X).to(tl.float32) * LOG2_E, LEAST)
        summed = tl.cumsum(gates.to(sums.dtype.element_ty), 0)
        store_tokens(sums + (b * T * H + h) * X, t, H * X, x, T, X, summed)
        at = load_positions(pos + b * T, t, T, HAS_POS)
        if READ:
            since = decay_from_start(summed, at, C, HAS_POS) * scale
            for q in tl.static_range(G):
                r_x = load_tokens(r + b * r_batch + (h * G + q) * r_head, t, r_row, x, T, X)
                store_tokens(read + (b * T * (H * G) + h * G + q) * X, t, H * G * X, x, T, X, r_x * since)
        if WRITE:
            total = tl.sum(tl.where((tl.arange(0, C) == C - 1)[:, None], summed, 0.0), 0)
            at_last = last_position(pos + b * T, n * C, T, C, HAS_POS)
            w_x = load_tokens(w + b * w_batch + h * w_head, t, w_row, x, T, X)
            until = decay_to_end(summed, total[None, :], at_last, C, HAS_POS)
            store_tokens(written + (b * T * H + h) * X, t, H * X, x, T, X, w_x * until)
            left = chunk_decay(total, at_last, C, HAS_POS)
            tl.store(whole + ((b * H + h) * tl.num_programs(0) + n) * X + x, left, mask=x < X)


@triton.jit
def gla_scores_kernel(
    r, w, sums, pos, out, T, r_batch, r_row, r_head, w_batch, w_row, w_head,
    X: tl.constexpr, H: tl.constexpr, G: tl.constexpr, GATE: tl.constexpr, HAS_POS: tl.constexpr, DOT_DTYPE: tl.constexpr,
    NEAR: tl.constexpr, LEVELS: tl.constexpr, C: tl.constexpr, BX: tl.constexpr,
):  # fmt: skip
    """What query i reads of key j, [B, Q, N C, C], but for the scale; GATE NONE: without decays."""
    n, q, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    h = q // G
    t, i = n * C + tl.arange(0, C), tl.arange(0, C)
    r += b * r_batch + q * r_head
    w += b * w_batch + h * w_head
    at = load_positions(pos + b * T, t, T, HAS_POS)
    found = tl.zeros([C, C], tl.float32)
    for x0 in range(0, X, BX):
        x = x0 + tl.arange(0, BX)
        r_x, w_x = load_tokens(r, t, r_row, x, T, X), load_tokens(w, t, w_row, x, T, X)
        if GATE == CHANNEL:
            here = sums + (b * T * H + h) * X
            summed = load_gate_sums(here, t, T, x, H, X, GATE)
            near = widest_block(here, n * C, T, x, H, X, NEAR, LEVELS, C)
            apart = (summed - load_gate_sums(here, n * C + split_token(near - 1, C), T, x, H, X, GATE)).to(tl.float32)
            found += tl.where(
                joined_pairs(0, 1 << near, C), dot(r_x * tl.exp2(apart), tl.trans(w_x * tl.exp2(-apart)), DOT_DTYPE), 0.0
            )
            for level in tl.range(near, LEVELS, num_stages=1):
                apart = (summed - load_gate_sums(here, n * C + split_token(level, C), T, x, H, X, GATE)).to(tl.float32)
                across = tl.exp2(-tl.abs(apart))
                # of the first of two blocks only what is written is needed, of the second only what reads
                second = ((i >> level) & 1 == 1)[:, None]
                side = round_operand(tl.where(second, r_x.to(tl.float32), w_x.to(tl.float32)) * across, DOT_DTYPE)
                found += tl.where(joined_pairs(1 << level, 2 << level, C), dot(side, tl.trans(side), DOT_DTYPE), 0.0)
        else:
            found += dot(r_x, tl.trans(w_x), DOT_DTYPE)
    if GATE == SCALAR:
        found *= pairwise_decays(load_gate_sums(sums + b * T * H + h, t, T, i, H, X, GATE), at, C, GATE, HAS_POS)
    else:
        found = tl.where(causal_mask(at, C, HAS_POS), found, 0.0)
    to = out + ((b * tl.num_programs(1) + q) * tl.num_programs(0) + n) * (C * C)
    tl.store(to + i[:, None] * C + i[None, :], found.to(out.dtype.element_ty))


@triton.jit
def chunk_h_kernel(
    a, c, sums, whole, pos, first, states, last, decay, T, chunks, piece, scale, a_batch, a_row, a_head, c_batch, c_row, c_head,
    X: tl.constexpr, Y: tl.constexpr, G: tl.constexpr, GATE: tl.constexpr, HAS_POS: tl.constexpr, HAS_FIRST: tl.constexpr,
    BACKWARDS: tl.constexpr, KEEP: tl.constexpr, DECAY: tl.constexpr, DOT_DTYPE: tl.constexpr, C: tl.constexpr, BX: tl.constexpr,
    BY: tl.constexpr,
):  # fmt: skip
    """The state before each chunk [B, H, N, X, Y] if KEEP, from first to last of each piece of so many chunks [B, P, H, X, Y]; and
    if DECAY what is left behind the piece of what entered it, [B, P, H, X], or of a head [B, P, H]. BACKWARDS: the cotangent of the
    state behind each, a and c being what is read with, of G query heads. Of channels a is as `gla_prepare_kernel` leaves it."""
    xs, h, H, pieces = tl.program_id(0), tl.program_id(1), tl.num_programs(1), tl.cdiv(chunks, piece)
    b, p = (tl.program_id(2) // pieces).to(tl.int64), tl.program_id(2) % pieces
    x = xs // tl.cdiv(Y, BY) * BX + tl.arange(0, BX)
    y = xs % tl.cdiv(Y, BY) * BY + tl.arange(0, BY)
    where = x[:, None] * Y + y[None, :]
    inside = (x < X)[:, None] & (y < Y)[None, :]
    head = (b * H + h) * (X * Y)
    of_piece = ((b * pieces + p) * H + h) * (X * Y) + where
    a += b * a_batch
    c += b * c_batch
    begin, end = p * piece, tl.minimum((p + 1) * piece, chunks)
    S = tl.load(first + of_piece, mask=inside, other=0.0) if HAS_FIRST else tl.zeros([BX, BY], tl.float32)
    remains = tl.full([BX], 1.0, tl.float32)
    for k in range(end - begin):
        n = tl.cast(end - 1 - k if BACKWARDS else begin + k, tl.int64)
        t = (end - 1 - k if BACKWARDS else begin + k) * C + tl.arange(0, C)
        if KEEP:
            tl.store(states + (head * chunks + n * (X * Y)) + where, S.to(states.dtype.element_ty), mask=inside)
        if GATE == CHANNEL:
            left = tl.load(whole + ((b * H + h) * chunks + n) * X + x, mask=x < X, other=0.0)
            S *= left[:, None]
        else:
            at = load_positions(pos + b * T, t, T, HAS_POS)
            summed = load_gate_sums(sums + b * T * H + h, t, T, x, H, X, GATE)
            total = last_gate_sum(sums + b * T * H + h, n * C, T, H, GATE, C)
            at_last = last_position(pos + b * T, n * C, T, C, HAS_POS)
            left = chunk_decay(total, at_last, C, HAS_POS)
            S *= left
            if BACKWARDS:
                factor = decay_from_start(summed, at, C, HAS_POS) * scale
            else:
                factor = decay_to_end(summed, total, at_last, C, HAS_POS)
        if DECAY:
            remains *= left
        for q in tl.static_range(G if BACKWARDS else 1):
            head_q = h * G + q if BACKWARDS else h
            a_x = load_tokens(a + head_q * a_head, t, a_row, x, T, X)
            if GATE != CHANNEL:
                a_x = a_x * factor[:, None]
            S += dot(tl.trans(a_x), load_tokens(c + head_q * c_head, t, c_row, y, T, Y), DOT_DTYPE)
    tl.store(last + of_piece, S, mask=inside)
    if DECAY:
        width = X if GATE == CHANNEL else 1
        tl.store(decay + ((b * pieces + p) * H + h) * width + x, remains, mask=(x < width) & (xs % tl.cdiv(Y, BY) == 0))


@triton.jit
def chunk_h_fold_kernel(
    decay, add, first, arriving, last, pieces,
    X: tl.constexpr, Y: tl.constexpr, WIDTH: tl.constexpr, HAS_FIRST: tl.constexpr, BACKWARDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What enters each piece, [B, P, H, X, Y], and leaves the last, [B, H, X, Y]; from the last piece to the first if BACKWARDS.
    decay: [B, P, H, WIDTH], WIDTH being X or 1; add: what a piece adds to a state of zeros."""
    i, h, b, H = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1), tl.program_id(2).to(tl.int64), tl.num_programs(1)
    inside = i < X * Y
    x = i // Y if WIDTH == X else i * 0
    S = tl.load(first + (b * H + h) * (X * Y) + i, mask=inside, other=0.0) if HAS_FIRST else tl.zeros([BLOCK], tl.float32)
    for k in range(pieces):
        at = (b * pieces + (pieces - 1 - k if BACKWARDS else k)) * H + h
        tl.store(arriving + at * (X * Y) + i, S, mask=inside)
        left = tl.load(decay + at * WIDTH + x, mask=inside, other=0.0)
        S = left * S + tl.load(add + at * (X * Y) + i, mask=inside, other=0.0)
    tl.store(last + (b * H + h) * (X * Y) + i, S, mask=inside)


@triton.jit
def gla_chunk_o_kernel(
    rx, ry, wx, wy, sums, pos, scores, states, cotangents, out_r, out_w, raw_r, raw_w, T, chunks, scale,
    rx_batch, rx_row, rx_head, ry_batch, ry_row, ry_head, wx_batch, wx_row, wx_head, wy_batch, wy_row, wy_head,
    out_r_batch, out_r_row, out_r_head, out_w_batch, out_w_row, out_w_head,
    raw_r_batch, raw_r_row, raw_r_head, raw_w_batch, raw_w_row, raw_w_head,
    X: tl.constexpr, Y: tl.constexpr, H: tl.constexpr, G: tl.constexpr, GATE: tl.constexpr, HAS_POS: tl.constexpr,
    READ: tl.constexpr, WRITE: tl.constexpr, SILU: tl.constexpr, SHARED: tl.constexpr, DOT_DTYPE: tl.constexpr, C: tl.constexpr,
    BX: tl.constexpr, BY: tl.constexpr,
):  # fmt: skip
    """Derivatives along y: to ry, [B, T, Q, Y], if READ, and to wy, [B, T, H, Y], if WRITE; scores are those of rx and wx, which of
    channels are here as `gla_prepare_kernel` leaves them. SHARED: they are of all heads, [B, N, C, C], without decays. SILU: ry and
    wy are silu of raw_r and raw_w, and derivatives are to those."""
    n, bh = tl.program_id(1), tl.program_id(2)
    y = tl.program_id(0) * BY + tl.arange(0, BY)
    b, h = (bh // H).to(tl.int64), bh % H
    t, i = n * C + tl.arange(0, C), tl.arange(0, C)
    square = i[:, None] * C + i[None, :]
    of_state = ((b * H + h) * chunks + n) * (X * Y)
    if GATE != CHANNEL:
        at = load_positions(pos + b * T, t, T, HAS_POS)
        summed = load_gate_sums(sums + b * T * H + h, t, T, i, H, X, GATE)
        since = decay_from_start(summed, at, C, HAS_POS) * scale
        total = last_gate_sum(sums + b * T * H + h, n * C, T, H, GATE, C)
        until = decay_to_end(summed, total, last_position(pos + b * T, n * C, T, C, HAS_POS), C, HAS_POS)
    grad_w = tl.zeros([C, BY], tl.float32)
    for group in tl.static_range(G):
        q = h * G + group
        if SHARED:
            M = tl.load(scores + (b * chunks + n) * (C * C) + square) * pairwise_decays(summed, at, C, GATE, HAS_POS)
        else:
            M = tl.load(scores + ((b * (H * G) + q) * chunks + n) * (C * C) + square)
        if READ:
            found = dot(M, load_tokens(wy + b * wy_batch + h * wy_head, t, wy_row, y, T, Y), DOT_DTYPE) * scale
            for x0 in range(0, X, BX):
                x = x0 + tl.arange(0, BX)
                r_x = load_tokens(rx + b * rx_batch + q * rx_head, t, rx_row, x, T, X)
                if GATE != CHANNEL:
                    r_x = r_x * since[:, None]
                found += dot(r_x, load_state_block(states + of_state, x, y, X, Y), DOT_DTYPE)
            if SILU:
                raw = load_tokens(raw_r + b * raw_r_batch + q * raw_r_head, t, raw_r_row, y, T, Y)
                _, slope = activation(raw.to(tl.float32), False)
                found *= slope
            store_tokens(out_r + b * out_r_batch + q * out_r_head, t, out_r_row, y, T, Y, found)
        if WRITE:
            grad_w += dot(tl.trans(M), load_tokens(ry + b * ry_batch + q * ry_head, t, ry_row, y, T, Y), DOT_DTYPE)
    if WRITE:
        grad_w *= scale
        for x0 in range(0, X, BX):
            x = x0 + tl.arange(0, BX)
            w_x = load_tokens(wx + b * wx_batch + h * wx_head, t, wx_row, x, T, X)
            if GATE != CHANNEL:
                w_x = w_x * until[:, None]
            grad_w += dot(w_x, load_state_block(cotangents + of_state, x, y, X, Y), DOT_DTYPE)
        if SILU:
            raw = load_tokens(raw_w + b * raw_w_batch + h * raw_w_head, t, raw_w_row, y, T, Y)
            _, slope = activation(raw.to(tl.float32), False)
            grad_w *= slope
        store_tokens(out_w + b * out_w_batch + h * out_w_head, t, out_w_row, y, T, Y, grad_w)


@triton.jit
def gla_chunk_dqk_kernel(
    rx, ry, wx, wy, sums, pos, scores, states, cotangents, out_r, out_w, out_g, T, chunks, scale,
    rx_batch, rx_row, rx_head, ry_batch, ry_row, ry_head, wx_batch, wx_row, wx_head, wy_batch, wy_row, wy_head,
    out_r_batch, out_r_row, out_r_head, out_w_batch, out_w_row, out_w_head,
    X: tl.constexpr, Y: tl.constexpr, H: tl.constexpr, G: tl.constexpr, GATE: tl.constexpr, HAS_POS: tl.constexpr,
    READ: tl.constexpr, WRITE: tl.constexpr, DECAYS: tl.constexpr, DOT_DTYPE: tl.constexpr, PRECISE: tl.constexpr,
    NEAR: tl.constexpr, LEVELS: tl.constexpr, C: tl.constexpr, BX: tl.constexpr, BY: tl.constexpr,
):  # fmt: skip
    """Derivatives along x: to rx, [B, T, Q, X], if READ, to wx, [B, T, H, X], if WRITE, and, if DECAYS, to the log-decays,
    [B, T, H, X] or, of a SCALAR, of each block of x [X / BX, B, T, H]; scores are those of ry and wy, without decays. PRECISE: of
    channels, what is read within a chunk is of wx with twice DOT_DTYPE's digits."""
    xs, n = tl.program_id(0), tl.program_id(1)
    x = xs * BX + tl.arange(0, BX)
    b, h = (tl.program_id(2) // H).to(tl.int64), tl.program_id(2) % H
    t, i = n * C + tl.arange(0, C), tl.arange(0, C)
    at = load_positions(pos + b * T, t, T, HAS_POS)
    at_last = last_position(pos + b * T, n * C, T, C, HAS_POS)
    of_state = ((b * H + h) * chunks + n) * (X * Y)
    here = sums + (b * T * H + h) * X if GATE == CHANNEL else sums + b * T * H + h
    if GATE == CHANNEL:
        near = widest_block(here, n * C, T, x, H, X, NEAR, LEVELS, C)
    grad_w = tl.zeros([C, BX], tl.float32)
    # what a gate's gradient grows by from a token on to the one before it, of a SCALAR in all channels together, and what it is
    # behind the chunk
    flow = tl.zeros([C], tl.float32) if GATE == SCALAR else tl.zeros([C, BX], tl.float32)
    behind = tl.zeros([BX], tl.float32)
    for group in tl.static_range(G):
        q = h * G + group
        found = tl.zeros([C, BX], tl.float32)
        for y0 in range(0, Y, BY):
            y = y0 + tl.arange(0, BY)
            S = load_state_block(states + of_state, x, y, X, Y)
            found += dot(load_tokens(ry + b * ry_batch + q * ry_head, t, ry_row, y, T, Y), tl.trans(S), DOT_DTYPE)
            if WRITE and group == 0:
                dS = load_state_block(cotangents + of_state, x, y, X, Y)
                grad_w += dot(load_tokens(wy + b * wy_batch + h * wy_head, t, wy_row, y, T, Y), tl.trans(dS), DOT_DTYPE)
                if DECAYS:
                    behind += tl.sum(S.to(tl.float32) * dS.to(tl.float32), 1)
        summed = load_gate_sums(here, t, T, x, H, X, GATE)
        w_x = load_tokens(wx + b * wx_batch + h * wx_head, t, wx_row, x, T, X)
        r_x = load_tokens(rx + b * rx_batch + q * rx_head, t, rx_row, x, T, X) if WRITE else w_x
        since = decay_from_start(summed, at, C, HAS_POS)
        found *= since if GATE == CHANNEL else since[:, None]
        if WRITE and group == 0:
            if GATE == CHANNEL:
                total = tl.sum(tl.where((i == C - 1)[:, None], summed, 0.0), 0)
                grad_w *= decay_to_end(summed, total[None, :], at_last, C, HAS_POS)
            else:
                total = last_gate_sum(here, n * C, T, H, GATE, C)
                grad_w *= decay_to_end(summed, total, at_last, C, HAS_POS)[:, None]
            if DECAYS and GATE == CHANNEL:
                flow -= w_x * grad_w
                behind = behind * chunk_decay(total, at_last, C, HAS_POS) - tl.sum(flow, 0)
            elif DECAYS:
                written = w_x * grad_w
                behind = behind * chunk_decay(total, at_last, C, HAS_POS) + tl.sum(written, 0)
                flow -= tl.sum(written, 1)
        if DECAYS and GATE == CHANNEL:
            flow += r_x * found * scale
        elif DECAYS:
            flow += tl.sum(r_x * found, 1) * scale
        pairs = scores + ((b * (H * G) + q) * chunks + n) * (C * C) + i[:, None] * C + i[None, :]
        if GATE == CHANNEL:
            for level in tl.range(near - 1, LEVELS, num_stages=1):
                apart = (summed - load_gate_sums(here, n * C + split_token(level, C), T, x, H, X, GATE)).to(tl.float32)
                # within a block of 2^near tokens of both sides read and are read; otherwise the first half is read by the second
                most = tl.where(level < near, float("inf"), 0.0)
                for_r, for_w = tl.exp2(tl.minimum(apart, most)), tl.exp2(tl.minimum(-apart, most))
                P_level = tl.load(pairs, mask=joined_pairs(tl.where(level < near, 0, 1 << level), 2 << level, C), other=0.0)
                if PRECISE:
                    w_level = w_x * for_w
                    read = dot_split(P_level, w_level, DOT_DTYPE)
                else:
                    w_level = round_operand(w_x * for_w, DOT_DTYPE)
                    read = dot(P_level, w_level, DOT_DTYPE)
                found += for_r * read
                if WRITE:
                    r_level = round_operand(r_x * for_r, DOT_DTYPE)
                    written = dot(tl.trans(P_level), r_level, DOT_DTYPE)
                    grad_w += for_w * written * scale
                    if DECAYS:
                        # every pair is the same number in both, so those on one side of a gate cancel
                        flow += (r_level * read - w_level * written) * scale
        else:
            P_all = tl.load(pairs) * pairwise_decays(summed, at, C, GATE, HAS_POS)
            read = dot(P_all, w_x, DOT_DTYPE)
            found += read
            if WRITE:
                written = dot(tl.trans(P_all), r_x, DOT_DTYPE)
                grad_w += written * scale
                if DECAYS:
                    flow += tl.sum(round_operand(r_x, DOT_DTYPE) * read - round_operand(w_x, DOT_DTYPE) * written, 1) * scale
        if READ:
            store_tokens(out_r + b * out_r_batch + q * out_r_head, t, out_r_row, x, T, X, found * scale)
    if WRITE:
        store_tokens(out_w + b * out_w_batch + h * out_w_head, t, out_w_row, x, T, X, grad_w)
        if DECAYS and GATE == CHANNEL:
            store_tokens(out_g + (b * T * H + h) * X, t, H * X, x, T, X, reverse_cumsum(flow, C, DOT_DTYPE) + behind[None, :])
        elif DECAYS:
            # of [1, BX]: with a sum over one dimension alone Triton 3.6 fails for sm_100
            grad_g = tl.cumsum(flow, 0, reverse=True) + tl.sum(behind[None, :], 1)
            to = out_g + (xs * (tl.num_programs(2) // H) + b) * T * H + h
            tl.store(to + t.to(tl.int64) * H, grad_g, mask=t < T)
