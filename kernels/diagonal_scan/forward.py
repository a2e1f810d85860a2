"""The diagonal scans forwards, in Triton: h = decay h + add, y = (sum_n query h + skip x) silu(z).

The one thing to know: a program is one warp and owns a block of channels, a lane each, with all their states in its registers, and
walks over time; so nothing but the loads waits for anything. What it reads of channels it reads STEPS tokens ahead. Where batch and
channels alone leave the GPU idle, the sequence is cut into pieces; `summarize_kernel` finds what each does to a state and
`fold_kernel` which state enters it.

That a lane has all states of a channel follows from how states and rates are read: [N, D], in rows of a length that Triton may not
know. Of what it knows to be contiguous it would give a lane 16 bytes, and sums over d_state would go from lane to lane.
"""

import triton
import triton.language as tl

from baton.kernels.diagonal_scan.per_token import (
    FORGET,
    MAMBA,
    activated,
    coefficients,
    decay_of,
    rates_of,
    shared_at,
)
from baton.kernels.rows import load_rows, loads_begun, released, sigmoid


@triton.jit(do_not_specialize=["state_row"])
def summarize_kernel(
    x, step, bias, A, vec_in, others, square, pos, decay_out, add_out,
    T, piece, state_row, x_batch, step_batch,
    D: tl.constexpr, N: tl.constexpr, x_row: tl.constexpr, step_row: tl.constexpr,
    KIND: tl.constexpr, ACTIVATE: tl.constexpr, HAS_POS: tl.constexpr, EVEN: tl.constexpr, FULL: tl.constexpr,
    BD: tl.constexpr, BN: tl.constexpr, STEPS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """What a piece does to the state that enters it: decay and add, [B, P, N, D]."""
    d, n, b, p = tl.program_id(0) * BD + tl.arange(0, BD), tl.arange(0, BN), tl.program_id(1), tl.program_id(2)
    d_in, n_in = d < D, n < N
    inside = n_in[:, None] & d_in[None, :]
    at_state = n[:, None] * state_row + d[None, :]
    rates = rates_of(tl.load(A + at_state, mask=inside, other=-1.0)) if KIND == MAMBA else 0.0
    shift = tl.load(bias + d, mask=d_in, other=0.0).to(tl.float32) if ACTIVATE else 0.0
    b = b.to(tl.int64)
    x += b * x_batch + d
    step += b * step_batch + d
    vec_in += b * T * N + n
    others += b * T * N + n
    square += b * T
    pos += b * T
    begin, end = p * piece, tl.minimum((p + 1) * piece, T)
    h = tl.zeros([BN, BD], tl.float32)
    kept = tl.zeros([BN, BD], tl.float32) + 1.0
    total = tl.zeros([BD], tl.float32)
    xs = load_rows(x, b * 0 + begin, x_row, d_in, end, STEPS, FULL, EVEN)
    steps = load_rows(step, b * 0 + begin, step_row, d_in, end, STEPS, FULL, EVEN)
    rows = ()
    for s in tl.static_range(AHEAD):
        rows += shared_at(b * 0 + begin + s, end, vec_in, vec_in, others, square, pos, n_in, N, KIND, HAS_POS, EVEN, FULL)
    for t0 in range(begin, end, STEPS):
        # behind the last token there may be no memory: the last ones again, of which nothing is read
        t1 = b * 0 + (tl.minimum(t0 + STEPS, end - STEPS) if EVEN else t0 + STEPS)
        next_xs = load_rows(x, t1, x_row, d_in, end, STEPS, FULL, EVEN)
        next_steps = load_rows(step, t1, step_row, d_in, end, STEPS, FULL, EVEN)
        for s in tl.static_range(STEPS):
            t_next = b * 0 + t0 + (s + AHEAD) if s + AHEAD < STEPS else t1 + (s + AHEAD - STEPS)
            rows += shared_at(t_next, end, vec_in, vec_in, others, square, pos, n_in, N, KIND, HAS_POS, EVEN, FULL)
            loads_begun()
            in_t, _query_t, rest, far, pos_t = rows[:5]
            rows = rows[5:]
            present = True if EVEN else t0 + s < end
            fresh = pos_t == 0 if HAS_POS else False
            size, _ = activated(KIND, ACTIVATE, released(steps[s], step) + shift)
            taken, first, second = coefficients(KIND, size, far, present, fresh)
            if KIND == MAMBA:
                decay = decay_of(KIND, rates, first[None, :], 0.0, 0.0)
                total += first
            else:
                decay = decay_of(KIND, 0.0, first[None, :], second[None, :], rest[:, None])
                kept *= decay
            h = decay * h + (taken * released(xs[s], x))[None, :] * in_t[:, None]
        xs, steps = next_xs, next_steps
    if KIND == MAMBA:
        kept = tl.exp2(tl.minimum(total, FORGET)[None, :] * rates)
    at_piece = (b * tl.num_programs(2) + p) * D * N
    tl.store(decay_out + at_piece + at_state, kept, mask=inside)
    tl.store(add_out + at_piece + at_state, h, mask=inside)


@triton.jit
def fold_kernel(
    decay, add, first, arriving, last, size, pieces,
    HAS_FIRST: tl.constexpr, BACKWARDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What arrives at each piece, [B, P, size], and what leaves the last one, [B, size]; from the last piece to the first if
    BACKWARDS. size is N D."""
    i, b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1).to(tl.int64)
    inside = i < size
    h = tl.load(first + b * size + i, mask=inside, other=0.0) if HAS_FIRST else tl.zeros([BLOCK], tl.float32)
    for k in range(pieces):
        p = pieces - 1 - k if BACKWARDS else k
        at = (b * pieces + p) * size + i
        tl.store(arriving + at, h, mask=inside)
        h = tl.load(decay + at, mask=inside, other=0.0) * h + tl.load(add + at, mask=inside, other=0.0)
    tl.store(last + b * size + i, h, mask=inside)


@triton.jit(do_not_specialize=["state_row"])
def scan_kernel(
    x, step, bias, A, vec_in, others, square, query, skip, z, pos, entering, y, gated, final, borders,
    T, piece, state_row, x_batch, step_batch, z_batch,
    D: tl.constexpr, N: tl.constexpr, x_row: tl.constexpr, step_row: tl.constexpr, z_row: tl.constexpr,
    KIND: tl.constexpr, ACTIVATE: tl.constexpr, GATED: tl.constexpr, HAS_POS: tl.constexpr, HAS_ENTERING: tl.constexpr,
    KEEP_BORDERS: tl.constexpr, EVEN: tl.constexpr, FULL: tl.constexpr,
    BD: tl.constexpr, BN: tl.constexpr, STEPS: tl.constexpr, AHEAD: tl.constexpr, BORDER: tl.constexpr,
):  # fmt: skip
    """y and, of a gated scan, y silu(z) [B, T, D], the state behind the last token [B, D, N] and, if kept, the state before each
    BORDER tokens [B, C, D, N], given the state that enters each piece [B, P, N, D]. A gated scan's y is for the backward pass."""
    d, n, b, p = tl.program_id(0) * BD + tl.arange(0, BD), tl.arange(0, BN), tl.program_id(1), tl.program_id(2)
    d_in, n_in = d < D, n < N
    inside = n_in[:, None] & d_in[None, :]
    at_state, at_kept = n[:, None] * state_row + d[None, :], d[None, :] * N + n[:, None]
    rates = rates_of(tl.load(A + at_state, mask=inside, other=-1.0)) if KIND == MAMBA else 0.0
    shift = tl.load(bias + d, mask=d_in, other=0.0).to(tl.float32) if ACTIVATE else 0.0
    through = tl.load(skip + d, mask=d_in, other=0.0).to(tl.float32)
    b = b.to(tl.int64)
    x += b * x_batch + d
    step += b * step_batch + d
    z += b * z_batch + d
    vec_in += b * T * N + n
    query += b * T * N + n
    others += b * T * N + n
    y += b * T * D + d
    gated += b * T * D + d
    square += b * T
    pos += b * T
    begin, end = p * piece, tl.minimum((p + 1) * piece, T)
    if HAS_ENTERING:
        h = tl.load(entering + (b * tl.num_programs(2) + p) * D * N + at_state, mask=inside, other=0.0)
    else:
        h = tl.zeros([BN, BD], tl.float32)
    xs = load_rows(x, b * 0 + begin, x_row, d_in, end, STEPS, FULL, EVEN)
    steps = load_rows(step, b * 0 + begin, step_row, d_in, end, STEPS, FULL, EVEN)
    zs = load_rows(z, b * 0 + begin, z_row, d_in, end, STEPS, FULL, EVEN) if GATED else xs
    rows = ()
    for s in tl.static_range(AHEAD):
        rows += shared_at(b * 0 + begin + s, end, vec_in, query, others, square, pos, n_in, N, KIND, HAS_POS, EVEN, FULL)
    for t0 in range(begin, end, STEPS):
        if KEEP_BORDERS and t0 % BORDER == 0:
            tl.store(borders + (b * tl.cdiv(T, BORDER) + t0 // BORDER) * D * N + at_kept, h, mask=inside)
        # behind the last token there may be no memory: the last ones again, of which nothing is read
        t1 = b * 0 + (tl.minimum(t0 + STEPS, end - STEPS) if EVEN else t0 + STEPS)
        next_xs = load_rows(x, t1, x_row, d_in, end, STEPS, FULL, EVEN)
        next_steps = load_rows(step, t1, step_row, d_in, end, STEPS, FULL, EVEN)
        next_zs = load_rows(z, t1, z_row, d_in, end, STEPS, FULL, EVEN) if GATED else next_xs
        t0_64 = b * 0 + t0
        outputs, gated_outputs = (), ()
        for s in tl.static_range(STEPS):
            t_next = t0_64 + (s + AHEAD) if s + AHEAD < STEPS else t1 + (s + AHEAD - STEPS)
            rows += shared_at(t_next, end, vec_in, query, others, square, pos, n_in, N, KIND, HAS_POS, EVEN, FULL)
            loads_begun()
            in_t, query_t, rest, far, pos_t = rows[:5]
            rows = rows[5:]
            present = True if EVEN else t0 + s < end
            fresh = pos_t == 0 if HAS_POS else False
            size, _ = activated(KIND, ACTIVATE, released(steps[s], step) + shift)
            taken, first, second = coefficients(KIND, size, far, present, fresh)
            if KIND == MAMBA:
                decay = decay_of(KIND, rates, first[None, :], 0.0, 0.0)
            else:
                decay = decay_of(KIND, 0.0, first[None, :], second[None, :], rest[:, None])
            x_t = released(xs[s], x)
            h = decay * h + (taken * x_t)[None, :] * in_t[:, None]
            y_t = tl.sum(h * query_t[:, None], 0) + through * x_t
            outputs += (y_t,)
            if GATED:
                z_t = released(zs[s], z)
                gated_outputs += (y_t * z_t * sigmoid(z_t),)
        # last, for a store keeps the compiler from moving later loads up
        for s in tl.static_range(STEPS):
            present = True if EVEN else t0 + s < end
            if GATED:
                tl.store(gated + (t0_64 + s) * D, gated_outputs[s].to(gated.dtype.element_ty), mask=d_in & present)
            if KEEP_BORDERS or not GATED:
                tl.store(y + (t0_64 + s) * D, outputs[s].to(y.dtype.element_ty), mask=d_in & present)
        xs, steps, zs = next_xs, next_steps, next_zs
    if end == T:
        tl.store(final + b * D * N + at_kept, h, mask=inside)


@triton.jit
def squares_kernel(k, others, square, T, N, k_batch, k_row, BT: tl.constexpr, BN: tl.constexpr):
    """Of keys: sum of all squares but n's, [B, T, N], and of all, [B, T]. No difference is taken: it would leave no digits where
    one key is large."""
    b, t = tl.program_id(1).to(tl.int64), tl.program_id(0) * BT + tl.arange(0, BT)
    n, m = tl.arange(0, BN), tl.arange(0, BN)
    at = b * k_batch + t[:, None].to(tl.int64) * k_row + m[None, :]
    keys = tl.load(k + at, mask=(t < T)[:, None] & (m < N)[None, :], other=0.0).to(tl.float32)
    squares = (keys * keys)[:, None, :]
    rest = tl.sum(tl.where((n[:, None] == m[None, :])[None, :, :], 0.0, squares), 2)
    rows = b * T + t
    tl.store(others + rows[:, None] * N + n[None, :], rest, mask=(t < T)[:, None] & (n < N)[None, :])
    tl.store(square + rows, tl.sum(keys * keys, 1), mask=t < T)
