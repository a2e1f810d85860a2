"""Triton kernels of the diagonal scan's backward pass.

With dh_t = dLoss/dh_t, the adjoint recurrence is dh_t = C_t dy_t + decay_{t+1} dh_{t+1}; `dh_next` is its second term.

Nothing is divided by a decay. The forward pass stores the state before every CHECKPOINT_INTERVAL-th token. From each checkpoint a
program computes the states twice: first it stores one state every BLOCK_T tokens in scratch memory, then it goes through these
blocks from the last to the first and keeps what the adjoint needs in registers. Inputs are prefetched CHECKPOINT_INTERVAL tokens
ahead.

Gradients of B and C are sums over channels. Each block of channels stores its partial sum in x's dtype, and the partial sums are
added in a fixed order: there are no atomics.

Shapes and layouts: see `triton_common`.
"""

import triton
import triton.language as tl

from baton.kernels.common.triton_prefetch import (
    issue_loads,
    line_pointers,
    load_rows,
    prefetch,
    reciprocal,
    row_lines,
    sigmoid,
    unpack_bits,
)
from baton.kernels.diagonal_scan.channel_reduce import store_channel_sums, sum_over_channels
from baton.kernels.diagonal_scan.triton_common import (
    LN_2,
    LONGHORN,
    MAMBA,
    MAMBA_ZOH,
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
    scratch_offsets,
    state_block,
    store_states,
    sum_over_states,
    zoh_terms,
)


@triton.jit
def diagonal_scan_transition_backward_kernel(
    dt, A, bc, z, dt_bias, dy, pos, add_out,
    T, split_len, dt_batch, z_batch, dy_batch,
    DIM: tl.constexpr, DSTATE: tl.constexpr, dt_row: tl.constexpr, z_row: tl.constexpr, dy_row: tl.constexpr,
    RECURRENCE: tl.constexpr, ACTIVATE: tl.constexpr, HAS_Z: tl.constexpr, HAS_POS: tl.constexpr, EVEN_T: tl.constexpr,
    EVEN_D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, PREFETCH_T: tl.constexpr,
):  # fmt: skip
    """The part of the gradient of each split's initial state that comes from the split's dy, [batch, splits, DIM, DSTATE]."""
    b, p = tl.program_id(1).to(tl.int64), tl.program_id(2)
    d, d_in, n, inside, state_offset = state_block(tl.program_id(0), DIM, DSTATE, BLOCK_D, BLOCK_N)
    A_log2e, zero_block = load_A(A, state_offset, inside, DSTATE, RECURRENCE, EVEN_D)
    bias_d = tl.load(dt_bias + d, mask=d_in, other=0.0).to(tl.float32) if ACTIVATE else 0.0
    tensors, lengths = (dt + b * dt_batch, dy + b * dy_batch), (dt_row, dy_row)
    if HAS_Z:
        tensors += (z + b * z_batch,)
        lengths += (z_row,)
    begin, end = p * split_len, tl.minimum((p + 1) * split_len, T)
    lines, line_row = row_lines(tensors, lengths, tl.program_id(0) * BLOCK_D, end - begin, DIM, BLOCK_D, BLOCK_T)
    dt += b * dt_batch + d
    z += b * z_batch + d
    dy += b * dy_batch + d
    bc += b * T * bc_row_size(RECURRENCE, BLOCK_N)
    bc_lines = bc_cache_lines(bc, end - begin, BLOCK_N, RECURRENCE, BLOCK_T)
    pos += b * T
    dh_next = zero_block
    blocks = tl.cdiv(end - begin, BLOCK_T)
    last = b * 0 + begin + (blocks - 1) * BLOCK_T
    dts = load_rows(dt, last, dt_row, d_in, end, BLOCK_T, EVEN_D, EVEN_T)
    dys = load_rows(dy, last, dy_row, d_in, end, BLOCK_T, EVEN_D, EVEN_T)
    zs = load_rows(z, last, z_row, d_in, end, BLOCK_T, EVEN_D, EVEN_T) if HAS_Z else dys
    positions = load_positions(last, end, pos, BLOCK_T, HAS_POS, EVEN_T)
    ahead = ()
    for s in tl.static_range(PREFETCH_T):
        ahead += load_bc(last + (BLOCK_T - 1 - s), end, bc, n, BLOCK_N, True, RECURRENCE, EVEN_T)
    for k in range(blocks):
        t0 = begin + (blocks - 1 - k) * BLOCK_T
        t1 = b * 0 + tl.maximum(t0 - BLOCK_T, begin)
        # what is loaded next time
        t2 = b * 0 + tl.maximum(t0 - 2 * BLOCK_T, begin)
        prefetch(lines + t2 * line_row)
        prefetch(bc_lines + t2 * bc_row_size(RECURRENCE, BLOCK_N))
        next_dts = load_rows(dt, t1, dt_row, d_in, end, BLOCK_T, EVEN_D, EVEN_T)
        next_positions = load_positions(t1, end, pos, BLOCK_T, HAS_POS, EVEN_T)
        bits = document_start_bits(positions, BLOCK_T, HAS_POS)
        next_dys = load_rows(dy, t1, dy_row, d_in, end, BLOCK_T, EVEN_D, EVEN_T)
        next_zs = load_rows(z, t1, z_row, d_in, end, BLOCK_T, EVEN_D, EVEN_T) if HAS_Z else next_dys
        for s in tl.static_range(BLOCK_T - 1, -1, -1):
            t_next = b * 0 + t0 + (s - PREFETCH_T) if s >= PREFETCH_T else t1 + (BLOCK_T + s - PREFETCH_T)
            ahead += load_bc(t_next, end, bc, n, BLOCK_N, True, RECURRENCE, EVEN_T)
            issue_loads()
            B_t, C_t, k_square = ahead[:3]
            ahead = ahead[3:]
            present = True if EVEN_T else t0 + s < end
            starts_document = is_document_start(bits, s, HAS_POS)
            dt_t, _ = activate_dt(RECURRENCE, ACTIVATE, unpack_bits(dts[s], dt) + bias_d)
            _, first, second = decay_coefficients(RECURRENCE, dt_t, k_square, present, starts_document)
            decay = decay_block(RECURRENCE, A_log2e, first, second, B_t, BLOCK_N)
            dy_t = unpack_bits(dys[s], dy)
            if HAS_Z:
                z_t = unpack_bits(zs[s], z)
                dy_t *= z_t * sigmoid(z_t)
            dh_next = decay * (dh_next + broadcast_channels(dy_t, BLOCK_N) * C_t[:, None, :, :])
        dts, dys, zs, positions = next_dts, next_dys, next_zs, next_positions
    store_states(add_out + (b * tl.num_programs(2) + p) * DIM * DSTATE, state_offset, dh_next, inside, DSTATE, EVEN_D)


