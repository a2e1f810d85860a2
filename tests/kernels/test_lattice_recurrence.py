"""Properties of Lattice's recurrence: geometry, its two implementations, limits and memory.

Split invariance is tested in test_law.py, long runs in test_lattice_recurrence_long.py.
"""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.compare import relative_error
from support.long_form import alternating
from support.memory import LargestTensor
from support.recurrences import gradients, law, positions, seeded, seeds
from torch import Tensor

from baton.kernels.errors import KernelError
from baton.kernels.lattice import lattice
from baton.kernels.lattice.chunked import Options, chunk_length, lattice_chunked
from baton.kernels.lattice.qr_chunk import qr_basis, run_qr_chunk
from baton.kernels.lattice.recurrence import Lattice
from baton.kernels.lattice.reference import lattice_reference
from baton.kernels.lattice.sequential import run_sequential
from baton.kernels.lattice.step_loop import Tokens
from baton.kernels.lattice.variant import VARIANTS, UpdateRule

every_variant = pytest.mark.parametrize("variant", VARIANTS)
either_projection = pytest.mark.parametrize("project", [True, False])
with_a_span = pytest.mark.parametrize("variant", ["enc", "sim"])


def _arguments(
    seed: int,
    batch: int = 2,
    length: int = 12,
    heads: int = 2,
    d: int = 6,
    m: int = 4,
    dtype: torch.dtype = torch.float64,
    **optional: bool,
) -> dict[str, Tensor]:
    """q, k, v, gamma, S0, an initial_state of unit slots, and mu and tau if requested. Steps rotate slots by about a radian."""
    generator = seeded(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype)

    along, S = (batch, length, heads), randn(batch, heads, d, m)
    arguments = {"q": randn(*along, m), "k": randn(*along, m), "v": randn(*along, d), "gamma": torch.sigmoid(randn(*along))}
    arguments["S0"] = torch.linalg.qr(randn(heads, d, m))[0].contiguous()
    arguments["initial_state"] = S / torch.linalg.vector_norm(S, dim=2, keepdim=True)
    if optional.get("forget"):
        arguments["mu"] = torch.sigmoid(randn(*along))
    if optional.get("sparse"):
        arguments["tau"] = 0.1 * randn(*along).clamp(min=0.0)
    return arguments


def _leaves(arguments: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.detach().clone().requires_grad_() for name, x in arguments.items()}


def _slots(variant, project, arguments):
    """The slots after each token, from one call per token."""
    S = arguments["initial_state"]
    for t in range(arguments["q"].shape[1]):
        token = {name: x if name in ("S0", "initial_state") else x[:, t : t + 1] for name, x in arguments.items()}
        y, S = lattice(**{**token, "initial_state": S}, variant=variant, project=project)
        yield y[:, 0], S


@law(max_examples=24)
@given(
    seed=seeds,
    variant=st.sampled_from(VARIANTS),
    project=st.booleans(),
    forget=st.booleans(),
    sparse=st.booleans(),
    batch=st.integers(1, 2),
    length=st.integers(1, 33),
    sizes=st.tuples(st.integers(2, 9), st.integers(1, 9)),
    chunk=st.integers(1, 40),
    start_probability=st.sampled_from([None, 0.05, 0.3]),
)
def test_any_chunk_size_equals_the_definition(
    seed, variant, project, forget, sparse, batch, length, sizes, chunk, start_probability
):
    d, m = max(sizes), min(sizes)
    arguments = _arguments(seed, batch, length, 3, d, m, forget=forget, sparse=sparse)
    pos = None if start_probability is None else positions(seeded(seed), batch, length, start_probability)
    rule, found = UpdateRule(variant, project), []
    for form, options in ((lattice_chunked, {"chunk": chunk}), (lattice_reference, {})):
        leaves = _leaves(arguments)
        outputs = form(**{"mu": None, "tau": None, **leaves}, rule=rule, pos=pos, **options)
        found.append([*outputs, *gradients(outputs, list(leaves.values()), seeded(seed))])
    for fast, definition in zip(*found, strict=True):
        assert relative_error(fast, definition) <= 1e-10


@every_variant
@either_projection
def test_without_a_state_every_lane_begins_with_s0_and_adds_to_its_gradient(variant, project):
    arguments = _arguments(1)
    state = arguments.pop("initial_state")
    S0 = arguments["S0"].clone().requires_grad_()
    state = arguments["S0"].expand_as(state).clone().requires_grad_()
    outputs = lattice(**{**arguments, "S0": S0}, variant=variant, project=project)
    same_outputs = lattice(**arguments, initial_state=state, variant=variant, project=project)
    assert all(torch.equal(one, other) for one, other in zip(outputs, same_outputs, strict=True))
    (dS0,), (dstate,) = gradients(outputs, [S0], seeded(2)), gradients(same_outputs, [state], seeded(2))
    assert relative_error(dS0, dstate.sum(0)) <= 1e-13


