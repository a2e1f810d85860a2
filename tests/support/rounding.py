"""Rounds the operands of matmuls in Triton's interpreter to bfloat16 and keeps everything between launches in float32, to measure
the error of bfloat16 matmuls alone. `support.bfloat16` rounds everywhere.

In `products_are_rounded` the kernels of gated linear attention use their code path and launch configurations for bfloat16 on a GPU.
"""

from contextlib import contextmanager

import triton
import triton.language as tl

from baton.kernels.gated_linear_attention import triton_common, triton_kernels
from baton.kernels.gated_linear_attention.triton_launch import LinearAttentionLaunch


@triton.jit
def cut(x):
    """To the nearest number that bfloat16 has, of two the even one."""
    bits = x.to(tl.float32).to(tl.uint32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def dot(a, b, DOT_DTYPE: tl.constexpr):
    return tl.dot(cut(a), cut(b), input_precision="ieee")


@triton.jit
def dot_split(a, b, DOT_DTYPE: tl.constexpr):
    high = cut(b)
    return tl.dot(cut(a), high, input_precision="ieee") + tl.dot(cut(a), cut(b - high), input_precision="ieee")


@triton.jit
def round_operand(x, DOT_DTYPE: tl.constexpr):
    return cut(x)


@triton.jit
def reverse_cumsum(x, C: tl.constexpr, DOT_DTYPE: tl.constexpr):
    return triton_common.reverse_cumsum(x, C, None)


@contextmanager
def products_are_rounded(monkeypatch, *, twice=True):
    """twice: what is taken with twice the digits is."""
    begin = LinearAttentionLaunch.__init__

    def as_of_bfloat16(self, *arguments, low):
        config = arguments[-1]
        begin(self, *arguments, low=False)
        self.config, self.chunks = config, -(-self.length // config.chunk)
        self.common["C"] = config.chunk
        self.low = {"DOT_DTYPE": 1}  # any but None

    with monkeypatch.context() as patched:
        for name, function in (("dot", dot), ("round_operand", round_operand), ("reverse_cumsum", reverse_cumsum)):
            patched.setattr(triton_kernels, name, function)
        patched.setattr(triton_kernels, "dot_split", dot_split if twice else dot)
        patched.setattr(LinearAttentionLaunch, "__init__", as_of_bfloat16)
        yield
