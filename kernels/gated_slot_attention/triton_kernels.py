"""Slot-wise computations of gated slot attention in Triton: write strengths from gates, weights from scores, and their gradients.

Shape suffixes: R rows, one per token and head; M slots.

There is little arithmetic on small tensors, so each kernel reads and writes every tensor once.
"""

import triton
import triton.language as tl

from baton.kernels.common.triton_prefetch import LOG2_E, sigmoid

SOFTMAX, IDENTITY, SILU, RELU, RELU2 = (tl.constexpr(n) for n in range(5))
NEAR = tl.constexpr(0.25)  # below it 1 - exp(-x) is summed up: a difference from 1 would lose the digits of what is small


@triton.jit
def slot_offsets(rows, M: tl.constexpr, BR: tl.constexpr, BM: tl.constexpr):
    """This program's offsets in [R, M], and which of them exist."""
    row, m = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR), tl.arange(0, BM)
    return row[:, None] * M + m[None, :], (row < rows)[:, None] & (m < M)[None, :]


@triton.jit
def gsa_write_strength_kernel(gates, out, rows, M: tl.constexpr, BR: tl.constexpr, BM: tl.constexpr):
    """1 - exp(gate) of [R, M]: what a slot takes in."""
    at, inside = slot_offsets(rows, M, BR, BM)
    gate = tl.load(gates + at, mask=inside, other=0.0).to(tl.float32)
    # -x (1 + x/2 (1 + x/3 (...))), whose eighth term is less than a float32's last digit
    summed = tl.zeros_like(gate) + 1.0
    for n in tl.static_range(8, 1, -1):
        summed = 1.0 + gate * (1.0 / n) * summed
    taken = tl.where(gate > -NEAR, -gate * summed, 1.0 - tl.exp2(gate * LOG2_E))
    tl.store(out + at, taken.to(out.dtype.element_ty), mask=inside)


@triton.jit
def softmax(scores, inside):
    """Over the last dimension; 0 of what does not exist."""
    scores = tl.where(inside, scores, float("-inf"))
    # a row that does not exist has no largest
    largest = tl.maximum(tl.max(scores, 1), -3e38)
    shares = tl.exp2((scores - largest[:, None]) * LOG2_E)
    return shares / tl.maximum(tl.sum(shares, 1), 1e-38)[:, None]


@triton.jit
def gsa_slot_weights_kernel(
    scores, weights, rows, M: tl.constexpr, SLOT_ACTIVATION: tl.constexpr, BR: tl.constexpr, BM: tl.constexpr
):
    """The link's weights of scores [R, M]."""
    at, inside = slot_offsets(rows, M, BR, BM)
    x = tl.load(scores + at, mask=inside, other=0.0)
    if SLOT_ACTIVATION == SOFTMAX:
        x = softmax(x, inside)
    elif SLOT_ACTIVATION == SILU:
        x = x * sigmoid(x)
    elif SLOT_ACTIVATION == RELU:
        x = tl.maximum(x, 0.0)
    elif SLOT_ACTIVATION == RELU2:
        x = tl.maximum(x, 0.0) * tl.maximum(x, 0.0)
    tl.store(weights + at, x.to(weights.dtype.element_ty), mask=inside)


@triton.jit
def gsa_slot_weights_backward_kernel(
    scores, dweights, dscores, rows, M: tl.constexpr, SLOT_ACTIVATION: tl.constexpr, BR: tl.constexpr, BM: tl.constexpr
):
    """The scores' gradient of the weights'."""
    at, inside = slot_offsets(rows, M, BR, BM)
    x, d = tl.load(scores + at, mask=inside, other=0.0), tl.load(dweights + at, mask=inside, other=0.0).to(tl.float32)
    if SLOT_ACTIVATION == SOFTMAX:
        x = softmax(x, inside)
        d = x * (d - tl.sum(x * d, 1)[:, None])
    elif SLOT_ACTIVATION == SILU:
        share = sigmoid(x)
        d *= share * (1.0 + x * (1.0 - share))
    elif SLOT_ACTIVATION == RELU:
        d = tl.where(x > 0.0, d, 0.0)
    elif SLOT_ACTIVATION == RELU2:
        d *= 2.0 * tl.maximum(x, 0.0)
    tl.store(dscores + at, d.to(dscores.dtype.element_ty), mask=inside)


@triton.jit
def gsa_gates_backward_kernel(
    gates, dg_k, dg_v, dwrite_k, dwrite_v, raw, dgates, rows, divisor, raw_row, dgates_row,
    H: tl.constexpr, LOGS: tl.constexpr, M: tl.constexpr, BR: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """The gates' gradient, [R, M]: of both passes' decays, and of what both passes write, whose strength falls by exp(gate). LOGS:
    gates are logarithms of sigmoids of raw, divided, of which the gradient is then. raw, dgates: rows of H heads."""
    at, inside = slot_offsets(rows, M, BR, BM)
    gate = tl.load(gates + at, mask=inside, other=0.0).to(tl.float32)
    written = tl.load(dwrite_k + at, mask=inside, other=0.0).to(tl.float32) + tl.load(dwrite_v + at, mask=inside, other=0.0)
    decayed = tl.load(dg_k + at, mask=inside, other=0.0) + tl.load(dg_v + at, mask=inside, other=0.0)
    found = decayed - tl.exp2(gate * LOG2_E) * written
    token, column = at // (H * M), at % (H * M)
    if LOGS:
        x = tl.load(raw + token * raw_row + column, mask=inside, other=0.0).to(tl.float32)
        found /= (1.0 + tl.exp2(LOG2_E * x)) * divisor
    tl.store(dgates + token * dgates_row + column, found.to(dgates.dtype.element_ty), mask=inside)
