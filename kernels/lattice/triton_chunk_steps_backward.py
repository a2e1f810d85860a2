"""The sequential steps of a chunk backward, on the device; their equations are in `triton_chunk_backward`.

Sizes: see `triton_forward`; a chunk has C tokens, of which N are in registers at a time.
"""

import triton
import triton.language as tl

from baton.kernels.common.triton_prefetch import prefetch
from baton.kernels.lattice.chunk_kernel_utils import add_multiples, c_and_weight, load_scalars, load_sectors, load_vectors
from baton.kernels.lattice.triton_forward import ENC

ROWS = tl.constexpr(7)
"""Rows of each chunk and program in memory, [ROWS, C, BLOCK_M], some overwritten: k, then A; h.s, then r; p; w; h's product with
the slot before it divided by p, then the terms of dmu; wbar, then the terms of dgamma; pbar, then the terms of 2 d|h|^2."""


@triton.jit
def load_row_group(rows, first, C: tl.constexpr, BLOCK_M: tl.constexpr, N: tl.constexpr):
    """Of N tokens from `first` on what `chunk_steps_backward` reads of each in rows, in tuples: k, h's product, w, p before the
    token, pbar.
    """
    at = rows + first * BLOCK_M
    ks, ws = load_vectors(at, BLOCK_M, N), load_vectors(at + 3 * C * BLOCK_M, BLOCK_M, N)
    products, pbars = load_vectors(at + 4 * C * BLOCK_M, BLOCK_M, N), load_vectors(at + 6 * C * BLOCK_M, BLOCK_M, N)
    before = (tl.where(first > 0, tl.load(at + (2 * C - tl.minimum(first, 1)) * BLOCK_M), 1.0),)
    if N > 1:
        before += load_vectors(at + 2 * C * BLOCK_M, BLOCK_M, N - 1)
    return ks, products, ws, before, pbars


@triton.jit
def prefetch_rows(rows, next_rows, first, C: tl.constexpr, BLOCK_M: tl.constexpr, N: tl.constexpr):
    """Prefetch what `load_row_group` reads of the next N tokens, those before `first`. Prefetching a whole chunk at once, for all
    programs, would evict half of it again. next_rows: of the chunk before.
    """
    EACH: tl.constexpr = (N * BLOCK_M + 31) // 32
    line = tl.arange(0, 8 * EACH)
    number = tl.minimum(line // EACH, 4)
    row = number + (number > 0).to(tl.int32) + (number > 3).to(tl.int32)
    at = row * (C * BLOCK_M) + tl.minimum(line % EACH * 32, N * BLOCK_M - 1)
    if first > 0:
        prefetch(rows + (first - N) * BLOCK_M + at)
    else:
        prefetch(next_rows + (C - N) * BLOCK_M + at)


@triton.jit
def chunk_steps_backward(
    gram, next_gram, rows, next_rows, own, dk, t0, T, m_in, DK_ROW: tl.constexpr, VARIANT: tl.constexpr, FORGET: tl.constexpr,
    HAS_POS: tl.constexpr, C: tl.constexpr, BLOCK_M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Store dk and, for each token, A in the row of k, and the terms whose sums over slots are dgamma, 2 d|h|^2 and dmu in the rows
    of wbar, pbar and h.s; N tokens at a time.

    rows: see `ROWS`; wbar and pbar still without the parts added here. next_gram, next_rows: of the chunk before. own: memory for
    more than C + 3 numbers, which is never read.
    """
    lane, begin = tl.arange(0, BLOCK_M), rows
    rows += lane
    carry = tl.zeros([BLOCK_M], tl.float32)
    for step in range(C // N):
        first = C - N - step * N
        prefetch_rows(begin, next_rows, first, C, BLOCK_M, N)
        numbers_of_next, first_of_next = gram, first - N
        if first == 0:
            numbers_of_next, first_of_next = next_gram, C - N
        sectors = load_sectors(numbers_of_next, first_of_next, C, N)
        wbars = load_vectors(rows + (5 * C + first) * BLOCK_M, BLOCK_M, N)
        for g in range(step):
            later = C - N - g * N
            cotangents, of_later = load_vectors(rows + later * BLOCK_M, BLOCK_M, N), gram + later * C + first
            for j in tl.static_range(N):
                wbars = add_multiples(wbars, of_later, cotangents[j], j * C, N)
        ks, products, ws, befores, pbars = load_row_group(rows, first, C, BLOCK_M, N)
        gammas, mus = load_scalars(gram + C * C + first, N), load_scalars(gram + (C + 1) * C + first, N)
        dks, cotangents, dgamma_group, square_group, dmu_group = (), (), (), (), ()
        for s in tl.static_range(N - 1, -1, -1):
            k_t, reached, w, before, pbar = ks[s], products[s], ws[s], befores[s], pbars[s]
            gamma_t, mu_t, gram_row = gammas[s], tl.abs(mus[s]), load_scalars(gram + (first + s) * C + first, N)
            square, wbar = gram_row[s], wbars[s]
            pbar += carry
            if HAS_POS:
                before = tl.where(mus[s] < 0.0, 1.0, before)
            a = before * reached
            c, weight = c_and_weight(k_t, gamma_t, a, VARIANT)
            f = mu_t - weight * a
            across = tl.maximum(square - a * a, 0.0)
            inv_norm = tl.rsqrt(mu_t * mu_t + weight * weight * across)
            quotient = 1.0 / (before * f)
            back, of_length = wbar * w * quotient, pbar * before
            fbar = of_length * inv_norm - back * before
            X = inv_norm * inv_norm * inv_norm * (of_length * f)
            wX = weight * X
            dw = wbar * quotient - a * fbar - across * wX
            da = weight * (a * wX - fbar)
            dk_t = gamma_t * dw
            if VARIANT == ENC:
                da -= dk_t
            A = before * da
            carry = pbar * (f * inv_norm) - back * f + da * reached
            if HAS_POS:
                carry = tl.where(mus[s] < 0.0, 0.0, carry)
            earlier = ()
            for e in tl.static_range(N):
                earlier += (tl.fma(gram_row[e], A, wbars[e]) if e < s else wbars[e],)
            wbars = earlier
            # the last token's first
            dks, cotangents = (dk_t,) + dks, (A,) + cotangents
            dgamma_group, square_group = (dw * c,) + dgamma_group, (-weight * wX,) + square_group
            if FORGET:
                dmu_group = (fbar - mu_t * X,) + dmu_group
        to, to_dk, exist = rows + first * BLOCK_M, dk + tl.cast(t0 + first, tl.int64) * DK_ROW + lane, T - t0 - first
        for s in tl.static_range(N):
            tl.store(to_dk + s * DK_ROW, dks[s].to(dk.dtype.element_ty), mask=m_in & (s < exist))
            tl.store(to + s * BLOCK_M, cotangents[s])
            tl.store(to + (5 * C + s) * BLOCK_M, dgamma_group[s])
            tl.store(to + (6 * C + s) * BLOCK_M, square_group[s])
            if FORGET:
                tl.store(to + (4 * C + s) * BLOCK_M, dmu_group[s])
        tl.debug_barrier()
        tl.store(own + tl.arange(0, sectors.shape[0]), sectors)
