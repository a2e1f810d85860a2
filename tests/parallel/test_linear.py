"""Linear layers compared with float64 autograd: split outputs, a shared input, accumulation of gradients in place."""

from contextlib import nullcontext
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from baton.parallel import linear as linears
from baton.parallel.linear import accumulate_product, fused_grad_accumulation, linear, overwriting, take_outdated

WIDTHS = (7, 3, 2, 5, 1)
SOME_READ = ((True,) * 5, (True, False, True, True, True), (False, False, True, False, False))


def relative(found, expected):
    return float((found.detach().double() - expected).norm() / expected.norm())


def case(dtype, seed=0):
    """x [2, 3, 4], a parameter in fp32 (float64) whose values the dtype holds, and a cotangent for y and for x."""
    g = torch.Generator().manual_seed(seed)
    x, weight, dy, dx = (torch.randn(*shape, generator=g) for shape in ((2, 3, 4), (18, 4), (2, 3, 18), (2, 3, 4)))
    parameter = nn.Parameter(weight.to(dtype).to(torch.promote_types(dtype, torch.float32)))
    return x.to(dtype).requires_grad_(), parameter, dy.to(dtype), dx.to(dtype)


def expected(x, parameter, dy, dx, read, return_input):
    """Gradients of x and of the weight, in float64."""
    x, weight = (of.detach().double().requires_grad_() for of in (x, parameter))
    mask = torch.cat([torch.full((width,), float(on)) for width, on in zip(WIDTHS, read, strict=True)])
    total = (F.linear(x, weight) * dy.double() * mask).sum() + (x * dx.double()).sum() * return_input
    return torch.autograd.grad(total, [x, weight])


def run(x, parameter, dy, dx, read, return_input):
    """A backward pass through parts that are read, and through x where something else reads it; the parts."""
    found = linear(x, parameter, parameter.detach().to(x.dtype), split_sizes=WIDTHS, return_input=return_input)
    first, parts = (found[0], found[1:]) if return_input else (None, found)
    chosen = [(y, d) for y, d, on in zip(parts, dy.split(WIDTHS, dim=-1), read, strict=True) if on]
    chosen += [(first, dx)] if first is not None else []
    torch.autograd.backward([y for y, _ in chosen], [d for _, d in chosen])
    return parts


@pytest.mark.parametrize("narrow", [1, 3, 100])
@pytest.mark.parametrize("read", SOME_READ)
@pytest.mark.parametrize("return_input", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_gradients_of_parts(monkeypatch, dtype, return_input, read, narrow):
    """Whatever parts are put together, and whichever of them are read."""
    monkeypatch.setattr(linears, "_NARROW", narrow)
    limit = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 6e-3}[dtype]
    x, parameter, dy, dx = case(dtype)
    parts = run(x, parameter, dy, dx, read, return_input)
    whole = F.linear(x.detach().double(), parameter.detach().double())
    for y, of in zip(parts, whole.split(WIDTHS, dim=-1), strict=True):
        assert relative(y, of) <= limit
    for found, exact in zip((x.grad, parameter.grad), expected(x, parameter, dy, dx, read, return_input), strict=True):
        assert relative(found, exact) <= limit


@pytest.mark.parametrize("narrow", [1, 100])
@pytest.mark.parametrize("read", SOME_READ)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_added_where_they_are(monkeypatch, dtype, read, narrow):
    """Three passes within `fused_grad_accumulation`, each of other numbers, leave their sum in `.grad`, in one tensor all along."""
    monkeypatch.setattr(linears, "_NARROW", narrow)
    _, parameter, *_ = case(dtype)
    total, places = 0, set()
    with fused_grad_accumulation():
        for seed in range(3):
            x, _, dy, dx = case(dtype, seed)
            run(x, parameter, dy, dx, read, False)
            total = total + expected(x, parameter, dy, dx, read, False)[1]
            places.add(parameter.grad.data_ptr())
    assert relative(parameter.grad, total) <= {torch.float32: 1e-6, torch.bfloat16: 6e-3}[dtype]
    assert parameter.grad.dtype == torch.float32
    assert len(places) == 1


