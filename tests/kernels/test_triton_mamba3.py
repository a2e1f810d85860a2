"""Mamba-3's turned queries and keys, and its outputs, in Triton against PyTorch in float64; on a CPU the same kernels are
interpreted."""

import pytest
import torch
from support.bfloat16 import bfloat16_is_rounded
from support.compare import relative_error
from support.recurrences import positions, seeded
from torch.nn.functional import pad

from baton.kernels.mamba3 import mamba3
from baton.kernels.mamba3.recurrence import Mamba3
from baton.kernels.mamba3.reference import mamba3_reference
from baton.kernels.mamba3.rotation import rotated
from baton.kernels.mamba3.triton_launch import output_triton, rotated_triton

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
RESULTS = ("q of next", "q of first", "k", "own products", "cosine", "sine")
INPUTS = ("B", "C", "dt", "theta", "B_bias", "C_bias")
IN_LOW = ("q of next", "k", "B", "C")
LIMITS = {torch.float32: 2e-6, torch.bfloat16: 4e-3}


def arguments(shape, *, rate=3.0):
    """batch, length, groups, heads, states, pairs that turn."""
    batch, length, groups, heads, states, pairs = shape
    g = seeded(3)
    normal = lambda *sizes: torch.randn(*sizes, generator=g)  # noqa: E731
    dt = 3 * torch.rand(batch, length, heads, generator=g)
    B, C = normal(batch, length, groups, states), normal(batch, length, groups, states)
    return [B, C, dt, rate * normal(batch, length, pairs), normal(heads, states), normal(heads, states)]


def compare(shape, pos=None, dtype=torch.float32, *, view=False, **words):
    given, found, g = arguments(shape, **words), [], seeded(5)
    given[:2] = [x.to(dtype) for x in given[:2]]
    for exact in (True, False):
        leaves = [x.detach().to("cpu" if exact else DEVICE, torch.float64 if exact else x.dtype).requires_grad_() for x in given]
        B, C = (torch.stack((x, x), 3).select(3, 1) if view else x for x in leaves[:2])
        if exact:
            results = rotated(B, C, *leaves[2:], pos, torch.float64)
            dtypes = [dtype if name in IN_LOW else torch.float32 for name in RESULTS]
            cotangents = [torch.randn(x.shape, generator=g).to(of) for of, x in zip(dtypes, results, strict=True)]
        else:
            results = rotated_triton(B, C, *leaves[2:], None if pos is None else pos.to(DEVICE))
            assert [x.dtype for x in results] == [dtype, torch.float32, dtype, *[torch.float32] * 3]
        grads = torch.autograd.grad(results, leaves, [d.to(x.device, x.dtype) for d, x in zip(cotangents, results, strict=True)])
        found.append([x.double().cpu() for x in (*results, *grads)])
    for name, want, have in zip((*RESULTS, *INPUTS), *found, strict=True):
        limit = LIMITS[dtype] if name in IN_LOW else LIMITS[torch.float32]
        assert relative_error(have, want) <= limit, name


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize(
    "shape",
    [(2, 37, 1, 3, 6, 2), (1, 150, 2, 4, 41, 18), (1, 1, 1, 2, 8, 4), (2, 64, 1, 1, 32, 16)],
    ids=["one chunk", "odd, groups, more than a block", "one token", "a whole chunk, all turn"],
)
@pytest.mark.parametrize("documents", [False, True], ids=["one document", "documents"])
def test_it_is_the_rotation(shape, documents, dtype):
    pos = positions(seeded(1), *shape[:2], 0.05) if documents else None
    with bfloat16_is_rounded():
        compare(shape, pos, dtype, view=True)


def test_documents_at_the_borders_of_chunks():
    """A document that ends with a chunk, one of a token, one that goes through a whole chunk, and one that began long ago."""
    starts, pos = {64, 65, 127, 192}, []
    for t in range(260):
        pos.append(0 if t in starts else 1000 if t == 0 else pos[-1] + 1)
    compare((1, 260, 1, 2, 6, 2), torch.tensor([pos]))


def test_a_document_has_nothing_of_another():
    """Not a bit."""
    pos, (shape, found) = torch.cat((torch.arange(70), torch.arange(80)))[None], ((1, 150, 1, 2, 6, 2), [])
    for first in (1.0, -2.0, 1e3):
        given = [x.to(DEVICE) for x in arguments(shape)]
        given[3][:, :70] *= first
        leaves = [x.requires_grad_() for x in given]
        q, _, k, own, *_ = rotated_triton(*leaves, pos.to(DEVICE))
        of_second = [x[:, 70:] for x in (q, k, own)]
        grads = torch.autograd.grad(sum((x * x).sum() for x in of_second), leaves[:4])
        found.append([*of_second, *(grad[:, 70:] for grad in grads)])
    for others in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], others, strict=True))


