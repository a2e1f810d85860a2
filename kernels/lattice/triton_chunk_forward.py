"""The forward pass of encoding and similarity chunk by chunk, in Triton: see `chunk_kernel_utils`, which says how.

The one thing to know: three kernels. The first leaves what the walk reads of a chunk's tokens alone, the second goes from chunk to
chunk with the slots, and the third reads outputs off slots, all chunks at once. Where a chunk turns out not to be safe, the second
takes it token by token instead, as `triton_forward` does, outputs too; which did is noted for the others and for the backward pass.
"""

import triton
import triton.language as tl

from baton.kernels.lattice.chunk_kernel_utils import exact, gates_of, lay_out, leave, product, segments_of, tile, walk
from baton.kernels.lattice.register_tiles import places, read, write
from baton.kernels.lattice.triton_forward import SMALLEST_SQUARE, tokens


@triton.jit
def lattice_chunk_gram_kernel(
    v, gamma, mu, pos, numbers, T, v_batch, v_row, v_head, gamma_batch, gamma_row, gamma_head, mu_batch, mu_row, mu_head,
    D: tl.constexpr, H: tl.constexpr, FORGET: tl.constexpr, HAS_POS: tl.constexpr, EVEN: tl.constexpr, BORDER: tl.constexpr,
    BD: tl.constexpr,
):  # fmt: skip
    """`lay_out` of chunk n of sequence and head bh: numbers [B H, chunks, BORDER + 3, BORDER]."""
    n, bh = tl.program_id(0), tl.program_id(1)
    b, h = (bh // H).to(tl.int64), bh % H
    LOW: tl.constexpr = v.dtype.element_ty == tl.bfloat16
    d, t = tl.arange(0, BD), n * BORDER + tl.arange(0, BORDER)
    here = tl.minimum(t, T - 1).to(tl.int64)
    there = (t < T)[:, None] & (d < D)[None, :]
    h_t = tile(v + b * v_batch + h * v_head + here[:, None] * v_row + d[None, :], there, EVEN and D == BD)
    gamma += b * gamma_batch + h * gamma_head
    mu += b * mu_batch + h * mu_head
    gates = gates_of(gamma, mu, pos + b * T, t, T, gamma_row, mu_row, FORGET, HAS_POS, BORDER)
    numbers += (bh.to(tl.int64) * tl.num_programs(0) + n) * (BORDER * (BORDER + 3))
    lay_out(numbers, h_t, gates, tl.cumsum(gates[2], 0), HAS_POS, LOW, BORDER)


@triton.jit
def given(
    v, k, numbers, n, chunks, T, v_row, k_row, m, m_in, D: tl.constexpr, ALL: tl.constexpr, C: tl.constexpr, BD: tl.constexpr
):
    """Of chunk n, or the last, what the next step of `chunk_forward_kernel` reads: h [C, BD], k [BM, C] and the numbers."""
    n = tl.minimum(n, chunks - 1)
    d, t = tl.arange(0, BD), n * C + tl.arange(0, C)
    here, exists = tl.minimum(t, T - 1).to(tl.int64), t < T
    h_t = tile(v + here[:, None] * v_row + d[None, :], exists[:, None] & (d < D)[None, :], ALL)
    k_t = tile(k + here[None, :] * k_row + m[:, None], m_in[:, None] & exists[None, :], ALL)
    N: tl.constexpr = C * (C + 3)
    at = tl.arange(0, 2 * C * C)
    return h_t, k_t, tl.load(numbers + tl.cast(n, tl.int64) * N + at, mask=at < N, other=0.0)


@triton.jit
def lattice_chunk_forward_kernel(
    q, k, v, gamma, mu, pos, numbers, first, loaded, y, borders, last, unsafe, rows, scales, own, T,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head, gamma_batch, gamma_row, gamma_head,
    mu_batch, mu_row, mu_head,
    D: tl.constexpr, M: tl.constexpr, H: tl.constexpr, VARIANT: tl.constexpr, FORGET: tl.constexpr, HAS_POS: tl.constexpr,
    EVEN: tl.constexpr, STEPS: tl.constexpr, BORDER: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, PARTS: tl.constexpr,
    WARPS: tl.constexpr, OWN: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Slots before each chunk and behind the last, as `triton_forward.lattice_forward_kernel`; of tokens p and w, rows [B H, P,
    chunks, 2, BORDER, BM]; which chunks were not safe, [P, B, H, chunks], and of the others what the slots behind them are times
    what the walk leaves, scales [B, H, chunks, M]. y: of the chunks that were not safe. own: memory of the programs' own,
    [programs, OWN]. GROUP: see `step_loop`."""
    p, bh = tl.program_id(0), tl.program_id(1)
    b, h = (bh // H).to(tl.int64), bh % H
    batch = tl.num_programs(1) // H
    m, part, inside, d_in, m_in = places(p, D, M, BD, BM, PARTS)
    WHOLE: tl.constexpr = D == BD and M % BM == 0
    ALL: tl.constexpr = WHOLE and EVEN
    BP: tl.constexpr = BD // PARTS
    d, c, lane = tl.arange(0, BD), tl.arange(0, BORDER), tl.arange(0, BM)
    slots_in = m_in[:, None] & (d < D)[None, :]
    of_slots = m[:, None] * D + d[None, :]
    # of parts, whose kept slots have none beside them
    of_parts = m[:, None] * D + part[None, :]
    of_own, of_own_parts = lane[:, None] * BD + d[None, :], lane[:, None] * BD + part[None, :]
    q += b * q_batch + h * q_head
    k += b * k_batch + h * k_head
    v += b * v_batch + h * v_head
    gamma += b * gamma_batch + h * gamma_head
    mu += b * mu_batch + h * mu_head
    pos += b * T
    y += ((p * batch + b) * T * H + h) * D
    head = bh.to(tl.int64) * (D * M)
    chunks = tl.cdiv(T, BORDER)
    N: tl.constexpr = BORDER * (BORDER + 3)
    numbers += bh.to(tl.int64) * chunks * N
    borders += head * chunks
    scales += bh.to(tl.int64) * chunks * M
    unsafe += (p * tl.num_programs(1) + bh) * chunks
    rows += (bh.to(tl.int64) * tl.num_programs(0) + p) * chunks * (2 * BORDER * BM)
    initial = loaded + h * (D * M)
    own += (bh.to(tl.int64) * tl.num_programs(0) + p) * OWN
    own_rows = own + 2 * BORDER * BORDER
    own_slots = own_rows + 2 * BORDER * BM
    at_own_rows = own_rows + c[None, :] * BM + lane[:, None]
    S = tile(first + head + of_slots, slots_in, WHOLE)
    h_next, k_next, numbers_next = given(v, k, numbers, 0, chunks, T, v_row, k_row, m, m_in, D, ALL, BORDER, BD)
    for n in tl.range(0, chunks, disable_licm=True):
        begins = borders + tl.cast(n, tl.int64) * (D * M)
        leave(begins + of_slots, S, slots_in, WHOLE)
        h_t, h_T = h_next, tl.trans(h_next)
        tl.store(at_own_rows, k_next.to(tl.float32))
        tl.store(own + tl.arange(0, 2 * BORDER * BORDER), numbers_next)
        # asked for a chunk before it is needed
        h_next, k_next, numbers_next = given(v, k, numbers, n + 1, chunks, T, v_row, k_row, m, m_in, D, ALL, BORDER, BD)
        products = exact(S, h_T)
        resets, of_last = 0.0, c >= 0
        if HAS_POS:
            segment, resets = segments_of(numbers + tl.cast(n, tl.int64) * N, HAS_POS, BORDER)
            of_last = segment == resets
            if resets > 0.0:
                products = tl.where((segment > 0.0)[None, :], exact(tile(initial + of_slots, slots_in, WHOLE), h_T), products)
        tl.store(at_own_rows + BORDER * BM, products)
        tl.debug_barrier()
        to = rows + tl.cast(n, tl.int64) * (2 * BORDER * BM)
        # two of it: where no document starts, as in most chunks, less is asked of each token
        if resets > 0.0:
            bad = walk(own, own_rows, to, VARIANT, HAS_POS, True, False, BORDER, BM, GROUP)
        else:
            bad = walk(own, own_rows, to, VARIANT, False, True, False, BORDER, BM, GROUP)
        safe = tl.max(bad, 0) == 0.0
        tl.store(unsafe + n, tl.where(safe, 0, 1))
        if safe:
            w_t = tl.load(to + (BORDER + c[None, :]) * BM + lane[:, None])
            if HAS_POS:
                w_t = tl.where(of_last[None, :], w_t, 0.0)
                if resets > 0.0:
                    S = tile(initial + of_slots, slots_in, WHOLE)
            p_last = tl.load(to + (BORDER - 1) * BM + lane)
            U = S + exact(w_t, h_t)
            scale = p_last * tl.rsqrt(tl.maximum(tl.sum(U * U, 1) * (p_last * p_last), SMALLEST_SQUARE))
            tl.store(scales + tl.cast(n, tl.int64) * M + m, scale, mask=m_in)
            S = U * scale[:, None]
        else:
            parts = read(begins, of_parts, BP, inside, PARTS, WHOLE)
            parts = tokens(
                parts, n * BORDER, n * BORDER + BORDER, q + m, k + m, v, gamma, mu, pos, initial, y, borders, of_parts, inside, m,
                part, m_in, d_in, T, (q_row, k_row, v_row, gamma_row, mu_row), D, M, H, VARIANT, FORGET, True, HAS_POS, EVEN,
                False, STEPS, BORDER, BD, PARTS, WARPS, WHOLE,
            )  # fmt: skip
            write(own_slots, of_own_parts, BP, parts, inside, PARTS, True)
            tl.debug_barrier()
            S = tl.load(own_slots + of_own)
    leave(last + head + of_slots, S, slots_in, WHOLE)


@triton.jit
def lattice_chunk_output_kernel(
    q, v, numbers, loaded, borders, unsafe, rows, y, T, q_batch, q_row, q_head, v_batch, v_row, v_head,
    D: tl.constexpr, M: tl.constexpr, H: tl.constexpr, HAS_POS: tl.constexpr, EVEN: tl.constexpr, BORDER: tl.constexpr,
    BD: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """y [P, B, T, H, D] of chunk n of sequence and head bh, off part p of the slots, unless it went token by token."""
    n, bh, p = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, h = (bh // H).to(tl.int64), bh % H
    batch, chunks, P = tl.num_programs(1) // H, tl.num_programs(0), tl.num_programs(2)
    ROUND: tl.constexpr = q.dtype.element_ty == tl.bfloat16
    WHOLE: tl.constexpr = D == BD and M % BM == 0
    ALL: tl.constexpr = WHOLE and EVEN
    d, c, lane = tl.arange(0, BD), tl.arange(0, BORDER), tl.arange(0, BM)
    m, t = p * BM + lane, n * BORDER + c
    here, exists = t.to(tl.int64), t < T
    of_d, slots_in = exists[:, None] & (d < D)[None, :], (m < M)[:, None] & (d < D)[None, :]
    of_slots = m[:, None] * D + d[None, :]
    at = bh.to(tl.int64) * chunks + n
    if tl.load(unsafe + (p * tl.num_programs(1) + bh) * chunks + n) == 0:
        at_rows = rows + ((bh.to(tl.int64) * P + p) * chunks + n) * (2 * BORDER * BM) + c[None, :] * BM + lane[:, None]
        w_t = tl.load(at_rows + BORDER * BM)
        at_q = q + b * q_batch + h * q_head + here[None, :] * q_row + m[:, None]
        read_t = tile(at_q, (m < M)[:, None] & exists[None, :], ALL).to(tl.float32) * tl.load(at_rows)
        h_t = tile(v + b * v_batch + h * v_head + here[:, None] * v_row + d[None, :], of_d, ALL)
        S = tile(borders + at * (D * M) + of_slots, slots_in, WHOLE)
        segment, resets = segments_of(numbers + at * (BORDER * (BORDER + 3)), HAS_POS, BORDER)
        seen = c[:, None] >= c[None, :]
        if HAS_POS:
            seen &= segment[:, None] == segment[None, :]
        out = product(tl.where(seen, product(tl.trans(read_t), w_t, ROUND), 0.0), h_t, ROUND)
        if HAS_POS:
            begun = (segment > 0.0)[None, :]
            out += product(tl.trans(tl.where(begun, 0.0, read_t)), S, ROUND)
            if resets > 0.0:
                L = tile(loaded + h * (D * M) + of_slots, slots_in, WHOLE)
                out += product(tl.trans(tl.where(begun, read_t, 0.0)), L, ROUND)
        else:
            out += product(tl.trans(read_t), S, ROUND)
        y += ((p * batch + b) * T * H + h) * D
        leave(y + here[:, None] * (H * D) + d[None, :], out, of_d, ALL)