@every_variant
def test_projected_slots_have_norm_one_after_every_step(variant):
    for dtype, bound in ((torch.float64, 1e-15), (torch.float32, 5e-7)):
        arguments = _arguments(3, length=50, dtype=dtype)
        for _, S in _slots(variant, True, arguments):
            assert float((torch.linalg.vector_norm(S, dim=2) - 1).abs().max()) <= bound
        _, S = lattice(**arguments, variant=variant)
        assert float((torch.linalg.vector_norm(S, dim=2) - 1).abs().max()) <= bound


@every_variant
def test_without_projection_a_step_descends_the_loss_of_the_slots_directions(variant):
    """u = mu s - gamma dL/ds, where L reads the slots' directions s / |s| (equations 5, 9 and 11): the derivative of that division
    is the paper's orthogonal projection over |s|. L is half a square for dec and enc, so that no factor of 2 remains.
    """
    found, pos = [], torch.tensor([[3, 4, 5, 0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 5, 6, 0, 0, 1, 2]])
    arguments = _arguments(8, length=11, heads=3, d=7, m=5, forget=True)
    arguments["S0"] = arguments["S0"] * torch.linspace(0.2, 3.0, 5, dtype=torch.float64)
    arguments["initial_state"] = arguments["initial_state"] * torch.linspace(2.0, 0.1, 5, dtype=torch.float64)

    def loop(q, k, v, gamma, S0, initial_state, mu):
        S, ys = initial_state, []
        for t in range(q.shape[1]):
            S = torch.where((pos[:, t] == 0)[:, None, None, None], S0[None], S)
            phi = S / S.square().sum(2, keepdim=True).sqrt()
            if variant == "dec":
                loss = (torch.einsum("bhdm,bhm->bhd", phi, k[:, t]) - v[:, t]).square().sum() / 2
            elif variant == "enc":
                loss = (torch.einsum("bhdm,bhd->bhm", phi, v[:, t]) - k[:, t]).square().sum() / 2
            else:
                loss = -torch.einsum("bhdm,bhd,bhm->", phi, v[:, t], k[:, t])
            (slope,) = torch.autograd.grad(loss, S, create_graph=True)
            S = mu[:, t, :, None, None] * S - gamma[:, t, :, None, None] * slope
            ys.append(torch.einsum("bhdm,bhm->bhd", S, q[:, t]))
        return torch.stack(ys, 1), S

    for form, options in ((lattice, {"variant": variant, "project": False, "pos": pos}), (loop, {})):
        leaves = _leaves(arguments)
        outputs = form(**leaves, **options)
        found.append([*outputs, *gradients(outputs, list(leaves.values()), seeded(9))])
    for ours, expected in zip(*found, strict=True):
        assert relative_error(ours, expected) <= 1e-12


@every_variant
@pytest.mark.parametrize("forget", [False, True])
def test_a_projected_step_turns_a_slot_towards_what_is_written_by_a_known_angle(variant, forget):
    """theta' = theta - atan(alpha |h| sin theta / mu), theta the angle from h to the slot, in the plane of both."""
    arguments = _arguments(4, length=8, forget=forget)
    before = arguments["initial_state"]
    for t, (_, after) in enumerate(_slots(variant, True, arguments)):
        k, v, gamma = (arguments[name][:, t, :, None] for name in ("k", "v", "gamma"))
        h = v.mT if variant == "enc" else -v.mT if variant == "sim" else before @ k.mT - v.mT
        c = before.mT @ v.mT - k.mT if variant == "enc" else k.mT
        alpha, size = -gamma[..., None] * c, torch.linalg.vector_norm(h, dim=2, keepdim=True)
        unit = h / size
        along = (before.mT @ unit).clamp(-1, 1)
        across = before - unit * along.mT
        across = across / torch.linalg.vector_norm(across, dim=2, keepdim=True)
        theta = torch.acos(along).mT
        mu = arguments["mu"][:, t, :, None, None] if forget else 1.0
        theta = theta - torch.atan(alpha.mT * size * torch.sin(theta) / mu)
        assert relative_error(after, torch.cos(theta) * unit + torch.sin(theta) * across) <= 1e-12
        before = after


