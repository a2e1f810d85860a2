"""The diagonal scans backwards, in Triton.

The one thing to know: nothing is divided by a decay. The forward pass leaves the state at every BORDER-th token; from
there a program computes the states twice: once to leave one in memory every STEPS tokens, then STEPS tokens at a time and the last
ones first, to keep what the adjoint recurrence needs in registers. What it loads of BORDER tokens it has asked for BORDER tokens
before. Sums over channels (gradients of in and query) leave as one part per block of channels, in x's type, to be added in a fixed
order: there are no atomics.

The adjoint, with lam_t = dLoss/dh_t: lam_t = query_t dy_t + decay_{t+1} lam_{t+1}; `carry` is its second term.
"""

import triton
import triton.language as tl

from baton.kernels.common.triton_prefetch import lines_from, lines_of, load_rows, loads_begun, near, reciprocal, released, sigmoid
from baton.kernels.diagonal_scan.channel_reduce import leave_sums, over_channels
from baton.kernels.diagonal_scan.triton_common import (
    LN_2,
    LONGHORN,
    MAMBA,
    MAMBA_ZOH,
    activated,
    coefficients,
    decay_of,
    held,
    lines_of_shared,
    load_states,
    over_states,
    own_memory,
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
def summarize_backward_kernel(
    step, bias, A, rows, z, dy, pos, add_out,
    T, piece, step_batch, z_batch, dy_batch,
    D: tl.constexpr, N: tl.constexpr, step_row: tl.constexpr, z_row: tl.constexpr, dy_row: tl.constexpr,
    KIND: tl.constexpr, ACTIVATE: tl.constexpr, GATED: tl.constexpr, HAS_POS: tl.constexpr, EVEN: tl.constexpr, FULL: tl.constexpr,
    BD: tl.constexpr, BN: tl.constexpr, STEPS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """What dy alone adds to the cotangent of the state that entered each piece, [B, P, D, N]."""
    b, p = tl.program_id(1).to(tl.int64), tl.program_id(2)
    d, d_in, n, inside, at_state = states_of(tl.program_id(0), D, N, BD, BN)
    rates, blank = rates_at(A, at_state, inside, N, KIND, FULL)
    shift = tl.load(bias + d, mask=d_in, other=0.0).to(tl.float32) if ACTIVATE else 0.0
    tensors, lengths = (step + b * step_batch, dy + b * dy_batch), (step_row, dy_row)
    if GATED:
        tensors += (z + b * z_batch,)
        lengths += (z_row,)
    begin, end = p * piece, tl.minimum((p + 1) * piece, T)
    lines, line_row = lines_of(tensors, lengths, tl.program_id(0) * BD, end - begin, D, BD, STEPS)
    step += b * step_batch + d
    z += b * z_batch + d
    dy += b * dy_batch + d
    rows += b * T * row_length(KIND, BN)
    shared_lines = lines_of_shared(rows, end - begin, BN, KIND, STEPS)
    pos += b * T
    carry = blank
    blocks = tl.cdiv(end - begin, STEPS)
    last = b * 0 + begin + (blocks - 1) * STEPS
    steps = load_rows(step, last, step_row, d_in, end, STEPS, FULL, EVEN)
    dys = load_rows(dy, last, dy_row, d_in, end, STEPS, FULL, EVEN)
    zs = load_rows(z, last, z_row, d_in, end, STEPS, FULL, EVEN) if GATED else dys
    positions = positions_from(last, end, pos, STEPS, HAS_POS, EVEN)
    ahead = ()
    for s in tl.static_range(AHEAD):
        ahead += shared_at(last + (STEPS - 1 - s), end, rows, n, BN, True, KIND, EVEN)
    for k in range(blocks):
        t0 = begin + (blocks - 1 - k) * STEPS
        t1 = b * 0 + tl.maximum(t0 - STEPS, begin)
        # what is loaded next time
        t2 = b * 0 + tl.maximum(t0 - 2 * STEPS, begin)
        near(lines + t2 * line_row)
        near(shared_lines + t2 * row_length(KIND, BN))
        next_steps = load_rows(step, t1, step_row, d_in, end, STEPS, FULL, EVEN)
        next_positions = positions_from(t1, end, pos, STEPS, HAS_POS, EVEN)
        bits = starts_among(positions, STEPS, HAS_POS)
        next_dys = load_rows(dy, t1, dy_row, d_in, end, STEPS, FULL, EVEN)
        next_zs = load_rows(z, t1, z_row, d_in, end, STEPS, FULL, EVEN) if GATED else next_dys
        for s in tl.static_range(STEPS - 1, -1, -1):
            t_next = b * 0 + t0 + (s - AHEAD) if s >= AHEAD else t1 + (STEPS + s - AHEAD)
            ahead += shared_at(t_next, end, rows, n, BN, True, KIND, EVEN)
            loads_begun()
            in_t, query_t, square = ahead[:3]
            ahead = ahead[3:]
            present = True if EVEN else t0 + s < end
            fresh = starts(bits, s, HAS_POS)
            size, _ = activated(KIND, ACTIVATE, released(steps[s], step) + shift)
            _, first, second = coefficients(KIND, size, square, present, fresh)
            decay = decay_of(KIND, rates, first, second, in_t, BN)
            dy_t = released(dys[s], dy)
            if GATED:
                z_t = released(zs[s], z)
                dy_t *= z_t * sigmoid(z_t)
            carry = decay * (carry + spread(dy_t, BN) * query_t[:, None, :, :])
        steps, dys, zs, positions = next_steps, next_dys, next_zs, next_positions
    store_states(add_out + (b * tl.num_programs(2) + p) * D * N, at_state, carry, inside, N, FULL)


@triton.jit
def scan_backward_kernel(
    x, step, bias, A, rows, skip, z, pos, borders, arriving, dy, states,
    dx, dstep, dz, dA, dskip, dbias, parts, dentering,
    T, piece, x_batch, step_batch, z_batch, dy_batch,
    D: tl.constexpr, N: tl.constexpr, x_row: tl.constexpr, step_row: tl.constexpr, z_row: tl.constexpr, dy_row: tl.constexpr,
    KIND: tl.constexpr, ACTIVATE: tl.constexpr, GATED: tl.constexpr, HAS_POS: tl.constexpr, EVEN: tl.constexpr, FULL: tl.constexpr,
    BD: tl.constexpr, BN: tl.constexpr, STEPS: tl.constexpr, BORDER: tl.constexpr, WARP_SUMS: tl.constexpr,
):  # fmt: skip
    """Gradients, given the cotangent that arrives from behind each piece, [B, P, D, N].

    dx, dstep, dz [B, T, D]; of each piece dA [B, P, D, N], dskip and dbias [B, P, D]; of each block of channels its
    part of din and dquery, [D / BD, B, T, 2, N]; dentering [B, D, N] of the first piece. states is memory of the programs'
    own, for BORDER / STEPS blocks each.
    """
    block, b, p = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    batch, pieces = tl.num_programs(1), tl.num_programs(2)
    d, d_in, n, inside, at_state = states_of(block, D, N, BD, BN)
    rates, _blank = rates_at(A, at_state, inside, N, KIND, FULL)
    shift = tl.load(bias + d, mask=d_in, other=0.0).to(tl.float32) if ACTIVATE else 0.0
    through = tl.load(skip + d, mask=d_in, other=0.0).to(tl.float32)
    tensors, lengths = (x + b * x_batch, step + b * step_batch, dy + b * dy_batch), (x_row, step_row, dy_row)
    if GATED:
        tensors += (z + b * z_batch,)
        lengths += (z_row,)
    begin, end = p * piece, tl.minimum((p + 1) * piece, T)
    lines, line_row = lines_of(tensors, lengths, block * BD, end - begin, D, BD, BORDER)
    x += b * x_batch + d
    step += b * step_batch + d
    z += b * z_batch + d
    dy += b * dy_batch + d
    out = b * T * D + d
    rows += b * T * row_length(KIND, BN)
    shared_lines = lines_of_shared(rows, end - begin, BN, KIND, BORDER)
    pos += b * T
    border_lines = borders + b * tl.cdiv(T, BORDER) * D * N + block * (BD * N)
    border_lines = lines_from(border_lines, tl.minimum(D - block * BD, BD) * N, BD * N)
    parts += (block.to(tl.int64) * batch + b) * T * (2 * N)
    at_piece = (b * pieces + p) * D
    states += ((b * pieces + p) * tl.num_programs(0) + block) * (BORDER // STEPS * BD * BN)
    at_own = own_memory(BD, BN)
    carry = load_states(arriving + at_piece * N, at_state, inside, N, FULL)
    grad_rates = tl.zeros(carry.shape, tl.float32)
    grad_skip = tl.zeros([BD], tl.float32)
    grad_shift = tl.zeros([BD], tl.float32)
    chunks = tl.cdiv(end - begin, BORDER)
    BLOCKS: tl.constexpr = BORDER // STEPS
    for k in range(chunks):
        c0 = b * 0 + begin + (chunks - 1 - k) * BORDER
        # what is loaded next time
        c1 = b * 0 + tl.maximum(begin + (chunks - 2 - k) * BORDER, begin)
        near(lines + c1 * line_row)
        near(shared_lines + c1 * row_length(KIND, BN))
        near(border_lines + c1 // BORDER * (D * N))
        # of the last block what the adjoint alone reads, and of all what both read
        t0 = c0 + (BLOCKS - 1) * STEPS
        dys = load_rows(dy, t0, dy_row, d_in, end, STEPS, FULL, EVEN)
        zs = load_rows(z, t0, z_row, d_in, end, STEPS, FULL, EVEN) if GATED else dys
        xs = load_rows(x, c0, x_row, d_in, end, BORDER, FULL, EVEN)
        steps = load_rows(step, c0, step_row, d_in, end, BORDER, FULL, EVEN)
        positions = positions_from(c0, end, pos, BORDER, HAS_POS, EVEN)
        shared = ()
        for s in tl.static_range(STEPS):
            shared += shared_at(c0 + s, end, rows, n, BN, BLOCKS == 1, KIND, EVEN)
        h = load_states(borders + (b * tl.cdiv(T, BORDER) + c0 // BORDER) * D * N, at_state, inside, N, FULL)
        bits = starts_among(positions, BORDER, HAS_POS)
        # what the memory held is read by every thread before it is written anew, and the other way round below
        loads_begun()
        for j in tl.static_range(BLOCKS - 1):
            next_shared = ()
            for s in tl.static_range(STEPS):
                t = c0 + (j + 1) * STEPS + s
                next_shared += shared_at(t, end, rows, n, BN, j == BLOCKS - 2, KIND, EVEN)
            loads_begun()
            store_states(states + j * BD * BN, at_own, h, True, BN, True)
            for s in tl.static_range(STEPS):
                in_t, _in_t, square = shared[3 * s : 3 * s + 3]
                present = True if EVEN else c0 + j * STEPS + s < end
                fresh = starts(bits, j * STEPS + s, HAS_POS)
                size, _ = activated(KIND, ACTIVATE, released(steps[j * STEPS + s], step) + shift)
                w, first, second = coefficients(KIND, size, square, present, fresh)
                decay = decay_of(KIND, rates, first, second, in_t, BN)
                h = decay * h + taken_in(KIND, rates, w, released(xs[j * STEPS + s], x), in_t, BN)
            shared = next_shared
        xs, steps = xs[BORDER - STEPS :], steps[BORDER - STEPS :]
        tl.debug_barrier()
        for j in range(BLOCKS):
            t0 = c0 + (BLOCKS - 1 - j) * STEPS
            # behind the first block nothing more is read: the first again
            t1 = tl.maximum(t0 - STEPS, c0)
            next_xs = load_rows(x, t1, x_row, d_in, end, STEPS, FULL, EVEN)
            next_steps = load_rows(step, t1, step_row, d_in, end, STEPS, FULL, EVEN)
            next_dys = load_rows(dy, t1, dy_row, d_in, end, STEPS, FULL, EVEN)
            next_zs = load_rows(z, t1, z_row, d_in, end, STEPS, FULL, EVEN) if GATED else next_dys
            loads_begun()
            # the last token first
            weights, slopes, cuts, befores, decays, dqueries, dins = (), (), (), (), (), (), ()
            for s in tl.static_range(STEPS):
                in_t, query_t, square = shared[3 * s : 3 * s + 3]
                present = True if EVEN else t0 + s < end
                fresh = starts(bits, (BLOCKS - 1 - j) * STEPS + s, HAS_POS)
                size, slope = activated(KIND, ACTIVATE, released(steps[s], step) + shift)
                w, first, second = coefficients(KIND, size, square, present, fresh)
                decay = decay_of(KIND, rates, first, second, in_t, BN)
                before = tl.where(fresh, 0.0, h) if KIND == LONGHORN and HAS_POS else h
                h = decay * h + taken_in(KIND, rates, w, released(xs[s], x), in_t, BN)
                dy_t = released(dys[s], dy)
                if GATED:
                    z_t = released(zs[s], z)
                    open_t = sigmoid(z_t)
                    y_t = over_states(h * query_t[:, None, :, :]) + through * released(xs[s], x)
                    dz_t = dy_t * y_t * open_t * (1.0 + z_t * (1.0 - open_t))
                    tl.store(dz + (out + (t0 + s) * D), dz_t.to(dz.dtype.element_ty), mask=d_in & present)
                    dy_t *= z_t * open_t
                dqueries += (over_channels(h * spread(dy_t, BN), WARP_SUMS),)
                weights = (w,) + weights
                # d beta = d eps / (1 + beta |k|^2)^2
                slopes = (
                    slope if KIND != LONGHORN else slope * reciprocal((1.0 + size * square) * (1.0 + size * square)),
                ) + slopes
                cuts = (dy_t,) + cuts
                befores = (before,) + befores
                decays = (decay,) + decays
            next_shared = ()
            for r in tl.static_range(STEPS):
                if r == STEPS - 1:
                    # not earlier: they would take registers from what the adjoint needs
                    for s in tl.static_range(STEPS):
                        next_shared += shared_at(t1 + s, end, rows, n, BN, True, KIND, EVEN)
                    h = load_states(states + tl.maximum(BLOCKS - 2 - j, 0) * (BD * BN), at_own, True, BN, True)
                    loads_begun()
                t = t0 + STEPS - 1 - r
                exists = d_in if EVEN else d_in & (t < end)
                in_t, query_t, _square = shared[3 * (STEPS - 1 - r) : 3 * (STEPS - r)]
                x_t = released(xs[STEPS - 1 - r], x)
                lam = carry + spread(cuts[r], BN) * query_t[:, None, :, :]
                carry = decays[r] * lam
                if KIND == MAMBA_ZOH:
                    grown, phi, by_rate = held(rates, weights[r], BN)
                    taken = lam * in_t[:, None, :, :]
                    read = over_states(taken * phi)
                    taken *= spread(x_t, BN)
                    faded = carry * befores[r]
                    grad_rates += faded * spread(weights[r], BN) + taken * by_rate
                    dsize = over_states(taken * grown + faded * (LN_2 * rates))
                    din = lam * phi * spread(x_t, BN)
                else:
                    read = over_states(lam * in_t[:, None, :, :])
                if KIND == MAMBA:
                    faded = carry * befores[r]
                    grad_rates += faded * spread(weights[r], BN)
                    dsize = x_t * read + LN_2 * over_states(faded * rates)
                    din = lam * spread(weights[r] * x_t, BN)
                elif KIND == LONGHORN:
                    # what the key fails to recall, not its parts: they cancel where the state has learned
                    missed = lam * (spread(x_t, BN) - in_t[:, None, :, :] * befores[r])
                    dsize = over_states(missed * in_t[:, None, :, :])
                    eps = weights[r]
                    din = spread(2.0 * eps, BN) * missed - spread(eps * x_t, BN) * lam
                    din -= spread(2.0 * dsize * eps * eps, BN) * in_t[:, None, :, :]
                dx_t = (read if KIND == MAMBA_ZOH else weights[r] * read) + through * cuts[r]
                grad_skip += cuts[r] * x_t
                draw = dsize * slopes[r] if FULL and EVEN else tl.where(exists, dsize * slopes[r], 0.0)
                grad_shift += draw
                tl.store(dx + (out + t * D), dx_t.to(dx.dtype.element_ty), mask=exists)
                tl.store(dstep + (out + t * D), draw.to(dstep.dtype.element_ty), mask=exists)
                dins = (over_channels(din, WARP_SUMS),) + dins
            leave_sums(parts + t0 * (2 * N), dins, dqueries, end - t0, N, STEPS, EVEN, WARP_SUMS)
            xs, steps, dys, zs, shared = next_xs, next_steps, next_dys, next_zs, next_shared
        # the last states are read before the next chunk's are written
        tl.debug_barrier()
    if KIND != LONGHORN:
        store_states(dA + at_piece * N, at_state, grad_rates, inside, N, FULL)
    tl.store(dskip + at_piece + d, grad_skip, mask=d_in)
    tl.store(dbias + at_piece + d, grad_shift, mask=d_in)
    if p == 0:
        store_states(dentering + b * D * N, at_state, carry, inside, N, FULL)
