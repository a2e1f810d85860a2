"""A norm beside a gate in Triton: forward and backward, a block of tokens for one of their rows per program.

Shape suffixes: R tokens, D width of a row; a token has H rows.

A program of the backward pass loops over several blocks of tokens and accumulates their contributions to the gradients of weight
and skip in registers, in order; one row per program remains to be summed afterwards.
"""

import triton
import triton.language as tl

from baton.kernels.gate.triton_kernels import activation


@triton.jit
def load_block(base, row, column, inside, ROW):
    """float32 [R, D]; zeros where nothing is. ROW: numbers between tokens."""
    return tl.load(base + row[:, None].to(tl.int64) * ROW + column[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def load_weights(weight, skip, h, column, D: tl.constexpr, PER_ROW: tl.constexpr, CHANNEL: tl.constexpr, BD: tl.constexpr):
    """The weight, and the skip's factors, [D]."""
    d, factors = tl.arange(0, BD), tl.zeros([BD], tl.float32)
    w = tl.load(weight + (column if PER_ROW else d), mask=d < D, other=0.0)
    if CHANNEL > 0:
        factors = tl.load(skip + column // CHANNEL, mask=d < D, other=0.0)
    return w, factors


@triton.jit(do_not_specialize=["rows"])
def gated_norm_forward_kernel(
    x, z, u, weight, skip, y, scale, mean, rows, eps, x_row, z_row, u_row, H,
    D: tl.constexpr, KIND: tl.constexpr, GATE_FIRST: tl.constexpr, CENTER: tl.constexpr, PER_ROW: tl.constexpr,
    CHANNEL: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """y [R, H D]; what each row was multiplied with, [R, H], and (CENTER) its mean. x, z, u: `_row` numbers between tokens.

    PER_ROW: a token's rows have weights of their own. CHANNEL: columns that a factor of the skip is for; 0: no skip.
    """
    h, row, d = tl.program_id(1), tl.program_id(0) * BR + tl.arange(0, BR), tl.arange(0, BD)
    column, inside = h * D + d, (row < rows)[:, None] & (d < D)[None, :]
    w, factors = load_weights(weight, skip, h, column, D, PER_ROW, CHANNEL, BD)
    x_rd = load_block(x, row, column, inside, x_row)
    act, _ = activation(load_block(z, row, column, inside, z_row), KIND)
    if CHANNEL > 0:
        x_rd += load_block(u, row, column, inside, u_row) * factors[None, :]
    if GATE_FIRST:
        x_rd *= act
    if CENTER:
        middle = tl.sum(x_rd, 1) / D
        tl.store(mean + row.to(tl.int64) * H + h, middle, mask=row < rows)
        x_rd = tl.where(inside, x_rd - middle[:, None], 0.0)
    factor = 1.0 / tl.sqrt(tl.sum(x_rd * x_rd, 1) / D + eps)
    tl.store(scale + row.to(tl.int64) * H + h, factor, mask=row < rows)
    y_rd = x_rd * factor[:, None] * w[None, :]
    if not GATE_FIRST:
        y_rd *= act
    at = row[:, None].to(tl.int64) * (H * D) + column[None, :]
    tl.store(y + at, y_rd.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "blocks"])
def gated_norm_backward_kernel(
    x, z, u, weight, skip, scale, mean, dy, dx, dz, du, dweight, dskip, rows, blocks, x_row, z_row, u_row, dy_row, dz_row, H,
    D: tl.constexpr, KIND: tl.constexpr, GATE_FIRST: tl.constexpr, CENTER: tl.constexpr, PER_ROW: tl.constexpr,
    CHANNEL: tl.constexpr, AHEAD: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """dx, dz and du [R, H D], and this program's shares of the gradients of the weight and of the skip's factors, [programs, H, D].
    x, z, u, dy and dz: `_row` numbers between tokens.

    blocks: of tokens, of a program; AHEAD: of which so many are loaded ahead of the one that is computed.
    """
    h, d = tl.program_id(1), tl.arange(0, BD)
    column = h * D + d
    w, factors = load_weights(weight, skip, h, column, D, PER_ROW, CHANNEL, BD)
    share, skip_share = tl.zeros([BD], tl.float32), tl.zeros([BD], tl.float32)
    for n in tl.range(tl.program_id(0) * blocks, (tl.program_id(0) + 1) * blocks, num_stages=AHEAD + 1):
        row = n * BR + tl.arange(0, BR)
        inside = (row < rows)[:, None] & (d < D)[None, :]
        of_row, at = row.to(tl.int64) * H + h, row[:, None].to(tl.int64) * (H * D) + column[None, :]
        to_z = row[:, None].to(tl.int64) * dz_row + column[None, :]
        factor = tl.load(scale + of_row, mask=row < rows, other=0.0)
        x_rd, dy_rd = load_block(x, row, column, inside, x_row), load_block(dy, row, column, inside, dy_row)
        act, slope = activation(load_block(z, row, column, inside, z_row), KIND)
        u_rd = x_rd
        if CHANNEL > 0:
            u_rd = load_block(u, row, column, inside, u_row)
            x_rd += u_rd * factors[None, :]
        normed = x_rd * act if GATE_FIRST else x_rd
        if CENTER:
            normed -= tl.load(mean + of_row, mask=row < rows, other=0.0)[:, None]
        normed *= factor[:, None]
        if GATE_FIRST:
            share += tl.sum(dy_rd * normed, 0)
        else:
            # y is normed w act(z)
            share += tl.sum(dy_rd * normed * act, 0)
            tl.store(dz + to_z, (dy_rd * normed * w[None, :] * slope).to(dz.dtype.element_ty), mask=inside)
            dy_rd *= act
        dnormed = dy_rd * w[None, :]
        along = tl.sum(dnormed * normed, 1) / D  # where nothing is, the weight is 0
        dx_rd = dnormed - normed * along[:, None]
        if CENTER:
            dx_rd -= (tl.sum(dnormed, 1) / D)[:, None]
        dx_rd *= factor[:, None]
        if GATE_FIRST:
            tl.store(dz + to_z, (dx_rd * x_rd * slope).to(dz.dtype.element_ty), mask=inside)
            dx_rd *= act
        tl.store(dx + at, dx_rd.to(dx.dtype.element_ty), mask=inside)
        if CHANNEL > 0:
            tl.store(du + at, (dx_rd * factors[None, :]).to(du.dtype.element_ty), mask=inside)
            skip_share += tl.sum(dx_rd * u_rd, 0)
    to = tl.program_id(0).to(tl.int64) * (H * D) + column
    tl.store(dweight + to, share, mask=d < D)
    if CHANNEL > 0:
        tl.store(dskip + to, skip_share, mask=d < D)
