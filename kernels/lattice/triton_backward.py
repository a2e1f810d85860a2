"""Triton kernel of the gradient of Lattice's recurrence token by token; see `triton_forward`.

A program goes from checkpoint to checkpoint, the last first. It runs forward once, and stores in scratch memory the slots before
each group of BLOCK_T tokens and, for each token, the results of the sums over d or slots. Then it goes through the groups from the
last to the first: each runs forward without any sum, and back. Going back, a token's own slots s and the cotangents dS of those
after it are enough. With S = A s + w/|u| h after it, A = (mu - w a) / |u|, and P = dS + dy q, the sums over d are s.P, h.P, s.dy
and h.dy, which do not depend on each other. The normalization keeps the part of P across S: in the plane of s and the tangent r = h
- a s that is one number, X = (mu r.P - w |r|^2 s.P) / |u|^3, and elsewhere P / |u|:

    dw = mu X,   s.du = -w X,   da = w^2 X (and dc, in encoding),   ds = A (P - S (S.P)) + h da,   dh = sum of w du + s da

S is expressed in s and h, so the slots after a token are not needed.

Without projection a step is S = mu s + w (h - a phi) with phi = s / |s|, a = h.phi and w = gamma c / |s|; the slot's length enters
through r = 1 / |s|. With P as above, A = mu - r w a and dw = h.P - a (phi.P):

    da = -w phi.P (and dc, in encoding),   dh = sum of w P + da phi,   e = da a + w dw - w a (phi.P) (and k phi.dh, in decoding),
    ds = A P + r da h - r^2 e s (and r k dh, in decoding)

e is r dr; where |s| is below its limit r is constant and the term with e is omitted.
"""

import triton
import triton.language as tl

from baton.kernels.lattice.register_tiles import (
    broadcast_parts,
    load_parts,
    slot_indices,
    stack,
    store_parts,
    sum_over_d,
    sum_over_slots,
    sum_two_over_slots,
    sum_within_warps,
)
from baton.kernels.lattice.triton_forward import (
    DEC,
    ENC,
    MAX_INVERSE_NORM,
    lattice_step,
    load_token,
    negative_c,
    next_slots,
    reset_at_start,
)


