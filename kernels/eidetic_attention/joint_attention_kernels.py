"""One softmax over a window of rows, rows farther back and published memories, in Triton: forward and backward.

The one thing to know: which rows a token sees is a matter of distances, and a memory is seen by one run of tokens. So tiles that
nobody sees are never read, a tile's tokens see few memories, and a memory's gradient is summed over the tokens of one window, in
their order: nothing is added in memory by two programs. What a memory holds are copies (`memory_copy_kernels`): a row's gradient
takes in those of its copies before it is rounded.

Weights are made again backwards from the scores and the logarithm of their sum.

Shape suffixes: B batch, T tokens, J rows of a history (N of them before the span), H heads, G key heads, K dim, P memories of M
rows.
"""

import triton
import triton.language as tl

from baton.kernels.common.triton_prefetch import LOG2_E
from baton.kernels.eidetic_attention.memory_copy_kernels import leave_tile, tile_of, with_copies
from baton.kernels.gated_linear_attention.decays import product


@triton.jit
def absorb(found, largest, total, scores, seen, v_j, scale, LOW: tl.constexpr):
    """Weighted values and sum of weights so far, relative to the largest score so far, with some more. seen: None: all that is not
    -inf. scale: of scores, to base 2, more than 0."""
    if seen is not None:
        scores = tl.where(seen, scores, float("-inf"))
    new = tl.maximum(largest, tl.max(scores, 1))
    # who has seen nothing yet has no largest
    base = tl.where(new == float("-inf"), 0.0, new * scale)
    weights, fewer = tl.exp2(scores * scale - base[:, None]), tl.exp2(largest * scale - base)
    return found * fewer[:, None] + product(weights, v_j, LOW), new, total * fewer + tl.sum(weights, 1)


@triton.jit
def within(distance, count):
    """Whether a distance is one of 0 to count - 1, in one comparison: what is below 0 is, without a sign, beyond all counts."""
    return distance.to(tl.uint32, bitcast=True) < count.to(tl.uint32, bitcast=True)


@triton.jit
def count_of(limits, b, i, inside, T, NEAR: tl.constexpr):
    """How many distances tokens i see, from NEAR to their limits, [B, T]; no token sees a row behind the last one."""
    return tl.maximum(tl.load(limits + b * T + i, mask=inside, other=-1) - (NEAR - 1), 0)


@triton.jit
def common_rows(i, count, N: tl.constexpr):
    """The first row that all of tokens i see, of how many each of them sees, and the last one."""
    return tl.max(i + N + 1 - count, 0), tl.min(i, 0) + N


@triton.jit
def first_row(i, count, N: tl.constexpr):
    """That any of tokens i sees, of how many each of them sees."""
    return tl.min(i + N + 1 - count, 0)


