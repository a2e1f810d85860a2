"""Sums over the inputs and outputs of Mamba-3's heads, in Triton: forward and backward; a run of a head's tokens per program.

Shape suffixes: B batch, T time, H heads, J inputs and outputs of a head, U = J (J - 1) / 2 pairs of them, D head_dim, C runs of
tokens.

The parameters of a head are read once per program, and what a program has of their gradients is one row, which are summed
afterwards in their order.
"""

import triton
import triton.language as tl

from baton.kernels.gate.triton_kernels import SILU, activation


@triton.jit
def block_of(start, T, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr):
    """Tokens and columns from `start` on, and which entries exist."""
    t, d = start + tl.arange(0, BT), tl.arange(0, BD)[None, :]
    return t, d, (t < T)[:, None] & (d < D)


@triton.jit
def load_of_head(base, d, J: tl.constexpr, D: tl.constexpr):
    """A head's J vectors, each [1, BD], in float32."""
    found = ()
    for j in tl.static_range(J):
        found += (tl.load(base + j * D + d, mask=d < D, other=0.0).to(tl.float32),)
    return found


@triton.jit
def zeros_of(COUNT: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr):
    found = ()
    for _ in tl.static_range(COUNT):
        found += (tl.zeros([BT, BD], tl.float32),)
    return found


@triton.jit
def store_sums(to, sums, d, FIRST: tl.constexpr, J: tl.constexpr, D: tl.constexpr):
    """Of J tiles, from the FIRST of `sums` on, the sums over tokens."""
    for j in tl.static_range(J):
        tl.store(to + j * D + d, tl.sum(sums[FIRST + j], 0)[None, :], mask=d < D)