@triton.jit
def backward_from_checkpoint(
    dS, c0, checkpoint, scratch, q, k, v, gamma, mu, pos, dy, S0_head, dS0, dq, dk, dv, dgamma, dmu, slot_offset, inside, m, d,
    m_in,
    d_in, of_token, of_part, T, strides, v_row, dy_row,
    D: tl.constexpr, M: tl.constexpr, H: tl.constexpr, VARIANT: tl.constexpr, FORGET: tl.constexpr, PROJECT: tl.constexpr,
    HAS_POS: tl.constexpr, EVEN_T: tl.constexpr, BLOCK_T: tl.constexpr, CHECKPOINT_INTERVAL: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, PARTS: tl.constexpr, WARPS: tl.constexpr, EVEN_D: tl.constexpr,
):  # fmt: skip
    """The slots' cotangents before the tokens of a checkpoint, the first of which is c0, given dS after them. begins: the
    checkpoint; dloaded: of the head; other pointers as in the kernel.
    """
    PART_D: tl.constexpr = BLOCK_D // PARTS
    BLOCKS: tl.constexpr = CHECKPOINT_INTERVAL // BLOCK_T
    lane = tl.arange(0, BLOCK_M)
    own = lane[:, None] * BLOCK_D + d[None, :]
    of_slots = scratch + BLOCKS * BLOCK_M * BLOCK_D
    of_h = of_slots + CHECKPOINT_INTERVAL * 2 * BLOCK_M
    of_square = of_h + (CHECKPOINT_INTERVAL * BLOCK_D if VARIANT == DEC else 0)
    S = load_parts(checkpoint, slot_offset, PART_D, inside, PARTS, EVEN_D)
    # every thread has read the scratch memory before it is overwritten; the barrier below orders writes before reads
    tl.debug_barrier()
    rows = ()
    for s in tl.static_range(BLOCK_T):
        rows += load_token(
            c0 + s, q, k, v + d, gamma, mu, pos, T, strides, m_in, d_in, PARTS, PART_D, EVEN_D, EVEN_T, FORGET, HAS_POS
        )
    for j in range(BLOCKS):
        for i in tl.static_range(PARTS):
            tl.store(scratch + j * (BLOCK_M * BLOCK_D) + i * PART_D + own, S[i])
        of_group, h_group, next_rows = (), (), ()
        for s in tl.static_range(BLOCK_T):
            t = c0 + (j + 1) * BLOCK_T + s
            next_rows += load_token(
                t, q, k, v + d, gamma, mu, pos, T, strides, m_in, d_in, PARTS, PART_D, EVEN_D, EVEN_T, FORGET, HAS_POS
            )
        for s in tl.static_range(BLOCK_T):
            row = rows[6 * s : 6 * s + 6]
            S = reset_at_start(S, row[5], S0_head, slot_offset, PART_D, inside, PARTS)
            S, h_t, a, inv_norm = lattice_step(S, row, VARIANT, FORGET, PROJECT, PARTS, WARPS)
            of_group += (a, inv_norm)
            h_group += h_t
            if PROJECT:
                tl.store(of_square + j * BLOCK_T + s, sum_over_d(h_t, h_t, PARTS))
        rows = next_rows
        column = tl.arange(0, 2 * BLOCK_T)
        tl.store(of_slots + (j * 2 * BLOCK_T + column[None, :]) * BLOCK_M + lane[:, None], stack(of_group, 2 * BLOCK_T))
        if VARIANT == DEC:
            column = tl.arange(0, PARTS * BLOCK_T)
            to = of_h + (j * BLOCK_T + column // PARTS) * BLOCK_D + column % PARTS * PART_D
            tl.store(to[None, :] + d[:, None], stack(h_group, PARTS * BLOCK_T))
    tl.debug_barrier()
    for k_block in range(BLOCKS):
        j = BLOCKS - 1 - k_block
        S = ()
        for i in tl.static_range(PARTS):
            S += (tl.load(scratch + j * (BLOCK_M * BLOCK_D) + i * PART_D + own),)
        found, slots = (), ()
        for s in tl.static_range(BLOCK_T):
            at = j * BLOCK_T + s
            row = load_token(
                c0 + at, q, k, v + d, gamma, mu, pos, T, strides, m_in, d_in, PARTS, PART_D, EVEN_D, EVEN_T, FORGET, HAS_POS
            )
            a = tl.load(of_slots + at * (2 * BLOCK_M) + lane)
            inv_norm = tl.load(of_slots + at * (2 * BLOCK_M) + BLOCK_M + lane)
            h_t = ()
            for i in tl.static_range(PARTS):
                h_t += (tl.load(of_h + at * BLOCK_D + i * PART_D + d) if VARIANT == DEC else row[2][i].to(tl.float32),)
            k_t = row[1].to(tl.float32)
            c = negative_c(a, k_t, VARIANT)
            weight = row[3] * c if PROJECT else row[3] * inv_norm * c
            S = reset_at_start(S, row[5], S0_head, slot_offset, PART_D, inside, PARTS)
            slots += S
            if s < BLOCK_T - 1:
                S = next_slots(S, h_t, a, inv_norm, weight, row[4], FORGET, PROJECT, PARTS)
            found += (row[0].to(tl.float32), k_t, h_t, row[3], row[4], row[5], a, inv_norm, c, weight)
        dq_group, dk_group, dgamma_group, dmu_group, dh_group, back_group = (), (), (), (), (), ()
        for s in tl.static_range(BLOCK_T - 1, -1, -1):
            at = j * BLOCK_T + s
            t = c0 + at
            q_t, k_t, h_t, gamma_t, mu_t, starts, a, inv_norm, c, weight = found[10 * s : 10 * s + 10]
            S = slots[s * PARTS : s * PARTS + PARTS]
            if s == 0:
                # loaded again, so that registers hold one state less; the policy makes it a load of its own
                S = ()
                for i in tl.static_range(PARTS):
                    S += (tl.load(scratch + j * (BLOCK_M * BLOCK_D) + i * PART_D + own, eviction_policy="evict_first"),)
                S = reset_at_start(S, starts, S0_head, slot_offset, PART_D, inside, PARTS)
            exists_d = ()
            for i in tl.static_range(PARTS):
                exists_d += (d_in[i] & (t < T),)
            given = load_parts(dy, tl.cast(t, tl.int64) * dy_row + d, PART_D, exists_d, PARTS, EVEN_D and EVEN_T)
            dy_t, P = (), ()
            for i in tl.static_range(PARTS):
                dy_t += (given[i].to(tl.float32),)
                P += (dS[i] + dy_t[i][None, :] * q_t[:, None],)
            h_S = broadcast_parts(h_t, PARTS)
            s_dy, s_P, h_P = sum_over_d(S, broadcast_parts(dy_t, PARTS), PARTS), sum_over_d(S, P, PARTS), sum_over_d(P, h_S, PARTS)
            h_dy = sum_over_d(h_t, dy_t, PARTS)
            if PROJECT:
                across = tl.maximum(tl.load(of_square + at) - a * a, 0.0)
                before, behind = inv_norm * mu_t if FORGET else inv_norm, inv_norm * weight
                A = before - behind * a
                r_P = h_P - a * s_P
                radial = before * s_P + behind * r_P
                X = inv_norm * inv_norm * (before * r_P - behind * across * s_P)
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
                A = (mu_t if FORGET else 1.0) - inv_norm * weight * a
                phi_P = inv_norm * s_P
                by_weight = h_P - a * phi_P
                dweight = inv_norm * by_weight
                da = -weight * phi_P
                dc = gamma_t * dweight
                if VARIANT == ENC:
                    da -= dc
                of_both = inv_norm * da
                inward = da * a + weight * (by_weight - a * phi_P)
                # no gradient where the norm is below its limit
                curved = tl.where(inv_norm < MAX_INVERSE_NORM, inv_norm * inv_norm, 0.0)
                dmu_t = s_P
            dq_t = A * s_dy + behind * h_dy
            mixed, dh_t, dS_t = (), (), ()
            for i in tl.static_range(PARTS):
                both = behind[:, None] * P[i] + of_both[:, None] * S[i]
                if VARIANT == DEC:
                    # here, because another sum over warps costs more
                    mixed += (both - back[:, None] * h_S[i] if PROJECT else both,)
                else:
                    dh_t += (tl.sum(both, 0) if WARPS == 1 else sum_within_warps(both, WARPS),)
            if VARIANT == DEC:
                dh_t = sum_over_slots(mixed, PARTS, WARPS)
            dk_t, read_k = dc, k_t
            if VARIANT == DEC:
                phi_dh = sum_over_d(S, broadcast_parts(dh_t, PARTS), PARTS)
                if not PROJECT:
                    phi_dh *= inv_norm
                    read_k = inv_norm * k_t
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
            # in reverse: the last token comes first
            dq_group, dk_group = (dq_t,) + dq_group, (dk_t,) + dk_group
            dgamma_group, dmu_group = (c * dweight,) + dgamma_group, (dmu_t,) + dmu_group
            if PROJECT:
                back_group = (back,) + back_group
            dh_group = dh_t + dh_group
            if starts:
                # rare, so the sum is kept in memory
                kept = load_parts(dS0, slot_offset, PART_D, inside, PARTS, False)
                total, none = (), ()
                for i in tl.static_range(PARTS):
                    total += (kept[i] + dS[i],)
                    none += (dS[i] * 0.0,)
                store_parts(dS0, slot_offset, PART_D, total, inside, PARTS, False)
                dS = none
        t = c0 + j * BLOCK_T + tl.arange(0, BLOCK_T)
        here, exists = t.to(tl.int64) * H, t < T
        to = (of_token + here)[None, :] * M + m[:, None]
        dq_all, dk_all = stack(dq_group, BLOCK_T).to(dq.dtype.element_ty), stack(dk_group, BLOCK_T).to(dk.dtype.element_ty)
        if EVEN_D and EVEN_T:
            tl.store(dq + to, dq_all)
            tl.store(dk + to, dk_all)
        else:
            tl.store(dq + to, dq_all, mask=m_in[:, None] & exists[None, :])
            tl.store(dk + to, dk_all, mask=m_in[:, None] & exists[None, :])
        if VARIANT == DEC or not PROJECT:
            dgamma_all = tl.sum(stack(dgamma_group, BLOCK_T), 0)
        else:
            dgamma_all, back_all = sum_two_over_slots(dgamma_group, back_group, BLOCK_T)
        tl.store(dgamma + of_part + here, dgamma_all, mask=exists)
        if FORGET:
            tl.store(dmu + of_part + here, tl.sum(stack(dmu_group, BLOCK_T), 0), mask=exists)
        column = tl.arange(0, BLOCK_T * PARTS)
        t = c0 + j * BLOCK_T + column // PARTS
        column_d = d[:, None] + column % PARTS * PART_D
        there = (column_d < D) & (t < T)
        dh_all = stack(dh_group, BLOCK_T * PARTS)
        if VARIANT == DEC:
            dv_all = -dh_all
        elif not PROJECT:
            dv_all = dh_all if WARPS == 1 else tl.sum(dh_all, 0)
        else:
            h_at = v + tl.minimum(t, T - 1) * v_row + column_d
            if EVEN_D:
                h_all = tl.load(h_at).to(tl.float32)
            else:
                h_all = tl.load(h_at, mask=column_d < D, other=0.0).to(tl.float32)
            back = back_all[:, None] + tl.zeros([BLOCK_T, PARTS], tl.float32)
            dv_all = (dh_all if WARPS == 1 else tl.sum(dh_all, 0)) - h_all * tl.reshape(back, [BLOCK_T * PARTS])
        to = dv + (of_part + t.to(tl.int64) * H) * D + column_d
        if EVEN_D and EVEN_T:
            tl.store(to, dv_all.to(dv.dtype.element_ty))
        else:
            tl.store(to, dv_all.to(dv.dtype.element_ty), mask=there)
    return dS


@triton.jit
def lattice_backward_kernel(
    q, k, v, gamma, mu, pos, S0, checkpoints, dy, dS_final, scratch, dq, dk, dv, dgamma, dmu, dS_initial, dS0, T,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head, gamma_batch, gamma_row, gamma_head,
    mu_batch, mu_row, mu_head, dy_batch, dy_row, dy_head,
    D: tl.constexpr, M: tl.constexpr, H: tl.constexpr, VARIANT: tl.constexpr, FORGET: tl.constexpr, PROJECT: tl.constexpr,
    HAS_POS: tl.constexpr, EVEN_T: tl.constexpr, BLOCK_T: tl.constexpr, CHECKPOINT_INTERVAL: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, PARTS: tl.constexpr, WARPS: tl.constexpr, SCRATCH: tl.constexpr,
):  # fmt: skip
    """Gradients dq, dk [B, T, H, M]; for the slots of each program dv [P, B, T, H, D], dgamma and dmu [P, B, T, H]; of the initial
    slots, [B, H, M, D]; and of S0 per sequence, [B, H, M, D], added to zeros.

    scratch: [programs, SCRATCH], see `scratch_size` in `triton_launch`.
    """
    p, bh = tl.program_id(0), tl.program_id(1)
    b, h = (bh // H).to(tl.int64), bh % H
    batch = tl.num_programs(1) // H
    m, d, inside, d_in, m_in = slot_indices(p, D, M, BLOCK_D, BLOCK_M, PARTS)
    EVEN_D: tl.constexpr = D == BLOCK_D and M % BLOCK_M == 0
    PART_D: tl.constexpr = BLOCK_D // PARTS
    slot_offset = m[:, None] * D + d[None, :]
    # scratch memory: slots before each group; for each token a, 1 / |u|, |h|^2 and, in decoding, h
    scratch += (bh.to(tl.int64) * tl.num_programs(0) + p) * SCRATCH
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
    dS = load_parts(dS_final + head, slot_offset, PART_D, inside, PARTS, EVEN_D)
    S0_head = S0 + h * (D * M)
    chunks = tl.cdiv(T, CHECKPOINT_INTERVAL)
    for n in range(chunks):
        c0 = (chunks - 1 - n) * CHECKPOINT_INTERVAL
        checkpoint = checkpoints + (bh.to(tl.int64) * chunks + (chunks - 1 - n)) * (D * M)
        dS = backward_from_checkpoint(
            dS, c0, checkpoint, scratch, q, k, v, gamma, mu, pos, dy, S0_head, dS0 + head, dq, dk, dv, dgamma, dmu, slot_offset,
            inside, m, d, m_in, d_in, of_token, of_part, T, strides, v_row, dy_row, D, M, H, VARIANT, FORGET, PROJECT, HAS_POS,
            EVEN_T, BLOCK_T, CHECKPOINT_INTERVAL, BLOCK_D, BLOCK_M, PARTS, WARPS, EVEN_D,
        )  # fmt: skip
        # all threads have read the scratch memory before the next chunk overwrites it
        tl.debug_barrier()
    store_parts(dS_initial + head, slot_offset, PART_D, dS, inside, PARTS, EVEN_D)
