"""The inverse that the delta rule's kernels compute within a program against PyTorch's in float64; interpreted on a CPU."""

import pytest
import torch
import triton
import triton.language as tl
from support.compare import relative_error
from support.recurrences import seeded

from baton.kernels.delta_rule.triangular_inverse import invert_unit_lower, store_inverse, tf32_parts

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PLANES = {torch.bfloat16: tl.bfloat16, None: None}


@triton.jit
def invert_kernel(A, to, DOT_DTYPE: tl.constexpr, C: tl.constexpr):
    A += tl.program_id(0) * C * C
    to += tl.program_id(0) * C * C * (1 if DOT_DTYPE is None else 2)
    inverse = invert_unit_lower(A, DOT_DTYPE, C)
    tl.debug_barrier()
    store_inverse(to, inverse, DOT_DTYPE, C)


@triton.jit
def tf32_parts_kernel(x, high, low, N: tl.constexpr):
    i = tl.arange(0, N)
    first, rest = tf32_parts(tl.load(x + i))
    tl.store(high + i, first)
    tl.store(low + i, rest)


@pytest.mark.parametrize("planes", PLANES)
@pytest.mark.parametrize("size", [16, 32, 64])
def test_the_part_below_the_diagonal_is_inverted(size, planes):
    """Random rows; rows that are alike, so that the inverse's largest elements are many times its smallest; and none."""
    alike = torch.ones(size, size, dtype=torch.float64) * torch.linspace(0.5, 1.5, size, dtype=torch.float64)[:, None]
    A = torch.stack([torch.randn(size, size, generator=seeded(0), dtype=torch.float64) / 4, alike, torch.zeros(size, size)])
    A = A.float().double().tril(-1)
    given = torch.where(torch.ones(size, size, dtype=torch.bool).tril(-1), A, float("nan")).float().to(DEVICE)
    found = torch.full((3, 1 if planes is None else 2, size, size), float("nan"), dtype=planes or torch.float32, device=DEVICE)
    invert_kernel[(3,)](given, found, PLANES[planes], size, num_warps=2)
    expected = torch.linalg.solve_triangular(torch.eye(size, dtype=torch.float64) + A, torch.eye(size).double(), upper=False)
    # of two parts that are rounded to 8 bits each
    limit = 2e-6 if planes is None else 2**-16
    for inverse, definition in zip(found.double().sum(1).cpu(), expected, strict=True):
        assert relative_error(inverse, definition) <= limit
        assert not inverse.triu(1).any()


def test_parts_of_a_number_are_of_11_bits_and_add_up_to_it():
    x = torch.randn(256, generator=seeded(0)) * torch.logspace(-30, 30, 256)
    x[:4] = torch.tensor([0.0, 1.0, -(2.0**-100), 1.0 + 2.0**-23])
    x = x.to(DEVICE)
    high, low = torch.empty_like(x), torch.empty_like(x)
    tf32_parts_kernel[(1,)](x, high, low, 256)
    assert torch.equal(high + low, x)
    assert not (high.view(torch.int32) & 0x1FFF).any()
    assert (low.abs() <= high.abs() * 2.0**-11).all()
