"""Mamba-3's kernels for heads with several inputs, in Triton against PyTorch in float64; on a CPU the kernels are interpreted."""

import itertools

import pytest
import torch
from support.compare import relative_error
from support.long_form import alternating, some
from support.recurrences import positions, seeded
from torch.nn.functional import pad

from baton.kernels.mamba3.rotation import rotated_of_several
from baton.kernels.mamba3.triton_launch import rotated_of_several_triton
from baton.kernels.mamba3_mimo import mamba3_mimo, torch_impl
from baton.kernels.mamba3_mimo.ranks import gated_sum
from baton.kernels.mamba3_mimo.recurrence import Mamba3MIMO
from baton.kernels.mamba3_mimo.reference import mamba3_mimo_reference
from baton.kernels.mamba3_mimo.triton_launch import MOST_INPUTS, gated_sum_triton, inputs_triton, output_triton, use_triton

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
LIMITS = {torch.float32: 2e-6, torch.bfloat16: 4e-3}
DTYPES = pytest.mark.parametrize("dtype", LIMITS, ids=str)
ROTATED = ("q of next", "q of first", "k", "own products", "later products", "cosine", "sine")
ARGUMENTS = ("B", "C", "dt", "theta", "B_bias", "C_bias")


def normal(g, *sizes):
    return torch.randn(*sizes, generator=g)


def in_columns(x):
    """x [B, T, H, D] as columns of wider rows."""
    return pad(x.flatten(2), (3, 5))[..., 3:-5].unflatten(2, x.shape[2:])


def compare(exact, triton, given, low, dtype):
    """Both functions' results and their gradients. given: tensors or None by name; low: names, also of results, in dtype."""
    found, cotangents, g = [], [], seeded(5)
    for function, place in ((exact, "cpu"), (triton, DEVICE)):
        leaves = {name: x for name, x in given.items() if x is not None}
        leaves = {name: x.to(dtype) if name in low else x for name, x in leaves.items()}
        leaves = {
            name: x.detach().to(place, torch.float64 if function is exact else x.dtype).requires_grad_()
            for name, x in leaves.items()
        }
        results = function(**{name: leaves.get(name) for name in given})
        if not cotangents:
            cotangents = [normal(g, *x.shape).to(dtype if name in low else torch.float32) for name, x in results.items()]
        else:
            wrong = {name: x.dtype for name, x in results.items() if x.dtype != (dtype if name in low else torch.float32)}
            assert wrong == {}
        cotangents = [d.to(x.device, x.dtype) for d, x in zip(cotangents, results.values(), strict=True)]
        grads = torch.autograd.grad(list(results.values()), list(leaves.values()), cotangents, materialize_grads=True)
        found.append({**results, **{f"d{name}": x for name, x in zip(leaves, grads, strict=True)}})
    for name, want in found[0].items():
        have, limit = found[1][name].double().cpu(), LIMITS[dtype if name.removeprefix("d") in low else torch.float32]
        assert relative_error(have, want) <= limit if want.any() else not have.any(), name


def check_rotation(shape, dtype, pos=None, *, view=False, rate=3.0):
    """batch, length, groups, heads, inputs, states, pairs that turn."""
    batch, length, groups, heads, inputs, states, pairs = shape
    g = seeded(3)
    B, C = (normal(g, batch, length, groups, inputs, states) for _ in range(2))
    dt, theta = 3 * torch.rand(batch, length, heads, generator=g), rate * normal(g, batch, length, pairs)
    biases = [normal(g, heads, inputs, states) for _ in range(2)]
    goes_on = torch.ones(batch, length) if pos is None else pad((pos[:, 1:] != 0).float(), (0, 1))

    def run(function, **given):
        given = {name: torch.stack((x, x), -1)[..., 1] if view and name in "BC" else x for name, x in given.items()}
        results = function(*given.values())
        return {name: x for name, x in zip(ROTATED, results, strict=True) if x is not None}

    def exact(*given):
        results = list(rotated_of_several(*given, pos, torch.float64))
        if inputs > 1:
            above = torch.ones(inputs, inputs).triu(1) > 0
            results[4] = results[4][..., above] * goes_on[..., None, None]
        return results

    compare(
        lambda **given: run(exact, **given),
        lambda **given: run(lambda *these: rotated_of_several_triton(*these, None if pos is None else pos.to(DEVICE)), **given),
        dict(zip(ARGUMENTS, (B, C, dt, theta, *biases), strict=True)),
        ("q of next", "k", "B", "C"),
        dtype,
    )


ROTATION = {
    "two": (2, 37, 1, 3, 2, 6, 2),
    "three, odd, groups": (1, 70, 2, 4, 3, 21, 9),
    "four, all turn": (2, 67, 1, 2, 4, 34, 17),
    "one token": (1, 1, 1, 2, 2, 8, 4),
    "one": (1, 66, 1, 2, 1, 6, 3),
}


