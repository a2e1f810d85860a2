"""The gradient of `triton_forward`, in Triton.

The one thing to know: a program goes from border to border, the last first. Once forwards, leaving in memory of its own the slots
before each group of tokens and, of each token, what was summed over d or slots; then through the groups, each forwards without any
sum, and back. Back, a token's own slots s and the cotangents dS of those behind it are enough. With S = A s + w/|u| h behind it,
A = (mu - w a) / |u|, and P = dS + dy q, what is summed over d follows from s.P, h.P, s.dy and h.dy, which do not wait for each
other. The normalisation keeps what of P is across S: in the plane of s and the tangent r = h - a s that is one number,
X = (mu r.P - w |r|^2 s.P) / |u|^3, and elsewhere P / |u|:

    dw = mu X,   s.du = -w X,   da = w^2 X (and dc, in encoding),   ds = A (P - S (S.P)) + h da,   dh = sum of w du + s da

Everything of S is written in s and h, so that the slots behind a token are not needed.

Without projection a step is S = mu s + w (h - a phi) with phi = s / |s|, a = h.phi and w = gamma c / |s|; r = 1 / |s| is where the
slot's length enters. With P as above, A = mu - r w a and dw = h.P - a (phi.P):

    da = -w phi.P (and dc, in encoding),   dh = sum of w P + da phi,   e = da a + w dw - w a (phi.P) (and k phi.dh, in decoding),
    ds = A P + r da h - r^2 e s (and r k dh, in decoding)

e is r dr; where |s| is below its limit r is a constant and the term with e is left out. Shape suffixes: see `triton_forward`.
"""

import triton
import triton.language as tl

from baton.kernels.lattice.register_tiles import (
    in_warp,
    over_d,
    over_slots,
    places,
    read,
    spread,
    stacked,
    two_sums,
    write,
)
from baton.kernels.lattice.triton_forward import DEC, ENC, LARGEST_INVERSE, coefficient, entered, moved, step, token


