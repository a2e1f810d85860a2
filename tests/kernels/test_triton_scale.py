"""Each head's scale in Triton against float64; on a CPU the same kernels are interpreted."""

import pytest
import torch
from support.compare import relative_error
from support.recurrences import seeded

from baton.kernels.errors import KernelError
from baton.kernels.head_scale import head_scale
from baton.kernels.head_scale.triton_launch import head_scale_triton

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LIMITS = {torch.float32: 1e-6, torch.bfloat16: 5e-3}


def compare(run, shape, dtype, *, view=False):
    g = seeded(0)
    x, scale, dy = (
        torch.randn(*shape, generator=g).to(dtype),
        torch.randn(*shape[:-1], generator=g),
        torch.randn(*shape, generator=g),
    )
    dy, found = dy.to(dtype), []
    for place, cast in (("cpu", torch.float64), (DEVICE, None)):
        own, s = (t.to(place, cast or t.dtype).requires_grad_() for t in (x, scale))
        given = torch.stack((own, own), -1)[..., 0] if view else own
        y = own * s.unsqueeze(-1) if cast else run(given, s)
        assert cast or y.dtype == dtype
        found.append([y, *torch.autograd.grad(y, (own, s), dy.to(place, y.dtype))])
    for name, want, have in zip(("y", "dx", "dscale"), *found, strict=True):
        assert relative_error(have.double().cpu(), want) <= LIMITS[dtype if name != "dscale" else torch.float32], name


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("shape", [(2, 5, 3, 17), (1, 300, 2, 64), (7, 1)], ids=str)
def test_it_is_the_product(shape, dtype):
    """Odd widths, more rows than a program has, views."""
    compare(head_scale_triton, shape, dtype, view=True)


def test_columns_of_a_projection_are_neither_copied_nor_kept():
    wide, scale = torch.randn(2, 5, 60, generator=seeded(0)).to(DEVICE), torch.randn(2, 5, 3, generator=seeded(1)).to(DEVICE)
    dy = torch.randn(2, 5, 51, generator=seeded(2)).to(DEVICE)
    found = []
    for x in (wide[..., 4:55], wide[..., 4:55].contiguous()):
        own, s = x.unflatten(-1, (3, 17)).detach().requires_grad_(), scale.clone().requires_grad_()
        y = head_scale_triton(own, s)
        assert y.grad_fn.saved_tensors[0].data_ptr() == x.data_ptr()
        found.append([y, *torch.autograd.grad(y, (own, s), dy.unflatten(-1, (3, 17)))])
    for columns, alone in zip(*found, strict=True):
        assert torch.equal(columns, alone)


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_the_cpus_form_is_the_product(dtype):
    x = torch.randn(2, 5, 3, 4, generator=seeded(0)).to(dtype)
    scale = torch.randn(2, 5, 3, generator=seeded(1))
    expected = (x.double() * scale.double().unsqueeze(-1)).to(dtype)
    torch.testing.assert_close(head_scale(x, scale), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_the_sizes_of_runs(dtype):
    compare(head_scale, (2, 1000, 64, 64), dtype)


def test_what_does_not_fit_is_refused():
    with pytest.raises(KernelError, match=r"head_scale: scale has shape \(4,\), expected \(heads,\) = \(2,\)"):
        head_scale(torch.ones(2, 5), torch.ones(4))
    with pytest.raises(KernelError, match="head_scale: x is a float"):
        head_scale(1.0, torch.ones(4))  # type: ignore[arg-type]