def test_angles_of_many_turns():
    """A million radians after some hundred tokens."""
    compare((1, 130, 1, 2, 6, 2), rate=3e4)


def output_in_float64(read, x, decay, skip, first):
    before = pad(read[:, :-1], (0, 0, 0, 0, 1, 0))
    if first is not None:
        before = before + pad(first[:, None], (0, 0, 0, 0, 0, x.shape[1] - 1))
    return decay[..., None] * before + skip[..., None] * x


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("with_first", [False, True], ids=["nothing before", "a state before"])
@pytest.mark.parametrize("shape", [(2, 300, 3, 17), (3, 1, 2, 8), (1, 65, 5, 64)], ids=str)
def test_the_output(shape, with_first, dtype):
    """Odd widths, more rows than a program has, columns of wider rows."""
    g, found = seeded(0), []
    batch, length, heads, width = shape
    read, x, dy = (torch.randn(*shape, generator=g).to(dtype) for _ in range(3))
    decay, skip = torch.rand(batch, length, heads, generator=g), torch.randn(batch, length, heads, generator=g)
    first = torch.randn(batch, heads, width, generator=g) if with_first else None
    for exact in (True, False):
        leaves = [
            None if of is None else of.to("cpu" if exact else DEVICE, torch.float64 if exact else of.dtype).requires_grad_()
            for of in (read, x, decay, skip, first)
        ]
        own_read, own_x, *others = leaves
        wide = pad(own_x.flatten(2), (3, 5))[..., 3:-5].unflatten(2, (heads, width))
        with bfloat16_is_rounded():
            y = output_in_float64(own_read, own_x, *others) if exact else output_triton(own_read, wide, *others)
            assert exact or y.dtype == dtype
            grads = torch.autograd.grad(y, [leaf for leaf in leaves if leaf is not None], dy.to(y.device, y.dtype))
        found.append([of.double().cpu() for of in (y, *grads)])
    for name, want, have in zip(("y", "read", "x", "decay", "skip", "first"), *found, strict=False):
        limit = LIMITS[dtype if name in ("y", "read", "x") else torch.float32]
        assert relative_error(have, want) <= limit, name


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("documents", [False, True], ids=["one document", "documents"])
def test_the_sizes_of_runs(documents, dtype):
    shape = (2, 1000, 1, 24, 128, 32)
    compare(shape, positions(seeded(1), 2, 1000, 0.01) if documents else None, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_recurrence_is_the_loop(dtype):
    """Of the operator on a GPU, with a state and documents, against the loop in float64."""
    g, (batch, length, groups, heads, states, pairs, width) = seeded(7), (2, 200, 2, 4, 64, 16, 32)
    B, C, dt, theta, B_bias, C_bias = arguments((batch, length, groups, heads, states, pairs), rate=1.0)
    x, lam = torch.randn(batch, length, heads, width, generator=g), torch.rand(batch, length, heads, generator=g)
    decays, D = -torch.rand(batch, length, heads, generator=g), torch.randn(heads, generator=g)
    state = {
        "h": torch.randn(batch, heads, states, width, generator=g),
        "k": torch.randn(batch, heads, states, generator=g),
        "x": torch.randn(batch, heads, width, generator=g),
    }
    inputs = [*(of.to(dtype) for of in (x, B, C)), dt, decays, lam, theta, B_bias, C_bias, D]
    pos, dy, found = positions(seeded(2), batch, length, 0.02), torch.randn(x.shape, generator=g).to(dtype), []
    for exact in (True, False):
        place, cast = ("cpu", torch.float64) if exact else (DEVICE, None)
        leaves = [of.detach().to(place, cast or of.dtype).requires_grad_() for of in inputs]
        entering = {name: of.detach().to(place, cast or of.dtype).requires_grad_() for name, of in state.items()}
        run = mamba3_reference if exact else mamba3
        y, leaving = run(*leaves, pos=pos.to(place), initial_state=entering)
        total = (y.double() * dy.to(place).double()).sum() + sum((of.double() ** 2).sum() for of in leaving.values())
        grads = torch.autograd.grad(total, [*leaves, *entering.values()])
        found.append([of.double().cpu() for of in (y, *leaving.values(), *grads)])
    names = ("y", *state, *(f"d{name}" for name in (*Mamba3.input_names, *state)))
    for name, want, have in zip(names, *found, strict=True):
        # the terms of an angle's gradient cancel: those of rounded q and k are as far off with PyTorch's operators (0.019)
        limit = 2e-5 if dtype == torch.float32 else 2.5e-2 if name == "dtheta" else Mamba3.bfloat16_limit
        assert relative_error(have, want) <= limit, name
