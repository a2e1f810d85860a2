"""Triton kernel that selects all memories of a span: one program for each block of `window` tokens, which publishes at most once.

A score and its row are packed into one int64. No two are equal, the older of two equal scores is larger, and the selection does not
depend on the order of comparisons. Most blocks of tokens hold no score above the smallest one kept, and are only read.
"""

import triton
import triton.language as tl

NO_KEY = tl.constexpr(-(1 << 63))
MAX_INT = tl.constexpr((1 << 31) - 1)


@triton.jit
def sort_keys(score, row, is_candidate):
    """int64 keys that sort by float32 score, then by age; NO_KEY where not a candidate."""
    # adding 0 turns -0 into 0; with the other bits of negative floats flipped, int32 order is float order
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & MAX_INT)
    return tl.where(is_candidate, (bits.to(tl.int64) << 32) | (-row + MAX_INT).to(tl.int64), NO_KEY)


@triton.jit
def topk_before(score, entry_score, entry_where, end, doc_start, E: tl.constexpr, EIDETIC: tl.constexpr, BLOCK_M: tl.constexpr):
    """The EIDETIC largest of E entries and a document's tokens before `end` (-1: none), [BLOCK_M] rows of the entries followed by
    the tokens, in time order and padded with -1. doc_start: the document's first token; negative: before the span, so that the
    entries count.
    """
    i = tl.arange(0, BLOCK_M)
    entry_valid = (i < E) & (doc_start < 0) & (end >= 0)
    if E > 0:
        entry_valid &= tl.load(entry_where + i, mask=i < E, other=-1) >= 0
    top = tl.sort(sort_keys(tl.load(entry_score + i, mask=entry_valid, other=0.0), i, entry_valid), descending=True)
    for t0 in range(tl.maximum(doc_start, 0), end, BLOCK_M):
        t = t0 + i
        keys_t = sort_keys(tl.load(score + t, mask=t < end, other=0.0), E + t, t < end)
        if tl.max(keys_t, 0) > tl.min(top, 0):
            top = tl.topk(tl.reshape(tl.join(top, keys_t), [2 * BLOCK_M]), BLOCK_M)
    valid = (i < EIDETIC) & (top != NO_KEY)
    in_time = tl.sort(tl.where(valid, -(top & MAX_INT).to(tl.int32) + MAX_INT, MAX_INT))
    return tl.where(in_time == MAX_INT, -1, in_time)


@triton.jit
def topk_memory_kernel(
    pos, seen, score, entry_score, entry_where, frozen, limit, far_limit, slot, begin, row, first, fading_first, last, T, blocks,
    WINDOW: tl.constexpr, EIDETIC: tl.constexpr, FADING: tl.constexpr, FAR: tl.constexpr, HAS_STATE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Fills `Visibility` for positions [B, T]; first and fading_first are set to -1 only. One more program per lane computes
    `last`, as `topk_memory_launch.select_memories` returns it. seen, entry_score, entry_where, frozen: from the State, if HAS_STATE
    is 1.
    """
    p, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    M: tl.constexpr = EIDETIC + FADING
    E: tl.constexpr = EIDETIC * HAS_STATE
    TAIL: tl.constexpr = FADING * HAS_STATE
    memories, token, none = blocks + HAS_STATE, tl.arange(0, BLOCK_T), tl.full([BLOCK_T], -1, tl.int32)
    read = tl.zeros([], tl.int32)
    if HAS_STATE > 0:
        read = tl.load(seen + b).to(tl.int32)
    # the token at which this block publishes; T: none
    publish_at = tl.zeros([], tl.int32) + T
    for t0 in range(p * WINDOW, tl.minimum(p * WINDOW + WINDOW, T), BLOCK_T):
        t = t0 + token
        inside = (t < p * WINDOW + WINDOW) & (t < T)
        at = tl.load(pos + b * T + t, mask=inside, other=0)
        farthest = tl.minimum(t + read, at)
        tl.store(limit + b * T + t, tl.minimum(farthest, WINDOW - 1), mask=inside)
        if FAR > 0:
            tl.store(far_limit + b * T + t, tl.minimum(farthest, 2 * WINDOW - 1), mask=inside)
        if M > 0:
            # the memory published at the last multiple of the window; if that is before the span, the frozen one
            multiple = t - at % WINDOW
            latest = tl.where(multiple >= 0, multiple // WINDOW + HAS_STATE, HAS_STATE - 1)
            tl.store(slot + b * T + t, tl.where(at >= WINDOW, latest, -1), mask=inside)
            publish_at = tl.minimum(publish_at, tl.min(tl.where(inside & (at >= WINDOW) & (multiple == t), t, T), 0))
        if EIDETIC > 0:
            tl.store(first + b * (E + T) + E + t, none, mask=inside)
        if FADING > 0:
            tl.store(fading_first + b * (TAIL + T) + TAIL + t, none, mask=inside)
    if M > 0:
        own, within = (b * memories + HAS_STATE + p) * M, p < blocks
        tl.store(begin + b * memories + HAS_STATE + p, publish_at, mask=within)
        if EIDETIC > 0:
            i = tl.arange(0, BLOCK_M)
            newest = tl.minimum(publish_at, T - 1)
            doc_start = newest - tl.load(pos + b * T + newest)
            end = tl.where(within & (publish_at == T), -1, publish_at)
            best = topk_before(score + b * T, entry_score + b * E, entry_where + b * E, end, doc_start, E, EIDETIC, BLOCK_M)
            tl.store(row + own + i, best, mask=(i < EIDETIC) & within)
            tl.store(last + b * EIDETIC + i, best, mask=(i < EIDETIC) & (p == blocks))
        if FADING > 0:
            j = tl.arange(0, BLOCK_F)
            known = (publish_at < T) & (FADING - j <= publish_at + read)
            tl.store(row + own + EIDETIC + j, tl.where(known, TAIL + publish_at - FADING + j, -1), mask=(j < FADING) & within)
        if HAS_STATE > 0:
            oldest = p == 0
            tl.store(begin + b * memories, 0, mask=oldest)
            for m0 in range(0, M, BLOCK_T):
                m = m0 + token
                holds = tl.load(frozen + b * M + m, mask=(m < M) & oldest, other=0) != 0
                tl.store(row + b * memories * M + m, tl.where(holds, m, -1), mask=(m < M) & oldest)
                tl.store(first + b * (E + T) + m, none, mask=(m < E) & oldest)
                tl.store(fading_first + b * (TAIL + T) + m, none, mask=(m < TAIL) & oldest)
