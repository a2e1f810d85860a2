"""The WY representation of the delta rule in Triton: computes u_t, the value that token t writes to the state.

Shape suffixes as in `gated_linear_attention.triton_kernels`: X is d_key, Y d_value.

With u as values, the delta rule is gated linear attention with one gate per token, so the kernels of
`baton.kernels.gated_linear_attention.triton_kernels` compute the output. In a chunk, u solves (I + A) u = beta (v - decay S^T k),
where A is the strictly lower triangular part of beta decay k k^T (see `chunked`). (I + A)^-1 (see `triangular_inverse`) depends
only on keys and gates, so only two products per chunk depend on the state. Where keys are similar to each other, u is a small
difference of large terms, so the operands of products with the inverse are kept more precisely than in bfloat16.

Row strides are compile-time constants, so that the addresses of a tile's rows differ by constants and take few registers.

A long sequence with few heads is split into pieces that are processed in parallel. A piece maps the state S to M S + add. M is the
result for a unit state without values, so all pieces are first processed with d_key additional columns. `wy_fold_kernel` then
computes the entering state of each piece, and the pieces are processed again from these states. In the backward pass, gradients of
states are multiplied by M^T.
"""

import triton
import triton.language as tl

from baton.kernels.delta_rule.triangular_inverse import invert_unit_lower, store_inverse
from baton.kernels.gated_linear_attention.triton_common import (
    NONE,
    chunk_decay,
    decay_from_start,
    decay_to_end,
    dot,
    last_gate_sum,
    last_position,
    load_gate_sums,
    load_positions,
    load_rows,
    load_tokens,
    round_operand,
    store_tokens,
)


@triton.jit
def apply_inverse(inverse, square, x, TRANSPOSED: tl.constexpr, DOT_DTYPE: tl.constexpr, C: tl.constexpr):
    """inverse x, of twice DOT_DTYPE's digits. inverse: a chunk's, as `wy_inverse_kernel` leaves it; square: where its elements
    lie."""
    if DOT_DTYPE is None:
        whole = tl.load(inverse + square)
        return tl.dot(tl.trans(whole) if TRANSPOSED else whole, x, input_precision="ieee")
    else:
        high, low = tl.load(inverse + square), tl.load(inverse + C * C + square)
        if TRANSPOSED:
            high, low = tl.trans(high), tl.trans(low)
        x_high = x.to(DOT_DTYPE)
        x_low = (x - x_high.to(tl.float32)).to(DOT_DTYPE)
        return tl.dot(high, x_high, tl.dot(low, x_high, tl.dot(high, x_low)))