@pytest.mark.parametrize("lies", ["whole", "of wider rows"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_a_returned_input_is_written_over_only_within_a_step(dtype, fused, lies):
    """A reader's gradient becomes the sum where it lies, if that is one piece of memory; outside of steps it stays as it is."""
    x, parameter, dy, dx = case(dtype)
    given = dx.clone() if lies == "whole" else torch.full((2, 3, 9), torch.nan, dtype=dtype)[..., 2:6].copy_(dx)
    (exact, _), leaf = expected(x, parameter, dy, dx, (True,) * 5, True), x.detach().requires_grad_()

    class Reader(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.sum()

        @staticmethod
        def backward(ctx, _):
            return given

    found, *parts = linear(leaf * 1, parameter, parameter.detach().to(dtype), split_sizes=WIDTHS, return_input=True)
    with fused_grad_accumulation() if fused else nullcontext():
        torch.autograd.backward([Reader.apply(found), *parts], [torch.ones((), dtype=dtype), *dy.split(WIDTHS, dim=-1)])
    limit = {torch.float32: 1e-6, torch.bfloat16: 6e-3}[dtype]
    assert relative(leaf.grad, exact) <= limit
    assert relative(given, exact if fused and lies == "whole" else dx.double()) <= limit


def test_a_returned_input_without_a_gradient_gets_none():
    """Its readers would compute one, a product each, for nothing."""
    x, parameter, dy, dx = case(torch.float32)
    of_weight = expected(x, parameter, dy, dx, (True,) * 5, False)[1]
    found, *parts = linear(x.detach(), parameter, parameter.detach(), split_sizes=WIDTHS, return_input=True)
    assert not found.requires_grad
    assert torch.equal(found, x)
    torch.autograd.backward(parts, dy.split(WIDTHS, dim=-1))
    assert relative(parameter.grad, of_weight) <= 1e-6


@pytest.mark.parametrize("narrow", [1, 100])
@pytest.mark.parametrize("read", SOME_READ)
@pytest.mark.parametrize("known", [False, True])
def test_what_gradients_hold_is_replaced_where_it_does_not_count(monkeypatch, narrow, read, known):
    """Of the parameters that are named, once, whatever parts are read; a second use of the weight in the pass adds."""
    monkeypatch.setattr(linears, "_NARROW", narrow)
    x, parameter, dy, dx = case(torch.float32)
    other, kept = nn.Parameter(torch.ones(3)), torch.full_like(parameter, torch.nan if known else 1.0)
    parameter.grad = kept
    with fused_grad_accumulation(), overwriting([other, *([parameter] if known else [])]) as outdated:
        for _ in range(2):
            run(x, parameter, dy, dx, read, False)
        assert set(outdated) == {other}
    assert not take_outdated(other), "and no longer"
    _, exact = expected(x, parameter, dy, dx, read, False)
    assert relative(parameter.grad, 2 * exact + (0 if known else 1)) <= 1e-6
    assert parameter.grad.data_ptr() == kept.data_ptr()


@pytest.mark.parametrize("read", [(True,) * 5, (False, True, True, False, True)])
def test_what_nothing_was_held_of_is_replaced_no_second_time(read):
    """A parameter that is named without a gradient: both uses of a pass count."""
    x, parameter, dy, dx = case(torch.float32)
    with fused_grad_accumulation(), overwriting([parameter]) as outdated:
        for _ in range(2):
            run(x, parameter, dy, dx, read, False)
        assert not outdated
    assert relative(parameter.grad, 2 * expected(x, parameter, dy, dx, read, False)[1]) <= 1e-6


@pytest.mark.parametrize("adjacent", [((1, 2),), ((0, 1, 2), (3, 4)), ((0, 1), (1, 2))])
def test_gradients_that_lie_side_by_side(monkeypatch, adjacent):
    """Columns of one tensor are taken as they lie, and only these: not those of another, nor what only overlaps."""
    monkeypatch.setattr(linears, "_NARROW", 1)
    x, parameter, dy, _ = case(torch.float64)
    dys = [part.clone() for part in dy.split(WIDTHS, dim=-1)]
    for numbers in adjacent:
        parts = torch.cat([dys[n] for n in numbers], -1).split([WIDTHS[n] for n in numbers], dim=-1)
        for n, part in zip(numbers, parts, strict=True):
            dys[n] = part
    parts = linear(x, parameter, parameter.detach(), split_sizes=WIDTHS)
    torch.autograd.backward(parts, dys)
    for found, exact in zip((x.grad, parameter.grad), expected(x, parameter, dy, dy[..., :4], (True,) * 5, False), strict=True):
        assert relative(found, exact) <= 1e-14
    calls = []
    monkeypatch.setattr(linears, "accumulate_product", lambda into, a, b, *, first: calls.append(len(into)))
    parts = linear(x, parameter, parameter.detach(), split_sizes=WIDTHS)
    torch.autograd.backward(parts, dys)
    assert calls == {((1, 2),): [7, 5, 5, 1], ((0, 1, 2), (3, 4)): [12, 6], ((0, 1), (1, 2)): [7, 5, 5, 1]}[adjacent]


def test_outside_gradients_are_given_to_who_asks():
    """torch.autograd.grad gets them, and `.grad` stays as it is."""
    x, parameter, dy, _ = case(torch.float32)
    (y,) = linear(x, parameter, parameter.detach())
    found = torch.autograd.grad(y, [x, parameter], dy)
    for grad, exact in zip(found, expected(x, parameter, dy, dy[..., :4], (True,) * 5, False), strict=True):
        assert relative(grad, exact) <= 1e-6
    assert parameter.grad is None


def test_what_needs_no_gradient_gets_none():
    for of_x, of_weight in product([False, True], repeat=2):
        x, parameter, dy, _ = case(torch.float32)
        parameter.requires_grad_(of_weight)
        (y,) = linear(x.detach().requires_grad_(of_x), parameter, parameter.detach())
        assert y.requires_grad == (of_x or of_weight)
        with fused_grad_accumulation():
            if y.requires_grad:
                y.backward(dy)
        assert (parameter.grad is not None) == of_weight


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_product_is_added(dtype, first):
    g = torch.Generator().manual_seed(0)
    a, b = (torch.randn(*shape, generator=g).to(dtype) for shape in ((5, 7), (7, 3)))
    before = torch.randn(5, 3, generator=g).to(torch.promote_types(dtype, torch.float32))
    into = torch.full_like(before, float("nan")) if first else before.clone()
    accumulate_product(into, a, b, first=first)
    exact = a.double() @ b.double() + (0 if first else before.double())
    assert relative(into, exact) <= {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 4e-3}[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("first", [False, True])
def test_a_product_is_added_in_float32_on_a_gpu(first):
    """Nothing is rounded to bfloat16 on the way, into rows of a larger tensor too."""
    g = torch.Generator("cuda").manual_seed(0)
    a, b = (torch.randn(*shape, generator=g, device="cuda").bfloat16() for shape in ((96, 160), (160, 72)))
    whole = torch.randn(200, 72, generator=g, device="cuda")
    exact = whole.double().clone()
    exact[64:160] = a.double() @ b.double() + (0 if first else exact[64:160])
    if first:
        whole[64:160] = float("nan")
    accumulate_product(whole[64:160], a, b, first=first)
    assert relative(whole, exact) <= 1e-6


@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("rows", [1, 2, 15, 16, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_added_to_zeros_is_the_product_to_the_bit(dtype, rows, place):
    """As steps have it that are recorded, where others begin with the product."""
    g = torch.Generator().manual_seed(0)
    a, b = (torch.randn(*shape, generator=g).to(place, dtype) for shape in ((96, rows), (96, 64)))
    first, added = (of(rows, 64, dtype=torch.float32, device=place) for of in (torch.empty, torch.zeros))
    for into, replaced in ((first, True), (added, False)):
        accumulate_product(into, a.mT, b, first=replaced)
    assert torch.equal(first, added)
