"""Rotation of pairs by the angles of their tokens, in Triton; the backward pass rotates by the negative angles.

Shape suffixes: B batch, T tokens, H heads, K dim, P pairs.

The first 2 P channels of a head are rotated; the others, if there are any, are copied.

A program handles many heads of a few tokens, so that a token's angles are loaded once for all of them.
"""

import triton
import triton.language as tl


# for all lengths the same: a few tokens are looked at before a run's first step, and decoding has one
@triton.jit(do_not_specialize=["T"])
def rotary_angles_kernel(
    pos, quarters, cos, sin, T, magnitude,
    P: tl.constexpr, BT: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """cos, sin [T, P], float32: of the angles pos[t] * quarters[p], which are counted in quarters of a turn, times magnitude.

    Angles are float64 until whole quarters are taken off. Of what is left, at most pi / 4, Taylor's series has float32's digits.
    """
    t, p = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT), tl.arange(0, BP)
    inside = (t < T)[:, None] & (p < P)[None, :]
    position = tl.load(pos + t, mask=t < T, other=0).to(tl.float64)
    angle = position[:, None] * tl.load(quarters + p, mask=p < P, other=0.0)[None, :]
    whole = tl.floor(angle + 0.5)
    x = ((angle - whole) * 1.5707963267948966).to(tl.float32)
    square = x * x
    of_sin = x + x * square * (-1 / 6 + square * (1 / 120 + square * (-1 / 5040 + square * (1 / 362880))))
    of_cos = 1.0 + square * (-1 / 2 + square * (1 / 24 + square * (-1 / 720 + square * (1 / 40320 - square * (1 / 3628800)))))
    quarter = (whole.to(tl.int64) & 3).to(tl.int32)
    odd = (quarter & 1) == 1
    cosine, sine = tl.where(odd, of_sin, of_cos), tl.where(odd, of_cos, of_sin)
    cosine, sine = tl.where((quarter == 1) | (quarter == 2), -cosine, cosine), tl.where(quarter >= 2, -sine, sine)
    at = t[:, None] * P + p[None, :]
    tl.store(cos + at, cosine * magnitude, mask=inside)
    tl.store(sin + at, sine * magnitude, mask=inside)


@triton.jit(do_not_specialize=["T"])
def rotary_kernel(
    x, cos, sin, y, T, x_batch, x_row, x_head, y_batch, y_row, y_head,
    H: tl.constexpr, K: tl.constexpr, P: tl.constexpr, BACK: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr, BP: tl.constexpr,
    BR: tl.constexpr,
):  # fmt: skip
    """y [B, T, H, K]: x rotated; cos, sin: [B, T, P]. BACK: by the negative angles."""
    b, p = tl.program_id(2).to(tl.int64), tl.arange(0, BP)[None, None, :]
    t = (tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT))[:, None, None]
    h = (tl.program_id(1).to(tl.int64) * BH + tl.arange(0, BH))[None, :, None]
    known, of_angle = (t < T) & (p < P), (b * T + t) * P + p
    cos_t1p = tl.load(cos + of_angle, mask=known, other=0.0)
    sin_t1p = tl.load(sin + of_angle, mask=known, other=0.0)
    if BACK:
        sin_t1p = -sin_t1p
    inside = known & (h < H)
    of_x = x + b * x_batch + t * x_row + h * x_head + p
    first = tl.load(of_x, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(of_x + P, mask=inside, other=0.0).to(tl.float32)
    of_y = y + b * y_batch + t * y_row + h * y_head + p
    tl.store(of_y, (first * cos_t1p - second * sin_t1p).to(y.dtype.element_ty), mask=inside)
    tl.store(of_y + P, (second * cos_t1p + first * sin_t1p).to(y.dtype.element_ty), mask=inside)
    if K > 2 * P:
        r = 2 * P + tl.arange(0, BR)[None, None, :]
        others = (t < T) & (h < H) & (r < K)
        x_thr = tl.load(x + b * x_batch + t * x_row + h * x_head + r, mask=others, other=0.0)
        tl.store(y + b * y_batch + t * y_row + h * y_head + r, x_thr, mask=others)