@every_variant
def test_without_projection_pythagoras_holds(variant):
    """|u|^2 = mu^2 |s|^2 + |u - mu s|^2: every update is orthogonal to its slot."""
    arguments = _arguments(5, length=20, forget=True)
    before = 3 * arguments["initial_state"]
    for t, (_, after) in enumerate(_slots(variant, False, {**arguments, "initial_state": before})):
        kept = arguments["mu"][:, t, :, None, None] * before
        assert relative_error((kept * (after - kept)).sum(2), torch.zeros(2, 2, 4)) <= 1e-12
        assert relative_error(after.square().sum(2), (kept.square() + (after - kept).square()).sum(2)) <= 1e-13
        before = after


@every_variant
def test_a_forget_gate_under_projection_is_a_larger_step(variant):
    """NOSR(mu, gamma) = NOSR(1, gamma / mu); and a gate of 0 does not destroy a slot."""
    arguments = _arguments(6, forget=True)
    arguments["mu"] = arguments["mu"].clamp(min=0.01)
    gated = lattice(**arguments, variant=variant)
    mu = arguments.pop("mu")
    larger = lattice(**{**arguments, "gamma": arguments["gamma"] / mu}, variant=variant)
    assert all(relative_error(one, other) <= 1e-12 for one, other in zip(gated, larger, strict=True))
    closed = lattice(**arguments, mu=torch.zeros_like(mu), variant=variant)
    limit = lattice(**{**arguments, "gamma": arguments["gamma"] * 1e3}, variant=variant)
    assert all(relative_error(one, other) <= 1e-9 for one, other in zip(closed, limit, strict=True))
    _, S = lattice(**{**arguments, "gamma": 0 * arguments["gamma"]}, mu=torch.zeros_like(mu), variant=variant)
    assert relative_error(S, arguments["initial_state"]) <= 1e-13


@either_projection
@with_a_span
def test_small_steps_towards_values_outside_the_slots_are_linear_attention(variant, project):
    """P(s) v = v then, so S = S0 + gamma sum v k^T + O(gamma^2): halving gamma quarters the difference."""
    arguments = _arguments(7, d=9, m=3)
    S0 = arguments["S0"].expand(2, -1, -1, -1)
    arguments["initial_state"] = S0
    v = arguments["v"]
    arguments["v"] = v - torch.einsum("bhdm,bhem,bthe->bthd", S0, S0, v)
    linear = torch.einsum("bthd,bthm->bhdm", arguments["v"], arguments["k"])
    missed = []
    for gamma in (1e-3, 5e-4):
        _, S = lattice(
            **{**arguments, "gamma": torch.full((2, 12, 2), gamma, dtype=torch.float64)}, variant=variant, project=project
        )
        missed.append(float((S - S0 - gamma * linear).norm()))
    assert missed[1] == pytest.approx(missed[0] / 4, rel=0.02)
    assert missed[1] <= 1e-2 * float((5e-4 * linear).norm())


@every_variant
@either_projection
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("fast", [True, pytest.param(False, marks=pytest.mark.long)], ids=["in a direction", "of each number"])
def test_the_backward_pass_by_hand_is_that_of_finite_differences(variant, project, sparse, fast):
    """Of the loop over slots of any norm, and of the loop over coordinates, with a new basis for every difference."""
    length, n, d, m = 4, 2, 6, 3
    rule, generator = UpdateRule(variant, project), seeded(8)
    shapes = [(length, n, 1, m), (length, n, 1, m), (length, n, d, 1), *[(length, n, 1, 1)] * 3, (n, d, m)]
    q, k, v, gamma, mu, tau, S = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes)
    mu, tau = torch.sigmoid(mu) + 0.1, 0.05 * torch.sigmoid(tau)
    leaves = [x.requires_grad_() for x in (q, k, v, gamma, mu, *([tau] if sparse else []), S)]

    def steps(*tensors):
        *inputs, S = tensors
        return run_sequential(rule, Tokens(*inputs, *([] if sparse else [None])), None, S)

    def span(*tensors):
        *inputs, S = tensors
        return run_qr_chunk(rule, qr_basis(rule, inputs[2]), Tokens(*inputs, None), S)

    assert torch.autograd.gradcheck(steps, leaves, atol=1e-7, rtol=1e-5, fast_mode=fast)
    if project and variant != "dec" and not sparse:
        assert torch.autograd.gradcheck(span, leaves, atol=1e-7, rtol=1e-5, fast_mode=fast)


@either_projection
@every_variant
def test_slots_are_coupled_in_decoding_alone(variant, project):
    arguments = _arguments(9)
    _, S = lattice(**arguments, variant=variant, project=project)
    other = arguments["initial_state"].clone()
    other[..., 1] = other[..., 1].roll(1, dims=-1)
    _, changed = lattice(**{**arguments, "initial_state": other}, variant=variant, project=project)
    differs = [relative_error(changed[..., slot], S[..., slot]) > 1e-13 for slot in range(4)]
    assert differs == [variant == "dec", True, variant == "dec", variant == "dec"]


