"""Triton kernels of one softmax over a window of rows, rows farther back and published memories: forward and backward.

Shape suffixes: B batch, T tokens, J rows of a history (N of them before the span), H query heads, G key heads, K dim, P memories of
M rows.

Distances determine which rows a token sees, and each memory is seen by one run of tokens. Tiles that no token sees are never read,
the tokens of a tile see few memories, and a memory's gradient is summed over the tokens of one window, in order: no two programs
add to the same memory. Memories hold copies of rows (`memory_copy_kernels`); the gradients of a row's copies are added before it is
rounded.

The backward pass recomputes the weights from the scores and the logarithm of their sum.

Keys of B'MOJO's fading tokens are outputs of a state space model, which nothing bounds. A product and a sum are one instruction on
a GPU, with one rounding: the largest score less itself is then not 0 but the rounding of their product with the scale, which for
scores of 1e10 is hundreds, and its power infinite or 0, as then those of all others are. With far rows and memories, scores are
therefore compared before they are scaled, and exponents of weights from the logarithm of their sum are held to 0.
"""

import triton
import triton.language as tl

from baton.kernels.common.triton_prefetch import LOG2_E
from baton.kernels.eidetic_attention.memory_copy_kernels import add_copy_gradients, load_tile, store_tile
from baton.kernels.gated_linear_attention.triton_common import dot


@triton.jit
def at_most_zero(x):
    """min(x, 0); NaN where x is, which an input's would otherwise be lost in."""
    return tl.minimum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def online_softmax_update(acc, row_max, row_sum, scores, mask, v_j, scale, DOT_DTYPE: tl.constexpr):
    """The accumulated values, row_max and row_sum after some more scores. Values and sum are relative to the largest score so far.

    mask: None: all scores that are not -inf count. scale: of the scores, to base 2, positive.
    """
    if mask is not None:
        scores = tl.where(mask, scores, float("-inf"))
    new = tl.maximum(row_max, tl.max(scores, 1))
    # row_max is -inf until a row is visible
    if mask is not None:
        base = tl.where(new == float("-inf"), 0.0, new)
        exponents, fewer = (scores - base[:, None]) * scale, (row_max - base) * scale
    else:
        base = tl.where(new == float("-inf"), 0.0, new * scale)
        exponents, fewer = scores * scale - base[:, None], row_max * scale - base
    weights, fewer = tl.exp2(exponents), tl.exp2(fewer)
    return acc * fewer[:, None] + dot(weights, v_j, DOT_DTYPE), new, row_sum * fewer + tl.sum(weights, 1)


@triton.jit
def score_factor(scale, CAP: tl.constexpr):
    """Of what `capped` returns, to the scores to base 2."""
    return (scale if CAP == 0 else CAP) * LOG2_E


@triton.jit
def capped(products, scale, CAP: tl.constexpr):
    """tanh(scale products / CAP), of which CAP times as much is the capped score; with CAP = 0, for none, the products."""
    if CAP > 0:
        # not the approximate instruction, whose error of 2^-11 times CAP would be that of a score; at infinity it is 1
        products = 1 - 2 / (1 + tl.exp2(products * (scale * (2 * LOG2_E / CAP))))
    return products


@triton.jit
def uncapped_gradient(dscores, scores, CAP: tl.constexpr):
    """The gradient of the products, before scaling, from that of CAP times what `capped` returns. scores: what it returned, -inf
    where there is none."""
    if CAP > 0:
        scores = tl.maximum(scores, -1.0)
        dscores *= 1 - scores * scores
    return dscores


@triton.jit
def in_range(distance, count):
    """Whether 0 <= distance < count, in one comparison: as unsigned numbers, negative distances exceed all counts."""
    return distance.to(tl.uint32, bitcast=True) < count.to(tl.uint32, bitcast=True)


@triton.jit
def num_visible(limits, b, i, inside, T, MIN_DISTANCE: tl.constexpr):
    """How many rows tokens i see, from MIN_DISTANCE to their limits [B, T]; tokens past the end see none."""
    return tl.maximum(tl.load(limits + b * T + i, mask=inside, other=-1) - (MIN_DISTANCE - 1), 0)


