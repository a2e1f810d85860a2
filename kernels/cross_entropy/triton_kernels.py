"""Vocabulary-parallel cross-entropy in Triton: partial sums of each row, and the gradient in place of the logits.

Shape suffixes: N rows, V columns of this rank.
"""

import triton
import triton.language as tl

from baton.kernels.common.triton_prefetch import LOG2_E


@triton.jit
def cross_entropy_sums_kernel(logits, labels, largest, total, own, first_column, row, V: tl.constexpr, BV: tl.constexpr):
    """See `op.Partial`. first_column: the first that is here; row: numbers between rows."""
    n = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + n) - first_column
    # a lane's own largest and sum; put together once
    most, sums = tl.full([BV], float("-inf"), tl.float32), tl.zeros([BV], tl.float32)
    for v0 in range(0, V, BV):
        v = v0 + tl.arange(0, BV)
        x = tl.load(logits + n * row + v, mask=v < V, other=float("-inf")).to(tl.float32)
        new = tl.maximum(most, x)
        base = tl.where(new == float("-inf"), 0.0, new)
        sums = sums * tl.exp2((most - base) * LOG2_E) + tl.exp2((x - base) * LOG2_E)
        most = new
    top = tl.max(most, 0)
    tl.store(largest + n, top)
    tl.store(total + n, tl.sum(sums * tl.exp2((most - top) * LOG2_E), 0))
    here = (label >= 0) & (label < V)
    tl.store(own + n, tl.load(logits + n * row + tl.where(here, label, 0), mask=here, other=0.0).to(tl.float32))


@triton.jit
def cross_entropy_gradient_kernel(logits, labels, largest, total, first_column, row, V: tl.constexpr, BV: tl.constexpr):
    """See `op.gradient`."""
    n = tl.program_id(0).to(tl.int64)
    v = tl.program_id(1) * BV + tl.arange(0, BV)
    label = tl.load(labels + n)
    x = tl.load(logits + n * row + v, mask=v < V, other=0.0).to(tl.float32)
    share = tl.exp2((x - tl.load(largest + n)) * LOG2_E) / tl.load(total + n)
    share = tl.where(label < 0, 0.0, share - tl.where(v == label - first_column, 1.0, 0.0))
    tl.store(logits + n * row + v, share.to(logits.dtype.element_ty), mask=v < V)
