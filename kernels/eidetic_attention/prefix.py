"""The largest scores of a document's beginning, in Triton: a program for each publication reads all of the document before it.

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
def largest_kernel(
    score, entry_score, entry_where, stop, begun, rows, valid, T, queries, E: tl.constexpr, M: tl.constexpr, BM: tl.constexpr
):
    """The M largest among E entries and a document's tokens before `stop` [B, queries] (-1: none), in the order of time: rows
    [B, queries, M] of the entries followed by the tokens, the valid ones first, 0 behind them. begun: the document's first token;
    the entries count where it is negative. Without entries E is 0."""
    q, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i = tl.arange(0, BM)
    end, first = tl.load(stop + b * queries + q), tl.load(begun + b * queries + q)
    entered = (i < E) & (first < 0) & (end >= 0)
    entered &= tl.load(entry_where + b * E + i, mask=i < E, other=-1) >= 0
    kept = tl.sort(numbers_of(tl.load(entry_score + b * E + i, mask=entered, other=0.0), i, entered), descending=True)
    for t0 in range(tl.maximum(first, 0), end, BM):
        t = t0 + i
        here = numbers_of(tl.load(score + b * T + t, mask=t < end, other=0.0), E + t, t < end)
        if tl.max(here, 0) > tl.min(kept, 0):
            kept = tl.topk(tl.reshape(tl.join(kept, here), [2 * BM]), BM)
    found = (i < M) & (kept != NOTHING)
    in_time = tl.sort(tl.where(found, -(kept & LAST).to(tl.int32) + LAST, LAST))
    to = (b * queries + q) * M + i
    tl.store(rows + to, tl.where(in_time == LAST, 0, in_time), mask=i < M)
    tl.store(valid + to, in_time != LAST, mask=i < M)