@triton.jit
def mimo_inputs_kernel(
    x, scale, mimo_x, v, T, x_row, H: tl.constexpr, J: tl.constexpr, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr
):  # fmt: skip
    """v [B, T, J, H, D] = x times `scale` [B, T, H] and mimo_x [H, J, D]."""
    h, b = tl.program_id(0) % H, tl.program_id(1).to(tl.int64)
    t, d, inside = block_of(tl.program_id(0) // H * BT, T, D, BT, BD)
    row, factors = b * T + t, load_of_head(mimo_x + h * (J * D), d, J, D)
    scaled = tl.load(x + row[:, None] * x_row + h * D + d, mask=inside, other=0.0).to(tl.float32)
    scaled *= tl.load(scale + row * H + h, mask=t < T, other=0.0)[:, None]
    for j in tl.static_range(J):
        tl.store(v + ((row * J + j) * H + h)[:, None] * D + d, (scaled * factors[j]).to(v.dtype.element_ty), mask=inside)


@triton.jit
def mimo_inputs_backward_kernel(
    x, scale, mimo_x, dv, dx, dscale, dmimo_x, T, x_row, H: tl.constexpr, J: tl.constexpr, D: tl.constexpr, RUN: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Derivatives to all of it; that to mimo_x of each run, [B, C, H, J, D]."""
    h, n, b, runs = tl.program_id(0) % H, tl.program_id(0) // H, tl.program_id(1).to(tl.int64), tl.num_programs(0) // H
    sums = zeros_of(J, BT, BD)
    for start in range(n * RUN, n * RUN + RUN, BT):
        t, d, inside = block_of(start, T, D, BT, BD)
        row, factors = b * T + t, load_of_head(mimo_x + h * (J * D), d, J, D)
        x_td = tl.load(x + row[:, None] * x_row + h * D + d, mask=inside, other=0.0).to(tl.float32)
        scale_t = tl.load(scale + row * H + h, mask=t < T, other=0.0)[:, None]
        total, new = tl.zeros([BT, BD], tl.float32), ()
        for j in tl.static_range(J):
            dv_td = tl.load(dv + ((row * J + j) * H + h)[:, None] * D + d, mask=inside, other=0.0).to(tl.float32)
            total += dv_td * factors[j]
            new += (sums[j] + dv_td * (scale_t * x_td),)
        sums = new
        tl.store(dx + (row * H + h)[:, None] * D + d, (scale_t * total).to(dx.dtype.element_ty), mask=inside)
        tl.store(dscale + row * H + h, tl.sum(total * x_td, 1), mask=t < T)
    store_sums(dmimo_x + ((b * runs + n) * H + h) * (J * D), sums, tl.arange(0, BD)[None, :], 0, J, D)


@triton.jit
def mimo_output_kernel(
    read, x, scale, mimo_x, decay, after, D_skip, own, later, first, y, T, x_row, H: tl.constexpr, J: tl.constexpr, D: tl.constexpr,
    HAS_FIRST: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """y [B, T, J, H, D] = decay times what the token before has read, of the first token `first` [B, J, H, D], and what it itself
    has written; see `triton_launch.output_triton`."""
    h, b, U = tl.program_id(0) % H, tl.program_id(1).to(tl.int64), J * (J - 1) // 2
    t, d, inside = block_of(tl.program_id(0) // H * BT, T, D, BT, BD)
    row, factors = b * T + t, load_of_head(mimo_x + h * (J * D), d, J, D)
    one, goes_on = row * H + h, (t > 0) & (t < T)
    x_td = tl.load(x + row[:, None] * x_row + h * D + d, mask=inside, other=0.0).to(tl.float32)
    decay_t = tl.load(decay + one, mask=t < T, other=0.0)[:, None]
    after_t, skip = tl.load(after + one, mask=t < T, other=0.0), tl.load(D_skip + h)
    before = inside & (t > 0)[:, None]
    if J > 1:
        scaled = tl.load(x + (row - 1)[:, None] * x_row + h * D + d, mask=before, other=0.0).to(tl.float32)
        scaled *= tl.load(scale + one - H, mask=goes_on, other=0.0)[:, None]
    for i in tl.static_range(J):
        was = tl.load(read + (((row - 1) * J + i) * H + h)[:, None] * D + d, mask=before, other=0.0).to(tl.float32)
        if i + 1 < J:
            missed = tl.zeros([BT, BD], tl.float32)
            for j in tl.static_range(i + 1, J):
                of_pair = later + (one - H) * U + i * (2 * J - i - 1) // 2 + j - i - 1
                missed += tl.load(of_pair, mask=goes_on, other=0.0)[:, None] * factors[j]
            was += missed * scaled
        if HAS_FIRST:
            was += tl.load(first + ((b * J + i) * H + h) * D + d, mask=inside & (t == 0)[:, None], other=0.0)
        itself = skip * factors[i]
        for j in tl.static_range(J):
            weight = after_t * tl.load(own + one * (J * J) + i * J + j, mask=t < T, other=0.0)
            itself += weight[:, None] * factors[j]
        y_td = decay_t * was + itself * x_td
        tl.store(y + ((row * J + i) * H + h)[:, None] * D + d, y_td.to(y.dtype.element_ty), mask=inside)


@triton.jit
def mimo_output_backward_kernel(
    read, x, scale, mimo_x, decay, after, D_skip, own, later, first, dy, dread, dx, dscale, dmimo_x, ddecay, dafter, dskip, down,
    dlater, dfirst, T, x_row, H: tl.constexpr, J: tl.constexpr, D: tl.constexpr, HAS_FIRST: tl.constexpr, RUN: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Derivatives to all of it; that to mimo_x of each run, [B, C, H, J, D], and that to D_skip of each token, [B, T, H]."""
    h, n, b, runs = tl.program_id(0) % H, tl.program_id(0) // H, tl.program_id(1).to(tl.int64), tl.num_programs(0) // H
    skip, sums, U = tl.load(D_skip + h), zeros_of(J, BT, BD), J * (J - 1) // 2
    for start in range(n * RUN, n * RUN + RUN, BT):
        t, d, inside = block_of(start, T, D, BT, BD)
        row, factors = b * T + t, load_of_head(mimo_x + h * (J * D), d, J, D)
        one, following = row * H + h, t + 1 < T
        x_td = tl.load(x + row[:, None] * x_row + h * D + d, mask=inside, other=0.0).to(tl.float32)
        scale_t = tl.load(scale + one, mask=t < T, other=0.0)[:, None]
        after_t = tl.load(after + one, mask=t < T, other=0.0)
        next_decay = tl.load(decay + one + H, mask=following, other=0.0)[:, None]
        of_decay, of_first = tl.zeros([BT], tl.float32), tl.zeros([BT], tl.float32)
        of_after, of_skip = tl.zeros([BT], tl.float32), tl.zeros([BT], tl.float32)
        if HAS_FIRST:
            begins = inside & (t == 0)[:, None]
            decay_t = tl.load(decay + one, mask=t == 0, other=0.0)[:, None]
        # of x times mimo_x_j, and of the same times `scale`
        to_x, to_scaled = zeros_of(J, BT, BD), zeros_of(J, BT, BD)
        for i in tl.static_range(J):
            at = ((row * J + i) * H + h)[:, None] * D + d
            dy_td = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
            next_dy = tl.load(dy + at + J * H * D, mask=inside & following[:, None], other=0.0).to(tl.float32)
            dread_td = next_decay * next_dy
            tl.store(dread + at, dread_td.to(dread.dtype.element_ty), mask=inside)
            new, new_scaled = (), ()
            dy_x, dread_x = dy_td * x_td, dread_td * (scale_t * x_td)
            was = tl.load(read + at, mask=inside, other=0.0).to(tl.float32)
            missed = tl.zeros([BT, BD], tl.float32)
            for j in tl.static_range(J):
                own_t = tl.load(own + one * (J * J) + i * J + j, mask=t < T, other=0.0)
                dweight = tl.sum(dy_x * factors[j], 1)
                of_after += own_t * dweight
                weight = after_t * own_t
                if i == j:
                    weight, of_skip = weight + skip, of_skip + dweight
                tl.store(down + one * (J * J) + i * J + j, after_t * dweight, mask=t < T)
                new += (to_x[j] + weight[:, None] * dy_td,)
                if j > i:
                    of_pair = one * U + i * (2 * J - i - 1) // 2 + j - i - 1
                    later_t = tl.load(later + of_pair, mask=t < T, other=0.0)[:, None]
                    missed += later_t * factors[j]
                    tl.store(dlater + of_pair, tl.sum(dread_x * factors[j], 1), mask=t < T)
                    new_scaled += (to_scaled[j] + later_t * dread_td,)
                else:
                    new_scaled += (to_scaled[j],)
            to_x, to_scaled = new, new_scaled
            of_decay += tl.sum(next_dy * (was + missed * (scale_t * x_td)), 1)
            if HAS_FIRST:
                at_first = ((b * J + i) * H + h + t * 0)[:, None] * D + d
                of_first += tl.sum(dy_td * tl.load(first + at_first, mask=begins, other=0.0), 1)
                tl.store(dfirst + at_first, decay_t * dy_td, mask=begins)
        dx_td, dscale_td, new = tl.zeros([BT, BD], tl.float32), tl.zeros([BT, BD], tl.float32), ()
        for j in tl.static_range(J):
            both = to_x[j] + scale_t * to_scaled[j]
            dx_td, dscale_td = dx_td + both * factors[j], dscale_td + to_scaled[j] * factors[j]
            new += (sums[j] + both * x_td,)
        sums = new
        tl.store(dx + one[:, None] * D + d, dx_td.to(dx.dtype.element_ty), mask=inside)
        tl.store(dscale + one, tl.sum(dscale_td * x_td, 1), mask=t < T)
        tl.store(dafter + one, of_after, mask=t < T)
        tl.store(dskip + one, of_skip, mask=t < T)
        tl.store(ddecay + one + H, of_decay, mask=following)
        tl.store(ddecay + one, of_first, mask=t == 0)
    store_sums(dmimo_x + ((b * runs + n) * H + h) * (J * D), sums, tl.arange(0, BD)[None, :], 0, J, D)


@triton.jit
def gated_sum_kernel(
    y, z, mimo_z, mimo_o, total, T, z_row, H: tl.constexpr, J: tl.constexpr, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr
):  # fmt: skip
    """total [B, T, H, D] = sum_j mimo_o_j y_j silu(z mimo_z_j), of y [B, T, J, H, D]."""
    h, b = tl.program_id(0) % H, tl.program_id(1).to(tl.int64)
    t, d, inside = block_of(tl.program_id(0) // H * BT, T, D, BT, BD)
    row = b * T + t
    of_z, of_o = load_of_head(mimo_z + h * (J * D), d, J, D), load_of_head(mimo_o + h * (J * D), d, J, D)
    z_td = tl.load(z + row[:, None] * z_row + h * D + d, mask=inside, other=0.0).to(tl.float32)
    found = tl.zeros([BT, BD], tl.float32)
    for j in tl.static_range(J):
        y_td = tl.load(y + ((row * J + j) * H + h)[:, None] * D + d, mask=inside, other=0.0).to(tl.float32)
        act, _ = activation(z_td * of_z[j], SILU)
        found += of_o[j] * y_td * act
    tl.store(total + (row * H + h)[:, None] * D + d, found.to(total.dtype.element_ty), mask=inside)


@triton.jit
def gated_sum_backward_kernel(
    y, z, mimo_z, mimo_o, dtotal, dy, dz, dmimo, T, z_row, dtotal_row, H: tl.constexpr, J: tl.constexpr, D: tl.constexpr,
    RUN: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Derivatives to all of it; those to mimo_z and mimo_o of each run, [B, C, H, 2, J, D]."""
    h, n, b, runs = tl.program_id(0) % H, tl.program_id(0) // H, tl.program_id(1).to(tl.int64), tl.num_programs(0) // H
    sums = zeros_of(2 * J, BT, BD)
    for start in range(n * RUN, n * RUN + RUN, BT):
        t, d, inside = block_of(start, T, D, BT, BD)
        row, of_head = b * T + t, h * (J * D)
        of_z, of_o = load_of_head(mimo_z + of_head, d, J, D), load_of_head(mimo_o + of_head, d, J, D)
        z_td = tl.load(z + row[:, None] * z_row + h * D + d, mask=inside, other=0.0).to(tl.float32)
        dtotal_td = tl.load(dtotal + row[:, None] * dtotal_row + h * D + d, mask=inside, other=0.0).to(tl.float32)
        dz_td, to_z, to_o = tl.zeros([BT, BD], tl.float32), (), ()
        for j in tl.static_range(J):
            at = ((row * J + j) * H + h)[:, None] * D + d
            y_td = tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
            act, slope = activation(z_td * of_z[j], SILU)
            dgate = dtotal_td * of_o[j] * y_td * slope
            tl.store(dy + at, (dtotal_td * act * of_o[j]).to(dy.dtype.element_ty), mask=inside)
            dz_td += dgate * of_z[j]
            to_z += (sums[j] + dgate * z_td,)
            to_o += (sums[J + j] + dtotal_td * act * y_td,)
        sums = to_z + to_o
        tl.store(dz + (row * H + h)[:, None] * D + d, dz_td.to(dz.dtype.element_ty), mask=inside)
    to = dmimo + ((b * runs + n) * H + h) * (2 * J * D)
    store_sums(to, sums, tl.arange(0, BD)[None, :], 0, J, D)
    store_sums(to + J * D, sums, tl.arange(0, BD)[None, :], J, J, D)
