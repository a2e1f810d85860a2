"""Triton kernels of the backward pass of encoding and similarity, chunk by chunk from the end; see `chunk_kernel_utils`. Chunks
that ran token by token in the forward pass do so here.

The sequential steps are recomputed from the slots before the chunk, and then run backward, again without a sum over lanes. With
r = p q, Z the slots over p, P, W and A those of all tokens, cotangents with a bar, and R the cotangent of the last Z:

    rbar = Z dy = s dy + W tril(dy h^T)^T,   pbar = q rbar + later ones,   wbar = r tril(dy h^T) + R h^T + A_later h_later.h
    fbar = pbar p / |u| - wbar w / f,   X = |u|^-3 pbar p f,   dmu = fbar - mu X
    dw = wbar / (p f) - a fbar - w |h - s a|^2 X,   da = w^2 a X - w fbar (and -gamma dw, in encoding),   A = p da
    pbar of p before = pbar f / |u| - wbar w / p + da a / p,   d|h|^2 = -w^2 X / 2
    dh = tril(r^T W)^T dy + W R + A s + (E + E^T) h + 2 d|h|^2 h with E = tril(A^T W, -1),   ds = R + r dy + A h

The length of a slot has no effect after the chunk, nor has p. Only R and A depend on the next chunk: one kernel goes from chunk to
chunk with them; a kernel before it (pre) and one after it (post) compute everything else for all chunks at once.

Sizes: see `triton_forward`.
"""

import triton
import triton.language as tl

from baton.kernels.common.triton_prefetch import prefetch
from baton.kernels.lattice.chunk_kernel_utils import (
    cache_line,
    chunk_steps,
    dot,
    dot_fp32,
    load_sectors,
    load_segments,
    load_tile,
    store_tile,
)
from baton.kernels.lattice.register_tiles import load_parts, slot_indices, store_parts
from baton.kernels.lattice.triton_backward import backward_from_checkpoint
from baton.kernels.lattice.triton_chunk_steps_backward import ROWS, chunk_steps_backward


