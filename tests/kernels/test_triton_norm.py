"""The root-mean-square norm in Triton against torch's in float64; on a CPU the same kernels are interpreted."""

import pytest
import torch
import torch.nn.functional as F
from support.compare import relative_error
from support.recurrences import seeded

from baton.kernels.errors import KernelError
from baton.kernels.rms_norm import fused_add_rms_norm, rms_norm, split_rms_norm
from baton.kernels.rms_norm.triton_launch import rms_norm_triton, split_rms_norm_triton

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LIMITS = {torch.float32: 1e-6, torch.bfloat16: 5e-3}
EPS = 1e-5
IN_ROUNDED = {torch.float32: (1e-6,) * 3, torch.bfloat16: (5e-5, 5e-3, 5e-3)}
"""Of dx, dweight and the gradient of what is added, where they are made from y: its rounding is in a projection of dy to one
direction of 2048."""


@pytest.mark.parametrize("out", LIMITS, ids=str)
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("shape", [(3, 7, 48), (131, 5), (2, 700)], ids=str)
def test_it_is_torchs(shape, dtype, out):
    """Rows of all sizes, one of them zeros; views; several programs, the last of which has less to do."""
    g = seeded(0)
    x = (torch.randn(*shape, generator=g) * torch.logspace(-3, 3, shape[-2])[:, None]).to(dtype)
    x[..., 1, :] = 0
    weight, dy = torch.randn(shape[-1], generator=g), torch.randn(*shape, generator=g).to(out)
    found = []
    for place, cast in (("cpu", torch.float64), (DEVICE, None)):
        own, w = (t.to(place, cast or t.dtype).requires_grad_() for t in (x, weight))
        if cast:
            y = F.rms_norm(own, shape[-1:], w, EPS)
        else:
            view = torch.stack((own, own), -1)[..., 0]
            _, y = rms_norm_triton(view, w, EPS, out, blocks=3)
            assert (y.dtype, view.is_contiguous()) == (out, False)
        found.append([y, *torch.autograd.grad(y, (own, w), dy.to(place, y.dtype))])
    for name, want, have in zip(("y", "dx", "dweight"), *found, strict=True):
        assert relative_error(have.double().cpu(), want) <= max(LIMITS[dtype] if name != "y" else 0, LIMITS[out]), name


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("run", [rms_norm, rms_norm_triton], ids=["op", "kernel"])
def test_a_norm_of_silu(run, dtype):
    g, found = seeded(0), []
    x, weight, dy = 3 * torch.randn(70, 90, generator=g).to(dtype), torch.randn(90, generator=g), torch.randn(70, 90, generator=g)
    for place, cast in (("cpu", torch.float64), (DEVICE, None)):
        own, w = (t.to(place, cast or t.dtype).requires_grad_() for t in (x, weight))
        if cast:
            y = F.rms_norm(F.silu(own), (90,), w, EPS)
        elif run is rms_norm:
            y = run(own, w, EPS, silu=True, dtype=dtype)
        else:
            _, y = run(own, w, EPS, dtype, silu=True, blocks=3)
        found.append([y, *torch.autograd.grad(y, (own, w), dy.to(place, y.dtype))])
    for name, want, have in zip(("y", "dx", "dweight"), *found, strict=True):
        assert relative_error(have.double().cpu(), want) <= LIMITS[dtype], name