@pytest.mark.parametrize(("shape", "dtype"), alternating(ROTATION, LIMITS), ids=str)
@pytest.mark.parametrize("documents", [pytest.param(False, marks=pytest.mark.long), True], ids=["one document", "documents"])
def test_it_is_the_rotation(shape, documents, dtype):
    shape = ROTATION[shape]
    check_rotation(shape, dtype, positions(seeded(1), *shape[:2], 0.05) if documents else None, view=True)


def test_documents_at_the_borders_of_chunks():
    """A document that ends with a chunk, one of a token, one that goes through a whole chunk, and one that began long ago."""
    starts, pos = {64, 65, 127, 192}, []
    for t in range(200):
        pos.append(0 if t in starts else 1000 if t == 0 else pos[-1] + 1)
    check_rotation((1, 200, 1, 2, 2, 6, 2), torch.float32, torch.tensor([pos]))


def test_angles_of_many_turns():
    """A million radians after some hundred tokens."""
    check_rotation((1, 130, 1, 2, 2, 6, 2), torch.float32, rate=3e4)


WIDTHS = pytest.mark.parametrize(
    ("shape", "dtype"),
    some(
        list(
            itertools.product([(2, 30, 3, 2, 17), (1, 270, 5, 3, 8), (3, 1, 2, 4, 3), (1, 140, 2, 4, 64), (1, 20, 2, 1, 5)], LIMITS)
        ),
        [((2, 30, 3, 2, 17), torch.float32), ((1, 270, 5, 3, 8), torch.bfloat16), ((3, 1, 2, 4, 3), torch.float32)],
    ),
    ids=str,
)
"""batch, length, heads, inputs, width: odd ones, and more tokens than a run has."""


@WIDTHS
def test_the_inputs(shape, dtype):
    g, (batch, length, heads, inputs, width) = seeded(0), shape

    def exact(x, scale, mimo_x):
        return {"v": torch.einsum("bth,bthp,hjp->btjhp", scale, in_columns(x), mimo_x)}

    def triton(x, scale, mimo_x):
        return {"v": inputs_triton(in_columns(x), scale, mimo_x)}

    given = {"x": normal(g, batch, length, heads, width), "scale": torch.rand(batch, length, heads, generator=g)}
    compare(exact, triton, given | {"mimo_x": normal(g, heads, inputs, width)}, ("x", "v"), dtype)


def output_in_float64(read, x, scale, mimo_x, decay, after, D, own, later, first):
    v, inputs = x[:, :, None] * mimo_x.transpose(0, 1), mimo_x.shape[1]
    if later is not None:
        above = torch.ones(inputs, inputs).triu(1) > 0
        square = own.new_zeros(own.shape).masked_scatter(above, later)
        read = read + torch.einsum("bth,bthij,btjhp->btihp", scale, square, v)
    read = pad(read[:, :-1], (0, 0, 0, 0, 0, 0, 1, 0))
    if first is not None:
        read = read + pad(first[:, None], (0, 0, 0, 0, 0, 0, 0, x.shape[1] - 1))
    own = torch.einsum("bth,bthij,btjhp->btihp", after, own, v)
    return decay[:, :, None, :, None] * read + own + D[:, None] * v