@triton.jit
def joint_attention_forward_kernel(
    q, k, v, far_k, far_v, memory_k, memory_v, row, slot, limit, far_limit, y, lse, T, memories, scale,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, N: tl.constexpr, FAR: tl.constexpr, M: tl.constexpr, LOW: tl.constexpr,
    BQ: tl.constexpr, BK: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, ROW: tl.constexpr,
):  # fmt: skip
    """y [B, T, H, K] and the logarithm (base 2) of the sum of weights, [B, H, T]. FAR: rows farther back count from this distance
    on (0: there are none); M: rows of a memory (0: there are none); ROW: elements between rows of k, and of v."""
    h, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    g, i0 = h // (H // G), tl.program_id(0) * BQ
    i = i0 + tl.arange(0, BQ)
    inside = i < T
    own = (b * T * H + h) * K
    q_i = tile_of(q + own, i, inside, H * K, K, BD)
    found, total = tl.zeros([BQ, BD], tl.float32), tl.zeros([BQ], tl.float32)
    largest = total + float("-inf")
    base_2 = scale * LOG2_E
    near, of_rows = count_of(limit, b, i, inside, T, 0), b * (N + T) * ROW + g * K
    common, last = common_rows(i, near, N)
    for r0 in range(first_row(i, near, N), tl.minimum(i0 + BQ, T) + N, BK):
        r = r0 + tl.arange(0, BK)
        scores = product(q_i, tl.trans(tile_of(k + of_rows, r, r < N + T, ROW, K, BD)), LOW)
        seen = (r[None, :] > (i + N - near)[:, None]) & (r[None, :] <= (i + N)[:, None])
        if FAR == 0 and M == 0:
            # most tiles are seen whole; beside far rows and memories there are few such, and no registers for it
            if (r0 < common) | (r0 + BK - 1 > last):
                scores = tl.where(seen, scores, float("-inf"))
            seen = None
        v_j = tile_of(v + of_rows, r, r < N + T, ROW, K, BD)
        found, largest, total = absorb(found, largest, total, scores, seen, v_j, base_2, LOW)
    if FAR > 0:
        far, F = count_of(far_limit, b, i, inside, T, FAR), 2 * FAR - 1
        of_rows = (b * (F + T) * G + g) * K
        for r0 in range(first_row(i, far, F - FAR), tl.minimum(i0 + BQ, T) + F - FAR, BK):
            r = r0 + tl.arange(0, BK)
            scores = product(q_i, tl.trans(tile_of(far_k + of_rows, r, r < F + T, G * K, K, BD)), LOW)
            seen = (r[None, :] > (i + (F - FAR) - far)[:, None]) & (r[None, :] <= (i + (F - FAR))[:, None])
            v_j = tile_of(far_v + of_rows, r, r < F + T, G * K, K, BD)
            found, largest, total = absorb(found, largest, total, scores, seen, v_j, base_2, LOW)
    if M > 0:
        place = tl.load(slot + b * T + i, mask=inside, other=-1)
        for s in range(tl.min(tl.where(place >= 0, place, memories), 0), tl.max(place, 0) + 1):
            of_memory = (b * memories + s) * M
            for m0 in range(0, M, BM):
                m = m0 + tl.arange(0, BM)
                exists = tl.load(row + of_memory + m, mask=m < M, other=-1) >= 0
                seen = (place == s)[:, None] & exists[None, :]
                at = (of_memory * G + g) * K
                scores = product(q_i, tl.trans(tile_of(memory_k + at, m, m < M, G * K, K, BD)), LOW)
                v_j = tile_of(memory_v + at, m, m < M, G * K, K, BD)
                found, largest, total = absorb(found, largest, total, scores, seen, v_j, base_2, LOW)
    # a token sees itself; behind the last one there is none
    total = tl.where(inside, total, 1.0)
    leave_tile(y + own, i, inside, found / total[:, None], H * K, K, BD)
    tl.store(lse + (b * H + h) * T + i, largest * base_2 + tl.log2(total), mask=inside)


@triton.jit
def weights_of(scores, seen, whole, scale):
    """Of scores again. whole: logarithms of the sums of weights; scale: of scores, to base 2."""
    return tl.where(seen, tl.exp2(scores * scale - whole), 0.0)


@triton.jit
def of_query(q_i, k_j, v_j, dy_i, seen, whole, delta_i, scale, LOW: tl.constexpr):
    """What rows give to the queries' gradient, before it is scaled."""
    weights = weights_of(product(q_i, tl.trans(k_j), LOW), seen, whole[:, None], scale)
    return product(weights * (product(dy_i, tl.trans(v_j), LOW) - delta_i[:, None]), k_j, LOW)


@triton.jit
def of_row(q_i, k_j, v_j, dy_i, seen, whole, delta_i, scale, LOW: tl.constexpr):
    """What tokens give to the gradients of keys, before it is scaled, and of values."""
    weights = weights_of(product(q_i, tl.trans(k_j), LOW), seen, whole[:, None], scale)
    slopes = weights * (product(dy_i, tl.trans(v_j), LOW) - delta_i[:, None])
    return product(tl.trans(slopes), q_i, LOW), product(tl.trans(weights), dy_i, LOW)


