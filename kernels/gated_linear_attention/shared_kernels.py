"""The derivatives along x where all heads share what is read and what is written with, in Triton: q and k of Mamba-2.

Shape suffixes as in `triton_kernels`.

A derivative is then a sum over heads. Within a chunk `gla_shared_scores_kernel` adds the heads' scores with their decays first,
[C, C], and `gla_shared_dqk_kernel` multiplies the sum once with the keys and once with the queries. To that it adds what each head
reads of the state that enters the chunk, and what reaches the cotangent of the state behind it.

A gate's derivative within a chunk needs no product of its own: for a pair of tokens it is the pair's score times the product of its
query and its key, which is one number for all heads.

Derivatives of log-decays are stored as flows: what such a derivative grows by from a token on to the one before it in the chunk.
`gla_shared_dg_kernel` sums them.

One loop goes over the heads and, of each head, over blocks of y. Everything that a block of y adds to a derivative is added to it
on its own, so that there is no loop within the loop, and loads are pipelined from head to head.
"""

import triton
import triton.language as tl

from baton.kernels.gated_linear_attention.triton_common import (
    SCALAR,
    chunk_decay,
    decay_from_start,
    decay_to_end,
    dot,
    last_position,
    load_positions,
    load_state_block,
    pairwise_decays,
    store_tokens,
)


@triton.jit
def load_rows(base, i, row, y, rows, Y: tl.constexpr):
    """Of a chunk's tokens i, of which there are so many `rows`, columns y, [C, BY]; offsets of 32 bits take fewer registers."""
    inside = (i < rows)[:, None] & (y < Y)[None, :]
    return tl.load(base + (i[:, None] * row + y[None, :]), mask=inside, other=0.0)


@triton.jit
def load_state(base, x, y, X: tl.constexpr, Y: tl.constexpr, BX: tl.constexpr, BY: tl.constexpr):
    """As `load_state_block`; without a mask, which takes registers, if no block is cut off."""
    if X % BX == 0 and Y % BY == 0:
        return tl.load(base + x[:, None] * Y + y[None, :])
    else:
        return load_state_block(base, x, y, X, Y)


@triton.jit
def gla_shared_scores_kernel(
    rx, ry, wx, wy, sums, pos, out, flow_to, T, share, scale,
    rx_batch, rx_row, rx_head, ry_batch, ry_row: tl.constexpr, ry_head, wx_batch, wx_row, wx_head, wy_batch,
    wy_row: tl.constexpr, wy_head,
    X: tl.constexpr, Y: tl.constexpr, H: tl.constexpr, GATE: tl.constexpr, HAS_POS: tl.constexpr, DOT_DTYPE: tl.constexpr,
    C: tl.constexpr, BX: tl.constexpr, BY: tl.constexpr,
):  # fmt: skip
    """The scores along y of each `share` heads with their decays, added, [B, parts, N, C, C], and of a SCALAR the flows of pairs
    of a chunk's tokens, [B, T, H]."""
    BLOCKS: tl.constexpr = (Y + BY - 1) // BY
    n, part, b, parts = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64), tl.num_programs(1)
    begin, i = tl.cast(n * C, tl.int64), tl.arange(0, C)
    rows = tl.minimum(T - n * C, C)
    at = load_positions(pos + b * T, n * C + i, T, HAS_POS)
    known, here = tl.minimum(i, rows - 1) * H, (b * T + begin) * H
    ry += b * ry_batch + begin * ry_row
    wy += b * wy_batch + begin * wy_row
    total, flows = tl.zeros([C, C], tl.float32), tl.zeros([C], tl.float32)
    if GATE == SCALAR:
        read = tl.zeros([C, C], tl.float32)
        for x0 in range(0, X, BX):
            x = x0 + tl.arange(0, BX)
            r_x = load_rows(rx + b * rx_batch + begin * rx_row, i, rx_row, x, rows, X)
            w_x = load_rows(wx + b * wx_batch + begin * wx_row, i, wx_row, x, rows, X)
            read += dot(r_x, tl.trans(w_x), DOT_DTYPE)
        read *= scale
    for step in range(part * share * BLOCKS, tl.minimum((part + 1) * share, H) * BLOCKS):
        h, block = step // BLOCKS, step % BLOCKS
        y = block * BY + tl.arange(0, BY)
        r_y = load_rows(ry + h * ry_head, i, ry_row, y, rows, Y)
        w_y = load_rows(wy + h * wy_head, i, wy_row, y, rows, Y)
        summed = tl.load(sums + (here + h) + known) if GATE == SCALAR else tl.zeros([C], tl.float32)
        P = dot(r_y, tl.trans(w_y), DOT_DTYPE) * pairwise_decays(summed, at, C, GATE, HAS_POS)
        total += P
        if GATE == SCALAR:
            # every pair is the same number in both sums, so those on one side of a gate cancel
            pairs = P * read
            flow = tl.sum(pairs, 1) - tl.sum(pairs, 0)
            if BLOCKS > 1:
                flow += tl.where(block == 0, 0.0, flows)
                flows = flow
            tl.store(flow_to + (here + h) + i * H, flow, mask=(i < rows) & (block == BLOCKS - 1))
    to = out + ((b * parts + part) * tl.num_programs(0) + n) * (C * C)
    tl.store(to + i[:, None] * C + i[None, :], total.to(out.dtype.element_ty))


