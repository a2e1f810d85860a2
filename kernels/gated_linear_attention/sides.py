"""Gated linear attention in chunks, in Triton: both ways, with every gate.

The one thing to know: forwards and backwards are derivatives of one sum. With L = sum_i rx_i^T S_i ry_i, where the state S_i =
Diag(a_i) S_{i-1} + wx_i wy_i^T decays along x, an output that is read with rx is dL/dry and one that is read with ry is dL/drx;
their gradients are the other derivatives. So there are two kernels for all of it: `plain_kernel` for what lies along y and
`gated_kernel` for what lies along x. A decay along the values is the same with x and y exchanged.

What is left of key j at query i is only ever a product of two factors of at most 1, what is left of j at a token between them and
of that token at i: blocks of 1, 2, 4, ... tokens are joined two by two, a product of matrices each. Sums of gates are made of their
own terms alone, so gates of another document do not touch a bit.

Shape suffixes: B batch, T time, H heads of the state, Q query heads (G = Q / H of each), X and Y the state's sizes, N chunks of C.
"""

import triton
import triton.language as tl

from baton.kernels.rows import LOG2_E

NONE, SCALAR, CHANNEL = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def product(a, b, LOW: tl.constexpr):
    """a b, of what is rounded to LOW, or in float32."""
    if LOW is None:
        return tl.dot(a, b, input_precision="ieee")
    else:
        return tl.dot(a.to(LOW), b.to(LOW))


@triton.jit
def sums(which, g, LOW: tl.constexpr):
    """Of g's rows those that `which` says, without rounding: three parts of eight bits hold a float32."""
    if LOW is None:
        return tl.dot(which.to(tl.float32), g, input_precision="ieee")
    else:
        ones = which.to(tl.bfloat16)
        high = g.to(tl.bfloat16)
        rest = g - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        return tl.dot(ones, low, tl.dot(ones, middle, tl.dot(ones, high)))


