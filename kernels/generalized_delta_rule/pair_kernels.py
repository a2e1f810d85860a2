"""A token of the generalized delta rule as two of the channel delta rule, and their gradients as one's, in Triton: one pass over
memory each. See `chunk_launch` for what the two are.

Shape suffixes: T time, H heads, X d_key, Y d_value; rows are tokens and heads.
"""

import triton
import triton.language as tl


@triton.jit
def row_offsets(batch_stride, row_stride, head_stride, T, H: tl.constexpr, BR: tl.constexpr):
    """Where this program's rows of a tensor [B, T, H, ..] begin, and which of them exist."""
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    t, h = (row // H).to(tl.int64), row % H
    return tl.program_id(1).to(tl.int64) * batch_stride + t * row_stride + h * head_stride, row < T * H


@triton.jit
def pair_inputs_kernel(
    r, k, a, b, g, readers, keys, gates, T,
    r_batch, r_row, r_head, k_batch, k_row, k_head, a_batch, a_row, a_head, b_batch, b_row, b_head, g_batch, g_row, g_head,
    X: tl.constexpr, H: tl.constexpr, BR: tl.constexpr, BX: tl.constexpr,
):  # fmt: skip
    """readers, keys and gates, [B, 2 T, H, X]: -exp(-g) a, b and g of the first of two tokens; r, k and 0 of the second."""
    x = tl.arange(0, BX)
    to, exists = row_offsets(tl.cast(T, tl.int64) * (2 * H * X), 2 * H * X, X, T, H, BR)
    inside = exists[:, None] & (x < X)[None, :]
    to = to[:, None] + x[None, :]
    of_a, _ = row_offsets(a_batch, a_row, a_head, T, H, BR)
    of_g, _ = row_offsets(g_batch, g_row, g_head, T, H, BR)
    a_rx = tl.load(a + of_a[:, None] + x[None, :], mask=inside, other=0.0).to(tl.float32)
    g_rx = tl.load(g + of_g[:, None] + x[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(readers + to, -tl.exp(-g_rx) * a_rx, mask=inside)
    tl.store(gates + to, g_rx.to(gates.dtype.element_ty), mask=inside)
    tl.store(gates + to + H * X, tl.zeros([BR, BX], tl.float32).to(gates.dtype.element_ty), mask=inside)
    of_r, _ = row_offsets(r_batch, r_row, r_head, T, H, BR)
    r_rx = tl.load(r + of_r[:, None] + x[None, :], mask=inside, other=0.0)
    tl.store(readers + to + H * X, r_rx.to(tl.float32), mask=inside)
    of_b, _ = row_offsets(b_batch, b_row, b_head, T, H, BR)
    b_rx = tl.load(b + of_b[:, None] + x[None, :], mask=inside, other=0.0)
    tl.store(keys + to, b_rx.to(keys.dtype.element_ty), mask=inside)
    of_k, _ = row_offsets(k_batch, k_row, k_head, T, H, BR)
    k_rx = tl.load(k + of_k[:, None] + x[None, :], mask=inside, other=0.0)
    tl.store(keys + to + H * X, k_rx.to(keys.dtype.element_ty), mask=inside)


@triton.jit
def pair_values_kernel(
    v, values, T, v_batch, v_row, v_head, Y: tl.constexpr, H: tl.constexpr, BR: tl.constexpr, BY: tl.constexpr
):  # fmt: skip
    """values [B, 2 T, H, Y]: 0 of the first of two tokens, v of the second."""
    y = tl.arange(0, BY)
    to, exists = row_offsets(tl.cast(T, tl.int64) * (2 * H * Y), 2 * H * Y, Y, T, H, BR)
    inside = exists[:, None] & (y < Y)[None, :]
    to = to[:, None] + y[None, :]
    of_v, _ = row_offsets(v_batch, v_row, v_head, T, H, BR)
    v_ry = tl.load(v + of_v[:, None] + y[None, :], mask=inside, other=0.0)
    tl.store(values + to, tl.zeros([BR, BY], tl.float32).to(values.dtype.element_ty), mask=inside)
    tl.store(values + to + H * Y, v_ry, mask=inside)


@triton.jit
def pair_gradients_kernel(
    dreaders, dkeys, dgates, a, g, dr, dk, da, db, dg, T, a_batch, a_row, a_head, g_batch, g_row, g_head,
    X: tl.constexpr, H: tl.constexpr, BR: tl.constexpr, BX: tl.constexpr,
):  # fmt: skip
    """Gradients of r, k, a, b and g, [B, T, H, X], of those of `pair_inputs_kernel`'s results."""
    x = tl.arange(0, BX)
    entries = tl.cast(T, tl.int64) * (H * X)
    to, exists = row_offsets(entries, H * X, X, T, H, BR)
    two, _ = row_offsets(2 * entries, 2 * H * X, X, T, H, BR)
    inside = exists[:, None] & (x < X)[None, :]
    to, two = to[:, None] + x[None, :], two[:, None] + x[None, :]
    of_a, _ = row_offsets(a_batch, a_row, a_head, T, H, BR)
    of_g, _ = row_offsets(g_batch, g_row, g_head, T, H, BR)
    a_rx = tl.load(a + of_a[:, None] + x[None, :], mask=inside, other=0.0).to(tl.float32)
    less = -tl.exp(-tl.load(g + of_g[:, None] + x[None, :], mask=inside, other=0.0).to(tl.float32))
    dread = tl.load(dreaders + two, mask=inside, other=0.0).to(tl.float32)
    tl.store(da + to, (dread * less).to(da.dtype.element_ty), mask=inside)
    # what reads, exp(-g) a, is computed with g too
    dg_rx = tl.load(dgates + two, mask=inside, other=0.0) - dread * less * a_rx
    tl.store(dg + to, dg_rx.to(dg.dtype.element_ty), mask=inside)
    db_rx = tl.load(dkeys + two, mask=inside, other=0.0)
    tl.store(db + to, db_rx.to(db.dtype.element_ty), mask=inside)
    dr_rx = tl.load(dreaders + two + H * X, mask=inside, other=0.0).to(tl.float32)
    tl.store(dr + to, dr_rx.to(dr.dtype.element_ty), mask=inside)
    dk_rx = tl.load(dkeys + two + H * X, mask=inside, other=0.0)
    tl.store(dk + to, dk_rx.to(dk.dtype.element_ty), mask=inside)
