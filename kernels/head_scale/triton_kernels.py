"""Scaling of each head's vector in Triton: forward and backward, heads as rows.

Shape suffixes: R rows, D width.
"""

import triton
import triton.language as tl


@triton.jit
def block_offsets(rows, D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr):
    """This program's rows, their memory offsets, and the mask of existing elements."""
    row, d = tl.program_id(0) * BR + tl.arange(0, BR), tl.arange(0, BD)
    return row, row[:, None].to(tl.int64) * D + d[None, :], (row < rows)[:, None] & (d < D)[None, :]


@triton.jit
def head_scale_forward_kernel(x, scale, y, rows, D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr):
    """y [R, D]."""
    row, at, inside = block_offsets(rows, D, BR, BD)
    factor = tl.load(scale + row, mask=row < rows, other=0.0)
    x_rd = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + at, (x_rd * factor[:, None]).to(y.dtype.element_ty), mask=inside)


@triton.jit
def head_scale_backward_kernel(x, scale, dy, dx, dscale, rows, D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr):
    """dx [R, D] and dscale [R]."""
    row, at, inside = block_offsets(rows, D, BR, BD)
    factor = tl.load(scale + row, mask=row < rows, other=0.0)
    x_rd = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    dy_rd = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(dx + at, (dy_rd * factor[:, None]).to(dx.dtype.element_ty), mask=inside)
    tl.store(dscale + row, tl.sum(dy_rd * x_rd, 1), mask=row < rows)