@triton.jit
def rows_visible_to_all(i, count, N):
    """The first and the last row that all of tokens i see. count: the number of rows that each sees."""
    return tl.max(i + N + 1 - count, 0), tl.min(i, 0) + N


@triton.jit
def first_visible_row(i, count, N):
    """The first row that any of tokens i sees. count: the number of rows that each sees."""
    return tl.min(i + N + 1 - count, 0)


@triton.jit
def joint_attention_forward_kernel(
    q, k, v, far_k, far_v, memory_k, memory_v, row, slot, limit, far_limit, y, lse, T, memories, scale, N,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, FAR: tl.constexpr, M: tl.constexpr, DOT_DTYPE: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, ROW: tl.constexpr,
    CAP: tl.constexpr,
):  # fmt: skip
    """y [B, T, H, K] and the base-2 logarithm of the sum of weights, [B, H, T].

    FAR: smallest distance of far rows (0: there are none). M: rows of a memory (0: there are none). ROW: elements between rows of
    k, and of v. CAP: the soft cap of scores (0: there is none), with neither far rows nor memories.
    """
    h, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    g, i0 = h // (H // G), tl.program_id(0) * BLOCK_Q
    i = i0 + tl.arange(0, BLOCK_Q)
    inside = i < T
    q_offset = (b * T * H + h) * K
    q_i = load_tile(q + q_offset, i, inside, H * K, K, BLOCK_D)
    acc, row_sum = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32), tl.zeros([BLOCK_Q], tl.float32)
    row_max = row_sum + float("-inf")
    scale_log2 = score_factor(scale, CAP)
    num_near, row_offset = num_visible(limit, b, i, inside, T, 0), b * (N + T) * ROW + g * K
    first_common, last_common = rows_visible_to_all(i, num_near, N)
    for r0 in range(first_visible_row(i, num_near, N), tl.minimum(i0 + BLOCK_Q, T) + N, BLOCK_K):
        r = r0 + tl.arange(0, BLOCK_K)
        products = dot(q_i, tl.trans(load_tile(k + row_offset, r, r < N + T, ROW, K, BLOCK_D)), DOT_DTYPE)
        scores = capped(products, scale, CAP)
        mask = (r[None, :] > (i + N - num_near)[:, None]) & (r[None, :] <= (i + N)[:, None])
        if FAR == 0 and M == 0:
            # most tiles are visible to all queries; with far rows and memories few are, and registers are short
            if (r0 < first_common) | (r0 + BLOCK_K - 1 > last_common):
                scores = tl.where(mask, scores, float("-inf"))
            mask = None
        v_j = load_tile(v + row_offset, r, r < N + T, ROW, K, BLOCK_D)
        acc, row_max, row_sum = online_softmax_update(acc, row_max, row_sum, scores, mask, v_j, scale_log2, DOT_DTYPE)
    if FAR > 0:
        num_far, F = num_visible(far_limit, b, i, inside, T, FAR), 2 * FAR - 1
        row_offset = (b * (F + T) * G + g) * K
        for r0 in range(first_visible_row(i, num_far, F - FAR), tl.minimum(i0 + BLOCK_Q, T) + F - FAR, BLOCK_K):
            r = r0 + tl.arange(0, BLOCK_K)
            scores = dot(q_i, tl.trans(load_tile(far_k + row_offset, r, r < F + T, G * K, K, BLOCK_D)), DOT_DTYPE)
            mask = (r[None, :] > (i + (F - FAR) - num_far)[:, None]) & (r[None, :] <= (i + (F - FAR))[:, None])
            v_j = load_tile(far_v + row_offset, r, r < F + T, G * K, K, BLOCK_D)
            acc, row_max, row_sum = online_softmax_update(acc, row_max, row_sum, scores, mask, v_j, scale_log2, DOT_DTYPE)
    if M > 0:
        slot_i = tl.load(slot + b * T + i, mask=inside, other=-1)
        for s in range(tl.min(tl.where(slot_i >= 0, slot_i, memories), 0), tl.max(slot_i, 0) + 1):
            memory_offset = (b * memories + s) * M
            for m0 in range(0, M, BLOCK_M):
                m = m0 + tl.arange(0, BLOCK_M)
                exists = tl.load(row + memory_offset + m, mask=m < M, other=-1) >= 0
                mask = (slot_i == s)[:, None] & exists[None, :]
                at = (memory_offset * G + g) * K
                scores = dot(q_i, tl.trans(load_tile(memory_k + at, m, m < M, G * K, K, BLOCK_D)), DOT_DTYPE)
                v_j = load_tile(memory_v + at, m, m < M, G * K, K, BLOCK_D)
                acc, row_max, row_sum = online_softmax_update(acc, row_max, row_sum, scores, mask, v_j, scale_log2, DOT_DTYPE)
    # row_sum is positive for a token, which sees itself, and 0 past the end
    row_sum = tl.where(inside, row_sum, 1.0)
    store_tile(y + q_offset, i, inside, acc / row_sum[:, None], H * K, K, BLOCK_D)
    tl.store(lse + (b * H + h) * T + i, row_max * scale_log2 + tl.log2(row_sum), mask=inside)


