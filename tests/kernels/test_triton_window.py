"""Window attention in Triton against the reference in float64; in Triton's interpreter where there is no GPU."""

from dataclasses import replace

import pytest
import torch
from support.compare import relative_error
from support.long_form import some
from support.recurrences import positions, seeded

from baton.kernels.common.kernel_check import gradients, moving
from baton.kernels.eidetic_attention.launch_config import LaunchConfig
from baton.kernels.window_attention.chunked import window_attention_chunked
from baton.kernels.window_attention.op import empty
from baton.kernels.window_attention.recurrence import RECURRENCES, WindowAttention
from baton.kernels.window_attention.triton_launch import window_attention_triton

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SMALL = LaunchConfig(queries=16, keys=16, queries_backward=16, keys_backward=16, memory=16)
ROWS_FIRST = replace(SMALL, rows_first=1)
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def compare(recurrence, length, config, *, wide, dtype=torch.float32, starts=0.1, carried=True):
    """Output, final State and every gradient; documents start within. carried: the initial State is one that an earlier document
    has left.
    """
    inputs, state = recurrence.example(seeded(0), 2, length, torch.float32, wide=wide)
    pos = positions(seeded(1), 2, length, starts)
    pos[0] = torch.arange(length) + 50  # goes on with the document that the State is of
    if not carried:
        rows = 0 if recurrence.window is None else recurrence.window - 1
        state = {name: torch.zeros(2, rows, *x.shape[2:]) if name != "seen" else torch.zeros_like(x) for name, x in state.items()}
    inputs = tuple(x.to(dtype) for x in inputs)
    state = {name: x.to(dtype) if x.is_floating_point() else x for name, x in state.items()}
    scale = inputs[0].shape[-1] ** -0.5

    def run(defined):
        place, cast = ("cpu", torch.float64) if defined else (DEVICE, None)
        own = [x.to(place, cast or x.dtype).requires_grad_() for x in inputs]
        entering = {
            name: x.to(place, cast or x.dtype).requires_grad_() if x.is_floating_point() else x.to(place)
            for name, x in state.items()
        }
        if defined:
            y, leaving = recurrence.reference(tuple(own), pos, entering)
        else:
            given = {"pos": pos.to(place), "state": entering, "scale": scale, "config": config}
            q, *sinks, k, v = own
            given |= {"sinks": sinks[0] if sinks else None, "soft_cap": recurrence.soft_cap}
            y, leaving = window_attention_triton(q, k, v, window=recurrence.window, **given)
        grads = gradients([y, *moving(leaving).values()], [*own, *moving(entering).values()], seeded(2))
        return {"y": y, **leaving, **{f"gradient {n}": x for n, x in enumerate(grads)}}

    expected, found = run(True), run(False)
    assert expected.keys() == found.keys()
    for name, want in expected.items():
        assert relative_error(found[name].double().cpu(), want.double()) <= LIMITS[dtype], name


@pytest.mark.parametrize("carried", [True, False])
@pytest.mark.parametrize("recurrence", RECURRENCES, ids=str)
def test_outputs_and_gradients_are_the_definitions(recurrence, carried):
    compare(recurrence, 21, SMALL if carried else ROWS_FIRST, wide=recurrence.grouped, carried=carried)


@pytest.mark.parametrize(("window", "options"), [(6, {"sinks": True}), (None, {}), (None, {"soft_cap": 2.0})], ids=str)
def test_bfloat16(window, options):
    compare(WindowAttention(window, **options), 29, ROWS_FIRST, wide=False, dtype=torch.bfloat16)


@pytest.mark.parametrize("window", some([37, None], [37]))
def test_longer_than_a_tile(window):
    """Rows visible to tokens several tiles later, and a window that is not a multiple of a tile."""
    options = {"sinks": True} if window is None else {"soft_cap": 50.0}
    for config in (SMALL, ROWS_FIRST):
        compare(WindowAttention(window, grouped=True, **options), 75, config, wide=False, starts=0.02)


