"""Log decays and forget gates in Triton against float64; on a CPU the same kernels are interpreted.

Arguments are columns of wider rows, whose other numbers are NaN.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from support.compare import relative_error
from support.recurrences import seeded

from baton.kernels.errors import KernelError
from baton.kernels.gate import forget_gate, log_sigmoid, op
from baton.kernels.gate.triton_launch import forget_gate_triton, log_sigmoid_triton

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LIMITS = {torch.float32: 1e-6, torch.bfloat16: 5e-3, torch.float16: 1e-3}
SHAPES = [(2, 21, 300), (70, 37)]  # several blocks of rows, odd widths, several blocks of columns
FACTORS = ["none", "number", "per channel"]
EXTREMES = [math.inf, 1e4, 80.0, 40.0, 16.0, 5.0, 1e-30, 0.0]
over_dtypes = pytest.mark.parametrize("dtype", LIMITS, ids=str)


def columns(width, *xs, dtype):
    """Each of xs [..., width] as leaves that are neighbouring columns of rows that are NaN elsewhere."""
    rows = torch.full((*xs[0].shape[:-1], len(xs) * width + 8), math.nan, dtype=dtype, device=DEVICE)
    views = rows[..., 3 : 3 + len(xs) * width].split(width, dim=-1)
    for view, x in zip(views, xs, strict=True):
        view.copy_(x)
    return [view.detach().requires_grad_() for view in views]


def exact(*xs):
    return [x.detach().double().cpu().requires_grad_() for x in xs]


def each(have, want):
    """The error of each number beside itself, however near 0 it is."""
    have, want = have.detach().double().cpu(), want.detach()
    return ((have - want).abs() / want.abs()).nan_to_num(0.0)


def in_float32(logits):
    """What the errors of an exponential may be that was computed in float32: its argument is rounded twice."""
    return 1e-6 + 2.0**-23 * logits.detach().abs()


def factors_of(kind, width):
    """Distinct ones for each channel, none so near 1 that 1 - k cancels."""
    return {"none": 1.0, "number": 0.75, "per channel": torch.linspace(0.02, 0.8, width)}[kind]


def reference_gate(q, f, factor):
    k = factor * torch.sigmoid(-f)
    return F.silu(q), k, torch.log1p(-k) if isinstance(factor, torch.Tensor) or factor < 1 else F.logsigmoid(f)


def compare_log_sigmoid(run, shape, dtype, biased):
    g, divisor = seeded(0), 16.0
    (x,) = columns(shape[-1], 8 * torch.randn(shape, generator=g), dtype=dtype)
    bias = torch.randn(shape[-1], generator=g).to(DEVICE).requires_grad_() if biased else None
    inputs = [x, bias] if biased else [x]
    known = exact(*inputs)
    y, want = run(x, bias=bias, divisor=divisor), F.logsigmoid(sum(known)) / divisor
    assert y.dtype == torch.float32
    assert (each(y, want) <= in_float32(sum(known))).all()
    (dy,) = columns(shape[-1], torch.randn(shape, generator=g), dtype=torch.float32)
    found = torch.autograd.grad(y, inputs, dy.detach())
    for have, exactly, like in zip(found, torch.autograd.grad(want, known, *exact(dy)), inputs, strict=True):
        assert have.dtype == like.dtype
        assert relative_error(have.double().cpu(), exactly) <= LIMITS[like.dtype]


def compare_forget_gate(run, shape, dtype, kind):
    g, width = seeded(0), shape[-1]
    q, f = columns(width, *(4 * torch.randn(2, *shape, generator=g)), dtype=dtype)
    factor = factors_of(kind, width)
    inputs = [q, f]
    if kind == "per channel":
        factor = factor.to(DEVICE).requires_grad_()
        inputs.append(factor)
    known = exact(*inputs)
    made, want = run(q, f, factor=factor), reference_gate(*known[:2], known[2] if kind == "per channel" else factor)
    assert [x.dtype for x in made] == [dtype, dtype, torch.float32]
    for have, exactly in zip(made, want, strict=True):
        assert relative_error(have.detach().double().cpu(), exactly) <= LIMITS[have.dtype]
    assert (each(made[2], want[2]) <= in_float32(known[1])).all()
    dy, dk = columns(width, *torch.randn(2, *shape, generator=g), dtype=dtype)
    (dg,) = columns(width, torch.randn(shape, generator=g), dtype=torch.float32)
    found = torch.autograd.grad(made, inputs, [x.detach() for x in (dy, dk, dg)])
    for have, exactly, like in zip(found, torch.autograd.grad(want, known, exact(dy, dk, dg)), inputs, strict=True):
        assert have.dtype == like.dtype
        assert relative_error(have.double().cpu(), exactly) <= LIMITS[like.dtype]


@pytest.mark.parametrize("biased", [True, False])
@over_dtypes
def test_it_is_the_logarithm_of_the_sigmoid(dtype, biased):
    for shape in SHAPES:
        compare_log_sigmoid(log_sigmoid_triton, shape, dtype, biased)


@pytest.mark.parametrize("kind", FACTORS)
@over_dtypes
def test_it_is_the_forget_gate(dtype, kind):
    for shape in SHAPES:
        compare_forget_gate(forget_gate_triton, shape, dtype, kind)


@pytest.mark.parametrize("kind", FACTORS)
def test_extreme_logits(kind):
    """Values and gradients, of which none is NaN; gates that keep nearly all keep their digits."""
    x = torch.tensor([EXTREMES, [-n for n in EXTREMES]]).to(DEVICE)
    (logits,), (known,) = columns(x.shape[1], x, dtype=torch.float32), exact(x)
    factor = factors_of(kind, x.shape[1])
    factor, exactly = (factor.to(DEVICE), factor.double()) if kind == "per channel" else (factor, factor)
    _, k, g = forget_gate_triton(torch.zeros_like(logits), logits, factor=factor)
    _, want_k, want_g = reference_gate(known, known, exactly)
    # autograd's have 1 - sigmoid, which is nothing far down
    keep, forget = torch.sigmoid(known), torch.sigmoid(-known)
    slope_k = -want_k * keep
    for have, want, slope in (
        (log_sigmoid_triton(logits, bias=None, divisor=2.0), F.logsigmoid(known) / 2, forget / 2),
        (k, want_k, slope_k),
        (g, want_g, forget if kind == "none" else -slope_k / (1 - want_k)),
    ):
        assert_near(have, want)
        assert_near(*torch.autograd.grad(have.sum(), logits, retain_graph=True), slope)


@pytest.mark.parametrize("launched", [False, True])
def test_factors_next_to_1_leave_logarithms_finite(launched, monkeypatch):
    """A bound may be so small that float32's factor is 1, and a learned one may become so."""
    monkeypatch.setattr(op, "use_triton", lambda *_: launched)
    logits = torch.tensor([[-200.0, -60.0, -20.0, 0.0, 20.0]]).expand(2, 5)
    for factor in (torch.ones(5), 1 - 1e-9):
        f = logits.to(DEVICE, copy=True).requires_grad_()
        inputs = [f]
        if isinstance(factor, torch.Tensor):
            factor = factor.to(DEVICE).requires_grad_()
            inputs.append(factor)
        _, _, g = forget_gate(torch.zeros_like(f), f, factor=factor)
        assert (g >= -16.7).all()
        assert all(x.isfinite().all() for x in torch.autograd.grad(g.sum(), inputs))
    f = torch.full((1, 1), -200.0, device=DEVICE)
    _, _, g = forget_gate(f, f, factor=1.0)
    assert g == -200.0