@triton.jit
def joint_attention_backward_dq_kernel(
    q, k, v, far_k, far_v, memory_k, memory_v, row, slot, limit, far_limit, y, lse, dy, dq, delta, T, memories, scale,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, N: tl.constexpr, FAR: tl.constexpr, M: tl.constexpr, LOW: tl.constexpr,
    BQ: tl.constexpr, BK: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, ROW: tl.constexpr,
):  # fmt: skip
    """dq, and delta, the product of what is read with its cotangent, [B, H, T]."""
    h, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    g, i0 = h // (H // G), tl.program_id(0) * BQ
    i = i0 + tl.arange(0, BQ)
    inside = i < T
    own = (b * T * H + h) * K
    q_i, dy_i = tile_of(q + own, i, inside, H * K, K, BD), tile_of(dy + own, i, inside, H * K, K, BD)
    delta_i = tl.sum(dy_i.to(tl.float32) * tile_of(y + own, i, inside, H * K, K, BD).to(tl.float32), 1)
    tl.store(delta + (b * H + h) * T + i, delta_i, mask=inside)
    whole = tl.load(lse + (b * H + h) * T + i, mask=inside, other=0.0)
    found, base_2 = tl.zeros([BQ, BD], tl.float32), scale * LOG2_E
    near, of_rows = count_of(limit, b, i, inside, T, 0), b * (N + T) * ROW + g * K
    for r0 in range(first_row(i, near, N), tl.minimum(i0 + BQ, T) + N, BK):
        r = r0 + tl.arange(0, BK)
        k_j, v_j = tile_of(k + of_rows, r, r < N + T, ROW, K, BD), tile_of(v + of_rows, r, r < N + T, ROW, K, BD)
        seen = within((i + N)[:, None] - r[None, :], near[:, None])
        found += of_query(q_i, k_j, v_j, dy_i, seen, whole, delta_i, base_2, LOW)
    if FAR > 0:
        far, F = count_of(far_limit, b, i, inside, T, FAR), 2 * FAR - 1
        of_rows = (b * (F + T) * G + g) * K
        for r0 in range(first_row(i, far, F - FAR), tl.minimum(i0 + BQ, T) + F - FAR, BK):
            r = r0 + tl.arange(0, BK)
            k_j, v_j = tile_of(far_k + of_rows, r, r < F + T, G * K, K, BD), tile_of(far_v + of_rows, r, r < F + T, G * K, K, BD)
            seen = within((i + (F - FAR))[:, None] - r[None, :], far[:, None])
            found += of_query(q_i, k_j, v_j, dy_i, seen, whole, delta_i, base_2, LOW)
    if M > 0:
        place = tl.load(slot + b * T + i, mask=inside, other=-1)
        for s in range(tl.min(tl.where(place >= 0, place, memories), 0), tl.max(place, 0) + 1):
            of_memory = (b * memories + s) * M
            for m0 in range(0, M, BM):
                m = m0 + tl.arange(0, BM)
                exists, at = tl.load(row + of_memory + m, mask=m < M, other=-1) >= 0, (of_memory * G + g) * K
                k_j, v_j = tile_of(memory_k + at, m, m < M, G * K, K, BD), tile_of(memory_v + at, m, m < M, G * K, K, BD)
                seen = (place == s)[:, None] & exists[None, :]
                found += of_query(q_i, k_j, v_j, dy_i, seen, whole, delta_i, base_2, LOW)
    leave_tile(dq + own, i, inside, found * scale, H * K, K, BD)


@triton.jit
def token_tile(q, dy, lse, delta, i, inside, b, h, T, H: tl.constexpr, K: tl.constexpr, BD: tl.constexpr):
    """What keys and values need of tokens: q, dy, the sums' logarithm and delta."""
    own, of_head = (b * T * H + h) * K, (b * H + h) * T + i
    q_i, dy_i = tile_of(q + own, i, inside, H * K, K, BD), tile_of(dy + own, i, inside, H * K, K, BD)
    return q_i, dy_i, tl.load(lse + of_head, mask=inside, other=0.0), tl.load(delta + of_head, mask=inside, other=0.0)


