"""Rotary position embeddings in Triton against complex numbers in float64; on a CPU the same kernel is interpreted."""

import math
from fractions import Fraction
from functools import partial

import pytest
import torch
from support.compare import relative_error
from support.recurrences import positions, seeded

from baton.kernels.compile.aot import META, Target, launching_nothing
from baton.kernels.errors import KernelError
from baton.kernels.rotary import op, rotary
from baton.kernels.rotary import triton_launch as on_gpus
from baton.models.rope import rope_rates

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# of what is rounded once
LIMITS = {torch.float64: 1e-9, torch.float32: 1e-6, torch.bfloat16: 2e-3, torch.float16: 2.5e-4}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
THETA = 1e4
RATES = rope_rates(THETA, 6)


@pytest.fixture
def use_triton(monkeypatch):
    """The kernel wherever it is able to compute, also on a CPU, by the interpreter."""
    monkeypatch.setattr(on_gpus, "on_gpu", lambda x: True)


def turned(x, pos, pairs=None, magnitude=1.0):
    """By complex numbers, pair by pair; channels behind the pairs are as they were."""
    pairs = pairs or x.shape[-1] // 2
    rates = torch.tensor([math.pow(THETA, -2 * i / (2 * pairs)) for i in range(pairs)], dtype=torch.float64)
    angles = (pos.double().unsqueeze(-1) * rates).unsqueeze(2)
    first, second, others = x.double().split((pairs, pairs, x.shape[-1] - 2 * pairs), dim=-1)
    z = torch.complex(first, second) * torch.polar(torch.full_like(angles, magnitude), angles)
    return torch.cat((z.real, z.imag, others), dim=-1)


