"""Triton kernels of the forward pass of encoding and similarity, chunk by chunk; see `chunk_kernel_utils`.

There are three kernels. The first stores the Gram matrices of all chunks, the second goes from chunk to chunk with the slots, and
the third computes the outputs of all chunks from the slots. If a chunk is not safe, the second kernel runs it token by token as
`triton_forward` does, outputs included, and records it for the other kernels and for the backward pass.
"""

import triton
import triton.language as tl

from baton.kernels.lattice.chunk_kernel_utils import (
    chunk_steps,
    dot,
    dot_fp32,
    load_gates,
    load_segments,
    load_tile,
    store_gram,
    store_tile,
)
from baton.kernels.lattice.register_tiles import load_parts, slot_indices, store_parts
from baton.kernels.lattice.triton_forward import MIN_SQUARE, lattice_loop


@triton.jit
def lattice_chunk_gram_kernel(
    v, gamma, mu, pos, gram, T, v_batch, v_row, v_head, gamma_batch, gamma_row, gamma_head, mu_batch, mu_row, mu_head,
    D: tl.constexpr, H: tl.constexpr, FORGET: tl.constexpr, HAS_POS: tl.constexpr, EVEN_T: tl.constexpr,
    CHECKPOINT_INTERVAL: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`store_gram` for chunk n of sequence and head bh: gram [B H, chunks, CHECKPOINT_INTERVAL + 3, CHECKPOINT_INTERVAL]."""
    n, bh = tl.program_id(0), tl.program_id(1)
    b, h = (bh // H).to(tl.int64), bh % H
    LOW_PRECISION: tl.constexpr = v.dtype.element_ty == tl.bfloat16
    d, t = tl.arange(0, BLOCK_D), n * CHECKPOINT_INTERVAL + tl.arange(0, CHECKPOINT_INTERVAL)
    here = tl.minimum(t, T - 1).to(tl.int64)
    there = (t < T)[:, None] & (d < D)[None, :]
    h_t = load_tile(v + b * v_batch + h * v_head + here[:, None] * v_row + d[None, :], there, EVEN_T and D == BLOCK_D)
    gamma += b * gamma_batch + h * gamma_head
    mu += b * mu_batch + h * mu_head
    gates = load_gates(gamma, mu, pos + b * T, t, T, gamma_row, mu_row, FORGET, HAS_POS, CHECKPOINT_INTERVAL)
    gram += (bh.to(tl.int64) * tl.num_programs(0) + n) * (CHECKPOINT_INTERVAL * (CHECKPOINT_INTERVAL + 3))
    store_gram(gram, h_t, gates, tl.cumsum(gates[2], 0), HAS_POS, LOW_PRECISION, CHECKPOINT_INTERVAL)


@triton.jit
def load_chunk(
    v, k, gram, n, chunks, T, v_row, k_row, m, m_in, D: tl.constexpr, ALL: tl.constexpr, C: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Inputs of the next step of `lattice_chunk_forward_kernel`: of chunk n, or of the last one, h [C, BLOCK_D], k [BLOCK_M, C] and
    gram.
    """
    n = tl.minimum(n, chunks - 1)
    d, t = tl.arange(0, BLOCK_D), n * C + tl.arange(0, C)
    here, exists = tl.minimum(t, T - 1).to(tl.int64), t < T
    h_t = load_tile(v + here[:, None] * v_row + d[None, :], exists[:, None] & (d < D)[None, :], ALL)
    k_t = load_tile(k + here[None, :] * k_row + m[:, None], m_in[:, None] & exists[None, :], ALL)
    N: tl.constexpr = C * (C + 3)
    at = tl.arange(0, 2 * C * C)
    return h_t, k_t, tl.load(gram + tl.cast(n, tl.int64) * N + at, mask=at < N, other=0.0)


@triton.jit
def lattice_chunk_forward_kernel(
    q, k, v, gamma, mu, pos, gram, S_initial, S0, y, checkpoints, S_final, unsafe, rows, scales, scratch, T,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head, gamma_batch, gamma_row, gamma_head,
    mu_batch, mu_row, mu_head,
    D: tl.constexpr, M: tl.constexpr, H: tl.constexpr, VARIANT: tl.constexpr, FORGET: tl.constexpr, HAS_POS: tl.constexpr,
    EVEN_T: tl.constexpr, BLOCK_T: tl.constexpr, CHECKPOINT_INTERVAL: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    PARTS: tl.constexpr, WARPS: tl.constexpr, SCRATCH: tl.constexpr, GROUP_T: tl.constexpr,
):  # fmt: skip
    """Slots before each chunk and after the last, as in `triton_forward.lattice_forward_kernel`; p and w of the tokens, rows [B H,
    P, chunks, 2, CHECKPOINT_INTERVAL, BLOCK_M]; which chunks were not safe, unsafe [P, B, H, chunks]; and, for the others, the
    factor between the result of the steps and the slots after them, scales [B, H, chunks, M].

    y: written for chunks that were not safe. scratch: [programs, SCRATCH]. GROUP_T: see `chunk_steps`.
    """
    p, bh = tl.program_id(0), tl.program_id(1)
    b, h = (bh // H).to(tl.int64), bh % H
    batch = tl.num_programs(1) // H
    m, part, inside, d_in, m_in = slot_indices(p, D, M, BLOCK_D, BLOCK_M, PARTS)
    EVEN_D: tl.constexpr = D == BLOCK_D and M % BLOCK_M == 0
    ALL: tl.constexpr = EVEN_D and EVEN_T
    PART_D: tl.constexpr = BLOCK_D // PARTS
    d, c, lane = tl.arange(0, BLOCK_D), tl.arange(0, CHECKPOINT_INTERVAL), tl.arange(0, BLOCK_M)
    slots_in = m_in[:, None] & (d < D)[None, :]
    slot_offset = m[:, None] * D + d[None, :]
    # offsets for the slots in parts
    of_parts = m[:, None] * D + part[None, :]
    of_own, of_own_parts = lane[:, None] * BLOCK_D + d[None, :], lane[:, None] * BLOCK_D + part[None, :]
    q += b * q_batch + h * q_head
    k += b * k_batch + h * k_head
    v += b * v_batch + h * v_head
    gamma += b * gamma_batch + h * gamma_head
    mu += b * mu_batch + h * mu_head
    pos += b * T
    y += ((p * batch + b) * T * H + h) * D
    head = bh.to(tl.int64) * (D * M)
    chunks = tl.cdiv(T, CHECKPOINT_INTERVAL)
    N: tl.constexpr = CHECKPOINT_INTERVAL * (CHECKPOINT_INTERVAL + 3)
    gram += bh.to(tl.int64) * chunks * N
    checkpoints += head * chunks
    scales += bh.to(tl.int64) * chunks * M
    unsafe += (p * tl.num_programs(1) + bh) * chunks
    rows += (bh.to(tl.int64) * tl.num_programs(0) + p) * chunks * (2 * CHECKPOINT_INTERVAL * BLOCK_M)
    S0_head = S0 + h * (D * M)
    scratch += (bh.to(tl.int64) * tl.num_programs(0) + p) * SCRATCH
    own_rows = scratch + 2 * CHECKPOINT_INTERVAL * CHECKPOINT_INTERVAL
    own_slots = own_rows + 2 * CHECKPOINT_INTERVAL * BLOCK_M
    at_own_rows = own_rows + c[None, :] * BLOCK_M + lane[:, None]
    S = load_tile(S_initial + head + slot_offset, slots_in, EVEN_D)
    h_next, k_next, gram_next = load_chunk(v, k, gram, 0, chunks, T, v_row, k_row, m, m_in, D, ALL, CHECKPOINT_INTERVAL, BLOCK_D)
    for n in tl.range(0, chunks, disable_licm=True):
        checkpoint = checkpoints + tl.cast(n, tl.int64) * (D * M)
        store_tile(checkpoint + slot_offset, S, slots_in, EVEN_D)
        h_t, h_T = h_next, tl.trans(h_next)
        tl.store(at_own_rows, k_next.to(tl.float32))
        tl.store(scratch + tl.arange(0, 2 * CHECKPOINT_INTERVAL * CHECKPOINT_INTERVAL), gram_next)
        # loaded one chunk ahead
        h_next, k_next, gram_next = load_chunk(
            v, k, gram, n + 1, chunks, T, v_row, k_row, m, m_in, D, ALL, CHECKPOINT_INTERVAL, BLOCK_D
        )
        products = dot_fp32(S, h_T)
        resets, in_last_segment = 0.0, c >= 0
        if HAS_POS:
            segment, resets = load_segments(gram + tl.cast(n, tl.int64) * N, HAS_POS, CHECKPOINT_INTERVAL)
            in_last_segment = segment == resets
            if resets > 0.0:
                products = tl.where(
                    (segment > 0.0)[None, :], dot_fp32(load_tile(S0_head + slot_offset, slots_in, EVEN_D), h_T), products
                )
        tl.store(at_own_rows + CHECKPOINT_INTERVAL * BLOCK_M, products)
        tl.debug_barrier()
        to = rows + tl.cast(n, tl.int64) * (2 * CHECKPOINT_INTERVAL * BLOCK_M)
        # specialized for chunks without a document start, which is most of them
        if resets > 0.0:
            bad = chunk_steps(scratch, own_rows, to, VARIANT, HAS_POS, True, False, CHECKPOINT_INTERVAL, BLOCK_M, GROUP_T)
        else:
            bad = chunk_steps(scratch, own_rows, to, VARIANT, False, True, False, CHECKPOINT_INTERVAL, BLOCK_M, GROUP_T)
        safe = tl.max(bad, 0) == 0.0
        tl.store(unsafe + n, tl.where(safe, 0, 1))
        if safe:
            w_t = tl.load(to + (CHECKPOINT_INTERVAL + c[None, :]) * BLOCK_M + lane[:, None])
            if HAS_POS:
                w_t = tl.where(in_last_segment[None, :], w_t, 0.0)
                if resets > 0.0:
                    S = load_tile(S0_head + slot_offset, slots_in, EVEN_D)
            p_last = tl.load(to + (CHECKPOINT_INTERVAL - 1) * BLOCK_M + lane)
            U = S + dot_fp32(w_t, h_t)
            scale = p_last * tl.rsqrt(tl.maximum(tl.sum(U * U, 1) * (p_last * p_last), MIN_SQUARE))
            tl.store(scales + tl.cast(n, tl.int64) * M + m, scale, mask=m_in)
            S = U * scale[:, None]
        else:
            parts = load_parts(checkpoint, of_parts, PART_D, inside, PARTS, EVEN_D)
            parts = lattice_loop(
                parts, n * CHECKPOINT_INTERVAL, n * CHECKPOINT_INTERVAL + CHECKPOINT_INTERVAL, q + m, k + m, v, gamma, mu, pos,
                S0_head, y, checkpoints, of_parts, inside, m, part, m_in, d_in, T, (q_row, k_row, v_row, gamma_row, mu_row), -1,
                D, M, H, VARIANT, FORGET, True, HAS_POS, EVEN_T, BLOCK_T, CHECKPOINT_INTERVAL, BLOCK_D, PARTS, WARPS, EVEN_D,
            )  # fmt: skip
            store_parts(own_slots, of_own_parts, PART_D, parts, inside, PARTS, True)
            tl.debug_barrier()
            S = tl.load(own_slots + of_own)
    store_tile(S_final + head + slot_offset, S, slots_in, EVEN_D)


@triton.jit
def lattice_chunk_output_kernel(
    q, v, gram, S0, checkpoints, unsafe, rows, y, T, q_batch, q_row, q_head, v_batch, v_row, v_head,
    D: tl.constexpr, M: tl.constexpr, H: tl.constexpr, HAS_POS: tl.constexpr, EVEN_T: tl.constexpr,
    CHECKPOINT_INTERVAL: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """y [P, B, T, H, D] of chunk n of sequence and head bh, from part p of the slots, unless the chunk ran token by token."""
    n, bh, p = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, h = (bh // H).to(tl.int64), bh % H
    batch, chunks, P = tl.num_programs(1) // H, tl.num_programs(0), tl.num_programs(2)
    LOW_PRECISION: tl.constexpr = q.dtype.element_ty == tl.bfloat16
    EVEN_D: tl.constexpr = D == BLOCK_D and M % BLOCK_M == 0
    ALL: tl.constexpr = EVEN_D and EVEN_T
    d, c, lane = tl.arange(0, BLOCK_D), tl.arange(0, CHECKPOINT_INTERVAL), tl.arange(0, BLOCK_M)
    m, t = p * BLOCK_M + lane, n * CHECKPOINT_INTERVAL + c
    here, exists = t.to(tl.int64), t < T
    of_d, slots_in = exists[:, None] & (d < D)[None, :], (m < M)[:, None] & (d < D)[None, :]
    slot_offset = m[:, None] * D + d[None, :]
    at = bh.to(tl.int64) * chunks + n
    if tl.load(unsafe + (p * tl.num_programs(1) + bh) * chunks + n) == 0:
        at_rows = (
            rows
            + ((bh.to(tl.int64) * P + p) * chunks + n) * (2 * CHECKPOINT_INTERVAL * BLOCK_M)
            + c[None, :] * BLOCK_M
            + lane[:, None]
        )
        w_t = tl.load(at_rows + CHECKPOINT_INTERVAL * BLOCK_M)
        at_q = q + b * q_batch + h * q_head + here[None, :] * q_row + m[:, None]
        read_t = load_tile(at_q, (m < M)[:, None] & exists[None, :], ALL).to(tl.float32) * tl.load(at_rows)
        h_t = load_tile(v + b * v_batch + h * v_head + here[:, None] * v_row + d[None, :], of_d, ALL)
        S = load_tile(checkpoints + at * (D * M) + slot_offset, slots_in, EVEN_D)
        segment, resets = load_segments(gram + at * (CHECKPOINT_INTERVAL * (CHECKPOINT_INTERVAL + 3)), HAS_POS, CHECKPOINT_INTERVAL)
        seen = c[:, None] >= c[None, :]
        if HAS_POS:
            seen &= segment[:, None] == segment[None, :]
        out = dot(tl.where(seen, dot(tl.trans(read_t), w_t, LOW_PRECISION), 0.0), h_t, LOW_PRECISION)
        if HAS_POS:
            begun = (segment > 0.0)[None, :]
            out += dot(tl.trans(tl.where(begun, 0.0, read_t)), S, LOW_PRECISION)
            if resets > 0.0:
                L = load_tile(S0 + h * (D * M) + slot_offset, slots_in, EVEN_D)
                out += dot(tl.trans(tl.where(begun, read_t, 0.0)), L, LOW_PRECISION)
        else:
            out += dot(tl.trans(read_t), S, LOW_PRECISION)
        y += ((p * batch + b) * T * H + h) * D
        store_tile(y + here[:, None] * (H * D) + d[None, :], out, of_d, ALL)