@triton.jit
def gla_shared_dqk_kernel(
    rx, ry, wx, wy, sums, pos, scores, states, cotangents, out_r, out_w, flow_to, T, chunks, share, scale,
    rx_batch, rx_row, rx_head, ry_batch, ry_row: tl.constexpr, ry_head, wx_batch, wx_row, wx_head, wy_batch,
    wy_row: tl.constexpr, wy_head,
    X: tl.constexpr, Y: tl.constexpr, H: tl.constexpr, GATE: tl.constexpr, HAS_POS: tl.constexpr, DOT_DTYPE: tl.constexpr,
    C: tl.constexpr, BX: tl.constexpr, BY: tl.constexpr,
):  # fmt: skip
    """The derivatives to rx and wx as sums over each `share` heads, [B, T, parts, X], and of a SCALAR the other flows of
    each block of x, [X / BX, B, T, H]. scores: of `gla_shared_scores_kernel`."""
    BLOCKS: tl.constexpr = (Y + BY - 1) // BY
    xs, n, parts = tl.program_id(0), tl.program_id(1), tl.cdiv(H, share)
    b, part, batch = (tl.program_id(2) // parts).to(tl.int64), tl.program_id(2) % parts, tl.num_programs(2) // parts
    begin, x, i = tl.cast(n * C, tl.int64), xs * BX + tl.arange(0, BX), tl.arange(0, C)
    rows = tl.minimum(T - n * C, C)
    at = load_positions(pos + b * T, n * C + i, T, HAS_POS)
    at_last = last_position(pos + b * T, n * C, T, C, HAS_POS)
    here = (b * T + begin) * H
    ry += b * ry_batch + begin * ry_row
    wy += b * wy_batch + begin * wy_row
    flow_to += tl.cast(xs * batch, tl.int64) * T * H
    r_x = load_rows(rx + b * rx_batch + begin * rx_row, i, rx_row, x, rows, X)
    w_x = load_rows(wx + b * wx_batch + begin * wx_row, i, wx_row, x, rows, X)
    sum_r, sum_w = tl.zeros([C, BX], tl.float32), tl.zeros([C, BX], tl.float32)
    flows = tl.zeros([C], tl.float32)
    for step in range(part * share * BLOCKS, tl.minimum((part + 1) * share, H) * BLOCKS):
        h, block = step // BLOCKS, step % BLOCKS
        y = block * BY + tl.arange(0, BY)
        of_state = ((b * H + h) * chunks + n) * (X * Y)
        S, dS = load_state(states + of_state, x, y, X, Y, BX, BY), load_state(cotangents + of_state, x, y, X, Y, BX, BY)
        r_y = load_rows(ry + h * ry_head, i, ry_row, y, rows, Y)
        w_y = load_rows(wy + h * wy_head, i, wy_row, y, rows, Y)
        if GATE == SCALAR:
            summed = tl.load(sums + (here + h) + i * H, mask=i < rows, other=0.0)
            total = tl.load(sums + (here + h) + (rows - 1) * H)
            # of [1, BX]: with a sum over one dimension alone Triton 3.6 fails for sm_100
            behind = tl.sum(tl.sum(S.to(tl.float32) * dS.to(tl.float32), 1)[None, :], 1) * chunk_decay(total, at_last, C, HAS_POS)
        else:
            summed, total = tl.zeros([C], tl.float32), 0.0
        since, until = decay_from_start(summed, at, C, HAS_POS), decay_to_end(summed, total, at_last, C, HAS_POS)
        read = dot(r_y, tl.trans(S), DOT_DTYPE)
        read *= since[:, None]
        sum_r += read
        if GATE == SCALAR:
            flow = tl.sum(r_x * read, 1) * scale
        written = dot(w_y, tl.trans(dS), DOT_DTYPE)
        written *= until[:, None]
        sum_w += written
        if GATE == SCALAR:
            reaching = tl.sum(w_x * written, 1)
            flow += tl.where(i == rows - 1, tl.sum(reaching[None, :], 1) + behind, 0.0) - reaching
            if BLOCKS > 1:
                flow += tl.where(block == 0, 0.0, flows)
                flows = flow
            tl.store(flow_to + (here + h) + i * H, flow, mask=(i < rows) & (block == BLOCKS - 1))
    P = tl.load(scores + ((b * parts + part) * chunks + n) * (C * C) + i[:, None] * C + i[None, :])
    to, t = (b * T * parts + part) * X, n * C + tl.arange(0, C)
    sum_r += dot(P, w_x, DOT_DTYPE)
    store_tokens(out_r + to, t, parts * X, x, T, X, sum_r * scale)
    sum_w += dot(tl.trans(P), r_x, DOT_DTYPE) * scale
    store_tokens(out_w + to, t, parts * X, x, T, X, sum_w)


@triton.jit
def gla_shared_dg_kernel(flows, out, T, count, H: tl.constexpr, C: tl.constexpr, BH: tl.constexpr):
    """The derivatives to the log-decays, [B, T, H]: the sum of `count` flows, each [B, T, H], from a token to its chunk's last."""
    b, batch = tl.program_id(2).to(tl.int64), tl.num_programs(2)
    t, h = tl.program_id(0) * C + tl.arange(0, C), tl.program_id(1) * BH + tl.arange(0, BH)
    inside = (t < T)[:, None] & (h < H)[None, :]
    at = (b * T + t[:, None]) * H + h[None, :]
    flow = tl.zeros([C, BH], tl.float32)
    for k in range(count):
        flow += tl.load(flows + tl.cast(k * batch, tl.int64) * T * H + at, mask=inside, other=0.0)
    tl.store(out + at, tl.cumsum(flow, 0, reverse=True), mask=inside)