@pytest.mark.parametrize("silu", [False, True], ids=["plain", "silu"])
@pytest.mark.parametrize(("run", "dtype"), [("op", torch.float32), *(("kernel", dtype) for dtype in LIMITS)], ids=str)
def test_rows_are_split_over_ranks(run, dtype, silu):
    """Of two ranks with 90 of 150 features and 60: each one's part of the norm over all, where the other's part of the sums is
    known. Ranks' losses are of the same outputs, so the other's gradient of the sum is this one's."""
    g = seeded(0)
    x, weight = 3 * torch.randn(7, 10, 150, generator=g).to(dtype), torch.randn(150, generator=g)
    dy = torch.randn(7, 10, 150, generator=g).to(dtype)
    own, w = (t.double().requires_grad_() for t in (x, weight))
    y = F.rms_norm(F.silu(own) if silu else own, (150,), w, EPS)
    wanted = [y, *torch.autograd.grad(y, (own, w), dy.double())]
    with torch.no_grad():  # what the ranks sum, forwards and backwards
        mapped = F.silu(x.double()) if silu else x.double()
        squares = mapped.square()
        along = dy.double() * weight * mapped * torch.rsqrt(squares.mean(-1, keepdim=True) + EPS)
        if run == "op":  # in which the gradient of the sum of squares is summed: along / (-2 width (mean + eps))
            along = along / (-2 * 150 * (squares.mean(-1, keepdim=True) + EPS))
    place = "cpu" if run == "op" else DEVICE
    for part in (slice(0, 90), slice(90, 150)):
        others = [(whole.sum(-1) - whole[..., part].sum(-1)).flatten().to(place, torch.float32) for whole in (squares, along)]

        class Summed(torch.autograd.Function):
            @staticmethod
            def forward(ctx, own_squares, others=others):
                return own_squares + others[0]

            @staticmethod
            def backward(ctx, grad, others=others):
                return grad + others[1]

        calls = iter(others)
        x_part, w_part = (t[..., part].to(place).requires_grad_() for t in (x, weight))
        if run == "op":
            have = split_rms_norm(x_part, w_part, EPS, width=150, sum_over_ranks=Summed.apply, silu=silu, dtype=dtype)
        else:
            have = split_rms_norm_triton(
                x_part, w_part, EPS, dtype, 150, lambda own, calls=calls: own + next(calls), silu=silu, blocks=3
            )
        found = [have, *torch.autograd.grad(have, (x_part, w_part), dy[..., part].to(place))]
        for name, want, got in zip(("y", "dx", "dweight"), wanted, found, strict=True):
            assert relative_error(got.double().cpu(), want[..., part]) <= LIMITS[dtype], name


@pytest.mark.parametrize("run", [fused_add_rms_norm, rms_norm_triton], ids=["op", "kernel"])
@pytest.mark.parametrize("read", [(True, True), (True, False), (False, True)], ids=["both", "stream", "norm"])
def test_what_else_reads_a_stream_has_its_cotangent_added(read, run):
    g = seeded(0)
    x, weight, dstream, dy = (torch.randn(*shape, generator=g) for shape in ((9, 40), (40,), (9, 40), (9, 40)))
    found = []
    for place, cast in (("cpu", torch.float64), (DEVICE, torch.float32)):
        own, w = (t.to(place, cast).requires_grad_() for t in (x, weight))
        if cast == torch.float64:
            stream, y = own, F.rms_norm(own, (40,), w, EPS)
        elif run is fused_add_rms_norm:
            stream, y = run(own, w, EPS)
        else:
            stream, y = run(own, w, EPS, cast)
        torch.testing.assert_close(stream, own)
        outputs = [(z, dz.to(z)) for z, dz, wanted in zip((stream, y), (dstream, dy), read, strict=True) if wanted]
        grads = torch.autograd.grad([z for z, _ in outputs], (own, w), [dz for _, dz in outputs], allow_unused=True)
        found.append([t.double().cpu() for t in grads if t is not None])
    for want, have in zip(*found, strict=True):
        assert relative_error(have, want) <= 1e-6


@pytest.mark.parametrize("run", [fused_add_rms_norm, rms_norm_triton], ids=["op", "kernel"])
@pytest.mark.parametrize("read", [(True, True), (True, False), (False, True)], ids=["both", "stream", "norm"])
@pytest.mark.parametrize(("dtype", "of_stream"), [(torch.float32,) * 2, (torch.bfloat16, torch.float32), (torch.bfloat16,) * 2])
def test_what_is_added_to_a_stream_is_added_before_its_norm(dtype, of_stream, read, run):
    """Its gradient is the stream's, in its own type; views."""
    g = seeded(0)
    x, added, weight, dstream, dy = (torch.randn(*shape, generator=g) for shape in ((9, 40), (9, 40), (40,), (9, 40), (9, 40)))
    x, added, found = x.to(of_stream), added.to(dtype), []
    for place, cast in (("cpu", torch.float64), (DEVICE, None)):
        own, w, more = (t.to(place, cast or t.dtype).requires_grad_() for t in (x, weight, added))
        if cast:
            stream = own + more
            y = F.rms_norm(stream, (40,), w, EPS)
        else:
            view = torch.stack((more, more), -1)[..., 0]
            stream, y = run(own, w, EPS, dtype=torch.float32, added=view)
            assert stream.dtype == of_stream
        outputs = [(z, dz.to(z)) for z, dz, wanted in zip((stream, y), (dstream, dy), read, strict=True) if wanted]
        grads = torch.autograd.grad([z for z, _ in outputs], (own, more, w), [dz for _, dz in outputs], allow_unused=True)
        found.append([t.detach().cpu() for t in (stream, y, *grads) if t is not None])
    for want, have in zip(*found, strict=True):
        assert relative_error(have.double(), want) <= max(LIMITS[have.dtype], LIMITS[of_stream])