@every_variant
def test_under_projection_norms_of_entering_and_initial_slots_mean_nothing(variant):
    arguments, pos = _arguments(10), torch.arange(12).remainder(7).add(3).remainder(7).expand(2, 12)
    leaves = _leaves(arguments)
    outputs = lattice(**leaves, variant=variant, pos=pos)
    longer = {**arguments, "S0": 3 * arguments["S0"], "initial_state": 0.2 * arguments["initial_state"]}
    for one, other in zip(lattice(**longer, variant=variant, pos=pos), outputs, strict=True):
        assert relative_error(one, other) <= 1e-12
    grads = dict(zip(leaves, gradients(outputs, list(leaves.values()), seeded(11))))
    for name in ("S0", "initial_state"):
        grad = grads[name]
        radial = (grad * arguments[name]).sum(-2)
        assert float(grad.norm()) > 0.1
        assert float(radial.norm()) <= 1e-12 * float(grad.norm())


@with_a_span
@pytest.mark.parametrize("words", [1, 4])
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_repeated_values_are_as_exact_in_coordinates_as_token_by_token(variant, words, scale):
    """Values of a few words: coordinates along the values themselves would grow without bound."""
    length, n, d, m = 64, 3, 64, 16
    generator = seeded(12)
    word = torch.randint(0, words, (length,), generator=generator)
    k, v = scale * torch.randn(words, n, 1, m, generator=generator)[word], torch.randn(words, n, d, 1, generator=generator)[word]
    q, gamma = torch.randn(length, n, 1, m, generator=generator), torch.full((length, n, 1, 1), 0.03 / scale)
    v[5] = 0.0
    S = torch.linalg.qr(torch.randn(n, d, m, generator=generator))[0]
    rule, found = UpdateRule(variant, True), {}
    for form, dtype in (("exact", torch.float64), ("steps", torch.float32), ("span", torch.float32)):
        *inputs, state = leaves = [x.to(dtype).requires_grad_() for x in (q, k, v, gamma, S)]
        tokens, ys = Tokens(*inputs, None, None), []
        for begin in range(0, length, 16):
            piece = Tokens(*(x if x is None else x[begin : begin + 16] for x in tokens))
            if form == "span":
                y, state = run_qr_chunk(rule, qr_basis(rule, piece.v), piece, state)
            else:
                y, state = run_sequential(rule, piece, None, state)
            ys.append(y)
        outputs = [torch.cat(ys), state]
        found[form] = [*outputs, *gradients(outputs, leaves, seeded(11))]
    for exact, steps, span in zip(found["exact"], found["steps"], found["span"], strict=True):
        assert relative_error(span, exact) <= max(1e-5, 10 * relative_error(steps, exact))


@law(max_examples=10)
@given(seed=seeds, tau=st.floats(0.0, 1.2))
def test_a_threshold_and_the_projection_are_the_nearest_sparse_unit_slot(seed, tau):
    """x minimizes |x - u|^2 / 2 + tau |x|_1 among unit x: no other candidate is better, and nothing is divided by zero."""
    arguments = {**_arguments(seed, length=1), "tau": torch.full((2, 1, 2), tau, dtype=torch.float64)}
    _, x = lattice(**arguments, variant="sim")
    k, v, gamma, S = (arguments[name] for name in ("k", "v", "gamma", "initial_state"))
    h, alpha = -v[:, 0, :, :, None], -gamma[:, 0, :, None, None] * k[:, 0, :, None, :]
    u = S + alpha * (h - S * (h * S).sum(2, keepdim=True))

    def objective(x):
        return (x - u).square().sum(2) / 2 + tau * x.abs().sum(2)

    others = torch.randn(200, *S.shape, generator=seeded(seed), dtype=torch.float64)
    others = torch.cat([others, x + 0.01 * others, torch.eye(6, dtype=torch.float64)[:, None, None, :, None].expand(6, *S.shape)])
    others = others / torch.linalg.vector_norm(others, dim=3, keepdim=True)
    for other in (*others, *-others):
        assert (objective(other) >= objective(x) - 1e-12).all()
    assert float((torch.linalg.vector_norm(x, dim=2) - 1).abs().max()) <= 1e-15