def assert_near(have, want):
    have, want = have.detach().double().cpu(), want.detach()
    assert not have.isnan().any()
    assert torch.equal(have.isinf(), want.isinf())
    assert torch.equal(have[have.isinf()], want[have.isinf()])
    finite = ~have.isinf() & (want.abs() > 1e-37)  # float32's exponential is 0 where float64's is not yet
    assert (each(have[finite], want[finite]) <= 1e-5).all()
    assert (have[want.abs() <= 1e-37].abs() <= 1e-37).all()


def test_gradients_of_q_and_f_are_neighbours():
    q, f = columns(9, *torch.randn(2, 6, 9), dtype=torch.bfloat16)
    dq, df = torch.autograd.grad(sum(x.sum() for x in forget_gate_triton(q, f, factor=0.5)), (q, f))
    assert dq.untyped_storage().data_ptr() == df.untyped_storage().data_ptr()
    assert df.storage_offset() - dq.storage_offset() == 9
    assert dq.stride() == df.stride() == (18, 1)


def test_only_arguments_are_kept():
    q, f = columns(9, *torch.randn(2, 6, 9), dtype=torch.bfloat16)
    bias, factor = torch.randn(9, device=DEVICE, requires_grad=True), torch.rand(9, device=DEVICE, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.data_ptr()), lambda x: x):
        log_sigmoid_triton(q, bias=bias, divisor=1.0)
        forget_gate_triton(q, f, factor=factor)
    assert kept == [x.data_ptr() for x in (q, bias, q, f, factor)]


@pytest.mark.parametrize("dtype", [*LIMITS, torch.float64], ids=str)
def test_the_cpus_form_is_pytorchs_operators(dtype):
    x, q = (3 * torch.randn(2, 2, 5, 7, generator=seeded(0))).to(dtype)
    precise = torch.float64 if dtype == torch.float64 else torch.float32
    bias = torch.randn(7, generator=seeded(1), dtype=precise)
    assert torch.equal(log_sigmoid(x, bias=bias, divisor=3.0), F.logsigmoid(x.to(precise) + bias) / 3.0)
    assert torch.equal(log_sigmoid(x), F.logsigmoid(x.to(precise)))
    for factor in (1.0, 0.75, torch.sigmoid(bias)):
        y, k, g = reference_gate(q, x.to(precise), factor)
        for have, want in zip(forget_gate(q, x, factor=factor), (y, k.to(dtype), g), strict=True):
            assert have.dtype == want.dtype
            assert torch.equal(have, want)


@pytest.mark.gpu
@over_dtypes
def test_the_sizes_of_runs(dtype):
    compare_log_sigmoid(log_sigmoid, (8, 2048, 1024), dtype, True)
    for kind in FACTORS:
        compare_forget_gate(forget_gate, (8, 2048, 2048), dtype, kind)


def test_what_does_not_fit_is_refused():
    x = torch.ones(2, 5)
    for call, message in (
        (lambda: log_sigmoid(1.0), "log_sigmoid: x is a float"),  # type: ignore[arg-type]
        (lambda: log_sigmoid(x, bias=torch.ones(2)), r"log_sigmoid: bias has shape \(2,\), expected \(d,\) = \(5,\)"),
        (lambda: log_sigmoid(x, divisor=0.0), "log_sigmoid: divisor is 0.0, expected a number above 0"),
        (lambda: forget_gate(x, x[0]), r"forget_gate: f has shape \(5,\), expected \(q's 0, q's 1\) = \(2, 5\)"),
        (lambda: forget_gate(x, x, factor=torch.ones(2)), r"forget_gate: factor has shape \(2,\), expected"),
        (lambda: forget_gate(x, x, factor=1.5), r"forget_gate: factor is 1.5, expected a number in \(0, 1\]"),
    ):
        with pytest.raises(KernelError, match=message):
            call()
