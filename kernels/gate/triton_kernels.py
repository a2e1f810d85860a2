"""Gated activations in Triton: forward and backward, a block of rows and columns per program.

Shape suffixes: R rows, D width.
"""

import triton
import triton.language as tl

from baton.kernels.common.triton_prefetch import LOG2_E
from baton.kernels.diagonal_scan.triton_common import softplus

SILU, GELU, SIGMOID = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def block_offsets(rows, D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr):
    """This program's rows (int64) and columns, and which entries exist."""
    r, d = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR), tl.program_id(1) * BD + tl.arange(0, BD)
    return r[:, None], d[None, :], (r < rows)[:, None] & (d < D)[None, :]


@triton.jit
def activation(z, KIND: tl.constexpr):
    """act(z) and its derivative. KIND: SILU (False is too), GELU or SIGMOID."""
    if KIND == GELU:
        share = 0.5 + 0.5 * tl.erf(z * 0.7071067811865476)
        # the normal density
        return z * share, share + z * tl.exp2(-0.5 * LOG2_E * z * z) * 0.3989422804014327
    share = 1.0 / (1.0 + tl.exp2(-LOG2_E * z))
    if KIND == SIGMOID:
        return share, share * (1.0 - share)
    return z * share, share * (1.0 + z * (1.0 - share))


@triton.jit
def gate_forward_kernel(
    x, z, y, rows, x_row, z_row, D: tl.constexpr, KIND: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr
):  # fmt: skip
    """y [R, D]; x_row, z_row: numbers between rows."""
    r, d, inside = block_offsets(rows, D, BR, BD)
    x_rd = tl.load(x + r * x_row + d, mask=inside, other=0.0).to(tl.float32)
    act, _ = activation(tl.load(z + r * z_row + d, mask=inside, other=0.0).to(tl.float32), KIND)
    tl.store(y + r * D + d, (x_rd * act).to(y.dtype.element_ty), mask=inside)


@triton.jit
def gate_backward_kernel(
    x, z, dy, dx, dz, rows, x_row, z_row, dy_row, dx_row, dz_row,
    D: tl.constexpr, KIND: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """dx and dz [R, D]."""
    r, d, inside = block_offsets(rows, D, BR, BD)
    x_rd = tl.load(x + r * x_row + d, mask=inside, other=0.0).to(tl.float32)
    dy_rd = tl.load(dy + r * dy_row + d, mask=inside, other=0.0).to(tl.float32)
    act, slope = activation(tl.load(z + r * z_row + d, mask=inside, other=0.0).to(tl.float32), KIND)
    tl.store(dx + r * dx_row + d, (dy_rd * act).to(dx.dtype.element_ty), mask=inside)
    tl.store(dz + r * dz_row + d, (dy_rd * x_rd * slope).to(dz.dtype.element_ty), mask=inside)


@triton.jit
def gate_activation_kernel(x, y, rows, divisor, x_row, D: tl.constexpr, LOGS: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr):
    """y [R, D], silu of x or (LOGS) the logarithm of its sigmoid, divided; x_row: numbers between rows."""
    r, d, inside = block_offsets(rows, D, BR, BD)
    x_rd = tl.load(x + r * x_row + d, mask=inside, other=0.0).to(tl.float32)
    if LOGS:
        y_rd = -softplus(-x_rd) / divisor
    else:
        y_rd, _ = activation(x_rd, SILU)
    tl.store(y + r * D + d, y_rd.to(y.dtype.element_ty), mask=inside)
