"""Gates in Triton against float64; on a CPU the same kernels are interpreted."""

import pytest
import torch
import torch.nn.functional as F
from support.compare import relative_error
from support.recurrences import seeded

from baton.kernels.errors import KernelError
from baton.kernels.gate import Part, activated, gated
from baton.kernels.gate.triton import activated_triton, gated_triton

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LIMITS = {torch.float32: 1e-6, torch.bfloat16: 5e-3}
ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu}


def compare(run, shape, dtype, activation, *, lies="apart", out=None):
    """lies: x and z as tensors of their own, or as columns of one, the gate first or last; with others around them."""
    g, found, width = seeded(0), [], shape[-1]
    rows = (3 * torch.randn(*shape[:-1], 2 * width + 5, generator=g)).to(dtype)
    dy = torch.randn(*shape, generator=g).to(out or dtype)
    first = {"apart": 0, "first": 3, "last": 3}[lies]
    for place, cast in (("cpu", torch.float64), (DEVICE, None)):
        own = rows.to(place, cast or rows.dtype).requires_grad_()
        x, z = own[..., first : first + width], own[..., first + width : first + 2 * width]
        if lies == "apart":
            x, z = x.contiguous(), z.contiguous()
        elif lies == "first":
            x, z = z, x
        y = x * ACTIVATIONS[activation](z) if cast else run(x, z)
        assert cast or y.dtype == (out or dtype)
        found.append([y, *torch.autograd.grad(y, own, dy.to(place, y.dtype))])
    for name, want, have in zip(("y", "gradients"), *found, strict=True):
        assert relative_error(have.double().cpu(), want) <= LIMITS[dtype], name


