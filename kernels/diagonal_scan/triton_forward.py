"""Triton kernels of the diagonal scan's forward pass: h = decay h + input, y = (sum_n C h + D x) silu(z).

A program is one warp. It owns a block of channels, holds all their states in registers and loops over time, so it waits for nothing
but loads. Rows of channels (x, dt, z) are loaded BLOCK_T tokens ahead, B and C PREFETCH_T tokens ahead; both are prefetched into
the cache BLOCK_T tokens before that.

Where batch and channels are too few programs to fill the GPU, the sequence is split. `diagonal_scan_transition_kernel` computes the
transition of each split, and `diagonal_scan_combine_kernel` the state that each split starts from.

Shapes and layouts: see `triton_common`.
"""

import triton
import triton.language as tl

from baton.kernels.common.triton_prefetch import issue_loads, load_rows, prefetch, row_lines, sigmoid, unpack_bits
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
    x, dt, A, bc, dt_bias, pos, decay_out, add_out,
    T, split_len, x_batch, dt_batch,
    DIM: tl.constexpr, DSTATE: tl.constexpr, x_row: tl.constexpr, dt_row: tl.constexpr, RECURRENCE: tl.constexpr,
    ACTIVATE: tl.constexpr, HAS_POS: tl.constexpr, EVEN_T: tl.constexpr, EVEN_D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, PREFETCH_T: tl.constexpr,
):  # fmt: skip
    """The transition of each split, h_out = decay h_in + add: decay and add, [batch, splits, DIM, DSTATE]."""
    b, p = tl.program_id(1).to(tl.int64), tl.program_id(2)
    d, d_in, n, inside, state_offset = state_block(tl.program_id(0), DIM, DSTATE, BLOCK_D, BLOCK_N)
    A_log2e, zero_block = load_A(A, state_offset, inside, DSTATE, RECURRENCE, EVEN_D)
    bias_d = tl.load(dt_bias + d, mask=d_in, other=0.0).to(tl.float32) if ACTIVATE else 0.0
    begin, end = p * split_len, tl.minimum((p + 1) * split_len, T)
    tensors, lengths = (x + b * x_batch, dt + b * dt_batch), (x_row, dt_row)
    lines, line_row = row_lines(tensors, lengths, tl.program_id(0) * BLOCK_D, end - begin, DIM, BLOCK_D, BLOCK_T)
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
        # memory may end after the last token: load the last ones again, which are not used
        t1 = b * 0 + (tl.minimum(t0 + BLOCK_T, end - BLOCK_T) if EVEN_T else t0 + BLOCK_T)
        # prefetch what the next iteration loads
        t2 = b * 0 + tl.minimum(t0 + 2 * BLOCK_T, last)
        prefetch(lines + t2 * line_row)
        prefetch(bc_lines + t2 * bc_row_size(RECURRENCE, BLOCK_N))
        next_xs = load_rows(x, t1, x_row, d_in, end, BLOCK_T, EVEN_D, EVEN_T)
        next_dts = load_rows(dt, t1, dt_row, d_in, end, BLOCK_T, EVEN_D, EVEN_T)
        next_positions = load_positions(t1, end, pos, BLOCK_T, HAS_POS, EVEN_T)
        bits = document_start_bits(positions, BLOCK_T, HAS_POS)
        for s in tl.static_range(BLOCK_T):
            t_next = b * 0 + t0 + (s + PREFETCH_T) if s + PREFETCH_T < BLOCK_T else t1 + (s + PREFETCH_T - BLOCK_T)
            ahead += load_bc(t_next, end, bc, n, BLOCK_N, False, RECURRENCE, EVEN_T)
            issue_loads()
            B_t, _C_t, k_square = ahead[:3]
            ahead = ahead[3:]
            present = True if EVEN_T else t0 + s < end
            starts_document = is_document_start(bits, s, HAS_POS)
            dt_t, _ = activate_dt(RECURRENCE, ACTIVATE, unpack_bits(dts[s], dt) + bias_d)
            x_scale, first, second = decay_coefficients(RECURRENCE, dt_t, k_square, present, starts_document)
            decay = decay_block(RECURRENCE, A_log2e, first, second, B_t, BLOCK_N)
            if RECURRENCE == LONGHORN:
                total_decay *= decay
            else:
                total += first if RECURRENCE == MAMBA else tl.where(starts_document, FORGET_ALL, x_scale)
            h = decay * h + input_block(RECURRENCE, A_log2e, x_scale, unpack_bits(xs[s], x), B_t, BLOCK_N)
        xs, dts, positions = next_xs, next_dts, next_positions
    if RECURRENCE != LONGHORN:
        total_decay = tl.exp2(broadcast_channels(tl.minimum(total, FORGET_ALL), BLOCK_N) * A_log2e)
    split_offset = (b * tl.num_programs(2) + p) * DIM * DSTATE
    store_states(decay_out + split_offset, state_offset, total_decay, inside, DSTATE, EVEN_D)
    store_states(add_out + split_offset, state_offset, h, inside, DSTATE, EVEN_D)