@triton.jit
def rows_of(base, t, row, x, T, X: tl.constexpr):
    """Tokens t, columns x, [C, BX] in fp32; zeros of what does not exist."""
    inside = (t < T)[:, None] & (x < X)[None, :]
    return tl.load(base + t[:, None].to(tl.int64) * row + x[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def leave_rows(to, t, row, x, T, X: tl.constexpr, value):
    """As `rows_of`."""
    inside = (t < T)[:, None] & (x < X)[None, :]
    tl.store(to + t[:, None].to(tl.int64) * row + x[None, :], value.to(to.dtype.element_ty), mask=inside)


@triton.jit
def positions_of(pos, t, T, HAS_POS: tl.constexpr):
    """Of tokens t in their documents; behind the last token its document goes on."""
    if HAS_POS:
        known = tl.minimum(t, T - 1)
        return tl.load(pos + known) + (t - known)
    else:
        return t * 0


@triton.jit
def gates_of(g, t, row, x, T, X: tl.constexpr, GATE: tl.constexpr):
    """Log2 of decays, [C, BX] or, of a SCALAR, [C, 1]."""
    if GATE == CHANNEL:
        return rows_of(g, t, row, x, T, X) * LOG2_E
    elif GATE == SCALAR:
        return tl.load(g + t.to(tl.int64) * row, mask=t < T, other=0.0).to(tl.float32)[:, None] * LOG2_E
    else:
        return tl.zeros([t.shape[0], 1], tl.float32)


@triton.jit
def running(x, GATE: tl.constexpr, BACKWARDS: tl.constexpr):
    """The running sum over tokens, [C, BX] or [C, 1]."""
    if GATE == CHANNEL:
        return tl.cumsum(x, 0, reverse=BACKWARDS)
    else:
        return tl.cumsum(tl.sum(x, 1), 0, reverse=BACKWARDS)[:, None]


@triton.jit
def since_begin(g, t, row, x, T, X: tl.constexpr, at, C: tl.constexpr, GATE: tl.constexpr, HAS_POS: tl.constexpr):
    """What is left of what entered the chunk at each of its tokens. at: their positions."""
    left_of = tl.exp2(running(gates_of(g, t, row, x, T, X, GATE), GATE, False))
    return tl.where((at > tl.arange(0, C))[:, None], left_of, 0.0) if HAS_POS else left_of


@triton.jit
def until_end(g, t, row, x, T, X: tl.constexpr, at_last, C: tl.constexpr, GATE: tl.constexpr, HAS_POS: tl.constexpr):
    """What is left of each token at the chunk's end. at_last: the last one's position."""
    i = tl.arange(0, C)
    after = gates_of(g, t + 1, row, x, T, X, GATE)
    left_of = tl.exp2(running(tl.where((i < C - 1)[:, None], after, 0.0), GATE, True))
    return tl.where((C - 1 - i <= at_last)[:, None], left_of, 0.0) if HAS_POS else left_of


@triton.jit
def visible(at, C: tl.constexpr, HAS_POS: tl.constexpr):
    """Which keys a query sees, its own not among them."""
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    return (i > j) & (i - j <= at[:, None]) if HAS_POS else i > j


@triton.jit
def joined(level, C: tl.constexpr):
    """Where blocks of 2^level tokens are joined two by two: which tokens' gates lie between a token and the middle, and which pairs
    meet there, both [C, C]."""
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    second = (i >> level) & 1 == 1
    between = (i >> level == j >> level) & tl.where(second, j <= i, j > i)
    return between, (i >> level == (j >> level) + 1) & second


@triton.jit
def decays_between(g, at, C: tl.constexpr, LEVELS: tl.constexpr, HAS_POS: tl.constexpr):
    """Of one gate per token, [C, 1]: what is left of token j at i, [C, C]; 1 of a token's own."""
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    found = tl.where(i == j, 1.0, 0.0)
    seen = visible(at, C, HAS_POS)
    for level in range(LEVELS):
        between, meet = joined(level, C)
        across = tl.exp2(tl.sum(tl.where(between, tl.trans(g), 0.0), 1))
        found += tl.where(meet & seen, across[:, None] * across[None, :], 0.0)
    return found


@triton.jit
def scores_kernel(
    r, w, g, pos, out, T, scale, r_batch, r_row, r_head, w_batch, w_row, w_head, g_batch, g_row, g_head,
    X: tl.constexpr, G: tl.constexpr, GATE: tl.constexpr, HAS_POS: tl.constexpr, LOW: tl.constexpr, LEVELS: tl.constexpr,
    C: tl.constexpr, BX: tl.constexpr,
):  # fmt: skip
    """What query i reads of key j, [B, Q, N C, C]; GATE NONE: without decays and whatever the documents."""
    n, q, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    h = q // G
    t, i = n * C + tl.arange(0, C), tl.arange(0, C)
    r += b * r_batch + q * r_head
    w += b * w_batch + h * w_head
    g += b * g_batch + h * g_head
    at = positions_of(pos + b * T, t, T, HAS_POS)
    found = tl.zeros([C, C], tl.float32)
    own = tl.zeros([C], tl.float32)
    for x0 in range(0, X, BX):
        x = x0 + tl.arange(0, BX)
        r_x, w_x = rows_of(r, t, r_row, x, T, X) * scale, rows_of(w, t, w_row, x, T, X)
        if GATE == CHANNEL:
            own += tl.sum(r_x * w_x, 1)
            g_x = gates_of(g, t, g_row, x, T, X, GATE)
            for level in range(LEVELS):
                between, meet = joined(level, C)
                across = tl.exp2(sums(between, g_x, LOW))
                found += tl.where(meet, product(r_x * across, tl.trans(w_x * across), LOW), 0.0)
        else:
            found += product(r_x, tl.trans(w_x), LOW)
    if GATE == CHANNEL:
        found = tl.where(visible(at, C, HAS_POS), found, 0.0) + tl.where(i[:, None] == i[None, :], own[:, None], 0.0)
    elif GATE == SCALAR:
        found *= decays_between(gates_of(g, t, g_row, i, T, X, GATE), at, C, LEVELS, HAS_POS)
    else:
        found = tl.where(visible(at, C, HAS_POS) | (i[:, None] == i[None, :]), found, 0.0)
    to = out + ((b * tl.num_programs(1) + q) * tl.num_programs(0) + n) * (C * C)
    tl.store(to + i[:, None] * C + i[None, :], found.to(out.dtype.element_ty))


@triton.jit
def states_kernel(
    a, c, g, pos, first, states, last, T, chunks, scale, a_batch, a_row, a_head, c_batch, c_row, c_head, g_batch, g_row, g_head,
    X: tl.constexpr, Y: tl.constexpr, G: tl.constexpr, GATE: tl.constexpr, HAS_POS: tl.constexpr, HAS_FIRST: tl.constexpr,
    BACKWARDS: tl.constexpr, KEEP: tl.constexpr, LOW: tl.constexpr, C: tl.constexpr, BX: tl.constexpr, BY: tl.constexpr,
):  # fmt: skip
    """The state before each chunk [B, H, N, X, Y], from first to last [B, H, X, Y]; BACKWARDS: the cotangent of the state behind
    each, a and c being what is read with, of G query heads."""
    xs, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    x = xs // tl.cdiv(Y, BY) * BX + tl.arange(0, BX)
    y = xs % tl.cdiv(Y, BY) * BY + tl.arange(0, BY)
    where = x[:, None] * Y + y[None, :]
    inside = (x < X)[:, None] & (y < Y)[None, :]
    head = (b * tl.num_programs(1) + h) * (X * Y)
    g += b * g_batch + h * g_head
    a += b * a_batch
    c += b * c_batch
    S = tl.load(first + head + where, mask=inside, other=0.0) if HAS_FIRST else tl.zeros([BX, BY], tl.float32)
    for k in range(chunks):
        n = tl.cast(chunks - 1 - k if BACKWARDS else k, tl.int64)
        t = n * C + tl.arange(0, C)
        at = positions_of(pos + b * T, t, T, HAS_POS)
        at_last = tl.max(tl.where(tl.arange(0, C) == C - 1, at, 0), 0)
        if KEEP:
            tl.store(states + (head * chunks + n * (X * Y)) + where, S.to(states.dtype.element_ty), mask=inside)
        whole = tl.exp2(tl.sum(gates_of(g, t, g_row, x, T, X, GATE), 0))[:, None]
        S *= tl.where(at_last > C - 1, whole, 0.0) if HAS_POS else whole
        if BACKWARDS:
            factor = since_begin(g, t, g_row, x, T, X, at, C, GATE, HAS_POS) * scale
            for q in range(h * G, h * G + G):
                S += product(
                    tl.trans(rows_of(a + q * a_head, t, a_row, x, T, X) * factor), rows_of(c + q * c_head, t, c_row, y, T, Y), LOW
                )
        else:
            factor = until_end(g, t, g_row, x, T, X, at_last, C, GATE, HAS_POS)
            S += product(
                tl.trans(rows_of(a + h * a_head, t, a_row, x, T, X) * factor), rows_of(c + h * c_head, t, c_row, y, T, Y), LOW
            )
    tl.store(last + head + where, S, mask=inside)


@triton.jit
def plain_kernel(
    rx, ry, wx, wy, g, pos, scores, states, cotangents, out_r, out_w, T, chunks, x_scale, y_scale,
    rx_batch, rx_row, rx_head, ry_batch, ry_row, ry_head, wx_batch, wx_row, wx_head, wy_batch, wy_row, wy_head,
    g_batch, g_row, g_head,
    X: tl.constexpr, Y: tl.constexpr, H: tl.constexpr, G: tl.constexpr, GATE: tl.constexpr, HAS_POS: tl.constexpr,
    READ: tl.constexpr, WRITE: tl.constexpr, LOW: tl.constexpr, C: tl.constexpr, BX: tl.constexpr, BY: tl.constexpr,
):  # fmt: skip
    """Derivatives along y: to ry, [B, T, Q, Y], if READ, and to wy, [B, T, H, Y], if WRITE; scores are those of rx and wx."""
    n, bh = tl.program_id(0), tl.program_id(2)
    y = tl.program_id(1) * BY + tl.arange(0, BY)
    b, h = (bh // H).to(tl.int64), bh % H
    t, i = n * C + tl.arange(0, C), tl.arange(0, C)
    at = positions_of(pos + b * T, t, T, HAS_POS)
    at_last = tl.max(tl.where(i == C - 1, at, 0), 0)
    g += b * g_batch + h * g_head
    square = i[:, None] * C + i[None, :]
    of_state = ((b * H + h) * chunks + n) * (X * Y)
    w_y = rows_of(wy + b * wy_batch + h * wy_head, t, wy_row, y, T, Y)
    grad_w = tl.zeros([C, BY], tl.float32)
    for q in range(h * G, h * G + G):
        M = tl.load(scores + ((b * (H * G) + q) * chunks + n) * (C * C) + square).to(tl.float32)
        if READ:
            found = product(M, w_y, LOW)
            for x0 in range(0, X, BX):
                x = x0 + tl.arange(0, BX)
                inside = (x < X)[:, None] & (y < Y)[None, :]
                S = tl.load(states + of_state + x[:, None] * Y + y[None, :], mask=inside, other=0.0).to(tl.float32)
                r_x = rows_of(rx + b * rx_batch + q * rx_head, t, rx_row, x, T, X) * x_scale
                found += product(r_x * since_begin(g, t, g_row, x, T, X, at, C, GATE, HAS_POS), S, LOW)
            leave_rows(out_r + (b * T * (H * G) + q) * Y, t, H * G * Y, y, T, Y, found * y_scale)
        if WRITE:
            r_y = rows_of(ry + b * ry_batch + q * ry_head, t, ry_row, y, T, Y) * y_scale
            grad_w += product(tl.trans(M), r_y, LOW)
    if WRITE:
        for x0 in range(0, X, BX):
            x = x0 + tl.arange(0, BX)
            inside = (x < X)[:, None] & (y < Y)[None, :]
            dS = tl.load(cotangents + of_state + x[:, None] * Y + y[None, :], mask=inside, other=0.0).to(tl.float32)
            w_x = rows_of(wx + b * wx_batch + h * wx_head, t, wx_row, x, T, X)
            grad_w += product(w_x * until_end(g, t, g_row, x, T, X, at_last, C, GATE, HAS_POS), dS, LOW)
        leave_rows(out_w + (b * T * H + h) * Y, t, H * Y, y, T, Y, grad_w)


@triton.jit
def gated_kernel(
    rx, ry, wx, wy, g, pos, scores, states, cotangents, out_r, out_w, out_g, T, chunks, x_scale, y_scale,
    rx_batch, rx_row, rx_head, ry_batch, ry_row, ry_head, wx_batch, wx_row, wx_head, wy_batch, wy_row, wy_head,
    g_batch, g_row, g_head,
    X: tl.constexpr, Y: tl.constexpr, H: tl.constexpr, G: tl.constexpr, GATE: tl.constexpr, HAS_POS: tl.constexpr,
    READ: tl.constexpr, WRITE: tl.constexpr, LOW: tl.constexpr, LEVELS: tl.constexpr,
    C: tl.constexpr, BX: tl.constexpr, BY: tl.constexpr,
):  # fmt: skip
    """Derivatives along x: to rx, [B, T, Q, X], if READ, and to wx, [B, T, H, X], and the log-decays, [B, T, H, X] or, of a SCALAR,
    of each block of x [X / BX, B, T, H], if WRITE; scores are those of ry and wy, without decays."""
    n, xs, bh = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    x = xs * BX + tl.arange(0, BX)
    b, h = (bh // H).to(tl.int64), bh % H
    t, i = n * C + tl.arange(0, C), tl.arange(0, C)
    at = positions_of(pos + b * T, t, T, HAS_POS)
    at_last = tl.max(tl.where(i == C - 1, at, 0), 0)
    g += b * g_batch + h * g_head
    own = i[:, None] == i[None, :]
    of_state = ((b * H + h) * chunks + n) * (X * Y)
    w_x = rows_of(wx + b * wx_batch + h * wx_head, t, wx_row, x, T, X)
    g_x = gates_of(g, t, g_row, x, T, X, GATE)
    since = since_begin(g, t, g_row, x, T, X, at, C, GATE, HAS_POS)
    seen = visible(at, C, HAS_POS)
    if GATE != CHANNEL:
        between_all = decays_between(g_x, at, C, LEVELS, HAS_POS)
    grad_w = tl.zeros([C, BX], tl.float32)
    grad_g = tl.zeros(g_x.shape, tl.float32)
    for q in range(h * G, h * G + G):
        P = tl.load(scores + ((b * (H * G) + q) * chunks + n) * (C * C) + i[:, None] * C + i[None, :]).to(tl.float32)
        r_x = rows_of(rx + b * rx_batch + q * rx_head, t, rx_row, x, T, X) * x_scale
        entered = tl.zeros([C, BX], tl.float32)
        for y0 in range(0, Y, BY):
            y = y0 + tl.arange(0, BY)
            inside = (x < X)[:, None] & (y < Y)[None, :]
            S = tl.load(states + of_state + x[:, None] * Y + y[None, :], mask=inside, other=0.0).to(tl.float32)
            r_y = rows_of(ry + b * ry_batch + q * ry_head, t, ry_row, y, T, Y) * y_scale
            entered += product(r_y, tl.trans(S), LOW)
        entered *= since
        found = entered
        if WRITE and GATE != NONE:
            grad_g += running(r_x * entered, GATE, True)
        if GATE == CHANNEL:
            diagonal = tl.sum(tl.where(own, P, 0.0), 1)[:, None]
            found += diagonal * w_x
            grad_w += diagonal * r_x
            for level in range(LEVELS):
                between, meet = joined(level, C)
                across = tl.exp2(sums(between, g_x, LOW))
                P_level = tl.where(meet & seen, P, 0.0)
                read = across * product(P_level, w_x * across, LOW)
                found += read
                if WRITE:
                    written = across * product(tl.trans(P_level), r_x * across, LOW)
                    grad_w += written
                    # a token reads in one half of a level's blocks and is read in the other
                    grad_g += sums(tl.trans(between), r_x * read + w_x * written, LOW)
        else:
            P *= between_all
            found += product(P, w_x, LOW)
            if WRITE:
                grad_w += product(tl.trans(P), r_x, LOW)
                if GATE == SCALAR:
                    both = tl.where(own, 0.0, P * product(r_x, tl.trans(w_x), LOW))
                    before = tl.cumsum(both, 1) - both
                    grad_g += tl.sum(tl.where(i[:, None] >= i[None, :], before, 0.0), 0)[:, None]
        if READ:
            leave_rows(out_r + (b * T * (H * G) + q) * X, t, H * G * X, x, T, X, found * x_scale)
    if WRITE:
        leaving = tl.zeros([C, BX], tl.float32)
        whole = tl.zeros([BX], tl.float32)
        for y0 in range(0, Y, BY):
            y = y0 + tl.arange(0, BY)
            inside = (x < X)[:, None] & (y < Y)[None, :]
            S = tl.load(states + of_state + x[:, None] * Y + y[None, :], mask=inside, other=0.0).to(tl.float32)
            dS = tl.load(cotangents + of_state + x[:, None] * Y + y[None, :], mask=inside, other=0.0).to(tl.float32)
            w_y = rows_of(wy + b * wy_batch + h * wy_head, t, wy_row, y, T, Y)
            leaving += product(w_y, tl.trans(dS), LOW)
            whole += tl.sum(S * dS, 1)
        leaving *= until_end(g, t, g_row, x, T, X, at_last, C, GATE, HAS_POS)
        leave_rows(out_w + (b * T * H + h) * X, t, H * X, x, T, X, grad_w + leaving)
        if GATE != NONE:
            total = tl.exp2(tl.sum(g_x, 0))
            total = tl.where(at_last > C - 1, total, 0.0) if HAS_POS else total
            if GATE == CHANNEL:
                behind = w_x * leaving
                grad_g += running(behind, GATE, False) - behind + (whole * total)[None, :]
                leave_rows(out_g + (b * T * H + h) * X, t, H * X, x, T, X, grad_g)
            else:
                behind = tl.sum(w_x * leaving, 1)[:, None]
                grad_g += running(behind, GATE, False) - behind + tl.sum(whole, 0) * total[None, :]
                to = out_g + ((xs * (tl.num_programs(2) // H) + b) * T * H + h)
                tl.store(to + t[:, None].to(tl.int64) * H, grad_g, mask=(t < T)[:, None])
