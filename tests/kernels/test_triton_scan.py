"""The diagonal scan's Triton kernels against the references in float64; in Triton's interpreter where there is no GPU."""

import itertools
import math
import os
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from support.compare import relative_error
from support.long_form import every_pair, some
from support.prefetch_trace import LINE, asking_watched
from support.recurrences import positions, seeded

from baton.kernels.common.example_inputs import extreme_gates, extreme_keys, extreme_steps
from baton.kernels.diagonal_scan.triton_launch import (
    LaunchConfig,
    ScanInputs,
    _splits,
    diagonal_scan_triton,
    state_transition_backward_triton,
    state_transition_triton,
)
from baton.kernels.longhorn.reference import longhorn_reference
from baton.kernels.selective_scan.reference import selective_scan_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# two lanes share their channels, or none do
WHOLE = LaunchConfig(block_t=4, block_t_transition=4, prefetch_t=3, prefetch_t_transition=2, checkpoint_interval=8, min_programs=1)
# a piece has four chunks of `border` tokens or more: 29 tokens and more are two
CUT = replace(WHOLE, block_d=8, block_d_backward=8, unroll=2, checkpoint_interval=4, min_programs=100, target_programs=100)
NAMES = ("initial", *ScanInputs._fields)
# float32 against float64, and bfloat16: what comes out is rounded to it
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 5e-3}


@pytest.fixture(autouse=True)
def unasked():
    """Checks in every test that prefetched addresses exist, and records which other addresses are loaded."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield None
        return
    with asking_watched() as found:
        yield found


def example(kind, batch, length, channels, d_state, *, activate, gated, dtype=torch.float32, seed=0):
    """Inputs by name in float64, exactly representable in `dtype`, and cotangents of y and the final state."""
    g = seeded(seed)

    def randn(*shape, dtype=dtype):
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype).double()

    tokens = (batch, length)
    given = {"x": randn(*tokens, channels), "C": randn(*tokens, d_state), "D": randn(channels)}
    mamba = kind != "longhorn"
    given["B"] = randn(*tokens, d_state) if mamba else extreme_keys(g, *tokens, d_state, dtype=dtype).double()
    given["dt"] = 2 * randn(*tokens, channels)
    given["dt_bias"] = randn(channels, dtype=torch.float32) if activate else None
    if not activate:
        steps = extreme_steps(g, *tokens, channels, dtype=dtype) if mamba else extreme_gates(g, *tokens, channels, dtype=dtype)
        given["dt"] = steps.double()
    given["A"] = -randn(channels, d_state, dtype=torch.float32).exp() if mamba else None
    given["A"] = None if given["A"] is None else given["A"].float().double()
    given["z"] = randn(*tokens, channels) if gated else None
    given["initial"] = randn(batch, channels, d_state, dtype=torch.float32)
    return given, (randn(*tokens, channels), randn(batch, channels, d_state, dtype=torch.float32))


def definition(given, pos, *, activate, zoh=False):
    x, dt, A, B, C, D, z, dt_bias = (given[name] for name in ScanInputs._fields)
    if activate:
        dt = F.softplus(dt + dt_bias) if A is not None else torch.sigmoid(dt + dt_bias)
    if A is not None:
        rule, state = "zoh" if zoh else "euler", given["initial"]
        y, final = selective_scan_reference(x, dt, A, B, C, D, pos=pos, initial_state=state, discretization=rule)
    else:
        y, final = longhorn_reference(x, B, C, dt, D, pos=pos, initial_state=given["initial"])
    return (y if z is None else y * F.silu(z)), final


def kernels(given, pos, *, activate, config, zoh=False):
    inputs = ScanInputs(*(given[name] for name in ScanInputs._fields))
    return diagonal_scan_triton(inputs, activate=activate, zoh=zoh, pos=pos, initial_state=given["initial"], config=config)


def with_gradients(run, given, cotangents, **options):
    """Outputs and gradients by name."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in given.items() if x is not None}
    y, final = run({**given, **leaves}, **options)
    grads = torch.autograd.grad(
        [y, final], list(leaves.values()), [dx.to(y.device, x.dtype) for x, dx in zip((y, final), cotangents)]
    )
    return {"y": y, "final": final, **dict(zip(leaves, grads))}


