"""The diagonal scans forwards, in Triton: h = decay h + add, y = (sum_n query h + skip x) silu(z).

The one thing to know: a program is one warp and owns a block of channels, with all their states in its registers, and walks over
time; so nothing but the loads waits for anything. What it reads of channels it reads STEPS tokens ahead, what all channels share
AHEAD tokens; both it has asked for STEPS tokens before. Where batch and channels alone leave the GPU idle, the sequence is cut into
pieces; `diagonal_scan_transition_kernel` finds what each does to a state and `diagonal_scan_combine_kernel` which state enters it.
"""

import triton
import triton.language as tl

from baton.kernels.common.triton_prefetch import lines_of, load_rows, loads_begun, near, released, sigmoid
from baton.kernels.diagonal_scan.triton_common import (
    FORGET_ALL,
    LONGHORN,
    MAMBA,
    activate_dt,
    bc_cache_lines,
    bc_row_size,
    broadcast_channels,
    decay_block,
    decay_coefficients,
    document_start_bits,
    input_block,
    is_document_start,
    load_A,
    load_bc,
    load_positions,
    load_states,
    state_block,
    store_states,
    sum_over_states,
)


@triton.jit
def diagonal_scan_transition_kernel(
    x, dt, dt_bias, A, bc, pos, decay_out, add_out,
    T, split_len, x_batch, dt_batch,
    DIM: tl.constexpr, DSTATE: tl.constexpr, x_row: tl.constexpr, dt_row: tl.constexpr,
    RECURRENCE: tl.constexpr, ACTIVATE: tl.constexpr, HAS_POS: tl.constexpr, EVEN_T: tl.constexpr, EVEN_D: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, PREFETCH_T: tl.constexpr,
):  # fmt: skip
    """What a piece does to the state that enters it: decay and add, [B, P, D, N]."""
    b, p = tl.program_id(1).to(tl.int64), tl.program_id(2)
    d, d_in, n, inside, state_offset = state_block(tl.program_id(0), DIM, DSTATE, BLOCK_D, BLOCK_N)
    A_log2e, zero_block = load_A(A, state_offset, inside, DSTATE, RECURRENCE, EVEN_D)
    bias_d = tl.load(dt_bias + d, mask=d_in, other=0.0).to(tl.float32) if ACTIVATE else 0.0
    begin, end = p * split_len, tl.minimum((p + 1) * split_len, T)
    tensors, lengths = (x + b * x_batch, dt + b * dt_batch), (x_row, dt_row)
    lines, line_row = lines_of(tensors, lengths, tl.program_id(0) * BLOCK_D, end - begin, DIM, BLOCK_D, BLOCK_T)
    x += b * x_batch + d
    dt += b * dt_batch + d
    bc += b * T * bc_row_size(RECURRENCE, BLOCK_N)
    bc_lines = bc_cache_lines(bc, end - begin, BLOCK_N, RECURRENCE, BLOCK_T)
    last = tl.maximum(end - BLOCK_T, begin)
    pos += b * T
    h = zero_block
    total_decay = zero_block + 1.0
    total = tl.zeros([BLOCK_D], tl.float32)
    xs = load_rows(x, b * 0 + begin, x_row, d_in, end, BLOCK_T, EVEN_D, EVEN_T)
    dts = load_rows(dt, b * 0 + begin, dt_row, d_in, end, BLOCK_T, EVEN_D, EVEN_T)
    positions = load_positions(b * 0 + begin, end, pos, BLOCK_T, HAS_POS, EVEN_T)
    ahead = ()
    for s in tl.static_range(PREFETCH_T):
        ahead += load_bc(b * 0 + begin + s, end, bc, n, BLOCK_N, False, RECURRENCE, EVEN_T)
    for t0 in range(begin, end, BLOCK_T):
        # behind the last token there may be no memory: the last ones again, of which nothing is read
        t1 = b * 0 + (tl.minimum(t0 + BLOCK_T, end - BLOCK_T) if EVEN_T else t0 + BLOCK_T)
        # what is loaded next time
        t2 = b * 0 + tl.minimum(t0 + 2 * BLOCK_T, last)
        near(lines + t2 * line_row)
        near(bc_lines + t2 * bc_row_size(RECURRENCE, BLOCK_N))
        next_xs = load_rows(x, t1, x_row, d_in, end, BLOCK_T, EVEN_D, EVEN_T)
        next_dts = load_rows(dt, t1, dt_row, d_in, end, BLOCK_T, EVEN_D, EVEN_T)
        next_positions = load_positions(t1, end, pos, BLOCK_T, HAS_POS, EVEN_T)
        bits = document_start_bits(positions, BLOCK_T, HAS_POS)
        for s in tl.static_range(BLOCK_T):
            t_next = b * 0 + t0 + (s + PREFETCH_T) if s + PREFETCH_T < BLOCK_T else t1 + (s + PREFETCH_T - BLOCK_T)
            ahead += load_bc(t_next, end, bc, n, BLOCK_N, False, RECURRENCE, EVEN_T)
            loads_begun()
            B_t, _C_t, k_square = ahead[:3]
            ahead = ahead[3:]
            present = True if EVEN_T else t0 + s < end
            starts_document = is_document_start(bits, s, HAS_POS)
            size, _ = activate_dt(RECURRENCE, ACTIVATE, released(dts[s], dt) + bias_d)
            taken, first, second = decay_coefficients(RECURRENCE, size, k_square, present, starts_document)
            decay = decay_block(RECURRENCE, A_log2e, first, second, B_t, BLOCK_N)
            if RECURRENCE == LONGHORN:
                total_decay *= decay
            else:
                total += first if RECURRENCE == MAMBA else tl.where(starts_document, FORGET_ALL, taken)
            h = decay * h + input_block(RECURRENCE, A_log2e, taken, released(xs[s], x), B_t, BLOCK_N)
        xs, dts, positions = next_xs, next_dts, next_positions
    if RECURRENCE != LONGHORN:
        total_decay = tl.exp2(broadcast_channels(tl.minimum(total, FORGET_ALL), BLOCK_N) * A_log2e)
    split_offset = (b * tl.num_programs(2) + p) * DIM * DSTATE
    store_states(decay_out + split_offset, state_offset, total_decay, inside, DSTATE, EVEN_D)
    store_states(add_out + split_offset, state_offset, h, inside, DSTATE, EVEN_D)