@triton.jit
def softmax_weights(scores, mask, lse_i, scale):
    """The weights, recomputed from scores. mask: None: those of all scores, which are -inf where there is none. lse_i: logarithm of
    the sum of weights; scale: of the scores, to base 2."""
    exponents = scores * scale - lse_i
    if mask is not None:
        return tl.where(mask, tl.exp2(at_most_zero(exponents)), 0.0)
    return tl.exp2(exponents)


@triton.jit
def dq_of_rows(scores, k_j, v_j, dy_i, mask, lse_i, delta_i, scale, DOT_DTYPE: tl.constexpr, CAP: tl.constexpr):
    """The part of the queries' gradient that comes from these rows, before scaling."""
    weights = softmax_weights(scores, mask, lse_i[:, None], scale)
    dscores = weights * (dot(dy_i, tl.trans(v_j), DOT_DTYPE) - delta_i[:, None])
    return dot(uncapped_gradient(dscores, scores, CAP), k_j, DOT_DTYPE)


@triton.jit
def products_of_rows(q_i, k_j, ROWS_FIRST: tl.constexpr, DOT_DTYPE: tl.constexpr):
    """Products of queries and rows, [queries, rows]; ROWS_FIRST: [rows, queries]."""
    if ROWS_FIRST:
        products = dot(k_j, tl.trans(q_i), DOT_DTYPE)
    else:
        products = dot(q_i, tl.trans(k_j), DOT_DTYPE)
    return products


@triton.jit
def sees(i, r, count, N, ROWS_FIRST: tl.constexpr):
    """Whether tokens i, each of which sees `count` rows up to its own, see rows r; shaped as `products_of_rows`."""
    if ROWS_FIRST:
        found = in_range((i + N)[None, :] - r[:, None], count[None, :])
    else:
        found = in_range((i + N)[:, None] - r[None, :], count[:, None])
    return found


@triton.jit
def dkv_of_queries(
    scores, q_i, v_j, dy_i, mask, lse_i, delta_i, scale, ROWS_FIRST: tl.constexpr, DOT_DTYPE: tl.constexpr, CAP: tl.constexpr
):  # fmt: skip
    """The parts of the gradients of keys (before scaling) and of values that come from these queries. scores, mask: shaped as
    `products_of_rows`."""
    if ROWS_FIRST:
        lse_i, delta_i = lse_i[None, :], delta_i[None, :]
    else:
        lse_i, delta_i = lse_i[:, None], delta_i[:, None]
    weights = softmax_weights(scores, mask, lse_i, scale)
    dscores = uncapped_gradient(weights * (products_of_rows(dy_i, v_j, ROWS_FIRST, DOT_DTYPE) - delta_i), scores, CAP)
    if not ROWS_FIRST:
        weights, dscores = tl.trans(weights), tl.trans(dscores)
    return dot(dscores, q_i, DOT_DTYPE), dot(weights, dy_i, DOT_DTYPE)