def rounded(given, dtype):
    """The inputs in the kernels' dtypes: states, A, D and biases in float32."""
    whole = ("initial", "A", "dt_bias", "D")
    return {name: None if x is None else x.to(DEVICE, torch.float32 if name in whole else dtype) for name, x in given.items()}


def compare(kind, sizes, config, *, starts, activate, gated, dtype=torch.float32):
    given, cotangents = example(kind, *sizes, activate=activate, gated=gated, dtype=dtype)
    pos = positions(seeded(1), *sizes[:2], 0.15) if starts else None
    options = {"activate": activate, "zoh": kind == "zoh"}
    expected = with_gradients(definition, given, cotangents, pos=pos, **options)
    own_pos = None if pos is None else pos.to(DEVICE)
    found = with_gradients(kernels, rounded(given, dtype), cotangents, pos=own_pos, config=config, **options)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        # the gate's gradient is made of the output as it was rounded
        limit = 8e-3 if name == "z" and dtype == torch.bfloat16 else LIMITS[dtype]
        assert relative_error(found[name].double().cpu(), value) <= limit, name


# the interpreter takes long for each; of the last a test of its own is in the default suite
ALL_KINDS = ("mamba", "longhorn", "zoh")
KINDS = some(ALL_KINDS, ALL_KINDS[:2])
SIZES = ((2, 16, 32, 8), (1, 37, 11, 5))


@pytest.mark.parametrize(("kind", "starts", "fused"), some(
    list(itertools.product(ALL_KINDS, (False, True), (False, True))), [("mamba", True, True), ("longhorn", False, False)],
))  # fmt: skip
def test_outputs_and_gradients_are_the_definitions(kind, starts, fused):
    """Unsplit and split, even and odd sizes, with and without document starts, activation and gate."""
    for config, sizes in zip((WHOLE, CUT) if starts == fused else (CUT, WHOLE), SIZES):
        compare(kind, sizes, config, starts=starts, activate=fused, gated=fused)


def test_sizes_are_cut_into_splits():
    """Otherwise the tests of splits would compare an unsplit sequence."""
    assert (_splits(2, 37, CUT), _splits(2, 29, CUT)) == ((2, 20), (2, 16))
    assert _splits(2, 37, WHOLE)[0] == 1


def test_a_zero_order_hold_is_the_definitions():
    """Split, of odd sizes, with document starts, activation and gate."""
    compare("zoh", SIZES[1], CUT, starts=True, activate=True, gated=True)


@pytest.mark.parametrize("kind", some(ALL_KINDS, ALL_KINDS[:1]))
def test_bfloat16_is_rounded_once(kind):
    compare(kind, SIZES[1], CUT, starts=True, activate=True, gated=True, dtype=torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["mamba", "longhorn", "zoh"])
def test_tensor_cores_sum_over_channels(kind, dtype):
    """Used on a GPU where a program has 32 channels of 16 states."""
    for sizes in ((2, 16, 64, 16), (1, 37, 41, 16), (2, 300, 96, 16)):
        compare(kind, sizes, WHOLE, starts=True, activate=True, gated=True, dtype=dtype)


@pytest.mark.parametrize("kind", some(ALL_KINDS, ("longhorn",)))
def test_pieces_with_the_state_handed_on_are_the_whole(kind):
    """And `state_transition_triton` of a segment is the transition of the segment."""
    options = {"activate": True, "zoh": kind == "zoh"}
    given, cotangents = example(kind, 2, 29, 8, 4, activate=True, gated=True)
    given, pos = rounded(given, torch.float32), positions(seeded(2), 2, 29, 0.1).to(DEVICE)

    def in_two(given, pos, cut):
        along = ("x", "dt", "B", "C", "z")
        state, outputs = given["initial"], []
        for span in (slice(0, cut), slice(cut, None)):
            part = {**given, **{name: given[name][:, span] for name in along}, "initial": state}
            y, state = kernels(part, pos[:, span], config=WHOLE, **options)
            outputs.append(y)
        return torch.cat(outputs, dim=1), state

    whole = with_gradients(kernels, given, cotangents, pos=pos, config=WHOLE, **options)
    for cut in (9,):
        for name, value in with_gradients(in_two, given, cotangents, pos=pos, cut=cut).items():
            assert relative_error(value, whole[name]) <= 2e-6, (cut, name)
    inputs = ScanInputs(*(given[name] for name in ScanInputs._fields))
    _, final = kernels(given, None, config=WHOLE, **options)
    found = with_gradients(kernels, given, [cotangents[0], torch.zeros_like(cotangents[1])], pos=None, config=WHOLE, **options)
    for config in (WHOLE, CUT):
        decay, add = state_transition_triton(inputs, pos=None, config=config, **options)
        assert relative_error(decay * given["initial"] + add, final) <= 1e-6
        early = state_transition_backward_triton(inputs, cotangents[0].to(final), pos=None, config=config, **options)
        assert relative_error(early, found["initial"]) <= 1e-6


