"""Triton kernel of the innovation score: each row is read once and compared with the rows before it.

Scores select tokens, so a token's score must not depend on where the sequence is split. Its channels are always summed in the same
blocks, in whichever program the token is.
"""

import triton
import triton.language as tl


@triton.jit
def innovation_kernel(
    y, tail, weights, pos, score, T, C: tl.constexpr, N: tl.constexpr, NORM: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr
):  # fmt: skip
    """score [B, T], float32, of y [B, T, C]; see `op.innovation`. tail: the N rows before, [B, N, C]; weights: [N]."""
    t0, b = tl.program_id(0) * BLOCK_T, tl.program_id(1).to(tl.int64)
    t = t0 + tl.arange(0, BLOCK_T)
    pos_t = tl.load(pos + b * T + t, mask=t < T, other=0)
    acc = tl.zeros([BLOCK_T], tl.float32)
    for c0 in range(0, C, BLOCK_C):
        c = c0 + tl.arange(0, BLOCK_C)
        exists = (c < C)[None, :]
        error = tl.load(y + (b * T + t)[:, None] * C + c[None, :], mask=(t < T)[:, None] & exists, other=0.0).to(tl.float32)
        for j in tl.static_range(1, N + 1):
            row, known = t - j, (t < T) & (pos_t >= j)
            previous = tl.load(y + (b * T + row)[:, None] * C + c[None, :], mask=(known & (row >= 0))[:, None] & exists, other=0.0)
            if t0 < N:
                before = (known & (row < 0))[:, None] & exists
                previous += tl.load(tail + (b * N + N + row)[:, None] * C + c[None, :], mask=before, other=0.0)
            error -= previous.to(tl.float32) * tl.load(weights + j - 1).to(tl.float32)
        if NORM == "max":
            acc = tl.maximum(acc, tl.max(tl.abs(error), 1))
        elif NORM == "l1":
            acc += tl.sum(tl.abs(error), 1)
        else:
            acc += tl.sum(error * error, 1)
    if NORM == "l1":
        acc = acc / C
    elif NORM == "l2":
        acc = tl.sqrt(acc / C)
    tl.store(score + b * T + t, acc, mask=t < T)
