"""The corrections of Triton's interpreter: its bfloat16 (`support.bfloat16`) equals PyTorch's bitwise, a scalar comparison can
mask a block, a constant times a tensor is a tensor, numbers are converted as PyTorch converts them, and integers that overflow are
refused (`support.interpreter`)."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from support.bfloat16 import rounded, widened
from triton.runtime.errors import InterpreterError

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU needs no interpreter")


@triton.jit
def operations(a, b, x, out, products, N: tl.constexpr):
    """a, b: bfloat16 [N, N]; x: float32; out: bfloat16 [6, N, N]; products: float32 [N, N]."""
    i = tl.arange(0, N)
    at = i[:, None] * N + i[None, :]
    a_t, b_t = tl.load(a + at), tl.load(b + at)
    tl.store(out + at, a_t + b_t)
    tl.store(out + N * N + at, a_t * b_t)
    tl.store(out + 2 * N * N + at, a_t - 0.3)
    tl.store(out + 3 * N * N + at, (a_t < b_t).to(tl.bfloat16))
    tl.store(out + 4 * N * N + at, tl.load(x + at).to(tl.bfloat16))
    tl.store(out + 5 * N * N + at, tl.maximum(a_t, b_t))
    tl.store(products + at, tl.dot(a_t, b_t))


def test_operations_are_torchs():
    g = torch.Generator().manual_seed(0)
    a, b, x = (100 * torch.randn(16, 16, generator=g) for _ in range(3))
    a, b = a.bfloat16(), b.bfloat16()
    x[0, :3] = torch.tensor([float("nan"), float("inf"), 1 + 2**-8])  # the last lies in the middle: to the even one
    out, products = torch.empty(6, 16, 16, dtype=torch.bfloat16), torch.empty(16, 16)
    operations[(1,)](a, b, x, out, products, 16)
    expected = (a + b, a * b, a - torch.tensor(0.3).bfloat16(), (a < b).bfloat16(), x.bfloat16(), torch.maximum(a, b))
    for found, want in zip(out, expected, strict=True):
        assert torch.equal(found.nan_to_num(7.0), want.nan_to_num(7.0))
    torch.testing.assert_close(products, a.float() @ b.float(), rtol=1e-5, atol=1e-2)


def test_bits_there_and_back():
    bits = np.arange(1 << 16, dtype=np.uint16)
    numbers = widened(bits)
    keep = ~np.isnan(numbers)
    assert (rounded(numbers)[keep] == bits[keep]).all()
    assert np.isnan(widened(rounded(numbers[~keep]))).all()


TWO = tl.constexpr(2.0)


@triton.jit
def masked_by_scalar(out, wanted, N: tl.constexpr):
    """out: int32 [programs, N]; one program writes."""
    program, i = tl.program_id(0), tl.arange(0, N)
    tl.store(out + program * N + i, i, mask=(i < 3) & (program == wanted))


def test_a_comparison_of_scalars_masks_a_block():
    out = torch.full((2, 4), -1, dtype=torch.int32)
    masked_by_scalar[(2,)](out, 1, 4)
    assert out.tolist() == [[-1] * 4, [0, 1, 2, -1]]


@triton.jit
def powers(out, N: tl.constexpr):
    """out: float32 [N]."""
    i = tl.arange(0, N)
    tl.store(out + i, tl.exp2(TWO * i.to(tl.float32)))


def test_a_constant_times_a_tensor_is_a_tensor():
    out = torch.empty(4)
    powers[(1,)](out, 4)
    assert out.tolist() == [1.0, 4.0, 16.0, 64.0]


@triton.jit
def doubled(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + i) * 2)


@triton.jit
def with_numbers(x, numbers, out, sorted_numbers, N: tl.constexpr):
    """x: int32 [N]; numbers, sorted_numbers: float32 [N]; out: float32 [5, N]."""
    i = tl.arange(0, N)
    x_t, numbers_t = tl.load(x + i), tl.load(numbers + i)
    tl.store(out + i, x_t / 4)
    tl.store(out + N + i, 4 * numbers_t - x_t)
    tl.store(out + 2 * N + i, 4.0 * numbers_t - 4 * x_t)
    tl.store(out + 3 * N + i, (1 - x_t) // 4 + (x_t + True))
    tl.store(out + 4 * N + i, (x_t.to(tl.int8) + 4).to(tl.float32))
    tl.store(sorted_numbers + i, tl.sort(numbers_t))


def test_numbers_beside_tensors_and_sorts_are_torchs():
    x, numbers = torch.arange(8, dtype=torch.int32), torch.rand(8, generator=torch.Generator().manual_seed(1))
    out, in_order = torch.empty(5, 8), torch.empty(8)
    with_numbers[(1,)](x, numbers, out, in_order, 8)
    # integers are divided towards zero
    whole = (torch.div(1 - x, 4, rounding_mode="trunc") + x + 1).float()
    expected = (x / 4, 4 * numbers - x, 4 * numbers - 4 * x, whole, x + 4.0)
    for found, want in zip(out, expected, strict=True):
        assert torch.equal(found, want)
    assert torch.equal(in_order, numbers.sort().values)


def test_integers_that_overflow_are_refused():
    x = torch.tensor([1, 1 << 30], dtype=torch.int32)
    with pytest.raises(InterpreterError, match="mul of int32: 2 to 2147483648"):
        doubled[(1,)](x, torch.empty_like(x), 2)
    out = torch.empty(2, dtype=torch.int64)
    doubled[(1,)](x.long(), out, 2)
    assert out.tolist() == [2, 1 << 31]
