"""The diagonal scans forwards, in Triton: h = decay h + add, y = (sum_n query h + skip x) silu(z).

The one thing to know: a program is one warp and owns a block of channels, with all their states in its registers, and walks over
time; so nothing but the loads waits for anything. What it reads of channels it reads STEPS tokens ahead, what all channels share
AHEAD tokens; both it has asked for STEPS tokens before. Where batch and channels alone leave the GPU idle, the sequence is cut into
pieces; `summarize_kernel` finds what each does to a state and `fold_kernel` which state enters it.
"""

import triton
import triton.language as tl

from baton.kernels.common.triton_prefetch import lines_of, load_rows, loads_begun, near, released, sigmoid
from baton.kernels.diagonal_scan.triton_common import (
    FORGET,
    LONGHORN,
    MAMBA,
    activated,
    coefficients,
    decay_of,
    lines_of_shared,
    load_states,
    over_states,
    positions_from,
    rates_at,
    row_length,
    shared_at,
    spread,
    starts,
    starts_among,
    states_of,
    store_states,
    taken_in,
)


@triton.jit
def summarize_kernel(
    x, step, bias, A, rows, pos, decay_out, add_out,
    T, piece, x_batch, step_batch,
    D: tl.constexpr, N: tl.constexpr, x_row: tl.constexpr, step_row: tl.constexpr,
    KIND: tl.constexpr, ACTIVATE: tl.constexpr, HAS_POS: tl.constexpr, EVEN: tl.constexpr, FULL: tl.constexpr,
    BD: tl.constexpr, BN: tl.constexpr, STEPS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """What a piece does to the state that enters it: decay and add, [B, P, D, N]."""
    b, p = tl.program_id(1).to(tl.int64), tl.program_id(2)
    d, d_in, n, inside, at_state = states_of(tl.program_id(0), D, N, BD, BN)
    rates, blank = rates_at(A, at_state, inside, N, KIND, FULL)
    shift = tl.load(bias + d, mask=d_in, other=0.0).to(tl.float32) if ACTIVATE else 0.0
    begin, end = p * piece, tl.minimum((p + 1) * piece, T)
    tensors, lengths = (x + b * x_batch, step + b * step_batch), (x_row, step_row)
    lines, line_row = lines_of(tensors, lengths, tl.program_id(0) * BD, end - begin, D, BD, STEPS)
    x += b * x_batch + d
    step += b * step_batch + d
    rows += b * T * row_length(KIND, BN)
    shared_lines = lines_of_shared(rows, end - begin, BN, KIND, STEPS)
    last = tl.maximum(end - STEPS, begin)
    pos += b * T
    h = blank
    kept = blank + 1.0
    total = tl.zeros([BD], tl.float32)
    xs = load_rows(x, b * 0 + begin, x_row, d_in, end, STEPS, FULL, EVEN)
    steps = load_rows(step, b * 0 + begin, step_row, d_in, end, STEPS, FULL, EVEN)
    positions = positions_from(b * 0 + begin, end, pos, STEPS, HAS_POS, EVEN)
    ahead = ()
    for s in tl.static_range(AHEAD):
        ahead += shared_at(b * 0 + begin + s, end, rows, n, BN, False, KIND, EVEN)
    for t0 in range(begin, end, STEPS):
        # behind the last token there may be no memory: the last ones again, of which nothing is read
        t1 = b * 0 + (tl.minimum(t0 + STEPS, end - STEPS) if EVEN else t0 + STEPS)
        # what is loaded next time
        t2 = b * 0 + tl.minimum(t0 + 2 * STEPS, last)
        near(lines + t2 * line_row)
        near(shared_lines + t2 * row_length(KIND, BN))
        next_xs = load_rows(x, t1, x_row, d_in, end, STEPS, FULL, EVEN)
        next_steps = load_rows(step, t1, step_row, d_in, end, STEPS, FULL, EVEN)
        next_positions = positions_from(t1, end, pos, STEPS, HAS_POS, EVEN)
        bits = starts_among(positions, STEPS, HAS_POS)
        for s in tl.static_range(STEPS):
            t_next = b * 0 + t0 + (s + AHEAD) if s + AHEAD < STEPS else t1 + (s + AHEAD - STEPS)
            ahead += shared_at(t_next, end, rows, n, BN, False, KIND, EVEN)
            loads_begun()
            in_t, _query_t, square = ahead[:3]
            ahead = ahead[3:]
            present = True if EVEN else t0 + s < end
            fresh = starts(bits, s, HAS_POS)
            size, _ = activated(KIND, ACTIVATE, released(steps[s], step) + shift)
            taken, first, second = coefficients(KIND, size, square, present, fresh)
            decay = decay_of(KIND, rates, first, second, in_t, BN)
            if KIND == LONGHORN:
                kept *= decay
            else:
                total += first if KIND == MAMBA else tl.where(fresh, FORGET, taken)
            h = decay * h + taken_in(KIND, rates, taken, released(xs[s], x), in_t, BN)
        xs, steps, positions = next_xs, next_steps, next_positions
    if KIND != LONGHORN:
        kept = tl.exp2(spread(tl.minimum(total, FORGET), BN) * rates)
    at_piece = (b * tl.num_programs(2) + p) * D * N
    store_states(decay_out + at_piece, at_state, kept, inside, N, FULL)
    store_states(add_out + at_piece, at_state, h, inside, N, FULL)


@triton.jit
def fold_kernel(
    decay, add, first, arriving, last, size, pieces,
    HAS_FIRST: tl.constexpr, BACKWARDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What arrives at each piece, [B, P, size], and what leaves the last one, [B, size]; from the last piece to the first if
    BACKWARDS. size is D N."""
    i, b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1).to(tl.int64)
    inside = i < size
    h = tl.load(first + b * size + i, mask=inside, other=0.0) if HAS_FIRST else tl.zeros([BLOCK], tl.float32)
    for k in range(pieces):
        p = pieces - 1 - k if BACKWARDS else k
        at = (b * pieces + p) * size + i
        tl.store(arriving + at, h, mask=inside)
        h = tl.load(decay + at, mask=inside, other=0.0) * h + tl.load(add + at, mask=inside, other=0.0)
    tl.store(last + b * size + i, h, mask=inside)


@triton.jit
def scan_kernel(
    x, step, bias, A, rows, skip, z, pos, entering, y, final, borders,
    T, piece, x_batch, step_batch, z_batch,
    D: tl.constexpr, N: tl.constexpr, x_row: tl.constexpr, step_row: tl.constexpr, z_row: tl.constexpr,
    KIND: tl.constexpr, ACTIVATE: tl.constexpr, GATED: tl.constexpr, HAS_POS: tl.constexpr, HAS_ENTERING: tl.constexpr,
    KEEP_BORDERS: tl.constexpr, EVEN: tl.constexpr, FULL: tl.constexpr,
    BD: tl.constexpr, BN: tl.constexpr, STEPS: tl.constexpr, AHEAD: tl.constexpr, BORDER: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """y or, of a gated scan, y silu(z) [B, T, D], the state behind the last token [B, D, N] and, if kept, the state before each
    BORDER tokens [B, C, D, N], given the state that enters each piece [B, P, D, N]."""
    b, p = tl.program_id(1).to(tl.int64), tl.program_id(2)
    d, d_in, n, inside, at_state = states_of(tl.program_id(0), D, N, BD, BN)
    rates, blank = rates_at(A, at_state, inside, N, KIND, FULL)
    shift = tl.load(bias + d, mask=d_in, other=0.0).to(tl.float32) if ACTIVATE else 0.0
    through = tl.load(skip + d, mask=d_in, other=0.0).to(tl.float32)
    tensors, lengths = (x + b * x_batch, step + b * step_batch), (x_row, step_row)
    if GATED:
        tensors += (z + b * z_batch,)
        lengths += (z_row,)
    begin, end = p * piece, tl.minimum((p + 1) * piece, T)
    lines, line_row = lines_of(tensors, lengths, tl.program_id(0) * BD, end - begin, D, BD, STEPS)
    x += b * x_batch + d
    step += b * step_batch + d
    z += b * z_batch + d
    y += b * T * D + d
    rows += b * T * row_length(KIND, BN)
    shared_lines = lines_of_shared(rows, end - begin, BN, KIND, STEPS)
    last = tl.maximum(end - STEPS, begin)
    pos += b * T
    if HAS_ENTERING:
        h = load_states(entering + (b * tl.num_programs(2) + p) * D * N, at_state, inside, N, FULL)
    else:
        h = blank
    xs = load_rows(x, b * 0 + begin, x_row, d_in, end, STEPS, FULL, EVEN)
    steps = load_rows(step, b * 0 + begin, step_row, d_in, end, STEPS, FULL, EVEN)
    zs = load_rows(z, b * 0 + begin, z_row, d_in, end, STEPS, FULL, EVEN) if GATED else xs
    positions = positions_from(b * 0 + begin, end, pos, STEPS, HAS_POS, EVEN)
    ahead = ()
    for s in tl.static_range(AHEAD):
        ahead += shared_at(b * 0 + begin + s, end, rows, n, BN, True, KIND, EVEN)
    for t0 in tl.range(begin, end, STEPS, loop_unroll_factor=UNROLL):
        if KEEP_BORDERS and t0 % BORDER == 0:
            store_states(borders + (b * tl.cdiv(T, BORDER) + t0 // BORDER) * D * N, at_state, h, inside, N, FULL)
        # behind the last token there may be no memory: the last ones again, of which nothing is read
        t1 = b * 0 + (tl.minimum(t0 + STEPS, end - STEPS) if EVEN else t0 + STEPS)
        # what is loaded next time
        t2 = b * 0 + tl.minimum(t0 + 2 * STEPS, last)
        near(lines + t2 * line_row)
        near(shared_lines + t2 * row_length(KIND, BN))
        next_xs = load_rows(x, t1, x_row, d_in, end, STEPS, FULL, EVEN)
        next_steps = load_rows(step, t1, step_row, d_in, end, STEPS, FULL, EVEN)
        next_positions = positions_from(t1, end, pos, STEPS, HAS_POS, EVEN)
        bits = starts_among(positions, STEPS, HAS_POS)
        next_zs = load_rows(z, t1, z_row, d_in, end, STEPS, FULL, EVEN) if GATED else next_xs
        t0_64 = b * 0 + t0
        outputs = ()
        for s in tl.static_range(STEPS):
            t_next = t0_64 + (s + AHEAD) if s + AHEAD < STEPS else t1 + (s + AHEAD - STEPS)
            ahead += shared_at(t_next, end, rows, n, BN, True, KIND, EVEN)
            loads_begun()
            in_t, query_t, square = ahead[:3]
            ahead = ahead[3:]
            present = True if EVEN else t0 + s < end
            fresh = starts(bits, s, HAS_POS)
            size, _ = activated(KIND, ACTIVATE, released(steps[s], step) + shift)
            taken, first, second = coefficients(KIND, size, square, present, fresh)
            decay = decay_of(KIND, rates, first, second, in_t, BN)
            x_t = released(xs[s], x)
            h = decay * h + taken_in(KIND, rates, taken, x_t, in_t, BN)
            y_t = over_states(h * query_t[:, None, :, :]) + through * x_t
            if GATED:
                z_t = released(zs[s], z)
                y_t *= z_t * sigmoid(z_t)
            outputs += (y_t,)
        # last, for a store keeps the compiler from moving later loads up
        for s in tl.static_range(STEPS):
            present = True if EVEN else t0 + s < end
            tl.store(y + (t0_64 + s) * D, outputs[s].to(y.dtype.element_ty), mask=d_in & present)
        xs, steps, zs, positions = next_xs, next_steps, next_zs, next_positions
    if end == T:
        store_states(final + b * D * N, at_state, h, inside, N, FULL)


@triton.jit
def pack_kernel(
    into, query, rows, T, N, into_batch, into_row, query_batch, query_row, KIND: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr
):
    """What all channels read of a token, side by side in float32 and zeros where a state is not: in [BN] (of Longhorn a key), query
    [BN] and, of Longhorn, the sum of its key's squares."""
    b, t = tl.program_id(1).to(tl.int64), tl.program_id(0) * BT + tl.arange(0, BT)
    n = tl.arange(0, BN)
    t_in, long = (t < T)[:, None], t[:, None].to(tl.int64)
    inside = t_in & (n < N)[None, :]
    keys = tl.load(into + b * into_batch + long * into_row + n[None, :], mask=inside, other=0.0).to(tl.float32)
    queries = tl.load(query + b * query_batch + long * query_row + n[None, :], mask=inside, other=0.0).to(tl.float32)
    row = rows + (b * T + long) * row_length(KIND, BN)
    tl.store(row + n[None, :], keys, mask=t_in)
    tl.store(row + BN + n[None, :], queries, mask=t_in)
    if KIND == LONGHORN:
        tl.store(row + 2 * BN, tl.sum(keys * keys, 1)[:, None], mask=t_in)
