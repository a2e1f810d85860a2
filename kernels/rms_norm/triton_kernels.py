"""RMSNorm in Triton: forward and backward, a block of rows per program.

Shape suffixes: R rows, D width.

A program of the backward pass loops over several blocks of rows and accumulates their contributions to the weight's gradient in
registers, in order; one row per program remains to be summed afterwards. With FROM_Y the backward pass recomputes the normalised
input as y / weight, so that x need not be kept; therefore no weight may be 0 there (`clamp_weight`).

Rows whose width is split over ranks need a sum over the ranks in the middle of a pass, so a pass is two kernels (rms_norm_split).
"""

import triton
import triton.language as tl

from baton.kernels.gate.triton_kernels import activation


@triton.jit
def block_offsets(n, rows, D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr):
    """Rows of the n-th block, their memory offsets, and the mask of existing elements."""
    row, d = n * BR + tl.arange(0, BR), tl.arange(0, BD)
    return row, row[:, None].to(tl.int64) * D + d[None, :], (row < rows)[:, None] & (d < D)[None, :]


@triton.jit
def clamp_weight(w):
    """The weight with magnitudes below 2^-60 replaced by 2^-60 of the same sign, so that y can be divided by it. This is far below
    the rounding of sums over features, and bfloat16 and float32 can represent the products."""
    least: tl.constexpr = 2.0**-60
    return tl.where(tl.abs(w) < least, tl.where(w < 0, -least, least), w)


