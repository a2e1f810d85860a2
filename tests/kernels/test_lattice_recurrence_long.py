"""Lattice's recurrence over many tokens: norms stay within their bounds, and all numbers are finite."""

import pytest
import torch
from support.recurrences import seeded

from baton.kernels.lattice import lattice
from baton.kernels.lattice.variant import VARIANTS

every_variant = pytest.mark.parametrize("variant", VARIANTS)
either_projection = pytest.mark.parametrize("project", [True, False])
thousands = pytest.mark.parametrize("length", [2_000, pytest.param(20_000, marks=pytest.mark.long)])


def _long_run(variant, project, length, d, m):
    """In fp32 from bfloat16 inputs and S0: keys of 30, one head of random tokens, one of the same token repeated."""
    generator = seeded(16)
    q, k, v = (torch.randn(1, length, 2, size, generator=generator) for size in (m, m, d))
    k *= 30
    for x in (k, v):
        x[:, :, 1] = x[:, :1, 1]
    gamma = torch.rand(1, length, 2, generator=generator)
    S0 = torch.linalg.qr(torch.randn(2, d, m, generator=generator))[0].contiguous()
    low = [x.to(torch.bfloat16) for x in (q, k, v, gamma)]
    y, S = lattice(*low, S0, variant=variant, project=project)
    assert y.isfinite().all()
    norm = torch.linalg.vector_norm(S.double(), dim=2)
    if project:
        assert float((norm - 1).abs().max()) <= 1e-5
        return
    # A step of x = gamma |c| |h| at most takes rho^2 to rho^2 + x^2 / rho^2 at most (Pythagoras). With rho >= 1 that is no more
    # than 1 + x^2 if rho^2 < x; else its square is no more than rho^4 + 3 x^2. So rho_T^4 <= max (1 + x^2)^2 + 3 sum x^2.
    _, k, v, gamma = (x.double() for x in low)
    written = v.norm(dim=3, keepdim=True)
    intensity, h = {
        "dec": (k.abs(), k.abs().sum(3, keepdim=True) + written),
        "enc": (k.abs() + written, written),
        "sim": (k.abs(), written),
    }[variant]
    square = (gamma[..., None] * intensity * h).square()
    bound = ((1 + square).square().amax(1) + 3 * square.sum(1)) ** 0.25
    assert (norm <= bound * (1 + 1e-3)).all()
    assert (norm >= 1 - 1e-3).all()


@every_variant
@thousands
def test_gradients_of_unit_keys_reach_back_over_many_tokens_as_numbers(variant, length):
    """With projection and steps of |gamma k h| < 1. (With large keys gradients are not bounded: decoding overshoots.)"""
    generator = seeded(17)
    q, k, v = (torch.randn(1, length, 2, size, generator=generator) for size in (3, 3, 8))
    k[:, :, 1], v[:, :, 1] = k[:, :1, 1], v[:, :1, 1]
    k, v = torch.nn.functional.normalize(k, dim=3), v / 8
    S0 = torch.linalg.qr(torch.randn(2, 8, 3, generator=generator))[0].contiguous()
    leaves = [x.to(torch.bfloat16).requires_grad_() for x in (q, k, v, torch.rand(1, length, 2, generator=generator))]
    leaves.append(S0.requires_grad_())
    outputs = lattice(*leaves, variant=variant)
    for grad in torch.autograd.grad(outputs, leaves, [torch.ones_like(x) for x in outputs]):
        assert grad.isfinite().all()
        assert grad.norm() < 1e4


@every_variant
@either_projection
@thousands
def test_many_tokens_leave_numbers_and_norms_within_bounds(variant, project, length):
    _long_run(variant, project, length, 8, 3)


@pytest.mark.long
@every_variant
@either_projection
def test_a_hundred_thousand_tokens_leave_numbers_and_norms_within_bounds(variant, project):
    _long_run(variant, project, 100_000, 64, 64)
