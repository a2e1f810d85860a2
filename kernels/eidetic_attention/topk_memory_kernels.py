"""What every token of a span sees, in Triton: a program for each block of a window's tokens, which publishes at most once, and then
the largest scores of its document before.

The one thing to know: a score and its row are one number, so no two are equal, the older of equal scores is the larger, and what is
kept does not depend on the order of comparing. Most blocks of tokens hold nothing larger than the least that is kept, and are only
read.
"""

import triton
import triton.language as tl

NOTHING = tl.constexpr(-(1 << 63))
LAST = tl.constexpr((1 << 31) - 1)  # a row behind all others


@triton.jit
def numbers_of(score, row, counted):
    """Of float32 scores and rows, int64 in the order of both; NOTHING where not counted."""
    # of a sum with 0 no zero is negative; and integers have the order of floats where negative ones are turned over
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & LAST)
    return tl.where(counted, (bits.to(tl.int64) << 32) | (-row + LAST).to(tl.int64), NOTHING)


@triton.jit
def largest_before(score, entry_score, entry_where, end, begun, E: tl.constexpr, EIDETIC: tl.constexpr, BM: tl.constexpr):
    """The EIDETIC largest, [BM], among E entries and a document's tokens before `end` (-1: none), in the order of time: rows of
    the entries followed by the tokens, and -1 behind them. begun: the document's first token; the entries count where it is
    negative."""
    i = tl.arange(0, BM)
    entered = (i < E) & (begun < 0) & (end >= 0)
    if E > 0:
        entered &= tl.load(entry_where + i, mask=i < E, other=-1) >= 0
    kept = tl.sort(numbers_of(tl.load(entry_score + i, mask=entered, other=0.0), i, entered), descending=True)
    for t0 in range(tl.maximum(begun, 0), end, BM):
        t = t0 + i
        here = numbers_of(tl.load(score + t, mask=t < end, other=0.0), E + t, t < end)
        if tl.max(here, 0) > tl.min(kept, 0):
            kept = tl.topk(tl.reshape(tl.join(kept, here), [2 * BM]), BM)
    found = (i < EIDETIC) & (kept != NOTHING)
    in_time = tl.sort(tl.where(found, -(kept & LAST).to(tl.int32) + LAST, LAST))
    return tl.where(in_time == LAST, -1, in_time)


@triton.jit
def topk_memory_kernel(
    pos, seen, score, entry_score, entry_where, frozen, limit, far_limit, slot, begin, row, first, fading_first, last, T, blocks,
    WINDOW: tl.constexpr, EIDETIC: tl.constexpr, FADING: tl.constexpr, FAR: tl.constexpr, OLD: tl.constexpr, BM: tl.constexpr,
    BF: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """What `Seen` says but where copies are, which is -1 so far, of positions [B, T]; and `last`, of one more program of each lane,
    as `topk_memory_launch.publish` returns it. seen, entry_score, entry_where, frozen: of a State, where there is one: OLD is 1;
    else 0."""
    p, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    M: tl.constexpr = EIDETIC + FADING
    E: tl.constexpr = EIDETIC * OLD
    TAIL: tl.constexpr = FADING * OLD
    memories, token, none = blocks + OLD, tl.arange(0, BT), tl.full([BT], -1, tl.int32)
    read = tl.zeros([], tl.int32)
    if OLD > 0:
        read = tl.load(seen + b).to(tl.int32)
    # where this block publishes; T: nowhere
    place = tl.zeros([], tl.int32) + T
    for t0 in range(p * WINDOW, tl.minimum(p * WINDOW + WINDOW, T), BT):
        t = t0 + token
        inside = (t < p * WINDOW + WINDOW) & (t < T)
        at = tl.load(pos + b * T + t, mask=inside, other=0)
        farthest = tl.minimum(t + read, at)
        tl.store(limit + b * T + t, tl.minimum(farthest, WINDOW - 1), mask=inside)
        if FAR > 0:
            tl.store(far_limit + b * T + t, tl.minimum(farthest, 2 * WINDOW - 1), mask=inside)
        if M > 0:
            # the last multiple of the window was published, if this span has it; before the span, what is frozen
            multiple = t - at % WINDOW
            latest = tl.where(multiple >= 0, multiple // WINDOW + OLD, OLD - 1)
            tl.store(slot + b * T + t, tl.where(at >= WINDOW, latest, -1), mask=inside)
            place = tl.minimum(place, tl.min(tl.where(inside & (at >= WINDOW) & (multiple == t), t, T), 0))
        if EIDETIC > 0:
            tl.store(first + b * (E + T) + E + t, none, mask=inside)
        if FADING > 0:
            tl.store(fading_first + b * (TAIL + T) + TAIL + t, none, mask=inside)
    if M > 0:
        own, within = (b * memories + OLD + p) * M, p < blocks
        tl.store(begin + b * memories + OLD + p, place, mask=within)
        if EIDETIC > 0:
            i = tl.arange(0, BM)
            newest = tl.minimum(place, T - 1)
            begun = newest - tl.load(pos + b * T + newest)
            end = tl.where(within & (place == T), -1, place)
            best = largest_before(score + b * T, entry_score + b * E, entry_where + b * E, end, begun, E, EIDETIC, BM)
            tl.store(row + own + i, best, mask=(i < EIDETIC) & within)
            tl.store(last + b * EIDETIC + i, best, mask=(i < EIDETIC) & (p == blocks))
        if FADING > 0:
            j = tl.arange(0, BF)
            known = (place < T) & (FADING - j <= place + read)
            tl.store(row + own + EIDETIC + j, tl.where(known, TAIL + place - FADING + j, -1), mask=(j < FADING) & within)
        if OLD > 0:
            oldest = p == 0
            tl.store(begin + b * memories, 0, mask=oldest)
            for m0 in range(0, M, BT):
                m = m0 + token
                holds = tl.load(frozen + b * M + m, mask=(m < M) & oldest, other=0) != 0
                tl.store(row + b * memories * M + m, tl.where(holds, m, -1), mask=(m < M) & oldest)
                tl.store(first + b * (E + T) + m, none, mask=(m < E) & oldest)
                tl.store(fading_first + b * (TAIL + T) + m, none, mask=(m < TAIL) & oldest)