@triton.jit
def joint_attention_backward_dq_kernel(
    q, k, v, far_k, far_v, memory_k, memory_v, row, slot, limit, far_limit, y, lse, dy, dq, delta, T, memories, scale, N,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, FAR: tl.constexpr, M: tl.constexpr, DOT_DTYPE: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, ROW: tl.constexpr,
    CAP: tl.constexpr,
):  # fmt: skip
    """dq, and delta = sum(y dy), [B, H, T]."""
    h, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    g, i0 = h // (H // G), tl.program_id(0) * BLOCK_Q
    i = i0 + tl.arange(0, BLOCK_Q)
    inside = i < T
    q_offset = (b * T * H + h) * K
    q_i, dy_i = load_tile(q + q_offset, i, inside, H * K, K, BLOCK_D), load_tile(dy + q_offset, i, inside, H * K, K, BLOCK_D)
    delta_i = tl.sum(dy_i.to(tl.float32) * load_tile(y + q_offset, i, inside, H * K, K, BLOCK_D).to(tl.float32), 1)
    tl.store(delta + (b * H + h) * T + i, delta_i, mask=inside)
    lse_i = tl.load(lse + (b * H + h) * T + i, mask=inside, other=0.0)
    acc, scale_log2 = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32), score_factor(scale, CAP)
    num_near, row_offset = num_visible(limit, b, i, inside, T, 0), b * (N + T) * ROW + g * K
    first_common, last_common = rows_visible_to_all(i, num_near, N)
    for r0 in range(first_visible_row(i, num_near, N), tl.minimum(i0 + BLOCK_Q, T) + N, BLOCK_K):
        r = r0 + tl.arange(0, BLOCK_K)
        k_j, v_j = (
            load_tile(k + row_offset, r, r < N + T, ROW, K, BLOCK_D),
            load_tile(v + row_offset, r, r < N + T, ROW, K, BLOCK_D),
        )
        scores = capped(dot(q_i, tl.trans(k_j), DOT_DTYPE), scale, CAP)
        mask = in_range((i + N)[:, None] - r[None, :], num_near[:, None])
        if FAR == 0 and M == 0:
            # as in the forward kernel
            if (r0 < first_common) | (r0 + BLOCK_K - 1 > last_common):
                scores = tl.where(mask, scores, float("-inf"))
            mask = None
        acc += dq_of_rows(scores, k_j, v_j, dy_i, mask, lse_i, delta_i, scale_log2, DOT_DTYPE, CAP)
    if FAR > 0:
        num_far, F = num_visible(far_limit, b, i, inside, T, FAR), 2 * FAR - 1
        row_offset = (b * (F + T) * G + g) * K
        for r0 in range(first_visible_row(i, num_far, F - FAR), tl.minimum(i0 + BLOCK_Q, T) + F - FAR, BLOCK_K):
            r = r0 + tl.arange(0, BLOCK_K)
            k_j, v_j = (
                load_tile(far_k + row_offset, r, r < F + T, G * K, K, BLOCK_D),
                load_tile(far_v + row_offset, r, r < F + T, G * K, K, BLOCK_D),
            )
            mask = in_range((i + (F - FAR))[:, None] - r[None, :], num_far[:, None])
            acc += dq_of_rows(dot(q_i, tl.trans(k_j), DOT_DTYPE), k_j, v_j, dy_i, mask, lse_i, delta_i, scale_log2, DOT_DTYPE, CAP)
    if M > 0:
        slot_i = tl.load(slot + b * T + i, mask=inside, other=-1)
        for s in range(tl.min(tl.where(slot_i >= 0, slot_i, memories), 0), tl.max(slot_i, 0) + 1):
            memory_offset = (b * memories + s) * M
            for m0 in range(0, M, BLOCK_M):
                m = m0 + tl.arange(0, BLOCK_M)
                exists, at = tl.load(row + memory_offset + m, mask=m < M, other=-1) >= 0, (memory_offset * G + g) * K
                k_j, v_j = (
                    load_tile(memory_k + at, m, m < M, G * K, K, BLOCK_D),
                    load_tile(memory_v + at, m, m < M, G * K, K, BLOCK_D),
                )
                mask = (slot_i == s)[:, None] & exists[None, :]
                scores = dot(q_i, tl.trans(k_j), DOT_DTYPE)
                acc += dq_of_rows(scores, k_j, v_j, dy_i, mask, lse_i, delta_i, scale_log2, DOT_DTYPE, CAP)
    store_tile(dq + q_offset, i, inside, acc * scale, H * K, K, BLOCK_D)