@triton.jit
def border_back(
    dS, c0, begins, states, q, k, v, gamma, mu, pos, dy, initial, dloaded, dq, dk, dv, dgamma, dmu, at_slots, inside, m, d, m_in,
    d_in, of_token, of_part, T, strides, v_row, dy_row,
    D: tl.constexpr, M: tl.constexpr, H: tl.constexpr, VARIANT: tl.constexpr, FORGET: tl.constexpr, PROJECT: tl.constexpr,
    HAS_POS: tl.constexpr, EVEN: tl.constexpr, STEPS: tl.constexpr, BORDER: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr,
    PARTS: tl.constexpr, WARPS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """The slots' cotangents before the border's tokens, the first of which is c0, from dS behind them. begins: where the slots
    before them lie; dloaded: of the head; other pointers as in the kernel."""
    BP: tl.constexpr = BD // PARTS
    BLOCKS: tl.constexpr = BORDER // STEPS
    lane = tl.arange(0, BM)
    own = lane[:, None] * BD + d[None, :]
    of_slots = states + BLOCKS * BM * BD
    of_h = of_slots + BORDER * 2 * BM
    of_square = of_h + (BORDER * BD if VARIANT == DEC else 0)
    S = read(begins, at_slots, BP, inside, PARTS, WHOLE)
    # what the memory held is read by every thread before it is written anew, and the other way round below
    tl.debug_barrier()
    rows = ()
    for s in tl.static_range(STEPS):
        rows += token(c0 + s, q, k, v + d, gamma, mu, pos, T, strides, m_in, d_in, PARTS, BP, WHOLE, EVEN, FORGET, HAS_POS)
    for j in range(BLOCKS):
        for i in tl.static_range(PARTS):
            tl.store(states + j * (BM * BD) + i * BP + own, S[i])
        of_group, h_group, next_rows = (), (), ()
        for s in tl.static_range(STEPS):
            t = c0 + (j + 1) * STEPS + s
            next_rows += token(t, q, k, v + d, gamma, mu, pos, T, strides, m_in, d_in, PARTS, BP, WHOLE, EVEN, FORGET, HAS_POS)
        for s in tl.static_range(STEPS):
            row = rows[6 * s : 6 * s + 6]
            S = entered(S, row[5], initial, at_slots, BP, inside, PARTS)
            S, h_t, a, over = step(S, row, VARIANT, FORGET, PROJECT, PARTS, WARPS)
            of_group += (a, over)
            h_group += h_t
            if PROJECT:
                tl.store(of_square + j * STEPS + s, over_d(h_t, h_t, PARTS))
        rows = next_rows
        column = tl.arange(0, 2 * STEPS)
        tl.store(of_slots + (j * 2 * STEPS + column[None, :]) * BM + lane[:, None], stacked(of_group, 2 * STEPS))
        if VARIANT == DEC:
            column = tl.arange(0, PARTS * STEPS)
            to = of_h + (j * STEPS + column // PARTS) * BD + column % PARTS * BP
            tl.store(to[None, :] + d[:, None], stacked(h_group, PARTS * STEPS))
    tl.debug_barrier()
    for k_block in range(BLOCKS):
        j = BLOCKS - 1 - k_block
        S = ()
        for i in tl.static_range(PARTS):
            S += (tl.load(states + j * (BM * BD) + i * BP + own),)
        found, slots = (), ()
        for s in tl.static_range(STEPS):
            at = j * STEPS + s
            row = token(c0 + at, q, k, v + d, gamma, mu, pos, T, strides, m_in, d_in, PARTS, BP, WHOLE, EVEN, FORGET, HAS_POS)
            a = tl.load(of_slots + at * (2 * BM) + lane)
            over = tl.load(of_slots + at * (2 * BM) + BM + lane)
            h_t = ()
            for i in tl.static_range(PARTS):
                h_t += (tl.load(of_h + at * BD + i * BP + d) if VARIANT == DEC else row[2][i].to(tl.float32),)
            k_t = row[1].to(tl.float32)
            c = coefficient(a, k_t, VARIANT)
            weight = row[3] * c if PROJECT else row[3] * over * c
            S = entered(S, row[5], initial, at_slots, BP, inside, PARTS)
            slots += S
            if s < STEPS - 1:
                S = moved(S, h_t, a, over, weight, row[4], FORGET, PROJECT, PARTS)
            found += (row[0].to(tl.float32), k_t, h_t, row[3], row[4], row[5], a, over, c, weight)
        dq_group, dk_group, dgamma_group, dmu_group, dh_group, back_group = (), (), (), (), (), ()
        for s in tl.static_range(STEPS - 1, -1, -1):
            at = j * STEPS + s
            t = c0 + at
            q_t, k_t, h_t, gamma_t, mu_t, starts, a, over, c, weight = found[10 * s : 10 * s + 10]
            S = slots[s * PARTS : s * PARTS + PARTS]
            if s == 0:
                # read anew, so that registers hold one state less; the policy makes it another load than the first
                S = ()
                for i in tl.static_range(PARTS):
                    S += (tl.load(states + j * (BM * BD) + i * BP + own, eviction_policy="evict_first"),)
                S = entered(S, starts, initial, at_slots, BP, inside, PARTS)
            exists_d = ()
            for i in tl.static_range(PARTS):
                exists_d += (d_in[i] & (t < T),)
            given = read(dy, tl.cast(t, tl.int64) * dy_row + d, BP, exists_d, PARTS, WHOLE and EVEN)
            dy_t, P = (), ()
            for i in tl.static_range(PARTS):
                dy_t += (given[i].to(tl.float32),)
                P += (dS[i] + dy_t[i][None, :] * q_t[:, None],)
            h_S = spread(h_t, PARTS)
            s_dy, s_P, h_P = over_d(S, spread(dy_t, PARTS), PARTS), over_d(S, P, PARTS), over_d(P, h_S, PARTS)
            h_dy = over_d(h_t, dy_t, PARTS)
            if PROJECT:
                across = tl.maximum(tl.load(of_square + at) - a * a, 0.0)
                before, behind = over * mu_t if FORGET else over, over * weight
                A = before - behind * a
                r_P = h_P - a * s_P
                radial = before * s_P + behind * r_P
                X = over * over * (before * r_P - behind * across * s_P)
                dweight = mu_t * X if FORGET else X
                wX = weight * X
                da = weight * wX
                dc = gamma_t * dweight
                if VARIANT == ENC:
                    da -= dc
                of_both = da - A * (behind * radial)
                along = A * A * radial
                back = behind * (behind * radial)
                dmu_t = -wX
            else:
                behind = weight
                A = (mu_t if FORGET else 1.0) - over * weight * a
                phi_P = over * s_P
                by_weight = h_P - a * phi_P
                dweight = over * by_weight
                da = -weight * phi_P
                dc = gamma_t * dweight
                if VARIANT == ENC:
                    da -= dc
                of_both = over * da
                inward = da * a + weight * (by_weight - a * phi_P)
                # where the length is below its limit it has no gradient
                curved = tl.where(over < LARGEST_INVERSE, over * over, 0.0)
                dmu_t = s_P
            dq_t = A * s_dy + behind * h_dy
            mixed, dh_t, dS_t = (), (), ()
            for i in tl.static_range(PARTS):
                both = behind[:, None] * P[i] + of_both[:, None] * S[i]
                if VARIANT == DEC:
                    # here, since another sum over warps is dearer
                    mixed += (both - back[:, None] * h_S[i] if PROJECT else both,)
                else:
                    dh_t += (tl.sum(both, 0) if WARPS == 1 else in_warp(both, WARPS),)
            if VARIANT == DEC:
                dh_t = over_slots(mixed, PARTS, WARPS)
            dk_t, read_k = dc, k_t
            if VARIANT == DEC:
                phi_dh = over_d(S, spread(dh_t, PARTS), PARTS)
                if not PROJECT:
                    phi_dh *= over
                    read_k = over * k_t
                    inward += k_t * phi_dh
                dk_t = phi_dh - dc
            if not PROJECT:
                along = curved * inward
            for i in tl.static_range(PARTS):
                dS_i = A[:, None] * P[i] - along[:, None] * S[i] + of_both[:, None] * h_S[i]
                if VARIANT == DEC:
                    dS_i += dh_t[i][None, :] * read_k[:, None]
                dS_t += (dS_i,)
            dS = dS_t
            # the last token's first
            dq_group, dk_group = (dq_t,) + dq_group, (dk_t,) + dk_group
            dgamma_group, dmu_group = (c * dweight,) + dgamma_group, (dmu_t,) + dmu_group
            if PROJECT:
                back_group = (back,) + back_group
            dh_group = dh_t + dh_group
            if starts:
                # rare, so the sum waits in memory
                kept = read(dloaded, at_slots, BP, inside, PARTS, False)
                total, none = (), ()
                for i in tl.static_range(PARTS):
                    total += (kept[i] + dS[i],)
                    none += (dS[i] * 0.0,)
                write(dloaded, at_slots, BP, total, inside, PARTS, False)
                dS = none
        t = c0 + j * STEPS + tl.arange(0, STEPS)
        here, exists = t.to(tl.int64) * H, t < T
        to = (of_token + here)[None, :] * M + m[:, None]
        dq_all, dk_all = stacked(dq_group, STEPS).to(dq.dtype.element_ty), stacked(dk_group, STEPS).to(dk.dtype.element_ty)
        if WHOLE and EVEN:
            tl.store(dq + to, dq_all)
            tl.store(dk + to, dk_all)
        else:
            tl.store(dq + to, dq_all, mask=m_in[:, None] & exists[None, :])
            tl.store(dk + to, dk_all, mask=m_in[:, None] & exists[None, :])
        if VARIANT == DEC or not PROJECT:
            dgamma_all = tl.sum(stacked(dgamma_group, STEPS), 0)
        else:
            dgamma_all, back_all = two_sums(dgamma_group, back_group, STEPS)
        tl.store(dgamma + of_part + here, dgamma_all, mask=exists)
        if FORGET:
            tl.store(dmu + of_part + here, tl.sum(stacked(dmu_group, STEPS), 0), mask=exists)
        column = tl.arange(0, STEPS * PARTS)
        t = c0 + j * STEPS + column // PARTS
        column_d = d[:, None] + column % PARTS * BP
        there = (column_d < D) & (t < T)
        dh_all = stacked(dh_group, STEPS * PARTS)
        if VARIANT == DEC:
            dv_all = -dh_all
        elif not PROJECT:
            dv_all = dh_all if WARPS == 1 else tl.sum(dh_all, 0)
        else:
            h_at = v + tl.minimum(t, T - 1) * v_row + column_d
            if WHOLE:
                h_all = tl.load(h_at).to(tl.float32)
            else:
                h_all = tl.load(h_at, mask=column_d < D, other=0.0).to(tl.float32)
            back = back_all[:, None] + tl.zeros([STEPS, PARTS], tl.float32)
            dv_all = (dh_all if WARPS == 1 else tl.sum(dh_all, 0)) - h_all * tl.reshape(back, [STEPS * PARTS])
        to = dv + (of_part + t.to(tl.int64) * H) * D + column_d
        if WHOLE and EVEN:
            tl.store(to, dv_all.to(dv.dtype.element_ty))
        else:
            tl.store(to, dv_all.to(dv.dtype.element_ty), mask=there)
    return dS


@triton.jit
def lattice_backward_kernel(
    q, k, v, gamma, mu, pos, loaded, borders, dy, arriving, states, dq, dk, dv, dgamma, dmu, dfirst, dloaded, T,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head, gamma_batch, gamma_row, gamma_head,
    mu_batch, mu_row, mu_head, dy_batch, dy_row, dy_head,
    D: tl.constexpr, M: tl.constexpr, H: tl.constexpr, VARIANT: tl.constexpr, FORGET: tl.constexpr, PROJECT: tl.constexpr,
    HAS_POS: tl.constexpr, EVEN: tl.constexpr, STEPS: tl.constexpr, BORDER: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr,
    PARTS: tl.constexpr, WARPS: tl.constexpr, OWN: tl.constexpr,
):  # fmt: skip
    """Gradients: dq, dk [B, T, H, M]; of each part of the slots dv [P, B, T, H, D], dgamma and dmu [P, B, T, H]; of the slots that
    entered, [B, H, M, D], and, added to zeros, of those that documents started with. states: memory of the programs' own,
    [programs, OWN], see `own` in `triton_launch`."""
    p, bh = tl.program_id(0), tl.program_id(1)
    b, h = (bh // H).to(tl.int64), bh % H
    batch = tl.num_programs(1) // H
    m, d, inside, d_in, m_in = places(p, D, M, BD, BM, PARTS)
    WHOLE: tl.constexpr = D == BD and M % BM == 0
    BP: tl.constexpr = BD // PARTS
    at_slots = m[:, None] * D + d[None, :]
    # the program's own: slots before each group; of each token a, one over |u|, |h|^2 and, in decoding, h
    states += (bh.to(tl.int64) * tl.num_programs(0) + p) * OWN
    q += b * q_batch + h * q_head + m
    k += b * k_batch + h * k_head + m
    v += b * v_batch + h * v_head
    dy += b * dy_batch + h * dy_head
    gamma += b * gamma_batch + h * gamma_head
    mu += b * mu_batch + h * mu_head
    pos += b * T
    of_token = b * T * H + h
    of_part = (p * batch + b) * T * H + h
    strides = (q_row, k_row, v_row, gamma_row, mu_row)
    head = bh.to(tl.int64) * (D * M)
    dS = read(arriving + head, at_slots, BP, inside, PARTS, WHOLE)
    initial = loaded + h * (D * M)
    chunks = tl.cdiv(T, BORDER)
    for n in range(chunks):
        c0 = (chunks - 1 - n) * BORDER
        begins = borders + (bh.to(tl.int64) * chunks + (chunks - 1 - n)) * (D * M)
        dS = border_back(
            dS, c0, begins, states, q, k, v, gamma, mu, pos, dy, initial, dloaded + head, dq, dk, dv, dgamma, dmu, at_slots, inside,
            m, d, m_in, d_in, of_token, of_part, T, strides, v_row, dy_row, D, M, H, VARIANT, FORGET, PROJECT, HAS_POS, EVEN, STEPS,
            BORDER, BD, BM, PARTS, WARPS, WHOLE,
        )  # fmt: skip
        # the last states are read before the next chunk's are written
        tl.debug_barrier()
    write(dfirst + head, at_slots, BP, dS, inside, PARTS, WHOLE)