@triton.jit
def lattice_backward_pre_kernel(
    q, k, v, gram, S0, checkpoints, unsafe, rows, dy, dq, T, q_batch, q_row, q_head, k_batch, k_row, k_head,
    v_batch, v_row, v_head, dy_batch, dy_row, dy_head,
    D: tl.constexpr, M: tl.constexpr, H: tl.constexpr, VARIANT: tl.constexpr, HAS_POS: tl.constexpr, EVEN_T: tl.constexpr,
    CHECKPOINT_INTERVAL: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, GROUP_T: tl.constexpr,
):  # fmt: skip
    """For chunk n of sequence and head bh and part p of the slots, unless the chunk ran token by token: the sequential steps, dq,
    and the parts of wbar and pbar that do not depend on the next chunk; rows [B H, P, chunks, ROWS, CHECKPOINT_INTERVAL, BLOCK_M].
    """
    n, bh, p = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, h = (bh // H).to(tl.int64), bh % H
    chunks, P = tl.num_programs(0), tl.num_programs(2)
    LINES: tl.constexpr = (CHECKPOINT_INTERVAL * (CHECKPOINT_INTERVAL + 3) + 31) // 32
    EVEN_D: tl.constexpr = D == BLOCK_D and M % BLOCK_M == 0
    ALL: tl.constexpr = EVEN_D and EVEN_T
    LOW_PRECISION: tl.constexpr = v.dtype.element_ty == tl.bfloat16 and dy.dtype.element_ty == tl.bfloat16
    d, c, lane = tl.arange(0, BLOCK_D), tl.arange(0, CHECKPOINT_INTERVAL), tl.arange(0, BLOCK_M)
    m, t = p * BLOCK_M + lane, n * CHECKPOINT_INTERVAL + c
    here, exists = t.to(tl.int64), t < T
    of_m, of_d = (m < M)[:, None] & exists[None, :], exists[:, None] & (d < D)[None, :]
    slot_offset, slots_in = m[:, None] * D + d[None, :], (m < M)[:, None] & (d < D)[None, :]
    at = bh.to(tl.int64) * chunks + n
    gram += at * (CHECKPOINT_INTERVAL * (CHECKPOINT_INTERVAL + 3))
    rows += ((bh.to(tl.int64) * P + p) * chunks + n) * (ROWS * CHECKPOINT_INTERVAL * BLOCK_M)
    at_rows = rows + c[None, :] * BLOCK_M + lane[:, None]
    prefetch(cache_line(gram, tl.arange(0, triton.next_power_of_2(LINES)), CHECKPOINT_INTERVAL * (CHECKPOINT_INTERVAL + 3)))
    if tl.load(unsafe + (p * tl.num_programs(1) + bh) * chunks + n) == 0:
        h_t = load_tile(v + b * v_batch + h * v_head + here[:, None] * v_row + d[None, :], of_d, ALL)
        k_t = load_tile(k + b * k_batch + h * k_head + here[None, :] * k_row + m[:, None], of_m, ALL)
        dy_t = load_tile(dy + b * dy_batch + h * dy_head + here[:, None] * dy_row + d[None, :], of_d, ALL)
        h_T, dy_T = tl.trans(h_t), tl.trans(dy_t)
        S = load_tile(checkpoints + at * (D * M) + slot_offset, slots_in, EVEN_D)
        products, rbar = dot_fp32(S, h_T), dot_fp32(S, dy_T)
        segment, resets = load_segments(gram, HAS_POS, CHECKPOINT_INTERVAL)
        seen = c[:, None] >= c[None, :]
        if HAS_POS:
            seen &= segment[:, None] == segment[None, :]
            if resets > 0.0:
                begun, L = (segment > 0.0)[None, :], load_tile(S0 + h * (D * M) + slot_offset, slots_in, EVEN_D)
                products, rbar = tl.where(begun, dot_fp32(L, h_T), products), tl.where(begun, dot_fp32(L, dy_T), rbar)
        tl.store(at_rows, k_t.to(tl.float32))
        tl.store(at_rows + CHECKPOINT_INTERVAL * BLOCK_M, products)
        sectors = load_sectors(gram, 0, CHECKPOINT_INTERVAL, CHECKPOINT_INTERVAL)
        tl.debug_barrier()
        # where wbar will be
        tl.store(rows + 5 * CHECKPOINT_INTERVAL * BLOCK_M + tl.arange(0, sectors.shape[0]), sectors)
        # specialized, see `lattice_chunk_backward_kernel`
        if resets > 0.0:
            chunk_steps(
                gram,
                rows,
                rows + 2 * CHECKPOINT_INTERVAL * BLOCK_M,
                VARIANT,
                HAS_POS,
                False,
                True,
                CHECKPOINT_INTERVAL,
                BLOCK_M,
                GROUP_T,
            )
        else:
            chunk_steps(
                gram,
                rows,
                rows + 2 * CHECKPOINT_INTERVAL * BLOCK_M,
                VARIANT,
                False,
                False,
                True,
                CHECKPOINT_INTERVAL,
                BLOCK_M,
                GROUP_T,
            )
        p_t, w_t = tl.load(at_rows + 2 * CHECKPOINT_INTERVAL * BLOCK_M), tl.load(at_rows + 3 * CHECKPOINT_INTERVAL * BLOCK_M)
        q_t = load_tile(q + b * q_batch + h * q_head + here[None, :] * q_row + m[:, None], of_m, ALL).to(tl.float32)
        across = tl.where(seen, dot(dy_t, h_T, LOW_PRECISION), 0.0)
        rbar += dot_fp32(w_t, tl.trans(across))
        store_tile(dq + ((b * T + here) * H + h)[None, :] * M + m[:, None], p_t * rbar, of_m, ALL)
        read_t = q_t * p_t
        tl.store(at_rows + CHECKPOINT_INTERVAL * BLOCK_M, read_t)
        tl.store(at_rows + 5 * CHECKPOINT_INTERVAL * BLOCK_M, dot_fp32(read_t, across))
        tl.store(at_rows + 6 * CHECKPOINT_INTERVAL * BLOCK_M, q_t * rbar)


@triton.jit(noinline=True)
def unsafe_chunk_backward(
    n, p, own_slots, checkpoint, q, k, v, gamma, mu, pos, dy, S0_head, dS0, dq, dk, dv, dgamma, dmu, of_token, of_part, T,
    q_row, k_row, v_row, gamma_row, mu_row, dy_row,
    D: tl.constexpr, M: tl.constexpr, H: tl.constexpr, VARIANT: tl.constexpr, FORGET: tl.constexpr, HAS_POS: tl.constexpr,
    EVEN_T: tl.constexpr, BLOCK_T: tl.constexpr, CHECKPOINT_INTERVAL: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    PARTS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Run chunk n backward token by token; the slots' cotangents are in own_slots, [BLOCK_M, BLOCK_D], before and after it, and
    scratch memory follows them. Such chunks are rare, so they are a function of their own: compiling the kernel with it takes twice
    as long, see `load_vectors`.
    """
    m, d, inside, d_in, m_in = slot_indices(p, D, M, BLOCK_D, BLOCK_M, PARTS)
    EVEN_D: tl.constexpr = D == BLOCK_D and M % BLOCK_M == 0
    PART_D: tl.constexpr = BLOCK_D // PARTS
    own = tl.arange(0, BLOCK_M)[:, None] * BLOCK_D + d[None, :]
    dS = load_parts(own_slots, own, PART_D, inside, PARTS, True)
    dS = backward_from_checkpoint(
        dS, n * CHECKPOINT_INTERVAL, checkpoint, own_slots + BLOCK_M * BLOCK_D, q + m, k + m, v, gamma, mu, pos, dy, S0_head, dS0,
        dq, dk, dv, dgamma, dmu, m[:, None] * D + d[None, :], inside, m, d, m_in, d_in, of_token, of_part, T,
        (q_row, k_row, v_row, gamma_row, mu_row), v_row, dy_row, D, M, H, VARIANT, FORGET, True, HAS_POS, EVEN_T, BLOCK_T,
        CHECKPOINT_INTERVAL, BLOCK_D, BLOCK_M, PARTS, WARPS, EVEN_D,
    )  # fmt: skip
    tl.debug_barrier()
    store_parts(own_slots, own, PART_D, dS, inside, PARTS, True)


@triton.jit
def lattice_chunk_backward_kernel(
    q, k, v, gamma, mu, pos, gram, S0, checkpoints, S_final, unsafe, rows, scales, dy, dS_final, scratch, dlasts, dq, dk, dv,
    dgamma,
    dmu, dS_initial, dS0, T,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head, gamma_batch, gamma_row, gamma_head,
    mu_batch, mu_row, mu_head, dy_batch, dy_row, dy_head,
    D: tl.constexpr, M: tl.constexpr, H: tl.constexpr, VARIANT: tl.constexpr, FORGET: tl.constexpr, HAS_POS: tl.constexpr,
    EVEN_T: tl.constexpr, BLOCK_T: tl.constexpr, CHECKPOINT_INTERVAL: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    PARTS: tl.constexpr, WARPS: tl.constexpr, SCRATCH: tl.constexpr, GROUP_T: tl.constexpr,
):  # fmt: skip
    """dk, the entries of `rows` that depend on the next chunk, and R of each chunk, dlasts [B H, chunks, M, D]; all gradients of
    chunks that ran token by token; and those of slots, as `triton_backward.lattice_backward_kernel`.

    S_final: the slots after the last chunk. scratch: [programs, SCRATCH]. GROUP_T: tokens whose rows are loaded together.
    """
    p, bh = tl.program_id(0), tl.program_id(1)
    b, h = (bh // H).to(tl.int64), bh % H
    batch = tl.num_programs(1) // H
    EVEN_D: tl.constexpr = D == BLOCK_D and M % BLOCK_M == 0
    ALL: tl.constexpr = EVEN_D and EVEN_T
    d, c, lane = tl.arange(0, BLOCK_D), tl.arange(0, CHECKPOINT_INTERVAL), tl.arange(0, BLOCK_M)
    m = p * BLOCK_M + lane
    m_in, d_there = m < M, d < D
    slots_in = m_in[:, None] & d_there[None, :]
    slot_offset, of_own = m[:, None] * D + d[None, :], lane[:, None] * BLOCK_D + d[None, :]
    q += b * q_batch + h * q_head
    k += b * k_batch + h * k_head
    v += b * v_batch + h * v_head
    dy += b * dy_batch + h * dy_head
    gamma += b * gamma_batch + h * gamma_head
    mu += b * mu_batch + h * mu_head
    pos += b * T
    of_token = b * T * H + h
    of_part = (p * batch + b) * T * H + h
    head = bh.to(tl.int64) * (D * M)
    chunks = tl.cdiv(T, CHECKPOINT_INTERVAL)
    N: tl.constexpr = CHECKPOINT_INTERVAL * (CHECKPOINT_INTERVAL + 3)
    ROW: tl.constexpr = CHECKPOINT_INTERVAL * BLOCK_M // 32
    line = tl.arange(0, triton.next_power_of_2(2 * ROW + (N + 31) // 32))
    gram += bh.to(tl.int64) * chunks * N
    checkpoints += head * chunks
    dlasts += head * chunks
    scales += bh.to(tl.int64) * chunks * M
    unsafe += (p * tl.num_programs(1) + bh) * chunks
    rows += (bh.to(tl.int64) * tl.num_programs(0) + p) * chunks * (ROWS * CHECKPOINT_INTERVAL * BLOCK_M)
    S0_head = S0 + h * (D * M)
    dS0 += head
    own_slots = scratch + (bh.to(tl.int64) * tl.num_programs(0) + p) * SCRATCH
    own_tokens = own_slots + BLOCK_M * BLOCK_D
    dS = load_tile(dS_final + head + slot_offset, slots_in, EVEN_D)
    behind = S_final + head
    # where each element of each tile lies would otherwise be found once, and take the registers
    for step in tl.range(0, chunks, disable_licm=True):
        n = chunks - 1 - step
        checkpoint = checkpoints + tl.cast(n, tl.int64) * (D * M)
        of_chunk = rows + tl.cast(n, tl.int64) * (ROWS * CHECKPOINT_INTERVAL * BLOCK_M)
        # what the next chunk reads, and behind this one's walk r; what its walk reads `walk_back` asks for
        before = tl.cast(tl.maximum(n - 1, 0), tl.int64)
        next_rows, next_gram = rows + before * (ROWS * CHECKPOINT_INTERVAL * BLOCK_M), gram + before * N
        at_line = tl.where(line < ROW, next_rows + 5 * CHECKPOINT_INTERVAL * BLOCK_M, of_chunk) + tl.minimum(line, 2 * ROW - 1) * 32
        prefetch(tl.where(line < 2 * ROW, at_line, cache_line(next_gram, tl.maximum(line - 2 * ROW, 0), N)))
        if tl.load(unsafe + n) == 0:
            at_rows = of_chunk + c[None, :] * BLOCK_M + lane[:, None]
            t = n * CHECKPOINT_INTERVAL + c
            here, exists = t.to(tl.int64), t < T
            of_d = exists[:, None] & d_there[None, :]
            h_t = load_tile(v + here[:, None] * v_row + d[None, :], of_d, ALL)
            dy_t = load_tile(dy + here[:, None] * dy_row + d[None, :], of_d, ALL)
            U = load_tile(behind + slot_offset, slots_in, EVEN_D)
            scale = tl.load(scales + tl.cast(n, tl.int64) * M + m, mask=m_in, other=0.0)
            wbar = tl.load(at_rows + 5 * CHECKPOINT_INTERVAL * BLOCK_M)
            R = (dS - U * tl.sum(U * dS, 1)[:, None]) * scale[:, None]
            of_behind = dot_fp32(R, tl.trans(h_t))
            store_tile(dlasts + tl.cast(n, tl.int64) * (D * M) + slot_offset, R, slots_in, EVEN_D)
            segment, resets = load_segments(gram + tl.cast(n, tl.int64) * N, HAS_POS, CHECKPOINT_INTERVAL)
            if resets > 0.0:
                of_behind = tl.where((segment == resets)[None, :], of_behind, 0.0)
            tl.store(at_rows + 5 * CHECKPOINT_INTERVAL * BLOCK_M, wbar + of_behind)
            tl.debug_barrier()
            # specialized for chunks without a document start, which is most of them: loads then do not wait for starts
            to_dk, of_numbers = dk + of_token * M + p * BLOCK_M, gram + tl.cast(n, tl.int64) * N
            if resets > 0.0:
                chunk_steps_backward(
                    of_numbers, next_gram, of_chunk, next_rows, own_tokens, to_dk, n * CHECKPOINT_INTERVAL, T, m_in, H * M, VARIANT,
                    FORGET, HAS_POS, CHECKPOINT_INTERVAL, BLOCK_M, GROUP_T,
                )  # fmt: skip
            else:
                chunk_steps_backward(
                    of_numbers, next_gram, of_chunk, next_rows, own_tokens, to_dk, n * CHECKPOINT_INTERVAL, T, m_in, H * M, VARIANT,
                    FORGET, False, CHECKPOINT_INTERVAL, BLOCK_M, GROUP_T,
                )  # fmt: skip
            A, read_t = tl.load(at_rows), tl.load(at_rows + CHECKPOINT_INTERVAL * BLOCK_M)
            if resets > 0.0:
                begun = (segment > 0.0)[None, :]
                dS = dot_fp32(tl.where(begun, 0.0, read_t), dy_t) + dot_fp32(tl.where(begun, 0.0, A), h_t)
                # rare, so the sum waits in memory
                dL = R + dot_fp32(tl.where(begun, read_t, 0.0), dy_t) + dot_fp32(tl.where(begun, A, 0.0), h_t)
                dL += tl.load(dS0 + slot_offset, mask=slots_in, other=0.0)
                tl.store(dS0 + slot_offset, dL, mask=slots_in)
            else:
                dS = R + dot_fp32(read_t, dy_t) + dot_fp32(A, h_t)
        else:
            tl.store(own_slots + of_own, dS)
            tl.debug_barrier()
            unsafe_chunk_backward(
                n, p, own_slots, checkpoint, q, k, v, gamma, mu, pos, dy, S0_head, dS0, dq, dk, dv, dgamma, dmu, of_token, of_part,
                T, q_row, k_row, v_row, gamma_row, mu_row, dy_row, D, M, H, VARIANT, FORGET, HAS_POS, EVEN_T, BLOCK_T,
                CHECKPOINT_INTERVAL, BLOCK_D, BLOCK_M, PARTS, WARPS,
            )  # fmt: skip
            tl.debug_barrier()
            dS = tl.load(own_slots + of_own)
        behind = checkpoint
    store_tile(dS_initial + head + slot_offset, dS, slots_in, EVEN_D)


@triton.jit
def lattice_backward_post_kernel(
    v, gram, S0, checkpoints, unsafe, rows, dlasts, dy, dv, dgamma, dmu, T, v_batch, v_row, v_head, dy_batch, dy_row, dy_head,
    D: tl.constexpr, M: tl.constexpr, H: tl.constexpr, FORGET: tl.constexpr, HAS_POS: tl.constexpr, EVEN_T: tl.constexpr,
    CHECKPOINT_INTERVAL: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """dv, dgamma and dmu, as `triton_backward.lattice_backward_kernel`, of chunk n of sequence and head bh and part p of the slots,
    unless the chunk ran token by token.
    """
    n, bh, p = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, h = (bh // H).to(tl.int64), bh % H
    batch, chunks, P = tl.num_programs(1) // H, tl.num_programs(0), tl.num_programs(2)
    EVEN_D: tl.constexpr = D == BLOCK_D and M % BLOCK_M == 0
    ALL: tl.constexpr = EVEN_D and EVEN_T
    LOW_PRECISION: tl.constexpr = v.dtype.element_ty == tl.bfloat16
    d, c, lane = tl.arange(0, BLOCK_D), tl.arange(0, CHECKPOINT_INTERVAL), tl.arange(0, BLOCK_M)
    m, t = p * BLOCK_M + lane, n * CHECKPOINT_INTERVAL + c
    here, exists = t.to(tl.int64), t < T
    of_d = exists[:, None] & (d < D)[None, :]
    slot_offset, slots_in = m[:, None] * D + d[None, :], (m < M)[:, None] & (d < D)[None, :]
    at = bh.to(tl.int64) * chunks + n
    rows += ((bh.to(tl.int64) * P + p) * chunks + n) * (ROWS * CHECKPOINT_INTERVAL * BLOCK_M)
    at_rows, at_sums = rows + c[None, :] * BLOCK_M + lane[:, None], rows + c[:, None] * BLOCK_M + lane[None, :]
    if tl.load(unsafe + (p * tl.num_programs(1) + bh) * chunks + n) == 0:
        to_sums = ((p * batch + b) * T + here) * H + h
        store_tile(dgamma + to_sums, tl.sum(tl.load(at_sums + 5 * CHECKPOINT_INTERVAL * BLOCK_M), 1), exists, EVEN_T)
        of_length = tl.sum(tl.load(at_sums + 6 * CHECKPOINT_INTERVAL * BLOCK_M), 1)
        if FORGET:
            store_tile(dmu + to_sums, tl.sum(tl.load(at_sums + 4 * CHECKPOINT_INTERVAL * BLOCK_M), 1), exists, EVEN_T)
        A, read_t, w_t = (
            tl.load(at_rows),
            tl.load(at_rows + CHECKPOINT_INTERVAL * BLOCK_M),
            tl.load(at_rows + 3 * CHECKPOINT_INTERVAL * BLOCK_M),
        )
        h_t = load_tile(v + b * v_batch + h * v_head + here[:, None] * v_row + d[None, :], of_d, ALL)
        dy_t = load_tile(dy + b * dy_batch + h * dy_head + here[:, None] * dy_row + d[None, :], of_d, ALL)
        segment, resets = load_segments(gram + at * (CHECKPOINT_INTERVAL * (CHECKPOINT_INTERVAL + 3)), HAS_POS, CHECKPOINT_INTERVAL)
        seen, w_last = c[:, None] >= c[None, :], w_t
        if HAS_POS:
            seen &= segment[:, None] == segment[None, :]
            w_last = tl.where((segment == resets)[None, :], w_t, 0.0)
        among = tl.where(seen, dot(tl.trans(read_t), w_t, LOW_PRECISION), 0.0)
        pairs = tl.where(seen & (c[:, None] > c[None, :]), dot(tl.trans(A), w_t, LOW_PRECISION), 0.0)
        pairs += tl.trans(pairs)
        pairs += tl.where(c[:, None] == c[None, :], of_length[:, None], 0.0)
        dh = dot(tl.trans(among), dy_t, LOW_PRECISION) + dot(pairs, h_t, LOW_PRECISION)
        dh += dot(tl.trans(w_last), load_tile(dlasts + at * (D * M) + slot_offset, slots_in, EVEN_D), LOW_PRECISION)
        S = load_tile(checkpoints + at * (D * M) + slot_offset, slots_in, EVEN_D)
        if HAS_POS:
            begun = (segment > 0.0)[None, :]
            dh += dot(tl.trans(tl.where(begun, 0.0, A)), S, LOW_PRECISION)
            if resets > 0.0:
                L = load_tile(S0 + h * (D * M) + slot_offset, slots_in, EVEN_D)
                dh += dot(tl.trans(tl.where(begun, A, 0.0)), L, LOW_PRECISION)
        else:
            dh += dot(tl.trans(A), S, LOW_PRECISION)
        store_tile(dv + (((p * batch + b) * T + here) * H + h)[:, None] * D + d[None, :], dh, of_d, ALL)
