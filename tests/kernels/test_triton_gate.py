"""Gates in Triton against float64; on a CPU the same kernels are interpreted."""

import pytest
import torch
import torch.nn.functional as F
from support.compare import relative_error
from support.recurrences import seeded

from baton.kernels.common.adjacent_views import empty_like_adjacent, merge_adjacent
from baton.kernels.errors import KernelError
from baton.kernels.gate import gated
from baton.kernels.gate.triton_launch import activate_columns, gate_triton

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LIMITS = {torch.float32: 1e-6, torch.bfloat16: 5e-3}
ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "sigmoid": torch.sigmoid}


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
    compare(lambda x, z: gate_triton(x, z, activation=activation, dtype=x.dtype), (2, 7, 1100), dtype, activation, lies=lies)
    compare(lambda x, z: gate_triton(x, z, activation=activation, dtype=x.dtype), (300, 37), dtype, activation, lies=lies)


def test_another_type_for_the_result():
    run = lambda x, z: gate_triton(x, z.bfloat16(), activation="silu", dtype=torch.bfloat16)  # noqa: E731
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
        dx, dz = torch.autograd.grad(gate_triton(x, z, activation="silu", dtype=x.dtype).sum(), (x, z))
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


WIDTHS = (300, 37, 65)


@pytest.mark.parametrize("logs", [None, 8.0])
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("lies", ["columns", "apart", "in time"])
def test_neighbours_are_activated_each(lies, dtype, logs):
    """Columns within wider rows, one launch; tensors of their own; columns of some of the tokens, which are no rows. Numbers so
    large that a gate keeps nearly all."""
    width = sum(WIDTHS)
    rows = (8 * torch.randn(2, 9, width + 6, generator=seeded(0))).to(DEVICE, dtype)
    taken = slice(1, 8) if lies == "in time" else slice(None)
    xs = rows[:, taken, 3 : 3 + width].split(WIDTHS, dim=-1)
    xs = [x.contiguous() if lies == "apart" else x for x in xs]
    assert [widths for _, widths in merge_adjacent(xs)] == ([[n] for n in WIDTHS] if lies == "apart" else [list(WIDTHS)])
    found = activate_columns(*xs, logs=logs)
    for x, y in zip(xs, found, strict=True):
        exact = x.double().cpu()
        want, have = F.silu(exact) if logs is None else F.logsigmoid(exact) / logs, y.double().cpu()
        assert y.dtype == (dtype if logs is None else torch.float32)
        assert relative_error(have, want) <= LIMITS[y.dtype]
        assert logs is None or ((have - want) / want).abs().max() <= 2e-6  # each number by itself, however near 0 it is
    assert len({y.untyped_storage()._cdata for y in found}) == (len(WIDTHS) if lies == "apart" else 1)


def test_memory_of_neighbours_is_in_rows_of_their_own():
    rows = torch.randn(3, 4, 20)
    a, b, c = rows[..., 1:6], rows[..., 6:9], rows[..., 10:]
    like_a, like_b, like_c = empty_like_adjacent([a, b, c])
    assert like_a.stride() == like_b.stride() == (32, 8, 1)
    assert like_b.storage_offset() - like_a.storage_offset() == 5
    assert like_c.is_contiguous()
    # overlapping rows, other numbers of rows, another type, turned columns: nothing of that is taken for neighbours
    overlapping = torch.as_strided(rows, (6, 5), (8, 1)), torch.as_strided(rows, (6, 5), (8, 1), 5)
    for left, right in (overlapping, (a, b[:2]), (a, b.bfloat16()), (b, a), (a.mT, b.mT)):
        assert len(merge_adjacent([left, right])) == 2