@pytest.mark.parametrize(("window", "length"), [(20, 45), (20, 12), (None, 45)])
def test_rows_that_nothing_was_read_into_need_not_be_there(window, length):
    """Bitwise: outputs, final State and gradients."""
    recurrence = WindowAttention(window, grouped=True)
    inputs, _ = recurrence.example(seeded(0), 2, length, torch.float32, wide=False)
    inputs = [x.to(DEVICE).requires_grad_() for x in inputs]
    state = empty(*inputs[1:], 0 if window is None else window - 1)
    pos = positions(seeded(1), 2, length, 0.05).to(DEVICE)

    def run(fresh):
        y, leaving = window_attention_triton(*inputs, window=window, pos=pos, state=state, scale=0.4, fresh=fresh, config=SMALL)
        return [y, *leaving.values(), *gradients([y, leaving["k"], leaving["v"]], inputs, seeded(2))]

    for found, expected in zip(run(True), run(False), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("entered", [False, True])
@pytest.mark.parametrize("window", [20, None])
def test_a_state_that_is_not_wanted_changes_nothing(window, entered):
    """Bitwise: outputs and gradients."""
    recurrence = WindowAttention(window, grouped=True)
    inputs, state = recurrence.example(seeded(0), 2, 45, torch.float32, wide=False)
    inputs = [x.to(DEVICE).requires_grad_() for x in inputs]
    state = {name: x.to(DEVICE).requires_grad_(name != "seen") for name, x in state.items()}
    wanted = [*inputs, *(x for x in state.values() if entered and x.requires_grad)]
    state = state if entered else empty(*inputs[1:], 0 if window is None else window - 1)
    given = {"window": window, "pos": positions(seeded(1), 2, 45, 0.05).to(DEVICE), "state": state, "scale": 0.4, "config": SMALL}

    def run(need_final_state):
        y, leaving = window_attention_triton(*inputs, fresh=not entered, need_final_state=need_final_state, **given)
        assert bool(leaving) == need_final_state
        return [y, *gradients([y], wanted, seeded(2))]

    for found, expected in zip(run(False), run(True), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("scale", [-0.7, 0.0])
def test_scales_that_are_not_positive(scale):
    recurrence = WindowAttention(6)
    inputs, state = recurrence.example(seeded(0), 2, 18, torch.float32, wide=False)
    found, expected = [], []
    for results, place, run in ((found, DEVICE, window_attention_triton), (expected, "cpu", window_attention_chunked)):
        own = [x.to(place).requires_grad_() for x in inputs]
        given = {"pos": None, "state": {name: x.to(place) for name, x in state.items()}, "scale": scale}
        y, _ = run(*own, window=6, **given, **({"config": SMALL} if run is window_attention_triton else {}))
        results += [y, *gradients([y], own, seeded(1))]
    for a, b in zip(found, expected, strict=True):
        assert relative_error(a.cpu(), b) <= 1e-5


@pytest.mark.parametrize("window", [8, None])
def test_the_leaving_state_is_the_chunked_forms(window):
    """Bitwise."""
    recurrence = WindowAttention(window)
    inputs, state = recurrence.example(seeded(0), 3, 30, torch.float32, wide=False)
    given = {"pos": positions(seeded(1), 3, 30, 0.1).to(DEVICE), "state": {name: x.to(DEVICE) for name, x in state.items()}}
    inputs = [x.to(DEVICE) for x in inputs]
    _, expected = window_attention_chunked(*inputs, window=window, scale=1.0, **given)
    _, found = window_attention_triton(*inputs, window=window, scale=1.0, config=SMALL, **given)
    for name, leaf in expected.items():
        assert torch.equal(found[name], leaf), name
        assert found[name].dtype == leaf.dtype


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [150, None])
def test_the_launch_configs_of_runs(window, dtype):
    compare(WindowAttention(window, grouped=True), 700, LaunchConfig(), wide=True, dtype=dtype, starts=0.004)
    compare(WindowAttention(window), 700, LaunchConfig(), wide=True, dtype=dtype, starts=0.004, carried=False)
    rows_first = LaunchConfig(queries_backward=32, warps_backward=4, rows_first=1)
    compare(WindowAttention(window, soft_cap=2.0), 700, rows_first, wide=True, dtype=dtype, starts=0.004)


def compare_heads(dim, dtype, length):
    """Of a size, four to a key head, with the launch configuration that runs have."""
    g = seeded(0)
    q, k, v, dy = (torch.randn(2, length, heads, dim, generator=g).to(dtype) for heads in (8, 2, 2, 8))
    pos = positions(seeded(1), 2, length, 0.01)

    def run(attention, place, cast):
        leaves = [x.to(place, cast).requires_grad_() for x in (q, k, v)]
        y, _ = attention(*leaves, window=None, pos=pos.to(place), state=empty(*leaves[1:], 0), scale=dim**-0.5)
        return [y, *torch.autograd.grad(y, leaves, dy.to(place, cast))]

    expected = run(window_attention_chunked, "cpu", torch.float64)
    for found, want in zip(run(window_attention_triton, DEVICE, dtype), expected, strict=True):
        assert relative_error(found.double().cpu(), want.detach()) <= LIMITS[dtype]


def test_heads_may_be_wider_than_128():
    compare_heads(144, torch.float32, 20)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [80, 128, 160, 192, 256])
def test_heads_of_any_size(dim, dtype):
    compare_heads(dim, dtype, 700)
