"""Correct bfloat16 arithmetic in Triton's interpreter, which adds, multiplies and compares bfloat16 bits as integers and truncates
where a GPU rounds.

In `bfloat16_is_rounded`, an operation on bfloat16 is computed in float32 and rounded to nearest even, and matmuls multiply bfloat16
values and accumulate in float32, as tensor cores do. A kernel then computes what it computes on a GPU, up to the order of sums.
`products_of_bfloat16` makes kernels that check for a GPU use their GPU code path.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import triton.language as tl

COMPARISONS = (np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal)


def widened(bits: np.ndarray) -> np.ndarray:
    """float32 of bfloat16's bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def rounded(x: np.ndarray) -> np.ndarray:
    """bfloat16's bits of float32."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), nearest)


def _low(x: Any) -> bool:
    return bool(x.dtype.scalar == tl.bfloat16)


@contextmanager
def bfloat16_is_rounded() -> Iterator[None]:
    """Within it interpreted kernels compute with bfloat16. Not for two threads."""
    from triton.runtime import interpreter

    Builder, Handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    names = ("cast_impl", "create_fp_to_fp", "create_dot", "binary_op")
    before = {name: getattr(Builder, name) for name in names}

    def cast(self, src, wanted):
        if wanted.scalar == tl.bfloat16:
            return src if _low(src) else Handle(rounded(src.data), tl.bfloat16)
        if _low(src):
            src = Handle(widened(src.data), tl.float32)
        return src if wanted.scalar == src.dtype.scalar else before["cast_impl"](self, src, wanted)

    def from_float(self, src, wanted, mode):
        low = _low(src) or wanted.scalar == tl.bfloat16
        return cast(self, src, wanted) if low else before["create_fp_to_fp"](self, src, wanted, mode)

    def dot(self, a, b, *rest):
        a, b = (Handle(widened(x.data), tl.float32) if _low(x) else x for x in (a, b))
        return before["create_dot"](self, a, b, *rest)

    def binary(self, lhs, rhs, op):
        if not _low(lhs):
            return before["binary_op"](self, lhs, rhs, op)
        found = op(widened(lhs.data), widened(rhs.data))
        return Handle(found, tl.int1) if op in COMPARISONS else Handle(rounded(found), tl.bfloat16)

    for name, function in zip(names, (cast, from_float, dot, binary), strict=True):
        setattr(Builder, name, function)
    # Triton 3.6 has none, though scalars are made of it
    scalar = getattr(Builder, "get_bf16", None)
    Builder.get_bf16 = lambda self, value: Handle(rounded(np.array([value], np.float32)), tl.bfloat16)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(Builder, name, function)
        if scalar is None:
            del Builder.get_bf16
        else:
            Builder.get_bf16 = scalar


def products_of_bfloat16(monkeypatch) -> None:
    """Gated linear attention's kernels and the delta rule's multiply as on a GPU, of q, k and v of 16 bits."""
    monkeypatch.setattr("baton.kernels.gated_linear_attention.launch_args.on_gpu", lambda x: True)
