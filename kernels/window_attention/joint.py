"""One softmax over a window of rows, rows farther back and published memories, in Triton: forward and backward.

The one thing to know: which rows a token sees is a matter of distances, and a memory is seen by one run of tokens. So tiles that
nobody sees are never read, a tile's tokens see few memories, and a memory's gradient is summed over the tokens of one window, in
their order: nothing is added in memory by two programs.

Weights are made again backwards from the scores and the logarithm of their sum.

Shape suffixes: B batch, T tokens, J rows of a history (N of them before the span), H heads, G key heads, K dim, P memories of M
rows.
"""

import triton
import triton.language as tl

from baton.kernels.gated_linear_attention.decays import product
from baton.kernels.rows import LOG2_E


@triton.jit
def tile_of(base, at, inside, ROW: tl.constexpr, K: tl.constexpr, BD: tl.constexpr):
    """Rows `at`, [rows, BD]; zeros of what does not exist. ROW: elements between rows."""
    x = tl.arange(0, BD)
    return tl.load(base + at[:, None].to(tl.int64) * ROW + x[None, :], mask=inside[:, None] & (x < K)[None, :], other=0.0)


@triton.jit
def leave_tile(to, at, inside, value, ROW: tl.constexpr, K: tl.constexpr, BD: tl.constexpr):
    """As `tile_of`."""
    x = tl.arange(0, BD)
    tl.store(
        to + at[:, None].to(tl.int64) * ROW + x[None, :], value.to(to.dtype.element_ty), mask=inside[:, None] & (x < K)[None, :]
    )


@triton.jit
def weighed(q_i, k_j, seen, scale, LOW: tl.constexpr):
    """Scores in base 2, minus infinity of what is not seen."""
    return tl.where(seen, product(q_i, tl.trans(k_j), LOW) * (scale * LOG2_E), float("-inf"))


@triton.jit
def absorb(found, largest, total, scores, v_j, LOW: tl.constexpr):
    """Weighted values and sum of weights so far, relative to the largest score so far, with some more."""
    new = tl.maximum(largest, tl.max(scores, 1))
    # who has seen nothing yet has no largest
    base = tl.where(new == float("-inf"), 0.0, new)
    weights, fewer = tl.exp2(scores - base[:, None]), tl.exp2(largest - base)
    return found * fewer[:, None] + product(weights, v_j, LOW), new, total * fewer + tl.sum(weights, 1)


@triton.jit
def seen_of(i, r, limit, J, N: tl.constexpr, NEAR: tl.constexpr):
    """Whether tokens i see rows r: those at distances from NEAR to limit."""
    distance = i[:, None] + N - r[None, :]
    return (distance >= NEAR) & (distance <= limit[:, None]) & (r < J)[None, :]


@triton.jit
def first_row(i0, near, N: tl.constexpr, WHOLE: tl.constexpr):
    """From which on rows are read for tokens i0, ... WHOLE: no window bounds the distances, so the tile's largest, which is a later
    token's than the first, may point before the first row."""
    return tl.maximum(i0 + N - tl.max(near, 0), 0) if WHOLE else i0 + N - tl.max(near, 0)