def at(batch, length, largest):
    """Positions up to the largest, of several documents."""
    pos = positions(seeded(3), batch, length, 0.1)
    pos[:, length // 2 :] += largest - int(pos.max())
    return pos


def within(like, lies):
    """A view, shaped and filled as `like`, of memory that is NaN elsewhere."""
    batch, length, heads, dim = like.shape
    if lies == "columns":  # of wider rows
        view = like.new_full((batch, length, 3 + (heads + 1) * dim), torch.nan)[..., 3 : 3 + heads * dim].unflatten(
            -1, (heads, dim)
        )
    elif lies == "heads first":
        view = like.new_full((batch, heads + 1, length + 2, dim), torch.nan)[:, 1:, 1:-1].transpose(1, 2)
    elif lies == "dim first":  # which is copied
        view = like.new_full((dim + 1, batch, length, heads), torch.nan)[1:].permute(1, 2, 3, 0)
    else:
        view = torch.empty_like(like)
    return view.copy_(like)


def compare(run, shape, key_heads, dtype, *, lies="apart", largest=4000, limits=LIMITS, pairs=None, magnitude=1.0):
    g, (batch, length, _, dim) = seeded(0), shape
    shapes = (shape, (batch, length, key_heads, dim))
    q, k, dq, dk = (torch.randn(*of, generator=g).to(dtype) for of in (*shapes, *shapes))
    pos = at(batch, length, largest)
    leaves = [x.double().requires_grad_() for x in (q, k)]
    ys = [turned(x, pos, pairs, magnitude) for x in leaves]
    want = [*ys, *torch.autograd.grad(ys, leaves, [dq.double(), dk.double()])]
    leaves = [within(x.to(DEVICE), lies).requires_grad_() for x in (q, k)]
    ys = run(*leaves, pos.to(DEVICE, torch.int32), rope_rates(THETA, 2 * (pairs or dim // 2)), magnitude=magnitude)
    assert all(y.dtype == dtype and y.is_contiguous() for y in ys)
    have = [*ys, *torch.autograd.grad(ys, leaves, [within(x.to(DEVICE), lies) for x in (dq, dk)])]
    for name, expected, found in zip(("q", "k", "dq", "dk"), want, have, strict=True):
        assert relative_error(found, expected) <= limits[dtype], name


@pytest.mark.parametrize("lies", ["apart", "columns", "heads first", "dim first"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_is_a_turn(use_triton, dtype, lies):
    """Odd numbers of tokens, heads and pairs; several blocks of tokens."""
    compare(rotary, (2, 37, 3, 6), 1, dtype, lies=lies)
    compare(rotary, (1, 9, 5, 64), 5, dtype, lies=lies)


@pytest.mark.parametrize("run", [pytest.param(True, id="triton"), pytest.param(False, id="cpu")])
def test_a_part_of_the_channels_is_turned_and_lengthened(run, monkeypatch):
    """With fewer other channels than rotated ones, with more, and an odd number of them."""
    if run:
        monkeypatch.setattr(on_gpus, "on_gpu", lambda x: True)
    for dim, pairs, lies in ((7, 2, "columns"), (16, 2, "heads first"), (64, 24, "apart")):
        compare(rotary, (2, 37, 3, dim), 1, torch.bfloat16, lies=lies, pairs=pairs, magnitude=1.3)


def test_several_blocks_of_heads(use_triton):
    assert on_gpus.launch_sizes(5, 2100, 1050)["BH"] == 1
    compare(rotary, (2, 3, 5, 2100), 1, torch.float32, lies="columns")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_far_into_a_document(use_triton, dtype):
    """Where a float32 angle would be off by 0.06."""
    compare(rotary, (2, 21, 2, 16), 1, dtype, largest=1_000_003)
    compare(rotary, (2, 21, 2, 16), 1, dtype, largest=2**31 - 1)


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_the_cpus_form_is_a_turn(dtype):
    compare(rotary, (2, 21, 3, 6), 1, dtype, lies="columns", largest=1_000_003)


def test_gradients_of_both_are_columns_of_one_tensor(use_triton):
    """In the order of the arguments, as a projection has them."""
    q, k = (torch.randn(2, 5, heads, 6, device=DEVICE, requires_grad=True) for heads in (3, 2))
    ys = rotary(q, k, at(2, 5, 100).to(DEVICE), RATES)
    dq, dk = torch.autograd.grad(ys, (q, k), [torch.ones_like(y) for y in ys])
    assert dq.untyped_storage().data_ptr() == dk.untyped_storage().data_ptr()
    assert dk.storage_offset() - dq.storage_offset() == 3 * 6
    assert dq.stride() == dk.stride() == (5 * 30, 30, 6, 1)


@pytest.mark.parametrize("pairs", [1, 5, 64])
def test_angles_are_float64s(use_triton, pairs):
    """Beside exact products: at borders of quarters, where sine and cosine are exact or change places, and far away on either side.
    Both are within a unit or two in the last place of 1, and float64's rounding of the angle."""
    quarters = torch.tensor([0.25 * 3**i / 7**i for i in range(pairs)], dtype=torch.float64)
    pos = torch.cat((torch.arange(-9, 40), torch.tensor([10**6 + 1, 2**31 - 2, 2**31 - 1, -(2**31)])))[None]
    turned = [[float(Fraction(rate) * at % 4) for rate in quarters.tolist()] for at in pos[0].tolist()]
    angles = torch.tensor(turned, dtype=torch.float64) * (math.pi / 2)
    limit = 2e-7 + 1.5 * (math.pi / 2) * 2**-53 * (pos.double()[0, :, None] * quarters).abs()
    for given in (pos, pos.int()):
        cos, sin = (x[0].double().cpu() for x in on_gpus.launch_angles(given.to(DEVICE), quarters.to(DEVICE), 1.5))
        assert bool(((cos - 1.5 * angles.cos()).abs() <= limit).all())
        assert bool(((sin - 1.5 * angles.sin()).abs() <= limit).all())
        assert torch.equal(cos[9], torch.full((pairs,), 1.5, dtype=torch.float64)), "of position 0"


def test_one_of_both_alone_has_its_gradient(use_triton):
    q, k = (torch.randn(1, 5, 2, 6, device=DEVICE, requires_grad=True) for _ in range(2))
    pos = at(1, 5, 100)
    (dq,) = torch.autograd.grad(rotary(q, k.detach(), pos.to(DEVICE), RATES)[0].sum(), q)
    assert relative_error(dq, turned(torch.ones(1, 5, 2, 6), -pos)) <= LIMITS[torch.float32]


def test_positions_as_they_come(use_triton):
    """In either type, and however they lie."""
    q, pos = torch.randn(3, 7, 2, 6, generator=seeded(0)), at(3, 7, 5000)
    expected = turned(q, pos)
    for given in (pos, pos.int(), torch.cat((pos, pos), 1)[:, :7], pos.T.contiguous().T):
        for y in rotary(q.to(DEVICE), q.to(DEVICE), given.to(DEVICE), RATES):
            assert relative_error(y, expected) <= LIMITS[torch.float32]


def test_float64_is_not_computed_in_float32(use_triton, monkeypatch):
    monkeypatch.setattr(op, "rotary_triton", None)
    compare(rotary, (2, 5, 3, 6), 1, torch.float64, limits={torch.float64: 1e-12})


def test_when_compiling_ahead_it_is_launched():
    q, pos = torch.empty(2, 5, 3, 6, device=META, requires_grad=True), torch.empty(2, 5, dtype=torch.int32, device=META)
    assert not on_gpus.use_triton(q)
    with launching_nothing(Target(90)):
        assert on_gpus.use_triton(q)
        y, _ = rotary(q, q, pos, RATES)
        assert y.grad_fn.name() == "_RotaryBackward"
        y.backward(y)
    assert q.grad.shape == q.shape


@pytest.mark.gpu
@pytest.mark.parametrize("lies", ["apart", "columns"])
def test_the_sizes_of_runs(lies):
    compare(rotary, (8, 2048, 32, 64), 32, torch.bfloat16, lies=lies, largest=1_000_003)
    compare(rotary, (2, 1001, 32, 128), 8, torch.bfloat16, lies=lies)


def test_what_does_not_fit_is_refused():
    q, pos = torch.ones(2, 5, 3, 6), torch.zeros(2, 5, dtype=torch.int64)
    refused = partial(pytest.raises, KernelError)
    with refused(match="rotary: q is a float"):
        rotary(1.0, q, pos, RATES)  # type: ignore[arg-type]
    with refused(match=r"rotary: k has shape \(2, 4, 3, 6\), expected \(batch, T, key heads, dim\) = \(2, 5, any, 6\)"):
        rotary(q, q[:, :4], pos, RATES)
    with refused(match="rotary: k has dtype bfloat16, expected float32"):
        rotary(q, q.bfloat16(), pos, RATES)
    with refused(match=r"rotary: pos has shape \(5,\)"):
        rotary(q, q, pos[0], RATES)
    with refused(match="rotary: pos has dtype float32, expected int32 or int64"):
        rotary(q, q, pos.float(), RATES)
    for rates in ((), (1.0,) * 4):
        with refused(match=f"rotary: rates are those of {len(rates)} pairs, expected 1 to 3 of 6 channels"):
            rotary(q, q, pos, rates)