@triton.jit
def wy_inverse_kernel(
    k, beta, sums, pos, out, T, chunks, k_batch, k_row: tl.constexpr, k_head, beta_batch, beta_row: tl.constexpr, beta_head,
    X: tl.constexpr, H: tl.constexpr, GATE: tl.constexpr, HAS_POS: tl.constexpr, DOT_DTYPE: tl.constexpr,
    C: tl.constexpr, BX: tl.constexpr,
):  # fmt: skip
    """(I + A)^-1 of each chunk: float32 [B, H, N, 1, C, C]; or of DOT_DTYPE [B, H, N, 2, C, C], what is rounded and then the rest,
    which tensor cores, unlike float32, also read transposed. A first lies where its inverse will, in float32."""
    n, bh = tl.program_id(0), tl.program_id(1)
    b, h = (bh // H).to(tl.int64), bh % H
    i, begin, left = tl.arange(0, C), (n * C).to(tl.int64), T - n * C
    PLANES: tl.constexpr = 1 if DOT_DTYPE is None else 2
    planes = out + ((b * H + h) * chunks + n) * PLANES * (C * C)
    to = planes.to(tl.pointer_type(tl.float32))
    k += b * k_batch + h * k_head + begin * k_row
    beta_t = tl.load(beta + b * beta_batch + h * beta_head + (begin + i) * beta_row, mask=i < left, other=0.0).to(tl.float32)
    A = tl.zeros([C, C], tl.float32)
    for x0 in range(0, X, BX):
        k_x = load_rows(k, i, k_row, x0 + tl.arange(0, BX), left, X)
        A += dot(k_x, tl.trans(k_x), DOT_DTYPE)
    seen = i[:, None] > i[None, :]
    if HAS_POS:
        seen &= i[:, None] - i[None, :] <= load_positions(pos + b * T + begin, i, left, HAS_POS)[:, None]
    if GATE != NONE:
        summed = load_gate_sums(sums + (b * T + begin) * H + h, i, left, i, H, X, GATE)
        A *= tl.exp2(tl.where(seen, summed[:, None] - summed[None, :], 0.0).to(tl.float32))
    tl.store(to + i[:, None] * C + i[None, :], tl.where(seen, beta_t[:, None] * A, 0.0))
    tl.debug_barrier()
    inverse = invert_unit_lower(to, DOT_DTYPE, C)
    tl.debug_barrier()
    store_inverse(planes, inverse, DOT_DTYPE, C)


@triton.jit
def wy_u_kernel(
    k, v, beta, sums, pos, inverse, first, u, states, last, T, chunks, piece,
    k_batch, k_row: tl.constexpr, k_head, v_batch, v_row: tl.constexpr, v_head, beta_batch, beta_row: tl.constexpr, beta_head,
    X: tl.constexpr, Y: tl.constexpr, H: tl.constexpr, GATE: tl.constexpr, HAS_POS: tl.constexpr, HAS_FIRST: tl.constexpr,
    KEEP: tl.constexpr, DOT_DTYPE: tl.constexpr, C: tl.constexpr, BX: tl.constexpr, BY: tl.constexpr,
):  # fmt: skip
    """Of P pieces of so many chunks; first: what enters each, [B, H, P, X, Y]. If KEEP, u [B, T, H, Y], the state before each
    chunk [B, H, N, X, Y] and behind the last one; else what each piece does to the state, add and M, last [B, H, P, X, Y + X], of
    which first says nothing. BX holds all of X."""
    y, bh, p = tl.program_id(0) * BY + tl.arange(0, BY), tl.program_id(1), tl.program_id(2)
    b, h = (bh // H).to(tl.int64), bh % H
    x, i = tl.arange(0, BX), tl.arange(0, C)
    where = x[:, None] * Y + y[None, :]
    inside = (x < X)[:, None] & (y < Y)[None, :]
    square = i[:, None] * C + i[None, :]
    head = (b * H + h) * (X * Y)
    of_piece = (b * H + h) * tl.num_programs(2) + p
    k += b * k_batch + h * k_head
    v += b * v_batch + h * v_head
    beta += b * beta_batch + h * beta_head
    PLANES: tl.constexpr = 1 if DOT_DTYPE is None else 2
    inverse += (b * H + h) * chunks * PLANES * (C * C)
    states += head * chunks
    if KEEP:
        S = tl.load(first + of_piece * (X * Y) + where, mask=inside, other=0.0) if HAS_FIRST else tl.zeros([BX, BY], tl.float32)
    else:
        S = tl.where(x[:, None] == y[None, :] - Y, 1.0, 0.0)
    for step in range(p * piece, tl.minimum(chunks, (p + 1) * piece)):
        n = tl.cast(step, tl.int64)
        begin, left = n * C, T - step * C
        # before the loads: a product waits for stores, too, and so for both at once
        low = round_operand(S, DOT_DTYPE)
        if KEEP:
            tl.store(states + n * (X * Y) + where, low.to(states.dtype.element_ty), mask=inside)
        k_x = load_tokens(k + begin * k_row, i, k_row, x, left, X)
        v_t = load_tokens(v + begin * v_row, i, v_row, y, left, Y)
        beta_t = tl.load(beta + begin * beta_row + i * beta_row, mask=i < left, other=0.0).to(tl.float32)
        at = load_positions(pos + b * T + begin, i, left, HAS_POS)
        at_last = last_position(pos + b * T + begin, 0, left, C, HAS_POS)
        of_chunk = sums + (b * T + begin) * H + h
        summed = load_gate_sums(of_chunk, i, left, x, H, X, GATE)
        total = last_gate_sum(of_chunk, 0, left, H, GATE, C)
        since, until = decay_from_start(summed, at, C, HAS_POS), decay_to_end(summed, total, at_last, C, HAS_POS)
        missed = v_t - since[:, None] * dot(k_x, low, DOT_DTYPE)
        u_t = apply_inverse(inverse + n * PLANES * (C * C), square, beta_t[:, None] * missed, False, DOT_DTYPE, C)
        S *= chunk_decay(total, at_last, C, HAS_POS)
        S += dot(tl.trans(k_x), until[:, None] * u_t, DOT_DTYPE)
        if KEEP:
            store_tokens(u + ((b * T + begin) * H + h) * Y, i, H * Y, y, left, Y, u_t)
    if KEEP:
        tl.store(last + head + where, S, mask=inside & (p == tl.num_programs(2) - 1))
    else:
        to = last + of_piece * (X * (Y + X)) + x[:, None] * (Y + X) + y[None, :]
        tl.store(to, S, mask=(x < X)[:, None] & (y < Y + X)[None, :])


@triton.jit
def wy_fold_kernel(
    transitions, adds, first, arriving, pieces, X: tl.constexpr, Y: tl.constexpr, WIDTH: tl.constexpr, HAS_FIRST: tl.constexpr,
    BACKWARDS: tl.constexpr, BX: tl.constexpr, BY: tl.constexpr,
):  # fmt: skip
    """What enters each piece, arriving [B, H, P, X, Y], by transitions [B, H, P, X, Y + X] as `wy_u_kernel` leaves them; or, if
    BACKWARDS, the cotangents of what leaves each. adds: what a piece adds, [B, H, P, X, WIDTH], in its first Y columns; first: what
    enters the first piece, [B, H, X, Y], or leaves the last. In float32, and exact where M is the unit matrix."""
    y, bh = tl.program_id(0) * BY + tl.arange(0, BY), tl.program_id(1).to(tl.int64)
    i = tl.arange(0, BX)
    first += bh * (X * Y)
    transitions += bh * pieces * (X * (Y + X)) + Y
    adds += bh * pieces * (X * WIDTH)
    arriving += bh * pieces * (X * Y)
    for x0 in range(0, X, BX):
        x = x0 + i
        inside = (x < X)[:, None] & (y < Y)[None, :]
        where = x[:, None] * Y + y[None, :]
        S = tl.load(first + where, mask=inside, other=0.0) if HAS_FIRST else tl.zeros([BX, BY], tl.float32)
        tl.store(arriving + (pieces - 1 if BACKWARDS else 0) * (X * Y) + where, S, mask=inside)
    for step in range(pieces - 1):
        n = pieces - 1 - step if BACKWARDS else step
        to = arriving + (n - 1 if BACKWARDS else n + 1) * (X * Y)
        # what other lanes have stored
        tl.debug_barrier()
        for x0 in range(0, X, BX):
            x = x0 + i
            inside = (x < X)[:, None] & (y < Y)[None, :]
            S = tl.load(adds + n * (X * WIDTH) + x[:, None] * WIDTH + y[None, :], mask=inside, other=0.0)
            for z0 in range(0, X, BX):
                z = z0 + i
                rows, columns = (z[None, :], x[:, None]) if BACKWARDS else (x[:, None], z[None, :])
                M = tl.load(transitions + n * (X * (Y + X)) + rows * (Y + X) + columns, mask=(rows < X) & (columns < X), other=0.0)
                entering = arriving + n * (X * Y) + z[:, None] * Y + y[None, :]
                S += tl.dot(M, tl.load(entering, mask=(z < X)[:, None] & (y < Y)[None, :], other=0.0), input_precision="ieee")
            tl.store(to + x[:, None] * Y + y[None, :], S, mask=inside)