def exact_hold(dt, rate):
    """phi = expm1(x) / rate with x = dt rate, d phi / d rate, and d phi / d dt = exp(x), in Python floats."""
    x = dt * rate
    if abs(x) < 1:
        phi = dt * sum(x**k / math.factorial(k + 1) for k in range(25))
        return phi, dt**2 * sum((k + 1) * x**k / math.factorial(k + 2) for k in range(25)), math.exp(x)
    phi = math.expm1(x) / rate
    return phi, (dt * math.exp(x) - phi) / rate, math.exp(x)


def test_a_zero_order_hold_loses_no_digits_at_any_step():
    """From a step of 0 to one that forgets everything: the state after one token and no initial state, and its derivatives."""
    steps = (0.0, 1e-9, 1e-4, 0.03, 0.49, 0.51, 3.0, 1e3)
    rates = (-1e-6, -1e-2, -0.99, -1.01, -16.0)
    A = torch.tensor(rates).repeat(len(steps), 1).to(DEVICE).requires_grad_()
    dt = torch.tensor(steps).to(DEVICE)[None, None].requires_grad_()
    x, one = torch.ones(1, 1, len(steps), device=DEVICE), torch.ones(1, 1, len(rates), device=DEVICE)
    _, final = diagonal_scan_triton(ScanInputs(x, dt, A, one, one, x[0, 0]), pos=None, initial_state=None, zoh=True, config=CUT)
    dA, dstep = torch.autograd.grad(final.sum(), (A, dt))
    for d, size in enumerate(steps):
        expected = [exact_hold(*torch.tensor([size, rate]).double().tolist()) for rate in rates]
        for n, (phi, slope, _) in enumerate(expected):
            assert float(final.detach()[0, d, n]) == pytest.approx(phi, rel=2e-6, abs=1e-37), (size, rates[n])
            assert float(dA[d, n]) == pytest.approx(slope, rel=5e-6, abs=1e-37), (size, rates[n])
        assert float(dstep[0, 0, d]) == pytest.approx(sum(grown for *_, grown in expected), rel=2e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("d_state", [16, 64])
def test_a_zero_order_hold_with_the_launch_configs_of_runs(dtype, d_state):
    """A whole sequence, and token by token as in generation."""
    compare("zoh", (2, 300, 96, d_state), None, starts=True, activate=True, gated=True, dtype=dtype)
    given, _ = example("zoh", 2, 20, 96, d_state, activate=True, gated=True, dtype=dtype)
    own = rounded(given, dtype)
    y, final = kernels(own, None, activate=True, config=None, zoh=True)
    outputs, along = [], ("x", "dt", "B", "C", "z")
    for t in range(20):
        one = {**own, **{name: own[name][:, t : t + 1] for name in along}}
        output, own["initial"] = kernels(one, None, activate=True, config=None, zoh=True)
        outputs.append(output)
    assert relative_error(torch.cat(outputs, dim=1).double(), y.double()) <= LIMITS[dtype]
    assert relative_error(own["initial"], final) <= LIMITS[torch.float32]


def test_equal_calls_give_equal_bits_and_views_are_taken():
    given, cotangents = example("mamba", 2, 19, 11, 3, activate=True, gated=True)
    given = rounded(given, torch.float32)
    wide = {name: torch.cat((x, x), dim=-1)[..., : x.shape[-1]] for name, x in given.items() if x.dim() == 3 and name != "initial"}
    pos = positions(seeded(1), 2, 19, 0.3).to(DEVICE, torch.int32)
    of_longer = torch.cat((pos, torch.zeros_like(pos)), dim=1)[:, :19]
    assert not any(x.is_contiguous() for x in (*wide.values(), of_longer))
    runs = [
        with_gradients(kernels, {**given, **other}, cotangents, pos=where, activate=True, config=CUT)
        for other, where in (({}, pos), ({}, pos), (wide, of_longer))
    ]
    for one, other in itertools.pairwise(runs):
        assert all(torch.equal(other[name], value) for name, value in one.items())


def test_without_gradients_the_bits_are_the_same():
    given, cotangents = example("longhorn", 1, 13, 8, 4, activate=True, gated=False)
    given = rounded(given, torch.float32)
    tracked = with_gradients(kernels, given, cotangents, pos=None, activate=True, config=CUT)
    y, final = kernels(given, None, activate=True, config=CUT)
    assert torch.equal(y, tracked["y"])
    assert torch.equal(final, tracked["final"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU nobody sees what is asked for")
@pytest.mark.parametrize(("kind", "length"), every_pair(("mamba", "longhorn"), (64, 61)))
def test_what_is_loaded_was_asked_for(kind, length, unasked):
    """Every load was prefetched, except a program's first: of a split, or of a split's last tokens in the backward pass."""
    channels, d_state = 32, 16
    config = replace(WHOLE, min_programs=100, target_programs=100)  # two pieces
    sizes, row = (1, length, channels, d_state), {"mamba": 32, "longhorn": 36}[kind]
    given, cotangents = example(kind, *sizes, activate=True, gated=True)
    with_gradients(kernels, rounded(given, torch.float32), cotangents, pos=None, activate=True, config=config)

    def lines(spans, row):
        """Cache lines of the tokens' rows of so many float32 numbers."""
        return {at // LINE for begin, end in spans for at in range(4 * row * begin, 4 * row * end, 4)}

    piece, steps, border = 32, config.block_t, config.checkpoint_interval
    # two blocks, of which the second is loaded while the first is computed
    ahead = [(0, 2 * steps), (piece, piece + 2 * steps)]
    last = (length - 1) // steps * steps
    back = [(piece - 2 * steps, piece), (last - steps, length)]
    last_chunk = (length - 1) // border * border
    chunks = [(piece - border, piece), (last_chunk, length)]
    for kernel, of_channels, first in (
        ("diagonal_scan_transition_kernel", "x dt", ahead),
        ("diagonal_scan_forward_kernel", "x dt z", ahead),
        ("diagonal_scan_transition_backward_kernel", "dt z dy", back),
        ("diagonal_scan_backward_kernel", "x dt z dy", chunks),
    ):
        for name in of_channels.split():
            assert unasked[kernel, name] == lines(first, channels), (kernel, name)
        assert unasked[kernel, "bc"] <= lines(first, row), kernel
    borders = [(begin // border, begin // border + 1) for begin, _ in chunks]
    assert unasked["diagonal_scan_backward_kernel", "checkpoints"] == lines(borders, channels * d_state)


@pytest.mark.parametrize("kind", ["mamba", "zoh", "longhorn"])
def test_a_step_writes_its_state_over_the_one_before(kind):
    """Also where a document starts, from a view of B, C and z, and with the launch that a step has by default."""
    given, _ = example(kind, 3, 1, 40, 16, activate=True, gated=True)
    pos = torch.tensor([5, 0, 1], dtype=torch.int32, device=DEVICE)[:, None]
    expected, final = definition(given, pos.cpu(), activate=True, zoh=kind == "zoh")
    own = rounded(given, torch.float32)
    for name in ("B", "C", "z"):
        own[name] = torch.cat((own[name], own[name]), dim=2)[..., : own[name].shape[2]]
    inputs, state = ScanInputs(*(own[name] for name in ScanInputs._fields)), own["initial"].clone()
    options = {"activate": True, "zoh": kind == "zoh", "pos": pos, "overwrite_state": True}
    y, after = diagonal_scan_triton(inputs, initial_state=state, **options)
    assert after.data_ptr() == state.data_ptr()
    for found, value in ((y, expected), (state, final)):
        assert relative_error(found.double().cpu(), value) <= LIMITS[torch.float32]
    apart = own["initial"].transpose(1, 2).contiguous().transpose(1, 2)  # cannot be written over
    assert torch.equal(diagonal_scan_triton(inputs, initial_state=apart, **options)[1], state)
    assert torch.equal(apart, own["initial"])
