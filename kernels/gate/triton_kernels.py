"""Gated activations and forget gates in Triton: forward and backward, a block of rows and columns per program.

Forget gates have parameters per channel. Their blocks are tall and narrow, so that a program's sum over its rows is small beside
what it reads: it writes one row of the parameter's gradient, and the rows of all programs are summed afterwards, in their order.

Shape suffixes: R rows, D width.
"""

import triton
import triton.language as tl

from baton.kernels.common.triton_prefetch import LOG2_E
from baton.kernels.diagonal_scan.triton_common import softplus

SILU, GELU, SIGMOID = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
# factors of a forget gate: none, a number for all channels, a number per channel
NONE, NUMBER, PER_CHANNEL = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
LARGEST_FACTOR = tl.constexpr(1 - 2.0**-24)  # see `op`


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


@triton.jit
def tile_offsets(rows, D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr):
    """As `block_offsets`, and the number of the block of rows first. Programs of the same rows are neighbours, so that what runs
    at a time reads whole rows."""
    COLUMNS: tl.constexpr = (D + BD - 1) // BD
    block = (tl.program_id(0) // COLUMNS).to(tl.int64)
    r, d = block * BR + tl.arange(0, BR), tl.program_id(0) % COLUMNS * BD + tl.arange(0, BD)
    return block, r[:, None], d[None, :], (r < rows)[:, None] & (d < D)[None, :]


@triton.jit
def sigmoids(x):
    """sigmoid(x) and sigmoid(-x), of neither of which a digit is lost."""
    e = tl.exp2(-LOG2_E * tl.abs(x))
    near_1 = 1.0 / (1.0 + e)
    near_0 = e * near_1
    return tl.where(x < 0, near_0, near_1), tl.where(x < 0, near_1, near_0)


@triton.jit
def log_of_rest(k):
    """log(1 - k), of which no digit is lost where k is small: the rounding error of 1 - k divides out (Goldberg 1991, "What Every
    Computer Scientist Should Know About Floating-Point Arithmetic", theorem 4)."""
    rest = 1.0 - k
    return tl.where(rest == 1.0, -k, tl.log(rest) * (k / tl.where(rest == 1.0, 1.0, 1.0 - rest)))


@triton.jit
def load_factor(factor, number, d, D: tl.constexpr, FACTOR: tl.constexpr):
    """[1, D], or a number. FACTOR: NONE, NUMBER or PER_CHANNEL."""
    if FACTOR == PER_CHANNEL:
        return tl.minimum(tl.load(factor + d, mask=d < D, other=0.0), LARGEST_FACTOR)
    elif FACTOR == NUMBER:
        return number
    else:
        return 1.0


@triton.jit(do_not_specialize=["rows"])
def gate_log_sigmoid_forward_kernel(
    x, bias, y, rows, divisor, x_row, D: tl.constexpr, BIASED: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr
):  # fmt: skip
    """y [R, D] in float32; x_row: numbers between rows."""
    _, r, d, inside = tile_offsets(rows, D, BR, BD)
    x_rd = tl.load(x + r * x_row + d, mask=inside, other=0.0).to(tl.float32)
    if BIASED:
        x_rd += tl.load(bias + d, mask=d < D, other=0.0)
    tl.store(y + r * D + d, -softplus(-x_rd) / divisor, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def gate_log_sigmoid_backward_kernel(
    x, bias, dy, dx, dbias, rows, divisor, x_row, dy_row,
    D: tl.constexpr, BIASED: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """dx [R, D] and (BIASED) this program's row of dbias [blocks of rows, D]."""
    block, r, d, inside = tile_offsets(rows, D, BR, BD)
    x_rd = tl.load(x + r * x_row + d, mask=inside, other=0.0).to(tl.float32)
    if BIASED:
        x_rd += tl.load(bias + d, mask=d < D, other=0.0)
    _, slope = sigmoids(x_rd)
    dx_rd = tl.load(dy + r * dy_row + d, mask=inside, other=0.0) / divisor * slope
    tl.store(dx + r * D + d, dx_rd.to(dx.dtype.element_ty), mask=inside)
    if BIASED:
        tl.store(dbias + block * D + d, tl.sum(dx_rd, 0)[None, :], mask=d < D)


@triton.jit(do_not_specialize=["rows"])
def gate_forget_forward_kernel(
    q, f, factor, y, k, g, rows, scale, q_row, f_row, D: tl.constexpr, FACTOR: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr
):  # fmt: skip
    """y = silu(q), k and, in float32, g [R, D]; q_row, f_row: numbers between rows. scale: the factor that is a NUMBER."""
    _, r, d, inside = tile_offsets(rows, D, BR, BD)
    q_rd = tl.load(q + r * q_row + d, mask=inside, other=0.0).to(tl.float32)
    f_rd = tl.load(f + r * f_row + d, mask=inside, other=0.0).to(tl.float32)
    y_rd, _ = activation(q_rd, SILU)
    _, forget = sigmoids(f_rd)
    k_rd = load_factor(factor, scale, d, D, FACTOR) * forget
    if FACTOR == NONE:
        g_rd = -softplus(-f_rd)
    else:
        g_rd = log_of_rest(k_rd)
    at = r * D + d
    tl.store(y + at, y_rd.to(y.dtype.element_ty), mask=inside)
    tl.store(k + at, k_rd.to(k.dtype.element_ty), mask=inside)
    tl.store(g + at, g_rd, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def gate_forget_backward_kernel(
    q, f, factor, dy, dk, dg, dq, df, dfactor, rows, scale, q_row, f_row, dy_row, dk_row, dg_row, dq_row, df_row,
    D: tl.constexpr, FACTOR: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """dq and df [R, D] and (PER_CHANNEL) this program's row of dfactor [blocks of rows, D]."""
    block, r, d, inside = tile_offsets(rows, D, BR, BD)
    q_rd = tl.load(q + r * q_row + d, mask=inside, other=0.0).to(tl.float32)
    dy_rd = tl.load(dy + r * dy_row + d, mask=inside, other=0.0).to(tl.float32)
    _, slope = activation(q_rd, SILU)
    tl.store(dq + r * dq_row + d, (dy_rd * slope).to(dq.dtype.element_ty), mask=inside)
    f_rd = tl.load(f + r * f_row + d, mask=inside, other=0.0).to(tl.float32)
    dk_rd = tl.load(dk + r * dk_row + d, mask=inside, other=0.0).to(tl.float32)
    dg_rd = tl.load(dg + r * dg_row + d, mask=inside, other=0.0)
    keep, forget = sigmoids(f_rd)
    if FACTOR == NONE:
        df_rd = forget * (dg_rd - dk_rd * keep)
    else:
        c = load_factor(factor, scale, d, D, FACTOR)
        dk_rd = (dk_rd - dg_rd / (1.0 - c * forget)) * forget
        df_rd = -dk_rd * c * keep
        if FACTOR == PER_CHANNEL:
            tl.store(dfactor + block * D + d, tl.sum(dk_rd, 0)[None, :], mask=d < D)
    tl.store(df + r * df_row + d, df_rd.to(df.dtype.element_ty), mask=inside)