@triton.jit
def rms_norm_forward_kernel(
    x, added, weight, stream, y, scale, rows, eps,
    D: tl.constexpr, ADD: tl.constexpr, SILU: tl.constexpr, FROM_Y: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """y [R, D], and what each row was multiplied with, [R]. ADD: what is normalised is x + added, which goes to stream [R, D];
    SILU: it is silu(x); FROM_Y: the backward pass will have y."""
    row, at, inside = block_offsets(tl.program_id(0), rows, D, BR, BD)
    d = tl.arange(0, BD)
    x_rd = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        total = (x_rd + tl.load(added + at, mask=inside, other=0.0).to(tl.float32)).to(stream.dtype.element_ty)
        tl.store(stream + at, total, mask=inside)
        x_rd = total.to(tl.float32)
    if SILU:
        x_rd, _ = activation(x_rd, False)
    factor = 1.0 / tl.sqrt(tl.sum(x_rd * x_rd, 1) / D + eps)
    w = tl.load(weight + d, mask=d < D, other=0.0)
    if FROM_Y:
        w = clamp_weight(w)
    tl.store(y + at, (x_rd * factor[:, None] * w[None, :]).to(y.dtype.element_ty), mask=inside)
    tl.store(scale + row, factor, mask=row < rows)


@triton.jit
def rms_norm_backward_kernel(
    x, weight, scale, dy, dstream, dx, dadded, dweight, rows,
    D: tl.constexpr, HAS_DSTREAM: tl.constexpr, ADD: tl.constexpr, SILU: tl.constexpr, FROM_Y: tl.constexpr, BLOCKS: tl.constexpr,
    AHEAD: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """dx [R, D], and this program's share of the weight's gradient, [programs, D]. HAS_DSTREAM: dx has what else reads x gives.
    ADD: dx once more, in the type of what was added. FROM_Y: x is y. AHEAD: blocks
    that are loaded ahead of the one that is computed."""
    d = tl.arange(0, BD)
    w = tl.load(weight + d, mask=d < D, other=0.0)
    if FROM_Y:
        w = clamp_weight(w)
        inverse = 1.0 / w
    share = tl.zeros([BD], tl.float32)
    for n in tl.range(tl.program_id(0) * BLOCKS, (tl.program_id(0) + 1) * BLOCKS, num_stages=AHEAD + 1):
        row, at, inside = block_offsets(n, rows, D, BR, BD)
        factor = tl.load(scale + row, mask=row < rows, other=0.0)
        x_rd = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        if SILU:
            x_rd, slope = activation(x_rd, False)
        if FROM_Y:
            normed = x_rd * inverse[None, :]
        else:
            normed = x_rd * factor[:, None]
        dy_rd = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
        share += tl.sum(dy_rd * normed, 0)
        dnormed = dy_rd * w[None, :]
        along = tl.sum(dnormed * normed, 1) / D
        dx_rd = (dnormed - normed * along[:, None]) * factor[:, None]
        if SILU:
            dx_rd *= slope
        if HAS_DSTREAM:
            dx_rd += tl.load(dstream + at, mask=inside, other=0.0)
        tl.store(dx + at, dx_rd.to(dx.dtype.element_ty), mask=inside)
        if ADD:
            tl.store(dadded + at, dx_rd.to(dadded.dtype.element_ty), mask=inside)
    tl.store(dweight + tl.program_id(0) * D + d, share, mask=d < D)


@triton.jit
def rms_norm_split_squares_kernel(x, squares, rows, D: tl.constexpr, SILU: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr):
    """Sums of this rank's squares, [R]. SILU: of silu(x)."""
    row, at, inside = block_offsets(tl.program_id(0), rows, D, BR, BD)
    x_rd = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        x_rd, _ = activation(x_rd, False)
    tl.store(squares + row, tl.sum(x_rd * x_rd, 1), mask=row < rows)


@triton.jit
def rms_norm_split_forward_kernel(
    x, weight, squares, y, rows, width, eps, D: tl.constexpr, SILU: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr
):  # fmt: skip
    """y [R, D], with all ranks' squares. width: of all ranks."""
    row, at, inside = block_offsets(tl.program_id(0), rows, D, BR, BD)
    d = tl.arange(0, BD)
    factor = 1.0 / tl.sqrt(tl.load(squares + row, mask=row < rows, other=0.0) / width + eps)
    x_rd = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        x_rd, _ = activation(x_rd, False)
    w = tl.load(weight + d, mask=d < D, other=0.0)
    tl.store(y + at, (x_rd * factor[:, None] * w[None, :]).to(y.dtype.element_ty), mask=inside)


@triton.jit
def rms_norm_split_along_kernel(
    x, weight, squares, dy, along, dweight, rows, width, eps,
    D: tl.constexpr, SILU: tl.constexpr, BLOCKS: tl.constexpr, AHEAD: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """This rank's part of the product of the normalised row and its gradient, [R], and this program's share of the weight's
    gradient, [programs, D]. AHEAD: blocks that are loaded ahead of the one that is computed."""
    d = tl.arange(0, BD)
    w = tl.load(weight + d, mask=d < D, other=0.0)
    share = tl.zeros([BD], tl.float32)
    for n in tl.range(tl.program_id(0) * BLOCKS, (tl.program_id(0) + 1) * BLOCKS, num_stages=AHEAD + 1):
        row, at, inside = block_offsets(n, rows, D, BR, BD)
        factor = 1.0 / tl.sqrt(tl.load(squares + row, mask=row < rows, other=0.0) / width + eps)
        x_rd = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        if SILU:
            x_rd, _ = activation(x_rd, False)
        product = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32) * x_rd * factor[:, None]
        share += tl.sum(product, 0)
        tl.store(along + row, tl.sum(product * w[None, :], 1), mask=row < rows)
    tl.store(dweight + tl.program_id(0) * D + d, share, mask=d < D)


@triton.jit
def rms_norm_split_backward_kernel(
    x, weight, squares, along, dy, dx, rows, width, eps, D: tl.constexpr, SILU: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr
):  # fmt: skip
    """dx [R, D], with what all ranks have along the row."""
    row, at, inside = block_offsets(tl.program_id(0), rows, D, BR, BD)
    d, exists = tl.arange(0, BD), row < rows
    factor = 1.0 / tl.sqrt(tl.load(squares + row, mask=exists, other=0.0) / width + eps)
    x_rd = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    slope = x_rd
    if SILU:
        x_rd, slope = activation(x_rd, False)
    w = tl.load(weight + d, mask=d < D, other=0.0)
    dnormed = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32) * w[None, :]
    mean = tl.load(along + row, mask=exists, other=0.0) / width
    dx_rd = (dnormed - x_rd * (factor * mean)[:, None]) * factor[:, None]
    if SILU:
        dx_rd *= slope
    tl.store(dx + at, dx_rd.to(dx.dtype.element_ty), mask=inside)
