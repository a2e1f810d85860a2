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
    LONGHORN,
    MAMBA,
    activated,
    coefficients,
    decay_of,
    rates_of,
    token_at,
)
from baton.kernels.rows import load_row, load_rows, released, sigmoid


@triton.jit(do_not_specialize=["state_row"])
def summarize_backward_kernel(
    step, bias, A, others, square, query, z, dy, pos, add_out,
    T, piece, state_row, step_batch, z_batch, dy_batch,
    D: tl.constexpr, N: tl.constexpr, step_row: tl.constexpr, z_row: tl.constexpr, dy_row: tl.constexpr,
    KIND: tl.constexpr, ACTIVATE: tl.constexpr, GATED: tl.constexpr, HAS_POS: tl.constexpr, EVEN: tl.constexpr, FULL: tl.constexpr,
    BD: tl.constexpr, BN: tl.constexpr, STEPS: tl.constexpr,
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
    for k in range(blocks):
        t0 = begin + (blocks - 1 - k) * STEPS
        t1 = b * 0 + tl.maximum(t0 - STEPS, begin)
        next_steps = load_rows(step, t1, step_row, d_in, end, STEPS, FULL, EVEN)
        next_dys = load_rows(dy, t1, dy_row, d_in, end, STEPS, FULL, EVEN)
        next_zs = load_rows(z, t1, z_row, d_in, end, STEPS, FULL, EVEN) if GATED else next_dys
        query_0, others_0 = query + (b * 0 + t0) * N, others + (b * 0 + t0) * N
        for s in tl.static_range(STEPS - 1, -1, -1):
            present, fresh = token_at(t0 + s, end, EVEN, pos, HAS_POS)
            size, _ = activated(KIND, ACTIVATE, released(steps[s], step) + shift)
            far = tl.load(square + t0 + s, mask=present, other=0.0) if KIND == LONGHORN else 0.0
            _, first, second = coefficients(KIND, size, far, present, fresh)
            if KIND == MAMBA:
                decay = decay_of(KIND, rates, first[None, :], 0.0, 0.0)
            else:
                rest = load_row(others_0 + s * N, n_in, present, FULL, EVEN)
                decay = decay_of(KIND, 0.0, first[None, :], second[None, :], rest[:, None])
            query_t = load_row(query_0 + s * N, n_in, present, FULL, EVEN)
            dy_t = released(dys[s], dy)
            if GATED:
                z_t = released(zs[s], z)
                dy_t *= z_t * sigmoid(z_t)
            carry = decay * (carry + dy_t[None, :] * query_t[:, None])
        steps, dys, zs = next_steps, next_dys, next_zs
    tl.store(add_out + (b * tl.num_programs(2) + p) * D * N + at_state, carry, mask=inside)


@triton.jit
def scan_backward_kernel(
    x, step, bias, A, vec_in, others, square, query, skip, z, pos, borders, arriving, dy, states,
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
    grad_skip = tl.zeros([BD], tl.float32)
    grad_shift = tl.zeros([BD], tl.float32)
    chunks = tl.cdiv(end - begin, BORDER)
    for k in range(chunks):
        c0 = begin + (chunks - 1 - k) * BORDER
        c1 = tl.minimum(c0 + BORDER, end)
        blocks = tl.cdiv(c1 - c0, STEPS)
        h = tl.load(borders + (b * tl.cdiv(T, BORDER) + c0 // BORDER) * D * N + at_state, mask=inside, other=0.0)
        # what the memory held is read by every thread before it is written anew, and the other way round below
        tl.debug_barrier()
        for j in range(blocks - 1):
            tl.store(states + j * D * N + at_state, h, mask=inside)
            t0 = c0 + j * STEPS
            t0_64 = b * 0 + t0
            x_0, step_0, in_0, others_0 = x + t0_64 * x_row, step + t0_64 * step_row, vec_in + t0_64 * N, others + t0_64 * N
            for s in tl.static_range(STEPS):
                # all of them exist: only a chunk's last block has fewer
                present, fresh = token_at(t0 + s, end, True, pos, HAS_POS)
                size, _ = activated(
                    KIND, ACTIVATE, load_row(step_0 + s * step_row, d_in, present, FULL, True).to(tl.float32) + shift
                )
                far = tl.load(square + t0 + s) if KIND == LONGHORN else 0.0
                w, first, second = coefficients(KIND, size, far, present, fresh)
                if KIND == MAMBA:
                    decay = decay_of(KIND, rates, first[:, None], 0.0, 0.0)
                else:
                    rest = load_row(others_0 + s * N, n_in, present, FULL, True)
                    decay = decay_of(KIND, 0.0, first[:, None], second[:, None], rest[None, :])
                taken = w * load_row(x_0 + s * x_row, d_in, present, FULL, True).to(tl.float32)
                h = decay * h + taken[:, None] * load_row(in_0 + s * N, n_in, present, FULL, True)[None, :]
        tl.store(states + (blocks - 1) * D * N + at_state, h, mask=inside)
        tl.debug_barrier()
        for j in range(blocks):
            t0 = c0 + (blocks - 1 - j) * STEPS
            h = tl.load(states + (blocks - 1 - j) * D * N + at_state, mask=inside, other=0.0)
            t0_64 = b * 0 + t0
            x_0, step_0, z_0, dy_0 = x + t0_64 * x_row, step + t0_64 * step_row, z + t0_64 * z_row, dy + t0_64 * dy_row
            in_0, query_0, others_0 = vec_in + t0_64 * N, query + t0_64 * N, others + t0_64 * N
            # the last token first
            xs, weights, ins, slopes, dys, befores, decays, dzs, dqueries = (), (), (), (), (), (), (), (), ()
            for s in tl.static_range(STEPS):
                present, fresh = token_at(t0 + s, end, EVEN, pos, HAS_POS)
                raw = load_row(step_0 + s * step_row, d_in, present, FULL, EVEN).to(tl.float32)
                size, slope = activated(KIND, ACTIVATE, raw + shift)
                far = tl.load(square + t0 + s, mask=present, other=0.0) if KIND == LONGHORN else 0.0
                w, first, second = coefficients(KIND, size, far, present, fresh)
                x_t = load_row(x_0 + s * x_row, d_in, present, FULL, EVEN).to(tl.float32)
                dy_t = load_row(dy_0 + s * dy_row, d_in, present, FULL, EVEN).to(tl.float32)
                in_t = load_row(in_0 + s * N, n_in, present, FULL, EVEN)
                query_t = load_row(query_0 + s * N, n_in, present, FULL, EVEN)
                if KIND == MAMBA:
                    decay = decay_of(KIND, rates, first[:, None], 0.0, 0.0)
                else:
                    rest = load_row(others_0 + s * N, n_in, present, FULL, EVEN)
                    decay = decay_of(KIND, 0.0, first[:, None], second[:, None], rest[None, :])
                if KIND == MAMBA:
                    before = decay * h
                    h = before + (w * x_t)[:, None] * in_t[None, :]
                else:
                    before = tl.where(fresh, 0.0, h) if HAS_POS else h
                    h = decay * h + (w * x_t)[:, None] * in_t[None, :]
                if GATED:
                    z_t = load_row(z_0 + s * z_row, d_in, present, FULL, EVEN).to(tl.float32)
                    open_t = sigmoid(z_t)
                    y_t = tl.sum(h * query_t[None, :], 1) + through * x_t
                    dzs = (dy_t * y_t * open_t * (1.0 + z_t * (1.0 - open_t)),) + dzs
                    dy_t *= z_t * open_t
                dqueries = (tl.sum(h * dy_t[:, None], 0),) + dqueries
                xs = (x_t,) + xs
                weights = (w,) + weights
                # d beta = d eps / (1 + beta |k|^2)^2
                slopes = (slope if KIND == MAMBA else slope / ((1.0 + size * far) * (1.0 + size * far)),) + slopes
                ins = (in_t,) + ins
                dys = (dy_t,) + dys
                befores = (before,) + befores
                decays = (decay,) + decays
            dxs, dsteps, dins = (), (), ()
            for r in tl.static_range(STEPS):
                present = True if EVEN else t0 + STEPS - 1 - r < end
                # read again: it is in cache, and would take registers until here
                query_t = load_row(query_0 + (STEPS - 1 - r) * N, n_in, present, FULL, EVEN)
                lam = carry + dys[r][:, None] * query_t[None, :]
                carry = decays[r] * lam
                read = tl.sum(lam * ins[r][None, :], 1)
                if KIND == MAMBA:
                    faded = lam * befores[r]
                    grad_rates += faded * weights[r][:, None]
                    dsize = tl.sum(faded * rates, 1) * LN_2 + xs[r] * read
                    dins += (tl.sum(lam * (weights[r] * xs[r])[:, None], 0),)
                else:
                    # what the key fails to recall, not its parts: they cancel where the state has learned
                    missed = lam * (xs[r][:, None] - ins[r][None, :] * befores[r])
                    dsize = tl.sum(missed * ins[r][None, :], 1)
                    eps = weights[r]
                    along = tl.sum((2.0 * eps)[:, None] * missed - (eps * xs[r])[:, None] * lam, 0)
                    dins += (along - 2.0 * ins[r] * tl.sum(dsize * eps * eps, 0),)
                dxs += (weights[r] * read + through * dys[r],)
                grad_skip += dys[r] * xs[r]
                draw = dsize * slopes[r]
                draw = tl.where(d_in & present, draw, 0.0)
                grad_shift += draw
                dsteps += (draw,)
            for r in tl.static_range(STEPS):
                present = True if EVEN else t0 + STEPS - 1 - r < end
                at = t0_64 * D + (STEPS - 1 - r) * D + d
                tl.store(dx + at, dxs[r].to(dx.dtype.element_ty), mask=d_in & present)
                tl.store(dstep + at, dsteps[r].to(dstep.dtype.element_ty), mask=d_in & present)
                if GATED:
                    tl.store(dz + at, dzs[r].to(dz.dtype.element_ty), mask=d_in & present)
                at = t0_64 * N + (STEPS - 1 - r) * N + n
                tl.store(din_parts + at, dins[r], mask=n_in & present)
                tl.store(dquery_parts + at, dqueries[r], mask=n_in & present)
    if KIND == MAMBA:
        tl.store(dA + at_piece * N + at_state, grad_rates, mask=inside)
    tl.store(dskip + at_piece + d, grad_skip, mask=d_in)
    tl.store(dbias + at_piece + d, grad_shift, mask=d_in)
    if p == 0:
        tl.store(dentering + b * D * N + at_state, carry, mask=inside)