@every_variant
@either_projection
def test_a_slot_that_lost_everything_is_written_again(variant, project):
    """By closed gates, or by high thresholds: with projection neither removes a slot, without it a slot is zero for a while."""
    arguments = _arguments(13, length=30, dtype=torch.float32, forget=True, sparse=True)
    for name in ("mu", "k", "v"):
        arguments[name][:, 5:8] = 0.0
    arguments["tau"] = torch.zeros(2, 30, 2)
    arguments["tau"][:, 20:23] = 1e9
    leaves = _leaves(arguments)
    y, S = lattice(**leaves, variant=variant, project=project)
    for x in (y, S, *gradients([y, S], list(leaves.values()), seeded(14))):
        assert x.isfinite().all()
    read = y.any(3).all(2).all(0)
    assert read.tolist() == [project or not (5 <= t < 8 or 20 <= t < 23) for t in range(30)]
    assert S.any(2).all()


def test_results_with_and_without_gradients_have_the_same_bits():
    for variant, project in itertools.product(VARIANTS, (True, False)):
        arguments = _arguments(15, length=40, dtype=torch.float32)
        tracked = lattice(**_leaves(arguments), variant=variant, project=project)
        untracked = lattice(**arguments, variant=variant, project=project)
        for with_gradient, without in zip(tracked, untracked, strict=True):
            assert with_gradient.requires_grad
            assert not without.requires_grad
            assert torch.equal(with_gradient, without)


@every_variant
def test_what_is_prepared_serves_every_state_and_is_not_rounded_by_autocast(variant):
    recurrence = Lattice(variant)
    inputs, state = recurrence.example(seeded(18), 2, 50, torch.float32, wide=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        context = recurrence.prepare(inputs, None)
        for S in (state["S"], state["S"].roll(1, 0)):
            found, expected = recurrence.run_prepared(context, {"S": S}), recurrence.run(inputs, None, {"S": S})
            assert torch.equal(found[0], expected[0])
            assert torch.equal(found[1]["S"], expected[1]["S"])


@pytest.mark.parametrize(("project", "variant"), alternating([True, False], VARIANTS))
def test_nothing_of_the_size_of_all_expanded_tokens_is_ever_allocated(variant, project):
    batch, length, heads, d, m = 2, 512, 3, 32, 32
    leaves = _leaves(_arguments(17, batch, length, heads, d, m, torch.float32))
    chunk = chunk_length(Options(UpdateRule(variant, project), False, False))
    with LargestTensor() as largest:
        outputs = lattice(**leaves, variant=variant, project=project)
        gradients([outputs[0]], [leaves[name] for name in ("q", "k", "v", "initial_state")], seeded(18))
    slots = batch * heads * d * m
    assert largest.numel <= (chunk + 1) * slots
    assert largest.numel < length * slots / 8


def test_more_slots_than_dimensions_unknown_variants_and_slots_of_zeros_are_refused():
    arguments = _arguments(19, length=3)
    more = {**arguments, "v": arguments["v"][..., :3].contiguous(), "S0": arguments["S0"][:, :3].contiguous()}
    with pytest.raises(KernelError, match=r"lattice: q has m = 4 but v has d = 3, expected m <= d"):
        lattice(**more)
    with pytest.raises(KernelError, match=r"variant is 'both', expected one of \('dec', 'enc', 'sim'\)"):
        lattice(**arguments, variant="both")
    for name in ("S0", "initial_state"):
        empty = arguments[name].clone()
        empty[..., 1] = 0.0
        with pytest.raises(KernelError, match=f"{name} holds a slot of zeros"):
            lattice(**{**arguments, name: empty})
    zeros = torch.zeros_like(arguments["initial_state"]).requires_grad_()
    y, S = lattice(**{**arguments, "initial_state": zeros}, pos=torch.arange(3).expand(2, 3))
    (grad,) = torch.autograd.grad([y.sum() + S.sum()], [zeros])
    assert not grad.any(), "what arrives in front of a start may be anything"


@pytest.mark.parametrize("name", ["mu", "tau", "initial_state"])
def test_optional_arguments_are_checked_as_the_others_are(name):
    arguments = _arguments(20, length=3, dtype=torch.float32, forget=True, sparse=True)
    wrong = {
        rf"{name} has shape .*expected \(batch": arguments[name][:, :1],
        f"{name} has dtype": arguments[name].to(torch.int64),
        f"{name} is on meta, expected cpu": arguments[name].to("meta"),
        f"{name} is a list, expected a tensor": [1.0],
    }
    for message, argument in wrong.items():
        with pytest.raises(KernelError, match=message):
            lattice(**{**arguments, name: argument})
    if name == "initial_state":
        with pytest.raises(KernelError, match="initial_state has dtype bfloat16, expected float32"):
            lattice(**{**arguments, name: arguments[name].bfloat16()})
