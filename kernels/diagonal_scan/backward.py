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
    load_channels,
    load_rates,
    load_vector,
    sigmoid,
    token_at,
)


@triton.jit
def summarize_backward_kernel(
    step, bias, A, others, square, query, z, dy, pos, add_out,
    T, D, N, piece, step_batch, step_row, query_batch, query_row, z_batch, z_row, dy_batch, dy_row,
    KIND: tl.constexpr, ACTIVATE: tl.constexpr, GATED: tl.constexpr, HAS_POS: tl.constexpr, EVEN: tl.constexpr,
    BD: tl.constexpr, BN: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """What dy alone adds to the cotangent of the state that entered each piece, [B, P, D, N]."""
    d, n, b, p = tl.program_id(0) * BD + tl.arange(0, BD), tl.arange(0, BN), tl.program_id(1), tl.program_id(2)
    d_in, n_in = d < D, n < N
    inside = d_in[:, None] & n_in[None, :]
    rates = load_rates(KIND, A, d, n, inside, N)
    shift = tl.load(bias + d, mask=d_in, other=0.0).to(tl.float32) if ACTIVATE else 0.0
    b = b.to(tl.int64)
    step += b * step_batch
    query += b * query_batch
    z += b * z_batch
    dy += b * dy_batch
    others += b * T * N
    square += b * T
    pos += b * T
    begin, end = p * piece, tl.minimum((p + 1) * piece, T)
    carry = tl.zeros([BD, BN], tl.float32)
    blocks = tl.cdiv(end - begin, STEPS)
    for k in range(blocks):
        t0 = begin + (blocks - 1 - k) * STEPS
        t0_64 = b * 0 + t0
        step_0, query_0, z_0 = step + t0_64 * step_row, query + t0_64 * query_row, z + t0_64 * z_row
        dy_0, others_0 = dy + t0_64 * dy_row, others + t0_64 * N
        first, second, rest, queries, dys = (), (), (), (), ()
        for r in tl.static_range(STEPS):
            t = t0 + STEPS - 1 - r
            present, fresh = token_at(t, end, EVEN, pos, HAS_POS)
            size, _ = activated(KIND, ACTIVATE, load_channels(step_0, STEPS - 1 - r, step_row, d, d_in, present) + shift)
            far = tl.load(square + t, mask=present, other=0.0) if KIND == LONGHORN else 0.0
            _, f1, f2 = coefficients(KIND, size, far, present, fresh)
            first += (f1,)
            second += (f2,)
            rest += (load_vector(others_0, STEPS - 1 - r, N, n, n_in, present) if KIND == LONGHORN else 0.0,)
            queries += (load_vector(query_0, STEPS - 1 - r, query_row, n, n_in, present),)
            z_t = load_channels(z_0, STEPS - 1 - r, z_row, d, d_in, present) if GATED else 0.0
            dys += (load_channels(dy_0, STEPS - 1 - r, dy_row, d, d_in, present) * (z_t * sigmoid(z_t) if GATED else 1.0),)
        for r in tl.static_range(STEPS):
            lam = carry + dys[r][:, None] * queries[r][None, :]
            carry = decay_of(KIND, rates, first[r], second[r], rest[r]) * lam
    tl.store(add_out + ((b * tl.num_programs(2) + p) * D + d[:, None]) * N + n[None, :], carry, mask=inside)


@triton.jit
def scan_backward_kernel(
    x, step, bias, A, vec_in, others, square, query, skip, z, pos, borders, arriving, dy, states,
    dx, dstep, dz, dA, dskip, dbias, din_parts, dquery_parts, dentering,
    T, D, N, piece, x_batch, x_row, step_batch, step_row, in_batch, in_row, query_batch, query_row, z_batch, z_row,
    dy_batch, dy_row,
    KIND: tl.constexpr, ACTIVATE: tl.constexpr, GATED: tl.constexpr, HAS_POS: tl.constexpr, EVEN: tl.constexpr,
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
    rates = load_rates(KIND, A, d, n, inside, N)
    shift = tl.load(bias + d, mask=d_in, other=0.0).to(tl.float32) if ACTIVATE else 0.0
    through = tl.load(skip + d, mask=d_in, other=0.0).to(tl.float32)
    x += b * x_batch
    step += b * step_batch
    vec_in += b * in_batch
    query += b * query_batch
    z += b * z_batch
    dy += b * dy_batch
    dx += b * T * D
    dstep += b * T * D
    dz += b * T * D
    others += b * T * N
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
            x_0, step_0, vec_in_0 = x + t0_64 * x_row, step + t0_64 * step_row, vec_in + t0_64 * in_row
            others_0 = others + t0_64 * N
            taken, first, second, ins, rest = (), (), (), (), ()
            for s in tl.static_range(STEPS):
                t = t0 + s
                # all of them exist: only a chunk's last block has fewer
                present, fresh = token_at(t, end, True, pos, HAS_POS)
                size, _ = activated(KIND, ACTIVATE, load_channels(step_0, s, step_row, d, d_in, present) + shift)
                far = tl.load(square + t) if KIND == LONGHORN else 0.0
                w, f1, f2 = coefficients(KIND, size, far, present, fresh)
                taken += (w * load_channels(x_0, s, x_row, d, d_in, present),)
                first += (f1,)
                second += (f2,)
                ins += (load_vector(vec_in_0, s, in_row, n, n_in, present),)
                rest += (load_vector(others_0, s, N, n, n_in, present) if KIND == LONGHORN else 0.0,)
            for s in tl.static_range(STEPS):
                h = decay_of(KIND, rates, first[s], second[s], rest[s]) * h + taken[s][:, None] * ins[s][None, :]
        tl.store(states + (blocks - 1) * D * N + at_state, h, mask=inside)
        tl.debug_barrier()
        for j in range(blocks):
            t0 = c0 + (blocks - 1 - j) * STEPS
            h = tl.load(states + (blocks - 1 - j) * D * N + at_state, mask=inside, other=0.0)
            t0_64 = b * 0 + t0
            x_0, step_0, vec_in_0 = x + t0_64 * x_row, step + t0_64 * step_row, vec_in + t0_64 * in_row
            query_0, z_0, dy_0 = query + t0_64 * query_row, z + t0_64 * z_row, dy + t0_64 * dy_row
            others_0 = others + t0_64 * N
            # the last token first
            xs, weights, ins, slopes, dys, befores, decays, dzs, dqueries = (), (), (), (), (), (), (), (), ()
            for s in tl.static_range(STEPS):
                t = t0 + s
                present, fresh = token_at(t, end, EVEN, pos, HAS_POS)
                size, slope = activated(KIND, ACTIVATE, load_channels(step_0, s, step_row, d, d_in, present) + shift)
                far = tl.load(square + t, mask=present, other=0.0) if KIND == LONGHORN else 0.0
                w, f1, f2 = coefficients(KIND, size, far, present, fresh)
                rest = load_vector(others_0, s, N, n, n_in, present) if KIND == LONGHORN else 0.0
                x_t, in_t = load_channels(x_0, s, x_row, d, d_in, present), load_vector(vec_in_0, s, in_row, n, n_in, present)
                query_t, dy_t = (
                    load_vector(query_0, s, query_row, n, n_in, present),
                    load_channels(dy_0, s, dy_row, d, d_in, present),
                )
                decay = decay_of(KIND, rates, f1, f2, rest)
                if KIND == MAMBA:
                    before = decay * h
                    h = before + (w * x_t)[:, None] * in_t[None, :]
                else:
                    before = tl.where(fresh, 0.0, h) if HAS_POS else h
                    h = decay * h + (w * x_t)[:, None] * in_t[None, :]
                if GATED:
                    z_t = load_channels(z_0, s, z_row, d, d_in, present)
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
                query_t = load_vector(query_0, STEPS - 1 - r, query_row, n, n_in, present)
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