@triton.jit
def forward_kernel(
    q, k, v, far_k, far_v, memory_k, memory_v, valid, slot, limit, far_limit, y, lse, T, memories, scale,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, N: tl.constexpr, FAR: tl.constexpr, M: tl.constexpr, LOW: tl.constexpr,
    BQ: tl.constexpr, BK: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """y [B, T, H, K] and the logarithm (base 2) of the sum of weights, [B, H, T]. FAR: rows farther back count from this distance
    on (0: there are none); M: rows of a memory (0: there are none)."""
    h, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    g, i0 = h // (H // G), tl.program_id(0) * BQ
    i = i0 + tl.arange(0, BQ)
    inside = i < T
    own = (b * T * H + h) * K
    q_i = tile_of(q + own, i, inside, H * K, K, BD)
    found, total = tl.zeros([BQ, BD], tl.float32), tl.zeros([BQ], tl.float32)
    largest = total + float("-inf")
    near = tl.load(limit + b * T + i, mask=inside, other=-1)
    of_rows = (b * (N + T) * G + g) * K
    for r0 in range(first_row(i0, near, N, WHOLE), tl.minimum(i0 + BQ, T) + N, BK):
        r = r0 + tl.arange(0, BK)
        scores = weighed(q_i, tile_of(k + of_rows, r, r < N + T, G * K, K, BD), seen_of(i, r, near, N + T, N, 0), scale, LOW)
        found, largest, total = absorb(found, largest, total, scores, tile_of(v + of_rows, r, r < N + T, G * K, K, BD), LOW)
    if FAR > 0:
        far, F = tl.load(far_limit + b * T + i, mask=inside, other=-1), 2 * FAR - 1
        of_rows = (b * (F + T) * G + g) * K
        for r0 in range(i0 + F - tl.max(far, 0), tl.minimum(i0 + BQ, T) + F - FAR, BK):
            r = r0 + tl.arange(0, BK)
            exists = r < F + T
            scores = weighed(q_i, tile_of(far_k + of_rows, r, exists, G * K, K, BD), seen_of(i, r, far, F + T, F, FAR), scale, LOW)
            found, largest, total = absorb(found, largest, total, scores, tile_of(far_v + of_rows, r, exists, G * K, K, BD), LOW)
    if M > 0:
        place = tl.load(slot + b * T + i, mask=inside, other=-1)
        for s in range(tl.min(tl.where(place >= 0, place, memories), 0), tl.max(place, 0) + 1):
            of_memory = (b * memories + s) * M
            for m0 in range(0, M, BM):
                m = m0 + tl.arange(0, BM)
                exists = tl.load(valid + of_memory + m, mask=m < M, other=0) != 0
                seen = (place == s)[:, None] & exists[None, :]
                at = (of_memory * G + g) * K
                scores = weighed(q_i, tile_of(memory_k + at, m, m < M, G * K, K, BD), seen, scale, LOW)
                found, largest, total = absorb(found, largest, total, scores, tile_of(memory_v + at, m, m < M, G * K, K, BD), LOW)
    # a token sees itself; behind the last one there is none
    total = tl.where(inside, total, 1.0)
    leave_tile(y + own, i, inside, found / total[:, None], H * K, K, BD)
    tl.store(lse + (b * H + h) * T + i, largest + tl.log2(total), mask=inside)


@triton.jit
def slope(weights, dy_i, v_j, delta, scale, LOW: tl.constexpr):
    """The scores' gradient before they are scaled: of weights whose values are v_j."""
    return weights * (product(dy_i, tl.trans(v_j), LOW) - delta[:, None]) * scale


@triton.jit
def queries_backward_kernel(
    q, k, v, far_k, far_v, memory_k, memory_v, valid, slot, limit, far_limit, y, lse, dy, dq, delta, T, memories, scale,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, N: tl.constexpr, FAR: tl.constexpr, M: tl.constexpr, LOW: tl.constexpr,
    BQ: tl.constexpr, BK: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """dq, and delta, the product of what is read with its cotangent, [B, H, T]."""
    h, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    g, i0 = h // (H // G), tl.program_id(0) * BQ
    i = i0 + tl.arange(0, BQ)
    inside = i < T
    own = (b * T * H + h) * K
    q_i, dy_i = tile_of(q + own, i, inside, H * K, K, BD), tile_of(dy + own, i, inside, H * K, K, BD)
    read = tl.sum(dy_i.to(tl.float32) * tile_of(y + own, i, inside, H * K, K, BD).to(tl.float32), 1)
    tl.store(delta + (b * H + h) * T + i, read, mask=inside)
    whole = tl.load(lse + (b * H + h) * T + i, mask=inside, other=0.0)
    found = tl.zeros([BQ, BD], tl.float32)
    near = tl.load(limit + b * T + i, mask=inside, other=-1)
    of_rows = (b * (N + T) * G + g) * K
    for r0 in range(first_row(i0, near, N, WHOLE), tl.minimum(i0 + BQ, T) + N, BK):
        r = r0 + tl.arange(0, BK)
        k_j, v_j = tile_of(k + of_rows, r, r < N + T, G * K, K, BD), tile_of(v + of_rows, r, r < N + T, G * K, K, BD)
        weights = tl.exp2(weighed(q_i, k_j, seen_of(i, r, near, N + T, N, 0), scale, LOW) - whole[:, None])
        found += product(slope(weights, dy_i, v_j, read, scale, LOW), k_j, LOW)
    if FAR > 0:
        far, F = tl.load(far_limit + b * T + i, mask=inside, other=-1), 2 * FAR - 1
        of_rows = (b * (F + T) * G + g) * K
        for r0 in range(i0 + F - tl.max(far, 0), tl.minimum(i0 + BQ, T) + F - FAR, BK):
            r = r0 + tl.arange(0, BK)
            k_j, v_j = tile_of(far_k + of_rows, r, r < F + T, G * K, K, BD), tile_of(far_v + of_rows, r, r < F + T, G * K, K, BD)
            weights = tl.exp2(weighed(q_i, k_j, seen_of(i, r, far, F + T, F, FAR), scale, LOW) - whole[:, None])
            found += product(slope(weights, dy_i, v_j, read, scale, LOW), k_j, LOW)
    if M > 0:
        place = tl.load(slot + b * T + i, mask=inside, other=-1)
        for s in range(tl.min(tl.where(place >= 0, place, memories), 0), tl.max(place, 0) + 1):
            of_memory = (b * memories + s) * M
            for m0 in range(0, M, BM):
                m = m0 + tl.arange(0, BM)
                exists, at = tl.load(valid + of_memory + m, mask=m < M, other=0) != 0, (of_memory * G + g) * K
                k_j, v_j = tile_of(memory_k + at, m, m < M, G * K, K, BD), tile_of(memory_v + at, m, m < M, G * K, K, BD)
                seen = (place == s)[:, None] & exists[None, :]
                weights = tl.exp2(weighed(q_i, k_j, seen, scale, LOW) - whole[:, None])
                found += product(slope(weights, dy_i, v_j, read, scale, LOW), k_j, LOW)
    leave_tile(dq + own, i, inside, found, H * K, K, BD)


@triton.jit
def token_tile(q, dy, lse, delta, i, inside, b, h, T, H: tl.constexpr, K: tl.constexpr, BD: tl.constexpr):
    """What keys and values need of tokens: q, dy, the sums' logarithm and delta."""
    own, of_head = (b * T * H + h) * K, (b * H + h) * T + i
    q_i, dy_i = tile_of(q + own, i, inside, H * K, K, BD), tile_of(dy + own, i, inside, H * K, K, BD)
    return q_i, dy_i, tl.load(lse + of_head, mask=inside, other=0.0), tl.load(delta + of_head, mask=inside, other=0.0)


@triton.jit
def rows_backward_kernel(
    q, k, v, limit, lse, dy, delta, dk, dv, T, scale,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, N: tl.constexpr, NEAR: tl.constexpr, LOW: tl.constexpr,
    BQ: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """dk, dv of a history, [B, N + T, G, K]. limit: [B, T], the largest distance, at most N unless WHOLE; NEAR: the smallest."""
    g, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    r0 = tl.program_id(0) * BK
    r = r0 + tl.arange(0, BK)
    exists, of_rows = r < N + T, (b * (N + T) * G + g) * K
    k_j, v_j = tile_of(k + of_rows, r, exists, G * K, K, BD), tile_of(v + of_rows, r, exists, G * K, K, BD)
    of_k, of_v = tl.zeros([BK, BD], tl.float32), tl.zeros([BK, BD], tl.float32)
    for h in range(g * (H // G), (g + 1) * (H // G)):
        for i0 in range(tl.maximum(r0 - N + NEAR, 0), T if WHOLE else tl.minimum(r0 + BK, T), BQ):
            i = i0 + tl.arange(0, BQ)
            q_i, dy_i, whole, read = token_tile(q, dy, lse, delta, i, i < T, b, h, T, H, K, BD)
            farthest = tl.load(limit + b * T + i, mask=i < T, other=-1)
            weights = tl.exp2(weighed(q_i, k_j, seen_of(i, r, farthest, N + T, N, NEAR), scale, LOW) - whole[:, None])
            of_v += product(tl.trans(weights), dy_i, LOW)
            of_k += product(tl.trans(slope(weights, dy_i, v_j, read, scale, LOW)), q_i, LOW)
    leave_tile(dk + of_rows, r, exists, of_k, G * K, K, BD)
    leave_tile(dv + of_rows, r, exists, of_v, G * K, K, BD)


@triton.jit
def memories_backward_kernel(
    q, memory_k, memory_v, valid, slot, begin, lse, dy, delta, dmemory_k, dmemory_v, T, memories, scale,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, M: tl.constexpr, WINDOW: tl.constexpr, LOW: tl.constexpr,
    BQ: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """dk, dv of memories, [B, P, M, G, K]. begin: [B, P], the token from which a memory is seen, by less than WINDOW + 1 tokens."""
    g, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    blocks: tl.constexpr = (M + BM - 1) // BM
    s = tl.program_id(0) // blocks
    m, of_memory = tl.program_id(0) % blocks * BM + tl.arange(0, BM), (b * memories + s) * M
    at, exists = (of_memory * G + g) * K, tl.load(valid + of_memory + m, mask=m < M, other=0) != 0
    k_j, v_j = tile_of(memory_k + at, m, m < M, G * K, K, BD), tile_of(memory_v + at, m, m < M, G * K, K, BD)
    of_k, of_v = tl.zeros([BM, BD], tl.float32), tl.zeros([BM, BD], tl.float32)
    first = tl.load(begin + b * memories + s)
    for h in range(g * (H // G), (g + 1) * (H // G)):
        for i0 in range(first, tl.minimum(first + WINDOW, T), BQ):
            i = i0 + tl.arange(0, BQ)
            q_i, dy_i, whole, read = token_tile(q, dy, lse, delta, i, i < T, b, h, T, H, K, BD)
            seen = (tl.load(slot + b * T + i, mask=i < T, other=-1) == s)[:, None] & exists[None, :]
            weights = tl.exp2(weighed(q_i, k_j, seen, scale, LOW) - whole[:, None])
            of_v += product(tl.trans(weights), dy_i, LOW)
            of_k += product(tl.trans(slope(weights, dy_i, v_j, read, scale, LOW)), q_i, LOW)
    leave_tile(dmemory_k + at, m, m < M, of_k, G * K, K, BD)
    leave_tile(dmemory_v + at, m, m < M, of_v, G * K, K, BD)