@pytest.mark.parametrize("added", [False, True], ids=["alone", "added"])
@pytest.mark.parametrize("out", LIMITS, ids=str)
def test_y_does_for_the_backward_pass(out, added):
    """Rows and weights of all sizes, weights of 0, of either sign and too small to divide by; nothing of the stream is kept."""
    g, width = seeded(0), 70
    rows = [torch.randn(131, width, generator=g) * torch.logspace(-3, 3, 131)[:, None] for _ in range(2)]
    rows[0][1], rows[1][1] = 0, 0
    weight = torch.randn(width, generator=g) * torch.logspace(-6, 6, width)
    few = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 1e-45])
    weight[: len(few)] = few
    dy = torch.randn(131, width, generator=g).to(out)
    found = []
    for place, cast in (("cpu", torch.float64), (DEVICE, torch.float32)):
        x, more, w = (t.to(place, cast).requires_grad_() for t in (*rows, weight))
        given = (x, more, w) if added else (x, w)
        if cast == torch.float64:
            y = F.rms_norm(x + more if added else x, (width,), w, EPS)
        else:
            stream, y = rms_norm_triton(x, w, EPS, out, more if added else None, from_y=True, blocks=3)
            assert all(t.dtype == out for t in y.grad_fn.saved_tensors if t.shape == y.shape)
            assert stream.grad_fn is y.grad_fn
        found.append([t.detach().cpu() for t in (y, *torch.autograd.grad(y, given, dy.to(place, y.dtype)))])
    (y, *dx, dweight), (own_y, *own_dx, own_dweight) = found
    # what a weight gets does not hang on its size, so none of them is lost among the others
    for want, have in zip((y, dweight, *dx), (own_y, own_dweight, *own_dx), strict=True):
        assert relative_error(have.double(), want) <= LIMITS[out]
    assert relative_error(own_dweight[: len(few)].double(), dweight[: len(few)]) <= LIMITS[out]


@pytest.mark.gpu
@pytest.mark.parametrize("out", LIMITS, ids=str)
def test_the_sizes_of_runs(out):
    """More rows than programs, a residual stream's width; twice the same bits."""
    shapes = [(3000, 2048), (2048,), (3000, 2048), (3000, 2048), (3000, 2048)]
    x, weight, dy, added, dstream = (torch.randn(*shape, generator=seeded(n)) for n, shape in enumerate(shapes))
    dy, added, found = dy.to(out), added.to(out), []
    for place, cast in (("cpu", torch.float64), (DEVICE, None), (DEVICE, None)):
        own, w, more = (t.to(place, cast or t.dtype).requires_grad_() for t in (x, weight, added))
        stream, y = fused_add_rms_norm(own, w, EPS, added=more, dtype=cast or out)
        given = dstream.to(stream), dy.to(place, y.dtype)
        found.append([t.detach().cpu() for t in (stream, y, *torch.autograd.grad((stream, y), (own, w, more), given))])
    limits = LIMITS[torch.float32], LIMITS[out], *IN_ROUNDED[out]
    for limit, want, have, again in zip(limits, *found, strict=True):
        assert relative_error(have.double(), want) <= limit
        assert torch.equal(have, again)


def test_what_does_not_fit_is_refused():
    with pytest.raises(KernelError, match=r"rms_norm: weight has shape \(4,\), expected \(width,\) = \(5,\)"):
        rms_norm(torch.ones(2, 5), torch.ones(4), EPS)
    with pytest.raises(KernelError, match=r"rms_norm: added has shape \(5, 2\), expected \(..., width\) = \(2, 5\)"):
        fused_add_rms_norm(torch.ones(2, 5), torch.ones(5), EPS, added=torch.ones(5, 2))
    with pytest.raises(KernelError, match="rms_norm: x is a float"):
        rms_norm(1.0, torch.ones(4), EPS)  # type: ignore[arg-type]
