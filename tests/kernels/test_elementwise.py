"""The in-place exponential is accurate, and its bits do not depend on an element's position."""

import pytest
import torch

from baton.kernels.common.elementwise import LOG2_E, exp2_, padded_buffer


@pytest.mark.parametrize("n_threads", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_element_has_the_same_bits_wherever_it_lies(n_threads: int, dtype: torch.dtype, threads: None):
    x = -20 * torch.rand(3 * 32768 + 1001, generator=torch.Generator().manual_seed(1), dtype=dtype)
    torch.set_num_threads(n_threads)
    whole = _exp2(x)
    for begin in (0, 1, 5, 31, 32, 777):
        for length in (1, 2, 3, 17, 31, 33, 100, 32768, 32769, 65537, 98303):
            assert torch.equal(_exp2(x[begin : begin + length]), whole[begin : begin + length]), f"{length} from {begin}"


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 4e-7), (torch.float64, 1e-15)])
def test_it_is_the_exponential(dtype: torch.dtype, tolerance: float):
    x = torch.linspace(-5, 5, 1001, dtype=dtype)
    assert torch.allclose(_exp2(x * LOG2_E).double(), torch.exp(x.double()), rtol=4 * tolerance, atol=0)
    assert _exp2(torch.tensor([-1e30, -2000.0, 0.0], dtype=dtype)).tolist() == [0.0, 0.0, 1.0]


def _exp2(x: torch.Tensor) -> torch.Tensor:
    buffer = padded_buffer(x.numel() + 50, x, x.dtype)
    buffer[: x.numel()] = x
    exp2_(buffer, x.numel())
    return buffer[: x.numel()].clone()
