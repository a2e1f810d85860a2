"""The diagonal scans backwards, in Triton.

The one thing to know: nothing is divided by a decay. The forward pass leaves the state at every BORDER-th token; from there a
program computes the states twice: once to leave one in memory every STEPS tokens, then STEPS tokens at a time and the last ones
first, to keep what the adjoint recurrence needs in registers. Sums over channels (gradients of in and query) leave as one partial
sum per block of channels, to be added in a fixed order: there are no atomics.

The adjoint, with lam_t = dLoss/dh_t: lam_t = query_t dy_t + decay_{t+1} lam_{t+1}; `carry` is its second term.
"""

import triton
import triton.language as tl

from baton.kernels.diagonal_scan.per_token import (
    LN_2,
    MAMBA,
    activated,
    coefficients,
    decay_of,
    rates_of,
    shared_at,
)
from baton.kernels.rows import load_rows, loads_begun, released, sigmoid


@triton.jit(do_not_specialize=["state_row"])
def summarize_backward_kernel(
    step, bias, A, others, square, query, z, dy, pos, add_out,
    T, piece, state_row, step_batch, z_batch, dy_batch,
    D: tl.constexpr, N: tl.constexpr, step_row: tl.constexpr, z_row: tl.constexpr, dy_row: tl.constexpr,
    KIND: tl.constexpr, ACTIVATE: tl.constexpr, GATED: tl.constexpr, HAS_POS: tl.constexpr, EVEN: tl.constexpr, FULL: tl.constexpr,
    BD: tl.constexpr, BN: tl.constexpr, STEPS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """What dy alone adds to the cotangent of the state that entered each piece, [B, P, N, D]. Blocks are those of `forward`."""
    d, n, b, p = tl.program_id(0) * BD + tl.arange(0, BD), tl.arange(0, BN), tl.program_id(1), tl.program_id(2)
    d_in, n_in = d < D, n < N
    inside = n_in[:, None] & d_in[None, :]
    at_state = n[:, None] * state_row + d[None, :]
    rates = rates_of(tl.load(A + at_state, mask=inside, other=-1.0)) if KIND == MAMBA else 0.0
    shift = tl.load(bias + d, mask=d_in, other=0.0).to(tl.float32) if ACTIVATE else 0.0
    b = b.to(tl.int64)
    step += b * step_batch + d
    z += b * z_batch + d
    dy += b * dy_batch + d
    query += b * T * N + n
    others += b * T * N + n
    square += b * T
    pos += b * T
    begin, end = p * piece, tl.minimum((p + 1) * piece, T)
    carry = tl.zeros([BN, BD], tl.float32)
    blocks = tl.cdiv(end - begin, STEPS)
    last = b * 0 + begin + (blocks - 1) * STEPS
    steps = load_rows(step, last, step_row, d_in, end, STEPS, FULL, EVEN)
    dys = load_rows(dy, last, dy_row, d_in, end, STEPS, FULL, EVEN)
    zs = load_rows(z, last, z_row, d_in, end, STEPS, FULL, EVEN) if GATED else dys
    rows = ()
    for s in tl.static_range(AHEAD):
        rows += shared_at(last + (STEPS - 1 - s), end, query, query, others, square, pos, n_in, N, KIND, HAS_POS, EVEN, FULL)
    for k in range(blocks):
        t0 = begin + (blocks - 1 - k) * STEPS
        t1 = b * 0 + tl.maximum(t0 - STEPS, begin)
        next_steps = load_rows(step, t1, step_row, d_in, end, STEPS, FULL, EVEN)
        next_dys = load_rows(dy, t1, dy_row, d_in, end, STEPS, FULL, EVEN)
        next_zs = load_rows(z, t1, z_row, d_in, end, STEPS, FULL, EVEN) if GATED else next_dys
        for s in tl.static_range(STEPS - 1, -1, -1):
            t_next = b * 0 + t0 + (s - AHEAD) if s >= AHEAD else t1 + (STEPS + s - AHEAD)
            rows += shared_at(t_next, end, query, query, others, square, pos, n_in, N, KIND, HAS_POS, EVEN, FULL)
            loads_begun()
            _in_t, query_t, rest, far, pos_t = rows[:5]
            rows = rows[5:]
            present = True if EVEN else t0 + s < end
            fresh = pos_t == 0 if HAS_POS else False
            size, _ = activated(KIND, ACTIVATE, released(steps[s], step) + shift)
            _, first, second = coefficients(KIND, size, far, present, fresh)
            if KIND == MAMBA:
                decay = decay_of(KIND, rates, first[None, :], 0.0, 0.0)
            else:
                decay = decay_of(KIND, 0.0, first[None, :], second[None, :], rest[:, None])
            dy_t = released(dys[s], dy)
            if GATED:
                z_t = released(zs[s], z)
                dy_t *= z_t * sigmoid(z_t)
            carry = decay * (carry + dy_t[None, :] * query_t[:, None])
        steps, dys, zs = next_steps, next_dys, next_zs
    tl.store(add_out + (b * tl.num_programs(2) + p) * D * N + at_state, carry, mask=inside)


@triton.jit
def scan_backward_kernel(
    x, step, bias, A, vec_in, others, square, query, skip, z, y, pos, borders, arriving, dy, states,
    dx, dstep, dz, dA, dskip, dbias, din_parts, dquery_parts, dentering,
    T, piece, x_batch, step_batch, z_batch, dy_batch,
    D: tl.constexpr, N: tl.constexpr, x_row: tl.constexpr, step_row: tl.constexpr, z_row: tl.constexpr, dy_row: tl.constexpr,
    KIND: tl.constexpr, ACTIVATE: tl.constexpr, GATED: tl.constexpr, HAS_POS: tl.constexpr, EVEN: tl.constexpr, FULL: tl.constexpr,
    BD: tl.constexpr, BN: tl.constexpr, STEPS: tl.constexpr, BORDER: tl.constexpr,
):  # fmt: skip
    """Gradients, given the cotangent that arrives from behind each piece, [B, P, D, N].

    dx, dstep, dz [B, T, D]; of each piece dA [B, P, D, N], dskip and dbias [B, P, D]; of each block of channels din and dquery
    [D / BD, B, T, N]; dentering [B, D, N] of the first piece. states is memory for BORDER / STEPS states per piece.
    """
    block, b, p = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    batch, pieces = tl.num_programs(1), tl.num_programs(2)
    d, n = block * BD + tl.arange(0, BD), tl.arange(0, BN)
    d_in, n_in = d < D, n < N
    inside = d_in[:, None] & n_in[None, :]
    at_state = d[:, None] * N + n[None, :]
    rates = rates_of(tl.load(A + at_state, mask=inside, other=-1.0)) if KIND == MAMBA else 0.0
    shift = tl.load(bias + d, mask=d_in, other=0.0).to(tl.float32) if ACTIVATE else 0.0
    through = tl.load(skip + d, mask=d_in, other=0.0).to(tl.float32)
    x += b * x_batch + d
    step += b * step_batch + d
    vec_in += b * T * N + n
    query += b * T * N + n
    z += b * z_batch + d
    y += b * T * D + d
    dy += b * dy_batch + d
    dx += b * T * D
    dstep += b * T * D
    dz += b * T * D
    others += b * T * N + n
    square += b * T
    pos += b * T
    din_parts += (block.to(tl.int64) * batch + b) * T * N
    dquery_parts += (block.to(tl.int64) * batch + b) * T * N
    at_piece = (b * pieces + p) * D
    states += at_piece * N * (BORDER // STEPS)
    begin, end = p * piece, tl.minimum((p + 1) * piece, T)
    carry = tl.load(arriving + at_piece * N + at_state, mask=inside, other=0.0)
    grad_rates = tl.zeros([BD, BN], tl.float32)
    # rows of states leave from the block's first channel, in the lanes that they are in
    nothing = tl.zeros([BD, BN], tl.float32)
    at_row = n[None, :] + 0 * d[:, None]
    first_row = (d == block * BD)[:, None] & n_in[None, :]
    grad_skip = tl.zeros([BD], tl.float32)
    grad_shift = tl.zeros([BD], tl.float32)
    chunks = tl.cdiv(end - begin, BORDER)
    BLOCKS: tl.constexpr = BORDER // STEPS
    for k in range(chunks):
        c0 = b * 0 + begin + (chunks - 1 - k) * BORDER
        # of the last block what the adjoint alone reads, and of all what both read
        t0 = c0 + (BLOCKS - 1) * STEPS
        dys = load_rows(dy, t0, dy_row, d_in, end, STEPS, FULL, EVEN)
        zs = load_rows(z, t0, z_row, d_in, end, STEPS, FULL, EVEN) if GATED else dys
        ys = load_rows(y, t0, D, d_in, end, STEPS, FULL, EVEN) if GATED else dys
        xs = load_rows(x, c0, x_row, d_in, end, BORDER, FULL, EVEN)
        steps = load_rows(step, c0, step_row, d_in, end, BORDER, FULL, EVEN)
        rows = ()
        for s in tl.static_range(STEPS):
            rows += shared_at(c0 + s, end, vec_in, query, others, square, pos, n_in, N, KIND, HAS_POS, EVEN, FULL)
        h = tl.load(borders + (b * tl.cdiv(T, BORDER) + c0 // BORDER) * D * N + at_state, mask=inside, other=0.0)
        # what the memory held is read by every thread before it is written anew, and the other way round below
        loads_begun()
        for j in tl.static_range(BLOCKS - 1):
            next_rows = ()
            for s in tl.static_range(STEPS):
                t = c0 + (j + 1) * STEPS + s
                next_rows += shared_at(t, end, vec_in, query, others, square, pos, n_in, N, KIND, HAS_POS, EVEN, FULL)
            loads_begun()
            tl.store(states + j * D * N + at_state, h, mask=inside)
            for s in tl.static_range(STEPS):
                in_t, _, rest, far, pos_t = rows[5 * s : 5 * s + 5]
                present = True if EVEN else c0 + j * STEPS + s < end
                fresh = pos_t == 0 if HAS_POS else False
                size, _ = activated(KIND, ACTIVATE, released(steps[j * STEPS + s], step) + shift)
                w, first, second = coefficients(KIND, size, far, present, fresh)
                if KIND == MAMBA:
                    decay = decay_of(KIND, rates, first[:, None], 0.0, 0.0)
                else:
                    decay = decay_of(KIND, 0.0, first[:, None], second[:, None], rest[None, :])
                h = decay * h + (w * released(xs[j * STEPS + s], x))[:, None] * in_t[None, :]
            rows = next_rows
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
            next_ys = load_rows(y, t1, D, d_in, end, STEPS, FULL, EVEN) if GATED else next_dys
            next_rows = ()
            for s in tl.static_range(STEPS):
                next_rows += shared_at(t1 + s, end, vec_in, query, others, square, pos, n_in, N, KIND, HAS_POS, EVEN, FULL)
            loads_begun()
            # the last token first
            weights, firsts, slopes, cuts, befores, decays = (), (), (), (), (), ()
            for s in tl.static_range(STEPS):
                in_t, query_t, rest, far, pos_t = rows[5 * s : 5 * s + 5]
                present = True if EVEN else t0 + s < end
                fresh = pos_t == 0 if HAS_POS else False
                size, slope = activated(KIND, ACTIVATE, released(steps[s], step) + shift)
                w, first, second = coefficients(KIND, size, far, present, fresh)
                if KIND == MAMBA:
                    decay = decay_of(KIND, rates, first[:, None], 0.0, 0.0)
                    before = decay * h
                    h = before + (w * released(xs[s], x))[:, None] * in_t[None, :]
                else:
                    decay = decay_of(KIND, 0.0, first[:, None], second[:, None], rest[None, :])
                    before = tl.where(fresh, 0.0, h) if HAS_POS else h
                    h = decay * h + (w * released(xs[s], x))[:, None] * in_t[None, :]
                dy_t = released(dys[s], dy)
                if GATED:
                    z_t = released(zs[s], z)
                    open_t = sigmoid(z_t)
                    dz_t = dy_t * released(ys[s], y) * open_t * (1.0 + z_t * (1.0 - open_t))
                    tl.store(dz + (t0 + s) * D + d, dz_t.to(dz.dtype.element_ty), mask=d_in & present)
                    dy_t *= z_t * open_t
                dquery = tl.sum(h * dy_t[:, None], 0)
                tl.store(dquery_parts + (t0 + s) * N + at_row, dquery[None, :] + nothing, mask=first_row & present)
                weights = (w,) + weights
                firsts = (first,) + firsts
                # d beta = d eps / (1 + beta |k|^2)^2
                slopes = (slope if KIND == MAMBA else slope / ((1.0 + size * far) * (1.0 + size * far)),) + slopes
                cuts = (dy_t,) + cuts
                befores = (before,) + befores
                decays = (decay,) + decays
            # not earlier: it would take registers from what the adjoint needs
            h = tl.load(states + tl.maximum(BLOCKS - 2 - j, 0) * D * N + at_state, mask=inside, other=0.0)
            loads_begun()
            for r in tl.static_range(STEPS):
                t = t0 + STEPS - 1 - r
                present = True if EVEN else t < end
                in_t, query_t, rest, far, pos_t = rows[5 * (STEPS - 1 - r) : 5 * (STEPS - r)]
                x_t = released(xs[STEPS - 1 - r], x)
                lam = carry + cuts[r][:, None] * query_t[None, :]
                carry = decays[r] * lam
                read = tl.sum(lam * in_t[None, :], 1)
                if KIND == MAMBA:
                    faded = lam * befores[r]
                    grad_rates += faded * firsts[r][:, None]
                    dsize = x_t * read + tl.sum(faded * rates, 1)
                    din = tl.sum(lam * (weights[r] * x_t)[:, None], 0)
                else:
                    # what the key fails to recall, not its parts: they cancel where the state has learned
                    missed = lam * (x_t[:, None] - in_t[None, :] * befores[r])
                    dsize = tl.sum(missed * in_t[None, :], 1)
                    eps = weights[r]
                    along = tl.sum((2.0 * eps)[:, None] * missed - (eps * x_t)[:, None] * lam, 0)
                    din = along - 2.0 * in_t * tl.sum(dsize * eps * eps, 0)
                dx_t = weights[r] * read + through * cuts[r]
                grad_skip += cuts[r] * x_t
                draw = tl.where(d_in & present, dsize * slopes[r], 0.0)
                grad_shift += draw
                tl.store(dx + t * D + d, dx_t.to(dx.dtype.element_ty), mask=d_in & present)
                tl.store(dstep + t * D + d, draw.to(dstep.dtype.element_ty), mask=d_in & present)
                tl.store(din_parts + t * N + at_row, din[None, :] + nothing, mask=first_row & present)
            xs, steps, dys, zs, ys, rows = next_xs, next_steps, next_dys, next_zs, next_ys, next_rows
        # the last states are read before the next chunk's are written
        tl.debug_barrier()
    if KIND == MAMBA:
        tl.store(dA + at_piece * N + at_state, grad_rates * LN_2, mask=inside)
    tl.store(dskip + at_piece + d, grad_skip, mask=d_in)
    tl.store(dbias + at_piece + d, grad_shift, mask=d_in)
    if p == 0:
        tl.store(dentering + b * D * N + at_state, carry, mask=inside)