@triton.jit
def joint_attention_backward_dkv_kernel(
    q, k, v, limit, lse, dy, delta, first, later, dmemory_k, dmemory_v, dk, dv, T, memories, scale,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, N: tl.constexpr, NEAR: tl.constexpr, M: tl.constexpr, E: tl.constexpr,
    LOW: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr, REACH: tl.constexpr, ROW: tl.constexpr,
    INTO: tl.constexpr,
):  # fmt: skip
    """dk, dv of a history, [B, N + T, G, K], and of the copies of its T tokens in memories (M = 0: there are none), of which first
    and later are said; E: entries that first begins with. limit: [B, T], the largest distance, at most N + REACH (-1: any); NEAR:
    the smallest; INTO: elements between rows of dk, and of dv. Tiles begin where they would if there were REACH more rows before,
    so that sums are the same to the bit."""
    g, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    r0 = tl.program_id(0) * BK - tl.maximum(REACH, 0)
    r = r0 + tl.arange(0, BK)
    exists, read, of_rows = (r >= 0) & (r < N + T), b * (N + T) * ROW + g * K, b * (N + T) * INTO + g * K
    k_j, v_j = tile_of(k + read, r, exists, ROW, K, BD), tile_of(v + read, r, exists, ROW, K, BD)
    of_k, of_v, base_2 = tl.zeros([BK, BD], tl.float32), tl.zeros([BK, BD], tl.float32), scale * LOG2_E
    end = tl.where(r0 + BK > 0, T if REACH < 0 else tl.minimum(r0 + BK + REACH, T), 0)
    for h in range(g * (H // G), (g + 1) * (H // G)):
        for i0 in range(tl.maximum(r0 - N + NEAR, 0), end, BQ):
            i = i0 + tl.arange(0, BQ)
            q_i, dy_i, whole, delta_i = token_tile(q, dy, lse, delta, i, i < T, b, h, T, H, K, BD)
            seen = within((i + (N - NEAR))[:, None] - r[None, :], count_of(limit, b, i, i < T, T, NEAR)[:, None])
            more_k, more_v = of_row(q_i, k_j, v_j, dy_i, seen, whole, delta_i, base_2, LOW)
            of_k += more_k
            of_v += more_v
    of_k *= scale
    if M > 0:
        at = tl.load(first + b * (E + T) + E + r - N, mask=exists & (r >= N), other=-1)
        copies, of_copies = b * memories * M, (b * memories * M * G + g) * K
        of_k, of_v = with_copies(
            of_k, of_v, at, later + copies, dmemory_k + of_copies, dmemory_v + of_copies, G * K, K, BD
        )  # fmt: skip
    leave_tile(dk + of_rows, r, exists, of_k, INTO, K, BD)
    leave_tile(dv + of_rows, r, exists, of_v, INTO, K, BD)


@triton.jit
def joint_attention_backward_dmemory_kernel(
    q, memory_k, memory_v, row, slot, begin, lse, dy, delta, dmemory_k, dmemory_v, T, memories, scale,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, M: tl.constexpr, WINDOW: tl.constexpr, LOW: tl.constexpr,
    BQ: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """dk, dv of memories, float32 [B, P, M, G, K]. begin: [B, P], the token from which a memory is seen, by less than WINDOW + 1
    tokens."""
    g, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    blocks: tl.constexpr = (M + BM - 1) // BM
    s = tl.program_id(0) // blocks
    m, of_memory = tl.program_id(0) % blocks * BM + tl.arange(0, BM), (b * memories + s) * M
    at, exists = (of_memory * G + g) * K, tl.load(row + of_memory + m, mask=m < M, other=-1) >= 0
    k_j, v_j = tile_of(memory_k + at, m, m < M, G * K, K, BD), tile_of(memory_v + at, m, m < M, G * K, K, BD)
    of_k, of_v, base_2 = tl.zeros([BM, BD], tl.float32), tl.zeros([BM, BD], tl.float32), scale * LOG2_E
    first = tl.load(begin + b * memories + s)
    for h in range(g * (H // G), (g + 1) * (H // G)):
        for i0 in range(first, tl.minimum(first + WINDOW, T), BQ):
            i = i0 + tl.arange(0, BQ)
            q_i, dy_i, whole, delta_i = token_tile(q, dy, lse, delta, i, i < T, b, h, T, H, K, BD)
            seen = (tl.load(slot + b * T + i, mask=i < T, other=-1) == s)[:, None] & exists[None, :]
            more_k, more_v = of_row(q_i, k_j, v_j, dy_i, seen, whole, delta_i, base_2, LOW)
            of_k += more_k
            of_v += more_v
    leave_tile(dmemory_k + at, m, m < M, of_k * scale, G * K, K, BD)
    leave_tile(dmemory_v + at, m, m < M, of_v, G * K, K, BD)