@triton.jit
def diagonal_scan_combine_kernel(
    decay, add, first, incoming, last, size, num_splits,
    HAS_INITIAL: tl.constexpr, REVERSE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What arrives at each piece, [B, P, size], and what leaves the last one, [B, size]; from the last piece to the first if
    BACKWARDS. size is D N."""
    i, b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1).to(tl.int64)
    inside = i < size
    h = tl.load(first + b * size + i, mask=inside, other=0.0) if HAS_INITIAL else tl.zeros([BLOCK], tl.float32)
    for k in range(num_splits):
        p = num_splits - 1 - k if REVERSE else k
        at = (b * num_splits + p) * size + i
        tl.store(incoming + at, h, mask=inside)
        h = tl.load(decay + at, mask=inside, other=0.0) * h + tl.load(add + at, mask=inside, other=0.0)
    tl.store(last + b * size + i, h, mask=inside)


@triton.jit
def diagonal_scan_forward_kernel(
    x, dt, dt_bias, A, bc, D, z, pos, initial_states, y, final, checkpoints,
    T, split_len, x_batch, dt_batch, z_batch,
    DIM: tl.constexpr, DSTATE: tl.constexpr, x_row: tl.constexpr, dt_row: tl.constexpr, z_row: tl.constexpr,
    RECURRENCE: tl.constexpr, ACTIVATE: tl.constexpr, HAS_Z: tl.constexpr, HAS_POS: tl.constexpr, HAS_INITIAL_STATES: tl.constexpr,
    STORE_CHECKPOINTS: tl.constexpr, EVEN_T: tl.constexpr, EVEN_D: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, PREFETCH_T: tl.constexpr,
    CHECKPOINT_INTERVAL: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """y or, of a gated scan, y silu(z) [B, T, D], the state behind the last token [B, D, N] and, if kept, the state before each
    BORDER tokens [B, C, D, N], given the state that enters each piece [B, P, D, N]."""
    b, p = tl.program_id(1).to(tl.int64), tl.program_id(2)
    d, d_in, n, inside, state_offset = state_block(tl.program_id(0), DIM, DSTATE, BLOCK_D, BLOCK_N)
    A_log2e, zero_block = load_A(A, state_offset, inside, DSTATE, RECURRENCE, EVEN_D)
    bias_d = tl.load(dt_bias + d, mask=d_in, other=0.0).to(tl.float32) if ACTIVATE else 0.0
    D_d = tl.load(D + d, mask=d_in, other=0.0).to(tl.float32)
    tensors, lengths = (x + b * x_batch, dt + b * dt_batch), (x_row, dt_row)
    if HAS_Z:
        tensors += (z + b * z_batch,)
        lengths += (z_row,)
    begin, end = p * split_len, tl.minimum((p + 1) * split_len, T)
    lines, line_row = lines_of(tensors, lengths, tl.program_id(0) * BLOCK_D, end - begin, DIM, BLOCK_D, BLOCK_T)
    x += b * x_batch + d
    dt += b * dt_batch + d
    z += b * z_batch + d
    y += b * T * DIM + d
    bc += b * T * bc_row_size(RECURRENCE, BLOCK_N)
    bc_lines = bc_cache_lines(bc, end - begin, BLOCK_N, RECURRENCE, BLOCK_T)
    last = tl.maximum(end - BLOCK_T, begin)
    pos += b * T
    if HAS_INITIAL_STATES:
        h = load_states(initial_states + (b * tl.num_programs(2) + p) * DIM * DSTATE, state_offset, inside, DSTATE, EVEN_D)
    else:
        h = zero_block
    xs = load_rows(x, b * 0 + begin, x_row, d_in, end, BLOCK_T, EVEN_D, EVEN_T)
    dts = load_rows(dt, b * 0 + begin, dt_row, d_in, end, BLOCK_T, EVEN_D, EVEN_T)
    zs = load_rows(z, b * 0 + begin, z_row, d_in, end, BLOCK_T, EVEN_D, EVEN_T) if HAS_Z else xs
    positions = load_positions(b * 0 + begin, end, pos, BLOCK_T, HAS_POS, EVEN_T)
    ahead = ()
    for s in tl.static_range(PREFETCH_T):
        ahead += load_bc(b * 0 + begin + s, end, bc, n, BLOCK_N, True, RECURRENCE, EVEN_T)
    for t0 in tl.range(begin, end, BLOCK_T, loop_unroll_factor=UNROLL):
        if STORE_CHECKPOINTS and t0 % CHECKPOINT_INTERVAL == 0:
            store_states(
                checkpoints + (b * tl.cdiv(T, CHECKPOINT_INTERVAL) + t0 // CHECKPOINT_INTERVAL) * DIM * DSTATE,
                state_offset,
                h,
                inside,
                DSTATE,
                EVEN_D,
            )
        # behind the last token there may be no memory: the last ones again, of which nothing is read
        t1 = b * 0 + (tl.minimum(t0 + BLOCK_T, end - BLOCK_T) if EVEN_T else t0 + BLOCK_T)
        # what is loaded next time
        t2 = b * 0 + tl.minimum(t0 + 2 * BLOCK_T, last)
        near(lines + t2 * line_row)
        near(bc_lines + t2 * bc_row_size(RECURRENCE, BLOCK_N))
        next_xs = load_rows(x, t1, x_row, d_in, end, BLOCK_T, EVEN_D, EVEN_T)
        next_dts = load_rows(dt, t1, dt_row, d_in, end, BLOCK_T, EVEN_D, EVEN_T)
        next_positions = load_positions(t1, end, pos, BLOCK_T, HAS_POS, EVEN_T)
        bits = document_start_bits(positions, BLOCK_T, HAS_POS)
        next_zs = load_rows(z, t1, z_row, d_in, end, BLOCK_T, EVEN_D, EVEN_T) if HAS_Z else next_xs
        t0_64 = b * 0 + t0
        outputs = ()
        for s in tl.static_range(BLOCK_T):
            t_next = t0_64 + (s + PREFETCH_T) if s + PREFETCH_T < BLOCK_T else t1 + (s + PREFETCH_T - BLOCK_T)
            ahead += load_bc(t_next, end, bc, n, BLOCK_N, True, RECURRENCE, EVEN_T)
            loads_begun()
            B_t, C_t, k_square = ahead[:3]
            ahead = ahead[3:]
            present = True if EVEN_T else t0 + s < end
            starts_document = is_document_start(bits, s, HAS_POS)
            size, _ = activate_dt(RECURRENCE, ACTIVATE, released(dts[s], dt) + bias_d)
            taken, first, second = decay_coefficients(RECURRENCE, size, k_square, present, starts_document)
            decay = decay_block(RECURRENCE, A_log2e, first, second, B_t, BLOCK_N)
            x_t = released(xs[s], x)
            h = decay * h + input_block(RECURRENCE, A_log2e, taken, x_t, B_t, BLOCK_N)
            y_t = sum_over_states(h * C_t[:, None, :, :]) + D_d * x_t
            if HAS_Z:
                z_t = released(zs[s], z)
                y_t *= z_t * sigmoid(z_t)
            outputs += (y_t,)
        # last, for a store keeps the compiler from moving later loads up
        for s in tl.static_range(BLOCK_T):
            present = True if EVEN_T else t0 + s < end
            tl.store(y + (t0_64 + s) * DIM, outputs[s].to(y.dtype.element_ty), mask=d_in & present)
        xs, dts, zs, positions = next_xs, next_dts, next_zs, next_positions
    if end == T:
        store_states(final + b * DIM * DSTATE, state_offset, h, inside, DSTATE, EVEN_D)


@triton.jit
def diagonal_scan_pack_bc_kernel(
    B, C, bc, T, DSTATE, B_batch, B_row, C_batch, C_row, RECURRENCE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr
):
    """What all channels read of a token, side by side in float32 and zeros where a state is not: in [BN] (of Longhorn a key), query
    [BN] and, of Longhorn, the sum of its key's squares."""
    b, t = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    n = tl.arange(0, BLOCK_N)
    t_in, long = (t < T)[:, None], t[:, None].to(tl.int64)
    inside = t_in & (n < DSTATE)[None, :]
    keys = tl.load(B + b * B_batch + long * B_row + n[None, :], mask=inside, other=0.0).to(tl.float32)
    queries = tl.load(C + b * C_batch + long * C_row + n[None, :], mask=inside, other=0.0).to(tl.float32)
    row = bc + (b * T + long) * bc_row_size(RECURRENCE, BLOCK_N)
    tl.store(row + n[None, :], keys, mask=t_in)
    tl.store(row + BLOCK_N + n[None, :], queries, mask=t_in)
    if RECURRENCE == LONGHORN:
        tl.store(row + 2 * BLOCK_N, tl.sum(keys * keys, 1)[:, None], mask=t_in)
