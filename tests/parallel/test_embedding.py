"""Embedding lookup and its gradient compared with torch's; on a CPU the GPU kernels are interpreted."""

import os
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from support.interpreter import interpreted_quickly
from torch import nn

from baton.kernels.embedding import triton_launch as kernels
from baton.parallel import embedding as embeddings
from baton.parallel.embedding import embedding
from baton.parallel.linear import fused_grad_accumulation

ROWS, WIDTH = 12, 6


def relative(found, expected):
    return float((found.detach().double() - expected).norm() / expected.norm())


@pytest.fixture(params=["autograd", "kernels"])
def taken(request, monkeypatch):
    """Who makes the gradient, on a CPU."""
    if request.param == "kernels":
        monkeypatch.setattr(embeddings, "use_triton", lambda parameter: True)
        monkeypatch.setattr(embeddings, "add_rows", kernels.add_rows_triton)
    with interpreted_quickly() if os.environ.get("TRITON_INTERPRET") == "1" else nullcontext():
        yield request.param


def case(seed, ids=(0, ROWS)):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(*ids, (3, 15), generator=g), torch.randn(3, 15, WIDTH, generator=g)


def parameter_of():
    return nn.Parameter(torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(9)))


def expected(parameter, ids, dy):
    """Rows and gradient of torch's, in float64; ids that are of no row have zeros and give none."""
    weight = F.pad(parameter.detach().double(), (0, 0, 0, 1)).requires_grad_()
    y = F.embedding(ids.where((ids >= 0) & (ids < ROWS), ROWS), weight)
    return y.detach(), torch.autograd.grad(y, weight, dy.double())[0][:ROWS]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("first", [None, 0, 24])
def test_rows_and_their_gradient(taken, first, dtype):
    """Of a whole table; of a rank's, whose first id is 0 or 24, where others' ids, and -1, have no rows."""
    parameter, begin = parameter_of(), first or 0
    ids, dy = case(0) if first is None else case(0, (begin - 3, begin + ROWS + 3))
    dy = dy.to(dtype or dy.dtype)
    y = embedding(ids, parameter, first, dtype=dtype)
    rows, gradient = expected(parameter, ids - begin, dy)
    assert y.dtype == (dtype or torch.float32)
    assert torch.equal(y, rows.to(y.dtype))
    assert relative(torch.autograd.grad(y, parameter, dy)[0], gradient) <= (1e-6 if dtype is None or taken == "kernels" else 5e-3)
    assert parameter.grad is None


def test_gradients_are_added_where_they_are(taken):
    """Three passes within `fused_grad_accumulation`, each of other ids, leave their sum in `.grad`, in one tensor all along."""
    parameter, total, places = parameter_of(), 0, set()
    with fused_grad_accumulation():
        for seed in range(3):
            ids, dy = case(seed)
            embedding(ids, parameter).backward(dy)
            total = total + expected(parameter, ids, dy)[1]
            places.add(parameter.grad.data_ptr())
    assert relative(parameter.grad, total) <= 1e-6
    assert len(places) == 1


@pytest.mark.parametrize("before", [False, True])
def test_what_else_has_a_gradient_of_it_adds_its_own(taken, before):
    """A tied head, through autograd; in `.grad` there may be something."""
    parameter, (ids, dy) = parameter_of(), case(0)
    total = expected(parameter, ids, dy)[1] + 3.0
    if before:
        parameter.grad, total = torch.ones_like(parameter), total + 1.0
    with fused_grad_accumulation():
        ((embedding(ids, parameter) * dy).sum() + 3.0 * parameter.sum()).backward()
    assert relative(parameter.grad, total) <= 1e-6


def test_on_a_cpu_it_is_torchs_bit_for_bit():
    for adding in (False, True):
        grads = []
        for look_up in (embedding, F.embedding):
            parameter = parameter_of()
            for seed in range(2):
                ids, dy = case(seed)
                if adding:
                    with fused_grad_accumulation():
                        look_up(ids, parameter).backward(dy)
                else:
                    look_up(ids, parameter).backward(dy)
            grads.append(parameter.grad)
        assert torch.equal(*grads)


def test_a_parameter_that_does_not_learn_needs_no_graph(taken):
    ids, _ = case(0)
    assert not embedding(ids, parameter_of().requires_grad_(False)).requires_grad