@triton.jit
def load_query_tile(q, dy, lse, delta, i, inside, b, h, T, H: tl.constexpr, K: tl.constexpr, BLOCK_D: tl.constexpr):
    """q, dy, logarithm of the sum of weights, and delta of tokens i."""
    q_offset, head_offset = (b * T * H + h) * K, (b * H + h) * T + i
    q_i, dy_i = load_tile(q + q_offset, i, inside, H * K, K, BLOCK_D), load_tile(dy + q_offset, i, inside, H * K, K, BLOCK_D)
    return q_i, dy_i, tl.load(lse + head_offset, mask=inside, other=0.0), tl.load(delta + head_offset, mask=inside, other=0.0)


@triton.jit
def joint_attention_backward_dkv_kernel(
    q, k, v, limit, ends, lse, dy, delta, first, later, dmemory_k, dmemory_v, dk, dv, T, memories, scale, N,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, MIN_DISTANCE: tl.constexpr, M: tl.constexpr,
    E: tl.constexpr, DOT_DTYPE: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
    REACH: tl.constexpr, ROW: tl.constexpr, DK_ROW: tl.constexpr, DV_ROW: tl.constexpr, CAP: tl.constexpr,
    ROWS_FIRST: tl.constexpr,
):  # fmt: skip
    """dk, dv of a history, [B, N + T, G, K], including the copies of its T tokens in memories (none if M = 0), located by first and
    later.

    E: entries at the start of first. limit: [B, T], the largest distance, at most N + REACH. REACH = -1: any; then ends, [B, 2,
    programs], has the queries up to the last one that sees the first row of a program, and that sees any of its rows.
    MIN_DISTANCE: the smallest distance.
    DK_ROW, DV_ROW: elements between rows of dk and of dv. Tiles begin where they would with REACH more rows in front, so that sums
    keep their bits. ROWS_FIRST: as of `products_of_rows`.
    """
    g, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    r0 = tl.program_id(0) * BLOCK_K - tl.maximum(REACH, 0)
    r = r0 + tl.arange(0, BLOCK_K)
    exists, read = (r >= 0) & (r < N + T), b * (N + T) * ROW + g * K
    k_j, v_j = load_tile(k + read, r, exists, ROW, K, BLOCK_D), load_tile(v + read, r, exists, ROW, K, BLOCK_D)
    dk_acc, dv_acc = tl.zeros([BLOCK_K, BLOCK_D], tl.float32), tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    scale_log2 = score_factor(scale, CAP)
    if REACH < 0:
        of_program = ends + 2 * b * tl.num_programs(0) + tl.program_id(0)
        common_end, end = tl.load(of_program), tl.load(of_program + tl.num_programs(0))
    else:
        end = tl.where(r0 + BLOCK_K > 0, tl.minimum(r0 + BLOCK_K + REACH, T), 0)
    for h in range(g * (H // G), (g + 1) * (H // G)):
        for i0 in range(tl.maximum(r0 - N + MIN_DISTANCE, 0), end, BLOCK_Q):
            i = i0 + tl.arange(0, BLOCK_Q)
            q_i, dy_i, lse_i, delta_i = load_query_tile(q, dy, lse, delta, i, i < T, b, h, T, H, K, BLOCK_D)
            scores = capped(products_of_rows(q_i, k_j, ROWS_FIRST, DOT_DTYPE), scale, CAP)
            if MIN_DISTANCE == 0 and M == 0:
                # as in the forward kernel. No token sees an earlier row than the token before it does
                if REACH < 0:
                    common = i0 + BLOCK_Q <= common_end
                else:
                    last = tl.minimum(i0 + BLOCK_Q, T) - 1
                    common = (i0 + BLOCK_Q <= T) & (last + N - tl.load(limit + b * T + last) <= r0)
                if (not common) | (r0 + BLOCK_K - 1 > i0 + N):
                    count = num_visible(limit, b, i, i < T, T, 0)
                    scores = tl.where(sees(i, r, count, N, ROWS_FIRST), scores, float("-inf"))
                mask = None
            else:
                count = num_visible(limit, b, i, i < T, T, MIN_DISTANCE)
                mask = sees(i, r, count, N - MIN_DISTANCE, ROWS_FIRST)
            dk_j, dv_j = dkv_of_queries(
                scores, q_i, v_j, dy_i, mask, lse_i, delta_i, scale_log2, ROWS_FIRST, DOT_DTYPE, CAP
            )  # fmt: skip
            dk_acc += dk_j
            dv_acc += dv_j
    dk_acc *= scale
    if M > 0:
        at = tl.load(first + b * (E + T) + E + r - N, mask=exists & (r >= N), other=-1)
        copies, copy_offset = b * memories * M, (b * memories * M * G + g) * K
        dk_acc, dv_acc = add_copy_gradients(
            dk_acc, dv_acc, at, later + copies, dmemory_k + copy_offset, dmemory_v + copy_offset, G * K, K, BLOCK_D
        )  # fmt: skip
    store_tile(dk + b * (N + T) * DK_ROW + g * K, r, exists, dk_acc, DK_ROW, K, BLOCK_D)
    store_tile(dv + b * (N + T) * DV_ROW + g * K, r, exists, dv_acc, DV_ROW, K, BLOCK_D)


@triton.jit
def joint_attention_backward_dmemory_kernel(
    q, memory_k, memory_v, row, slot, begin, lse, dy, delta, dmemory_k, dmemory_v, T, memories, scale,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, M: tl.constexpr, WINDOW: tl.constexpr, DOT_DTYPE: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, ROWS_FIRST: tl.constexpr,
):  # fmt: skip
    """dk, dv of memories, float32 [B, P, M, G, K]. begin: [B, P], the first token that sees a memory, of at most WINDOW tokens."""
    g, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    blocks: tl.constexpr = (M + BLOCK_M - 1) // BLOCK_M
    s = tl.program_id(0) // blocks
    m, memory_offset = tl.program_id(0) % blocks * BLOCK_M + tl.arange(0, BLOCK_M), (b * memories + s) * M
    at, exists = (memory_offset * G + g) * K, tl.load(row + memory_offset + m, mask=m < M, other=-1) >= 0
    k_j, v_j = load_tile(memory_k + at, m, m < M, G * K, K, BLOCK_D), load_tile(memory_v + at, m, m < M, G * K, K, BLOCK_D)
    dk_acc, dv_acc, scale_log2 = tl.zeros([BLOCK_M, BLOCK_D], tl.float32), tl.zeros([BLOCK_M, BLOCK_D], tl.float32), scale * LOG2_E
    first = tl.load(begin + b * memories + s)
    for h in range(g * (H // G), (g + 1) * (H // G)):
        for i0 in range(first, tl.minimum(first + WINDOW, T), BLOCK_Q):
            i = i0 + tl.arange(0, BLOCK_Q)
            q_i, dy_i, lse_i, delta_i = load_query_tile(q, dy, lse, delta, i, i < T, b, h, T, H, K, BLOCK_D)
            of_memory = tl.load(slot + b * T + i, mask=i < T, other=-1) == s
            if ROWS_FIRST:
                mask = of_memory[None, :] & exists[:, None]
            else:
                mask = of_memory[:, None] & exists[None, :]
            scores = products_of_rows(q_i, k_j, ROWS_FIRST, DOT_DTYPE)
            dk_j, dv_j = dkv_of_queries(scores, q_i, v_j, dy_i, mask, lse_i, delta_i, scale_log2, ROWS_FIRST, DOT_DTYPE, 0)
            dk_acc += dk_j
            dv_acc += dv_j
    store_tile(dmemory_k + at, m, m < M, dk_acc * scale, G * K, K, BLOCK_D)
    store_tile(dmemory_v + at, m, m < M, dv_acc, G * K, K, BLOCK_D)
