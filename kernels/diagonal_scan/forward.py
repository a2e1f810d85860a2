"""The diagonal scans forwards, in Triton: h = decay h + add, y = (sum_n query h + skip x) silu(z).

The one thing to know: a program owns a block of channels with all their states in registers and walks over time. It loads STEPS
tokens, then computes them, then stores them: a store in between would keep the compiler from moving the next loads up. Where batch
and channels alone leave the GPU idle, the sequence is cut into pieces; `summarize_kernel` finds what each does to a state and
`fold_kernel` which state enters it.
"""

import triton
import triton.language as tl

from baton.kernels.diagonal_scan.per_token import (
    FORGET,
    LONGHORN,
    MAMBA,
    activated,
    coefficients,
    decay_of,
    load_channels,
    load_rates,
    load_vector,
    sigmoid,
    token_at,
)


@triton.jit
def summarize_kernel(
    x, step, bias, A, vec_in, others, square, pos, decay_out, add_out,
    T, D, N, piece, x_batch, x_row, step_batch, step_row, in_batch, in_row,
    KIND: tl.constexpr, ACTIVATE: tl.constexpr, HAS_POS: tl.constexpr, EVEN: tl.constexpr,
    BD: tl.constexpr, BN: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """What a piece does to the state that enters it: decay and add, [B, P, D, N]."""
    d, n, b, p = tl.program_id(0) * BD + tl.arange(0, BD), tl.arange(0, BN), tl.program_id(1), tl.program_id(2)
    d_in, n_in = d < D, n < N
    inside = d_in[:, None] & n_in[None, :]
    rates = load_rates(KIND, A, d, n, inside, N)
    shift = tl.load(bias + d, mask=d_in, other=0.0).to(tl.float32) if ACTIVATE else 0.0
    b = b.to(tl.int64)
    x += b * x_batch
    step += b * step_batch
    vec_in += b * in_batch
    others += b * T * N
    square += b * T
    pos += b * T
    begin, end = p * piece, tl.minimum((p + 1) * piece, T)
    h = tl.zeros([BD, BN], tl.float32)
    kept = tl.zeros([BD, BN], tl.float32) + 1.0
    total = tl.zeros([BD], tl.float32)
    for t0 in range(begin, end, STEPS):
        t0_64 = b * 0 + t0
        x_0, step_0, vec_in_0 = x + t0_64 * x_row, step + t0_64 * step_row, vec_in + t0_64 * in_row
        others_0 = others + t0_64 * N
        taken, first, second, ins, rest = (), (), (), (), ()
        for s in tl.static_range(STEPS):
            present, fresh = token_at(t0 + s, end, EVEN, pos, HAS_POS)
            size, _ = activated(KIND, ACTIVATE, load_channels(step_0, s, step_row, d, d_in, present) + shift)
            far = tl.load(square + t0 + s, mask=present, other=0.0) if KIND == LONGHORN else 0.0
            w, f1, f2 = coefficients(KIND, size, far, present, fresh)
            taken += (w * load_channels(x_0, s, x_row, d, d_in, present),)
            first += (f1,)
            second += (f2,)
            ins += (load_vector(vec_in_0, s, in_row, n, n_in, present),)
            rest += (load_vector(others_0, s, N, n, n_in, present) if KIND == LONGHORN else 0.0,)
        for s in tl.static_range(STEPS):
            decay = decay_of(KIND, rates, first[s], second[s], rest[s])
            h = decay * h + taken[s][:, None] * ins[s][None, :]
            if KIND == MAMBA:
                total += first[s]
            else:
                kept *= decay
    if KIND == MAMBA:
        kept = tl.exp2(tl.minimum(total, FORGET)[:, None] * rates)
    at = ((b * tl.num_programs(2) + p) * D + d[:, None]) * N + n[None, :]
    tl.store(decay_out + at, kept, mask=inside)
    tl.store(add_out + at, h, mask=inside)


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
    x, step, bias, A, vec_in, others, square, query, skip, z, pos, entering, y, final, borders,
    T, D, N, piece, x_batch, x_row, step_batch, step_row, in_batch, in_row, query_batch, query_row, z_batch, z_row,
    KIND: tl.constexpr, ACTIVATE: tl.constexpr, GATED: tl.constexpr, HAS_POS: tl.constexpr, HAS_ENTERING: tl.constexpr,
    KEEP_BORDERS: tl.constexpr, EVEN: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, STEPS: tl.constexpr, BORDER: tl.constexpr,
):  # fmt: skip
    """y [B, T, D], the state behind the last token [B, D, N] and, if kept, the state before each BORDER tokens [B, C, D, N], given
    the state that enters each piece."""
    d, n, b, p = tl.program_id(0) * BD + tl.arange(0, BD), tl.arange(0, BN), tl.program_id(1), tl.program_id(2)
    d_in, n_in = d < D, n < N
    inside = d_in[:, None] & n_in[None, :]
    at_state = d[:, None] * N + n[None, :]
    rates = load_rates(KIND, A, d, n, inside, N)
    shift = tl.load(bias + d, mask=d_in, other=0.0).to(tl.float32) if ACTIVATE else 0.0
    through = tl.load(skip + d, mask=d_in, other=0.0).to(tl.float32)
    b = b.to(tl.int64)
    x += b * x_batch
    step += b * step_batch
    vec_in += b * in_batch
    query += b * query_batch
    z += b * z_batch
    y += b * T * D
    others += b * T * N
    square += b * T
    pos += b * T
    begin, end = p * piece, tl.minimum((p + 1) * piece, T)
    if HAS_ENTERING:
        h = tl.load(entering + (b * tl.num_programs(2) + p) * D * N + at_state, mask=inside, other=0.0)
    else:
        h = tl.zeros([BD, BN], tl.float32)
    for c0 in range(begin, end, BORDER):
        if KEEP_BORDERS:
            tl.store(borders + (b * tl.cdiv(T, BORDER) + c0 // BORDER) * D * N + at_state, h, mask=inside)
        for t0 in range(c0, tl.minimum(c0 + BORDER, end), STEPS):
            t0_64 = b * 0 + t0
            x_0, step_0, vec_in_0 = x + t0_64 * x_row, step + t0_64 * step_row, vec_in + t0_64 * in_row
            query_0, z_0, y_0, others_0 = query + t0_64 * query_row, z + t0_64 * z_row, y + t0_64 * D, others + t0_64 * N
            xs, taken, first, second, ins, rest, queries, gates, outputs = (), (), (), (), (), (), (), (), ()
            for s in tl.static_range(STEPS):
                present, fresh = token_at(t0 + s, end, EVEN, pos, HAS_POS)
                size, _ = activated(KIND, ACTIVATE, load_channels(step_0, s, step_row, d, d_in, present) + shift)
                far = tl.load(square + t0 + s, mask=present, other=0.0) if KIND == LONGHORN else 0.0
                w, f1, f2 = coefficients(KIND, size, far, present, fresh)
                x_t = load_channels(x_0, s, x_row, d, d_in, present)
                xs += (through * x_t,)
                taken += (w * x_t,)
                first += (f1,)
                second += (f2,)
                ins += (load_vector(vec_in_0, s, in_row, n, n_in, present),)
                rest += (load_vector(others_0, s, N, n, n_in, present) if KIND == LONGHORN else 0.0,)
                queries += (load_vector(query_0, s, query_row, n, n_in, present),)
                z_t = load_channels(z_0, s, z_row, d, d_in, present) if GATED else 0.0
                gates += (z_t * sigmoid(z_t) if GATED else 1.0,)
            for s in tl.static_range(STEPS):
                h = decay_of(KIND, rates, first[s], second[s], rest[s]) * h + taken[s][:, None] * ins[s][None, :]
                outputs += ((tl.sum(h * queries[s][None, :], 1) + xs[s]) * gates[s],)
            for s in tl.static_range(STEPS):
                present = True if EVEN else t0 + s < end
                tl.store(y_0 + s * D + d, outputs[s].to(y.dtype.element_ty), mask=d_in & present)
    if end == T:
        tl.store(final + b * D * N + at_state, h, mask=inside)


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
