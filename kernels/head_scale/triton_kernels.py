"""Scaling of each head's vector in Triton: forward and backward, heads as rows.

Shape suffixes: R rows, D width. A token's H rows lie side by side, and tokens `_row` numbers apart.
"""

import triton
import triton.language as tl


@triton.jit
def block_offsets(rows, D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr):
    """This program's rows, their columns, and the mask of existing elements."""
    row, d = tl.program_id(0) * BR + tl.arange(0, BR), tl.arange(0, BD)
    return row, d[None, :], (row < rows)[:, None] & (d < D)[None, :]


@triton.jit
def offsets_of(row, d, H: tl.constexpr, ROW, D: tl.constexpr):
    """Memory offsets of rows whose tokens are ROW numbers apart."""
    return (row // H)[:, None].to(tl.int64) * ROW + (row % H * D)[:, None] + d


@triton.jit
def head_scale_forward_kernel(
    x, scale, y, rows, x_row, H: tl.constexpr, D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr
):  # fmt: skip
    """y [R, D]."""
    row, d, inside = block_offsets(rows, D, BR, BD)
    factor = tl.load(scale + row, mask=row < rows, other=0.0)
    x_rd = tl.load(x + offsets_of(row, d, H, x_row, D), mask=inside, other=0.0).to(tl.float32)
    tl.store(y + offsets_of(row, d, H, H * D, D), (x_rd * factor[:, None]).to(y.dtype.element_ty), mask=inside)


@triton.jit
def head_scale_backward_kernel(
    x, scale, dy, dx, dscale, rows, x_row, dy_row, H: tl.constexpr, D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr
):  # fmt: skip
    """dx [R, D] and dscale [R]."""
    row, d, inside = block_offsets(rows, D, BR, BD)
    factor = tl.load(scale + row, mask=row < rows, other=0.0)
    x_rd = tl.load(x + offsets_of(row, d, H, x_row, D), mask=inside, other=0.0).to(tl.float32)
    dy_rd = tl.load(dy + offsets_of(row, d, H, dy_row, D), mask=inside, other=0.0).to(tl.float32)
    tl.store(dx + offsets_of(row, d, H, H * D, D), (dy_rd * factor[:, None]).to(dx.dtype.element_ty), mask=inside)
    tl.store(dscale + row, tl.sum(dy_rd * x_rd, 1), mask=row < rows)