@triton.jit
def diagonal_scan_combine_kernel(
    decay, add, initial, initial_states, final, size, num_splits,
    HAS_INITIAL: tl.constexpr, REVERSE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The state that each split starts from, [batch, splits, size], and the one after the last, [batch, size], with size = DIM
    DSTATE. REVERSE: from the last split to the first, for cotangents."""
    i, b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1).to(tl.int64)
    inside = i < size
    h = tl.load(initial + b * size + i, mask=inside, other=0.0) if HAS_INITIAL else tl.zeros([BLOCK], tl.float32)
    for k in range(num_splits):
        p = num_splits - 1 - k if REVERSE else k
        at = (b * num_splits + p) * size + i
        tl.store(initial_states + at, h, mask=inside)
        h = tl.load(decay + at, mask=inside, other=0.0) * h + tl.load(add + at, mask=inside, other=0.0)
    tl.store(final + b * size + i, h, mask=inside)


@triton.jit(do_not_specialize=["first_checkpoint"])
def diagonal_scan_forward_kernel(
    x, dt, A, bc, D, z, dt_bias, pos, initial_states, y, final, checkpoints,
    T, split_len, x_batch, dt_batch, z_batch, first_checkpoint,
    DIM: tl.constexpr, DSTATE: tl.constexpr, x_row: tl.constexpr, dt_row: tl.constexpr, z_row: tl.constexpr,
    RECURRENCE: tl.constexpr, ACTIVATE: tl.constexpr, HAS_Z: tl.constexpr, HAS_POS: tl.constexpr, HAS_INITIAL_STATES: tl.constexpr,
    EVEN_T: tl.constexpr, EVEN_D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr, PREFETCH_T: tl.constexpr, CHECKPOINT_INTERVAL: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """y [batch, T, DIM], multiplied by silu(z) if HAS_Z; the final state [batch, DIM, DSTATE]; and the state before every
    CHECKPOINT_INTERVAL-th token, [batch, chunks, DIM, DSTATE].

    first_checkpoint: 0, or -1 for no checkpoints, a number and not a constexpr: one program computes both, so that they have the
    same bits. (Compilers choose which product of a b + c d is rounded, and chose otherwise without the store.)
    initial_states: of the splits, [batch, splits, DIM, DSTATE]. bc: see `diagonal_scan_pack_bc_kernel`.
    """
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
    lines, line_row = row_lines(tensors, lengths, tl.program_id(0) * BLOCK_D, end - begin, DIM, BLOCK_D, BLOCK_T)
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
        if t0 % CHECKPOINT_INTERVAL == first_checkpoint:
            store_states(
                checkpoints + (b * tl.cdiv(T, CHECKPOINT_INTERVAL) + t0 // CHECKPOINT_INTERVAL) * DIM * DSTATE,
                state_offset,
                h,
                inside,
                DSTATE,
                EVEN_D,
            )
        # memory may end after the last token: load the last ones again, which are not used
        t1 = b * 0 + (tl.minimum(t0 + BLOCK_T, end - BLOCK_T) if EVEN_T else t0 + BLOCK_T)
        # prefetch what the next iteration loads
        t2 = b * 0 + tl.minimum(t0 + 2 * BLOCK_T, last)
        prefetch(lines + t2 * line_row)
        prefetch(bc_lines + t2 * bc_row_size(RECURRENCE, BLOCK_N))
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
            issue_loads()
            B_t, C_t, k_square = ahead[:3]
            ahead = ahead[3:]
            present = True if EVEN_T else t0 + s < end
            starts_document = is_document_start(bits, s, HAS_POS)
            dt_t, _ = activate_dt(RECURRENCE, ACTIVATE, unpack_bits(dts[s], dt) + bias_d)
            x_scale, first, second = decay_coefficients(RECURRENCE, dt_t, k_square, present, starts_document)
            decay = decay_block(RECURRENCE, A_log2e, first, second, B_t, BLOCK_N)
            x_t = unpack_bits(xs[s], x)
            h = decay * h + input_block(RECURRENCE, A_log2e, x_scale, x_t, B_t, BLOCK_N)
            y_t = sum_over_states(h * C_t[:, None, :, :]) + D_d * x_t
            if HAS_Z:
                z_t = unpack_bits(zs[s], z)
                y_t *= z_t * sigmoid(z_t)
            outputs += (y_t,)
        # last: the compiler does not move later loads above a store
        for s in tl.static_range(BLOCK_T):
            present = True if EVEN_T else t0 + s < end
            tl.store(y + (t0_64 + s) * DIM, outputs[s].to(y.dtype.element_ty), mask=d_in & present)
        xs, dts, zs, positions = next_xs, next_dts, next_zs, next_positions
    if end == T:
        store_states(final + b * DIM * DSTATE, state_offset, h, inside, DSTATE, EVEN_D)


@triton.jit
def diagonal_scan_pack_bc_kernel(
    B, C, bc, T, dstate, B_batch, B_row, C_batch, C_row, RECURRENCE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr
):
    """B [BLOCK_N] and C [BLOCK_N] of each token side by side in float32, padded with zeros, and for Longhorn |k|^2 (its B is k)."""
    b, t = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    n = tl.arange(0, BLOCK_N)
    t_in, t_64 = (t < T)[:, None], t[:, None].to(tl.int64)
    inside = t_in & (n < dstate)[None, :]
    B_t = tl.load(B + b * B_batch + t_64 * B_row + n[None, :], mask=inside, other=0.0).to(tl.float32)
    C_t = tl.load(C + b * C_batch + t_64 * C_row + n[None, :], mask=inside, other=0.0).to(tl.float32)
    row = bc + (b * T + t_64) * bc_row_size(RECURRENCE, BLOCK_N)
    tl.store(row + n[None, :], B_t, mask=t_in)
    tl.store(row + BLOCK_N + n[None, :], C_t, mask=t_in)
    if RECURRENCE == LONGHORN:
        tl.store(row + 2 * BLOCK_N, tl.sum(B_t * B_t, 1)[:, None], mask=t_in)