@triton.jit
def diagonal_scan_backward_kernel(
    x, dt, A, bc, D, z, dt_bias, pos, checkpoints, dfinal_states, dy, scratch,
    dx, ddt, dA, dbc_partial, dD, dz, ddt_bias, dinitial_state,
    T, split_len, x_batch, dt_batch, z_batch, dy_batch, dz_batch,
    DIM: tl.constexpr, DSTATE: tl.constexpr, x_row: tl.constexpr, dt_row: tl.constexpr, z_row: tl.constexpr, dy_row: tl.constexpr,
    dz_row: tl.constexpr, RECURRENCE: tl.constexpr, ACTIVATE: tl.constexpr, HAS_Z: tl.constexpr, HAS_POS: tl.constexpr,
    EVEN_T: tl.constexpr, EVEN_D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr,
    CHECKPOINT_INTERVAL: tl.constexpr, WARP_SUMS: tl.constexpr,
):  # fmt: skip
    """Gradients, given the cotangent of each split's final state, dfinal_states [batch, splits, DIM, DSTATE].

    dx, ddt, dz: [batch, T, DIM]. dA: [batch, splits, DIM, DSTATE], and dD, ddt_bias: [batch, splits, DIM], to be summed over batch
    and splits. dbc_partial: dB and dC of each block of channels, [DIM / BLOCK_D, batch, T, 2, DSTATE]. dinitial_state: [batch, DIM,
    DSTATE]. scratch: CHECKPOINT_INTERVAL / BLOCK_T blocks of states for each program.
    """
    block, b, p = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    batch, num_splits = tl.num_programs(1), tl.num_programs(2)
    d, d_in, n, inside, state_offset = state_block(block, DIM, DSTATE, BLOCK_D, BLOCK_N)
    A_log2e, _blank = load_A(A, state_offset, inside, DSTATE, RECURRENCE, EVEN_D)
    bias_d = tl.load(dt_bias + d, mask=d_in, other=0.0).to(tl.float32) if ACTIVATE else 0.0
    D_d = tl.load(D + d, mask=d_in, other=0.0).to(tl.float32)
    tensors, lengths = (x + b * x_batch, dt + b * dt_batch, dy + b * dy_batch), (x_row, dt_row, dy_row)
    if HAS_Z:
        tensors += (z + b * z_batch,)
        lengths += (z_row,)
    begin, end = p * split_len, tl.minimum((p + 1) * split_len, T)
    lines, line_row = row_lines(tensors, lengths, block * BLOCK_D, end - begin, DIM, BLOCK_D, CHECKPOINT_INTERVAL)
    x += b * x_batch + d
    dt += b * dt_batch + d
    z += b * z_batch + d
    dy += b * dy_batch + d
    dz += b * dz_batch + d
    out = b * T * DIM + d
    bc += b * T * bc_row_size(RECURRENCE, BLOCK_N)
    bc_lines = bc_cache_lines(bc, end - begin, BLOCK_N, RECURRENCE, CHECKPOINT_INTERVAL)
    pos += b * T
    checkpoint_lines = checkpoints + b * tl.cdiv(T, CHECKPOINT_INTERVAL) * DIM * DSTATE + block * (BLOCK_D * DSTATE)
    checkpoint_lines = line_pointers(checkpoint_lines, tl.minimum(DIM - block * BLOCK_D, BLOCK_D) * DSTATE, BLOCK_D * DSTATE)
    dbc_partial += (block.to(tl.int64) * batch + b) * T * (2 * DSTATE)
    split_offset = (b * num_splits + p) * DIM
    scratch += ((b * num_splits + p) * tl.num_programs(0) + block) * (CHECKPOINT_INTERVAL // BLOCK_T * BLOCK_D * BLOCK_N)
    scratch_offset = scratch_offsets(BLOCK_D, BLOCK_N)
    dh_next = load_states(dfinal_states + split_offset * DSTATE, state_offset, inside, DSTATE, EVEN_D)
    dA_block = tl.zeros(dh_next.shape, tl.float32)
    dD_d = tl.zeros([BLOCK_D], tl.float32)
    dbias_d = tl.zeros([BLOCK_D], tl.float32)
    chunks = tl.cdiv(end - begin, CHECKPOINT_INTERVAL)
    BLOCKS: tl.constexpr = CHECKPOINT_INTERVAL // BLOCK_T
    for k in range(chunks):
        c0 = b * 0 + begin + (chunks - 1 - k) * CHECKPOINT_INTERVAL
        # what is loaded next time
        c1 = b * 0 + tl.maximum(begin + (chunks - 2 - k) * CHECKPOINT_INTERVAL, begin)
        prefetch(lines + c1 * line_row)
        prefetch(bc_lines + c1 * bc_row_size(RECURRENCE, BLOCK_N))
        prefetch(checkpoint_lines + c1 // CHECKPOINT_INTERVAL * (DIM * DSTATE))
        # dy and z of the last block, which only the adjoint reads; x, dt, B and C of all tokens
        t0 = c0 + (BLOCKS - 1) * BLOCK_T
        dys = load_rows(dy, t0, dy_row, d_in, end, BLOCK_T, EVEN_D, EVEN_T)
        zs = load_rows(z, t0, z_row, d_in, end, BLOCK_T, EVEN_D, EVEN_T) if HAS_Z else dys
        xs = load_rows(x, c0, x_row, d_in, end, CHECKPOINT_INTERVAL, EVEN_D, EVEN_T)
        dts = load_rows(dt, c0, dt_row, d_in, end, CHECKPOINT_INTERVAL, EVEN_D, EVEN_T)
        positions = load_positions(c0, end, pos, CHECKPOINT_INTERVAL, HAS_POS, EVEN_T)
        bcs = ()
        for s in tl.static_range(BLOCK_T):
            bcs += load_bc(c0 + s, end, bc, n, BLOCK_N, BLOCKS == 1, RECURRENCE, EVEN_T)
        h = load_states(
            checkpoints + (b * tl.cdiv(T, CHECKPOINT_INTERVAL) + c0 // CHECKPOINT_INTERVAL) * DIM * DSTATE,
            state_offset,
            inside,
            DSTATE,
            EVEN_D,
        )
        bits = document_start_bits(positions, CHECKPOINT_INTERVAL, HAS_POS)
        # every thread has read the scratch memory before it is overwritten; the barrier below orders writes before reads
        issue_loads()
        for j in tl.static_range(BLOCKS - 1):
            next_bcs = ()
            for s in tl.static_range(BLOCK_T):
                t = c0 + (j + 1) * BLOCK_T + s
                next_bcs += load_bc(t, end, bc, n, BLOCK_N, j == BLOCKS - 2, RECURRENCE, EVEN_T)
            issue_loads()
            store_states(scratch + j * BLOCK_D * BLOCK_N, scratch_offset, h, True, BLOCK_N, True)
            for s in tl.static_range(BLOCK_T):
                B_t, _C_t, k_square = bcs[3 * s : 3 * s + 3]
                present = True if EVEN_T else c0 + j * BLOCK_T + s < end
                starts_document = is_document_start(bits, j * BLOCK_T + s, HAS_POS)
                dt_t, _ = activate_dt(RECURRENCE, ACTIVATE, unpack_bits(dts[j * BLOCK_T + s], dt) + bias_d)
                w, first, second = decay_coefficients(RECURRENCE, dt_t, k_square, present, starts_document)
                decay = decay_block(RECURRENCE, A_log2e, first, second, B_t, BLOCK_N)
                h = decay * h + input_block(RECURRENCE, A_log2e, w, unpack_bits(xs[j * BLOCK_T + s], x), B_t, BLOCK_N)
            bcs = next_bcs
        xs, dts = xs[CHECKPOINT_INTERVAL - BLOCK_T :], dts[CHECKPOINT_INTERVAL - BLOCK_T :]
        tl.debug_barrier()
        for j in range(BLOCKS):
            t0 = c0 + (BLOCKS - 1 - j) * BLOCK_T
            # before the first block there is nothing to load: the first block again
            t1 = tl.maximum(t0 - BLOCK_T, c0)
            next_xs = load_rows(x, t1, x_row, d_in, end, BLOCK_T, EVEN_D, EVEN_T)
            next_dts = load_rows(dt, t1, dt_row, d_in, end, BLOCK_T, EVEN_D, EVEN_T)
            next_dys = load_rows(dy, t1, dy_row, d_in, end, BLOCK_T, EVEN_D, EVEN_T)
            next_zs = load_rows(z, t1, z_row, d_in, end, BLOCK_T, EVEN_D, EVEN_T) if HAS_Z else next_dys
            issue_loads()
            # the last token first
            dt_ts, ddt_slopes, dy_ts, h_befores, decays, dC_ts, dB_ts = (), (), (), (), (), (), ()
            for s in tl.static_range(BLOCK_T):
                B_t, C_t, k_square = bcs[3 * s : 3 * s + 3]
                present = True if EVEN_T else t0 + s < end
                starts_document = is_document_start(bits, (BLOCKS - 1 - j) * BLOCK_T + s, HAS_POS)
                dt_t, slope = activate_dt(RECURRENCE, ACTIVATE, unpack_bits(dts[s], dt) + bias_d)
                w, first, second = decay_coefficients(RECURRENCE, dt_t, k_square, present, starts_document)
                decay = decay_block(RECURRENCE, A_log2e, first, second, B_t, BLOCK_N)
                h_before = tl.where(starts_document, 0.0, h) if RECURRENCE == LONGHORN and HAS_POS else h
                h = decay * h + input_block(RECURRENCE, A_log2e, w, unpack_bits(xs[s], x), B_t, BLOCK_N)
                dy_t = unpack_bits(dys[s], dy)
                if HAS_Z:
                    z_t = unpack_bits(zs[s], z)
                    sigmoid_z = sigmoid(z_t)
                    y_t = sum_over_states(h * C_t[:, None, :, :]) + D_d * unpack_bits(xs[s], x)
                    dz_t = dy_t * y_t * sigmoid_z * (1.0 + z_t * (1.0 - sigmoid_z))
                    tl.store(dz + (t0 + s) * dz_row, dz_t.to(dz.dtype.element_ty), mask=d_in & present)
                    dy_t *= z_t * sigmoid_z
                dC_ts += (sum_over_channels(h * broadcast_channels(dy_t, BLOCK_N), WARP_SUMS),)
                dt_ts = (w,) + dt_ts
                # d beta = d eps / (1 + beta |k|^2)^2
                ddt_slopes = (
                    slope if RECURRENCE != LONGHORN else slope * reciprocal((1.0 + dt_t * k_square) * (1.0 + dt_t * k_square)),
                ) + ddt_slopes
                dy_ts = (dy_t,) + dy_ts
                h_befores = (h_before,) + h_befores
                decays = (decay,) + decays
            next_bcs = ()
            for r in tl.static_range(BLOCK_T):
                if r == BLOCK_T - 1:
                    # loaded no earlier, to leave registers to the adjoint
                    for s in tl.static_range(BLOCK_T):
                        next_bcs += load_bc(t1 + s, end, bc, n, BLOCK_N, True, RECURRENCE, EVEN_T)
                    h = load_states(
                        scratch + tl.maximum(BLOCKS - 2 - j, 0) * (BLOCK_D * BLOCK_N), scratch_offset, True, BLOCK_N, True
                    )
                    issue_loads()
                t = t0 + BLOCK_T - 1 - r
                exists = d_in if EVEN_T else d_in & (t < end)
                B_t, C_t, _k_square = bcs[3 * (BLOCK_T - 1 - r) : 3 * (BLOCK_T - r)]
                x_t = unpack_bits(xs[BLOCK_T - 1 - r], x)
                dh = dh_next + broadcast_channels(dy_ts[r], BLOCK_N) * C_t[:, None, :, :]
                dh_next = decays[r] * dh
                if RECURRENCE == MAMBA_ZOH:
                    exp_dtA, phi, by_rate = zoh_terms(A_log2e, dt_ts[r], BLOCK_N)
                    taken = dh * B_t[:, None, :, :]
                    read = sum_over_states(taken * phi)
                    taken *= broadcast_channels(x_t, BLOCK_N)
                    faded = dh_next * h_befores[r]
                    dA_block += faded * broadcast_channels(dt_ts[r], BLOCK_N) + taken * by_rate
                    ddt_activated = sum_over_states(taken * exp_dtA + faded * (LN_2 * A_log2e))
                    dB_t = dh * phi * broadcast_channels(x_t, BLOCK_N)
                else:
                    read = sum_over_states(dh * B_t[:, None, :, :])
                if RECURRENCE == MAMBA:
                    faded = dh_next * h_befores[r]
                    dA_block += faded * broadcast_channels(dt_ts[r], BLOCK_N)
                    ddt_activated = x_t * read + LN_2 * sum_over_states(faded * A_log2e)
                    dB_t = dh * broadcast_channels(dt_ts[r] * x_t, BLOCK_N)
                elif RECURRENCE == LONGHORN:
                    # the recall error x - k h as one term: x and k h cancel where the state has learned
                    missed = dh * (broadcast_channels(x_t, BLOCK_N) - B_t[:, None, :, :] * h_befores[r])
                    ddt_activated = sum_over_states(missed * B_t[:, None, :, :])
                    eps = dt_ts[r]
                    dB_t = broadcast_channels(2.0 * eps, BLOCK_N) * missed - broadcast_channels(eps * x_t, BLOCK_N) * dh
                    dB_t -= broadcast_channels(2.0 * ddt_activated * eps * eps, BLOCK_N) * B_t[:, None, :, :]
                dx_t = (read if RECURRENCE == MAMBA_ZOH else dt_ts[r] * read) + D_d * dy_ts[r]
                dD_d += dy_ts[r] * x_t
                ddt_t = ddt_activated * ddt_slopes[r] if EVEN_D and EVEN_T else tl.where(exists, ddt_activated * ddt_slopes[r], 0.0)
                dbias_d += ddt_t
                tl.store(dx + (out + t * DIM), dx_t.to(dx.dtype.element_ty), mask=exists)
                tl.store(ddt + (out + t * DIM), ddt_t.to(ddt.dtype.element_ty), mask=exists)
                dB_ts = (sum_over_channels(dB_t, WARP_SUMS),) + dB_ts
            store_channel_sums(dbc_partial + t0 * (2 * DSTATE), dB_ts, dC_ts, end - t0, DSTATE, BLOCK_T, EVEN_T, WARP_SUMS)
            xs, dts, dys, zs, bcs = next_xs, next_dts, next_dys, next_zs, next_bcs
        # all threads have read the scratch memory before the next chunk overwrites it
        tl.debug_barrier()
    if RECURRENCE != LONGHORN:
        store_states(dA + split_offset * DSTATE, state_offset, dA_block, inside, DSTATE, EVEN_D)
    tl.store(dD + split_offset + d, dD_d, mask=d_in)
    tl.store(ddt_bias + split_offset + d, dbias_d, mask=d_in)
    if p == 0:
        store_states(dinitial_state + b * DIM * DSTATE, state_offset, dh_next, inside, DSTATE, EVEN_D)
