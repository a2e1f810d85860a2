"""What products of bfloat16 lose by themselves: what is kept between launches stays float32 here, and is rounded where it is
multiplied. With all of bfloat16's rounding kernels run as `support.bfloat16` has it.

The one thing to know: within `products_are_rounded` the kernels of gated linear attention multiply as on a GPU where products are
of bfloat16, with its launch configurations.
"""

from contextlib import contextmanager

import triton
import triton.language as tl

from baton.kernels.gated_linear_attention import triton_common, triton_kernels
from baton.kernels.gated_linear_attention.triton_launch import Sum


@triton.jit
def cut(x):
    """To the nearest number that bfloat16 has, of two the even one."""
    bits = x.to(tl.float32).to(tl.uint32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def product(a, b, LOW: tl.constexpr):
    return tl.dot(cut(a), cut(b), input_precision="ieee")


@triton.jit
def product_of_two(a, b, LOW: tl.constexpr):
    high = cut(b)
    return tl.dot(cut(a), high, input_precision="ieee") + tl.dot(cut(a), cut(b - high), input_precision="ieee")


@triton.jit
def rounded(x, LOW: tl.constexpr):
    return cut(x)


@triton.jit
def from_here_on(x, C: tl.constexpr, LOW: tl.constexpr):
    return triton_common.from_here_on(x, C, None)


@contextmanager
def products_are_rounded(monkeypatch, *, twice=True):
    """twice: what is taken with twice the digits is."""
    begin = Sum.__init__

    def as_of_bfloat16(self, *arguments, low):
        config = arguments[-1]
        begin(self, *arguments, low=False)
        self.config, self.chunks = config, -(-self.length // config.chunk)
        self.common["C"] = config.chunk
        self.low = {"LOW": 1}  # any but None

    with monkeypatch.context() as patched:
        for name, function in (("product", product), ("rounded", rounded), ("from_here_on", from_here_on)):
            patched.setattr(triton_kernels, name, function)
        patched.setattr(triton_kernels, "product_of_two", product_of_two if twice else product)
        patched.setattr(Sum, "__init__", as_of_bfloat16)
        yield