@pytest.mark.parametrize("lies", ["apart", "first", "last"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_it_is_the_product(dtype, activation, lies):
    """Odd widths, several blocks of rows and of columns."""
    compare(lambda x, z: gated_triton(x, z, gelu=activation == "gelu", dtype=x.dtype), (2, 7, 1100), dtype, activation, lies=lies)
    compare(lambda x, z: gated_triton(x, z, gelu=activation == "gelu", dtype=x.dtype), (300, 37), dtype, activation, lies=lies)


def test_another_type_for_the_result():
    run = lambda x, z: gated_triton(x, z.bfloat16(), gelu=False, dtype=torch.bfloat16)  # noqa: E731
    rows = seeded(0)
    x, z = torch.randn(5, 9, generator=rows), torch.randn(5, 9, generator=rows).bfloat16()
    y = run(x.to(DEVICE), z.to(DEVICE))
    assert y.dtype == torch.bfloat16
    assert relative_error(y.double().cpu(), x.double() * F.silu(z.double())) <= LIMITS[torch.bfloat16]


def test_gradients_of_neighbours_are_neighbours():
    """In rows of their own, in the order of the arguments."""
    for turned in (False, True):
        rows = torch.randn(6, 20, device=DEVICE).requires_grad_()
        x, z = rows[:, 2:11], rows[:, 11:20]
        x, z = (z, x) if turned else (x, z)
        dx, dz = torch.autograd.grad(gated_triton(x, z, gelu=False, dtype=x.dtype).sum(), (x, z))
        assert dx.untyped_storage().data_ptr() == dz.untyped_storage().data_ptr()
        assert dz.storage_offset() - dx.storage_offset() == (-9 if turned else 9)
        assert dx.stride() == dz.stride() == (18, 1)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_the_cpus_form_is_the_product(dtype, activation):
    compare(lambda x, z: gated(x, z, activation=activation), (2, 5, 7), dtype, activation)
    compare(lambda x, z: gated(x, z, activation=activation, dtype=torch.bfloat16), (2, 5, 7), torch.bfloat16, activation)


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_the_sizes_of_runs(dtype, activation):
    compare(lambda x, z: gated(x, z, activation=activation), (2, 1000, 5632), dtype, activation, lies="last")


def test_what_does_not_fit_is_refused():
    with pytest.raises(KernelError, match=r"gated: z has shape \(4,\), expected \(x's 0, x's 1\) = \(2, 5\)"):
        gated(torch.ones(2, 5), torch.ones(4))
    with pytest.raises(KernelError, match="gated: x is a float"):
        gated(1.0, torch.ones(4))  # type: ignore[arg-type]
    with pytest.raises(KernelError, match="gated: activation is 'relu'"):
        gated(torch.ones(4), torch.ones(4), activation="relu")  # type: ignore[arg-type]


PARTS = (Part(300, "silu"), Part(37, "silu"), Part(65, "log_sigmoid", 8.0), Part(4, "silu"))


def compare_parts(run, shape, parts, dtype, *, without=()):
    """Of columns within wider rows. without: parts that nobody has a gradient of. Numbers so large that a gate keeps nearly all."""
    g, found, width = seeded(0), [], sum(part.width for part in parts)
    rows = (8 * torch.randn(*shape, width + 6, generator=g)).to(dtype)
    dys = [torch.randn(*shape, part.width, generator=g) for n, part in enumerate(parts) if n not in without]
    for place, cast in (("cpu", torch.float64), (DEVICE, None)):
        own = rows.to(place, cast or rows.dtype).requires_grad_()
        x = own[..., 3 : 3 + width]
        if cast:
            columns = zip(parts, x.split([part.width for part in parts], dim=-1), strict=True)
            ys = [F.silu(of) if part.activation == "silu" else F.logsigmoid(of) / part.divisor for part, of in columns]
        else:
            ys = list(run(x, parts))
            assert [y.dtype for y in ys] == [dtype if part.activation == "silu" else torch.float32 for part in parts]
        read = [y for n, y in enumerate(ys) if n not in without]
        grads = torch.autograd.grad(read, own, [dy.to(place, y.dtype) for dy, y in zip(dys, read, strict=True)])
        found.append([*ys, *(dx for dx in grads[0][..., 3 : 3 + width].split([part.width for part in parts], dim=-1))])
    for n, (want, have) in enumerate(zip(*found, strict=True)):
        assert relative_error(have.double().cpu(), want) <= LIMITS[have.dtype], n
    logs = [n for n, part in enumerate(parts) if part.activation == "log_sigmoid"]
    for n in logs:  # each number by itself, however near 0 it is
        want, have = found[0][n], found[1][n].double().cpu()
        assert ((have - want) / want).abs().max() <= 2e-6


@pytest.mark.parametrize("without", [(), (1,), (0, 2)])
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_parts_are_activated_each_in_its_way(dtype, without):
    compare_parts(activated_triton, (2, 7), PARTS, dtype, without=without)


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_the_cpus_form_of_parts(dtype):
    compare_parts(activated, (2, 5), PARTS, dtype, without=(3,))


def test_gradients_of_parts_are_columns_of_one_tensor():
    x = torch.randn(3, 4, 20, device=DEVICE).requires_grad_()
    taken = []
    x.register_hook(taken.append)
    a, b = activated_triton(x, (Part(12, "silu"), Part(8, "log_sigmoid")))
    assert a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr()
    (a.sum() + b.sum()).backward()
    assert taken[0].is_contiguous()


def test_parts_that_do_not_fit_are_refused():
    x = torch.randn(3, 20)
    with pytest.raises(KernelError, match=r"activated: parts of \[12, 9\] columns, expected 20 together, as x has"):
        activated(x, (Part(12, "silu"), Part(9, "silu")))
    with pytest.raises(KernelError, match="activated: activation is 'relu', expected 'silu' or 'log_sigmoid'"):
        activated(x, (Part(20, "relu"),))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_the_parts_of_runs(dtype):
    compare_parts(activated, (2, 1000), (*(Part(2048, "silu"),) * 3, Part(256, "log_sigmoid", 8.0)), dtype)