@WIDTHS
@pytest.mark.parametrize(
    "with_first", [pytest.param(False, marks=pytest.mark.long), True], ids=["nothing before", "a state before"]
)
def test_the_output(shape, with_first, dtype):
    g, (batch, length, heads, inputs, width) = seeded(0), shape
    x, read = normal(g, batch, length, heads, width), normal(g, batch, length, inputs, heads, width)
    scale, decay, after = (torch.rand(batch, length, heads, generator=g) for _ in range(3))
    given = {"read": read, "x": x, "scale": scale, "mimo_x": normal(g, heads, inputs, width), "decay": decay, "after": after}
    given |= {"D": normal(g, heads), "own": normal(g, batch, length, heads, inputs, inputs)}
    given["later"] = normal(g, batch, length, heads, inputs * (inputs - 1) // 2) if inputs > 1 else None
    given["first"] = normal(g, batch, inputs, heads, width) if with_first else None

    def with_columns(function):
        return lambda read, x, **others: {"y": function(read, in_columns(x), **others)}

    compare(with_columns(output_in_float64), with_columns(output_triton), given, ("x", "read", "y"), dtype)


@WIDTHS
def test_the_gated_sum(shape, dtype):
    """Also of float32 y, as behind a norm."""
    g, (batch, length, heads, inputs, width) = seeded(0), shape
    given = {"y": normal(g, batch, length, inputs, heads, width), "z": normal(g, batch, length, heads, width)}
    given |= {"mimo_z": normal(g, heads, inputs, width), "mimo_o": normal(g, heads, inputs, width)}

    def exact(y, z, mimo_z, mimo_o):
        return {"total": gated_sum(y, in_columns(z), mimo_z, mimo_o, torch.float64)}

    def triton(y, z, mimo_z, mimo_o):
        return {"total": gated_sum_triton(y, in_columns(z), mimo_z, mimo_o, dtype)}

    for low in (("y", "z", "total"), ("z", "total")):
        compare(exact, triton, given, low, dtype)


def check_recurrence(shape, dtype, limit):
    """The operator, with a state and documents, against the loop in float64.

    shape: batch, length, groups, heads, inputs, states, pairs, width.
    """
    g, (batch, length, groups, heads, inputs, states, pairs, width) = seeded(7), shape
    x, lam = normal(g, batch, length, heads, width), torch.rand(batch, length, heads, generator=g)
    B, C = (normal(g, batch, length, groups, inputs, states) for _ in range(2))
    B_bias, C_bias = (normal(g, heads, inputs, states) for _ in range(2))
    dt, decays = (torch.rand(batch, length, heads, generator=g) for _ in range(2))
    theta, D, mimo_x = normal(g, batch, length, pairs), normal(g, heads), normal(g, heads, inputs, width)
    sizes = {"h": (states, width), "k": (inputs, states), "x": (inputs, width)}
    state = {name: normal(g, batch, heads, *size) for name, size in sizes.items()}
    inputs = [*(of.to(dtype) for of in (x, B, C)), dt, -decays, lam, theta, B_bias, C_bias, D, mimo_x]
    pos, found = positions(seeded(2), batch, length, 0.05), []
    for exact in (True, False):
        place, cast = ("cpu", torch.float64) if exact else (DEVICE, None)
        leaves = [of.detach().to(place, cast or of.dtype).requires_grad_() for of in inputs]
        entering = {name: of.detach().to(place, cast or of.dtype).requires_grad_() for name, of in state.items()}
        run = mamba3_mimo_reference if exact else mamba3_mimo
        y, leaving = run(*leaves, pos=pos.to(place), initial_state=entering)
        dy = normal(seeded(4), *y.shape).to(dtype).to(place).double()
        total = (y.double() * dy).sum() + sum((of.double() ** 2).sum() for of in leaving.values())
        grads = torch.autograd.grad(total, [*leaves, *entering.values()])
        found.append([of.double().cpu() for of in (y, *leaving.values(), *grads)])
    names = ("y", *state, *(f"d{name}" for name in (*Mamba3MIMO.input_names, *state)))
    for name, want, have in zip(names, *found, strict=True):
        # the terms of an angle's gradient cancel
        assert relative_error(have, want) <= (2.5e-2 if name == "dtheta" and limit > 1e-3 else limit), name


@pytest.mark.parametrize(
    ("inputs", "groups"),
    some([(inputs, groups) for inputs in (1, 2, 3, 4) for groups in (1, 2)], [(2, 1), (4, 2)]),
)
def test_the_operator_with_these_kernels_is_the_loop(inputs, groups, monkeypatch):
    """Around the CPU's gated linear attention."""
    monkeypatch.setattr(torch_impl, "use_triton", lambda *of: True)
    check_recurrence((2, 70, groups, 4, inputs, 10, 3, 5), torch.float32, 1e-5)


def test_more_inputs_than_the_kernels_have_are_computed_by_pytorch(monkeypatch):
    monkeypatch.setattr("baton.kernels.mamba3_mimo.triton_launch.on_gpu", lambda x: True)
    for inputs, dtype in ((MOST_INPUTS, torch.float32), (MOST_INPUTS + 1, torch.float32), (2, torch.float64)):
        mimo = torch.ones(1, inputs, 2, dtype=dtype)
        assert use_triton(mimo, mimo) == (inputs <= MOST_INPUTS and dtype == torch.float32)


@pytest.mark.gpu
@DTYPES
@pytest.mark.parametrize("documents", [False, True], ids=["one document", "documents"])
def test_the_sizes_of_runs(documents, dtype):
    check_rotation((2, 1000, 1, 24, 4, 128, 32), dtype, positions(seeded(1), 2, 1000, 0.01) if documents else None)


@pytest.mark.gpu
@pytest.mark.parametrize("inputs", range(1, MOST_INPUTS + 2))
@DTYPES
def test_the_operator_on_a_gpu_is_the_loop(inputs, dtype):
    limit = 2e-5 if dtype == torch.float32 else Mamba3MIMO.bfloat16_limit
    check_recurrence((2, 200, 2, 4, inputs, 64, 16, 64), dtype, limit)


@pytest.mark.gpu
@DTYPES
def test_the_same_bits_twice(dtype):
    g, (batch, length, heads, inputs, width) = seeded(0), (2, 3000, 8, 4, 64)
    x, z = (normal(g, batch, length, heads, width).to(DEVICE, dtype) for _ in range(2))
    scale, mimo_x, mimo_z, mimo_o = (
        of.to(DEVICE)
        for of in (torch.rand(batch, length, heads, generator=g), *(normal(g, heads, inputs, width) for _ in range(3)))
    )
    found = []
    for _ in range(2):
        leaves = [of.detach().requires_grad_() for of in (x, z, scale, mimo_x, mimo_z, mimo_o)]
        y = gated_sum_triton(inputs_triton(leaves[0], leaves[2], leaves[3]), leaves[1], *leaves[4:], dtype)
        found.append([y, *torch.autograd.grad(y, leaves, y.detach())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
