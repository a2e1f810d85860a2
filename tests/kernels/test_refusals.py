"""Arguments of a wrong shape or dtype raise a KernelError that names them with the expected shape; nothing is broadcast."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.compare import relative_error
from support.recurrences import RECURRENCES, no_starts, seeded

from baton.kernels.errors import KernelError
from baton.kernels.longhorn import longhorn
from baton.kernels.protocol import Recurrence
from baton.kernels.selective_scan import selective_scan
from baton.kernels.short_conv import short_conv

BATCH, T, CHANNELS, D_STATE, WIDTH = 2, 5, 4, 3, 4


def _scan_arguments() -> dict[str, Any]:
    along = torch.rand(BATCH, T, CHANNELS)
    return {
        "x": along,
        "dt": along.clone(),
        "A": -torch.rand(CHANNELS, D_STATE),
        "B": torch.rand(BATCH, T, D_STATE),
        "C": torch.rand(BATCH, T, D_STATE),
        "D": torch.rand(CHANNELS),
        "pos": torch.zeros(BATCH, T, dtype=torch.int32),
        "initial_state": torch.zeros(BATCH, CHANNELS, D_STATE),
    }


def _longhorn_arguments() -> dict[str, Any]:
    return {
        "x": torch.rand(BATCH, T, CHANNELS),
        "k": torch.rand(BATCH, T, D_STATE),
        "q": torch.rand(BATCH, T, D_STATE),
        "beta": torch.rand(BATCH, T, CHANNELS),
        "D": torch.rand(CHANNELS),
        "pos": torch.zeros(BATCH, T, dtype=torch.int32),
        "initial_state": torch.zeros(BATCH, CHANNELS, D_STATE),
    }


def _conv_arguments() -> dict[str, Any]:
    return {
        "x": torch.rand(BATCH, T, CHANNELS),
        "weight": torch.rand(CHANNELS, WIDTH),
        "bias": torch.rand(CHANNELS),
        "pos": torch.zeros(BATCH, T, dtype=torch.int64),
        "tail": torch.zeros(BATCH, WIDTH - 1, CHANNELS),
    }


KERNELS = {
    "selective_scan": (selective_scan, _scan_arguments),
    "longhorn": (longhorn, _longhorn_arguments),
    "short_conv": (short_conv, _conv_arguments),
}
EVERY_ARGUMENT = [(kernel, name) for kernel, (_, make) in KERNELS.items() for name in make()]
# the sizes of these are what the others are measured against
FREE = {("selective_scan", "x"), ("longhorn", "x"), ("short_conv", "x")}


@pytest.mark.parametrize(("kernel", "name"), EVERY_ARGUMENT)
def test_another_number_of_dimensions_is_refused(kernel: str, name: str):
    function, make = KERNELS[kernel]
    arguments = make()
    wrong = arguments[name][None]
    with pytest.raises(KernelError, match=re.escape(f"{kernel}: {name} has shape {tuple(wrong.shape)}, expected (")):
        function(**{**arguments, name: wrong})


@pytest.mark.parametrize(("kernel", "name"), [pair for pair in EVERY_ARGUMENT if pair not in FREE])
@pytest.mark.parametrize("change", ["one", "longer"])
def test_a_size_that_would_broadcast_or_is_off_by_one_is_refused(kernel: str, name: str, change: str):
    function, make = KERNELS[kernel]
    arguments = make()
    shape = tuple(arguments[name].shape)
    # d_state and width are theirs to choose
    chosen = {"A": 1, "weight": 1, "k": 2}.get(name)
    expected = str(shape) if chosen is None else f"({', '.join(map(str, shape[:chosen]))}, any)"
    for dim in range(len(shape)):
        if dim == chosen:
            continue
        size = 1 if change == "one" else shape[dim] + 1
        wrong = arguments[name].narrow(dim, 0, 1) if change == "one" else torch.cat([arguments[name]] * 2, dim).narrow(dim, 0, size)
        with pytest.raises(KernelError, match=re.escape(f"{name} has shape {tuple(wrong.shape)}") + ".*" + re.escape(expected)):
            function(**{**arguments, name: wrong})


@pytest.mark.parametrize(("kernel", "name"), EVERY_ARGUMENT)
def test_another_dtype_is_refused(kernel: str, name: str):
    function, make = KERNELS[kernel]
    arguments = make()
    wrong = arguments[name].float() if name == "pos" else arguments[name].to(torch.int64)
    with pytest.raises(KernelError, match=f"{name} has dtype {'float32' if name == 'pos' else 'int64'}, expected"):
        function(**{**arguments, name: wrong})


@pytest.mark.parametrize(("kernel", "name"), EVERY_ARGUMENT)
def test_another_device_is_refused(kernel: str, name: str):
    function, make = KERNELS[kernel]
    arguments = make()
    with pytest.raises(KernelError, match=r"is on .*, expected"):
        function(**{**arguments, name: arguments[name].to("meta")})


@pytest.mark.parametrize(("kernel", "name"), EVERY_ARGUMENT)
def test_what_is_no_tensor_is_refused(kernel: str, name: str):
    function, make = KERNELS[kernel]
    with pytest.raises(KernelError, match=f"{name} is a list, expected a tensor of shape"):
        function(**{**make(), name: [1.0]})


@pytest.mark.parametrize(("kernel", "name"), [pair for pair in EVERY_ARGUMENT if pair[1] != "pos"])
def test_float64_is_not_mixed_with_less(kernel: str, name: str):
    function, make = KERNELS[kernel]
    arguments = make()
    with pytest.raises(KernelError, match="float64"):
        function(**{**arguments, name: arguments[name].double()})


@pytest.mark.parametrize("kernel", KERNELS)
def test_no_tokens_are_refused(kernel: str):
    function, make = KERNELS[kernel]
    arguments = make()
    name = "x"
    with pytest.raises(KernelError, match=re.escape(f"{name} has shape (2, 0, 4), expected (batch, T, channels)") + ".*at least 1"):
        function(**{**arguments, name: arguments[name][:, :0]})


@pytest.mark.parametrize("kernel", KERNELS)
def test_negative_positions_are_refused(kernel: str):
    function, make = KERNELS[kernel]
    arguments = make()
    arguments["pos"][1, 2] = -3
    with pytest.raises(KernelError, match="pos holds -3"):
        function(**arguments)


def test_states_are_not_kept_in_low_precision():
    for kernel in ("selective_scan", "longhorn"):
        function, make = KERNELS[kernel]
        arguments = {name: x.bfloat16() if x.is_floating_point() else x for name, x in make().items()}
        with pytest.raises(KernelError, match="initial_state has dtype bfloat16, expected float32"):
            function(**arguments)
        _, final = function(**{**arguments, "initial_state": None})
        assert final.dtype == torch.float32


def test_unknown_choices_are_refused_with_the_known_ones():
    with pytest.raises(KernelError, match=re.escape("discretization is 'bilinear', expected one of ('euler', 'zoh')")):
        selective_scan(**_scan_arguments(), discretization="bilinear")
    with pytest.raises(KernelError, match=re.escape("activation is 'relu', expected None or one of ('silu',)")):
        short_conv(**_conv_arguments(), activation="relu")


@pytest.mark.parametrize("width", [0, CHANNELS + 1])
def test_heads_that_do_not_divide_the_channels_are_refused(width):
    with pytest.raises(KernelError, match=f"unit_width is {width}, expected a divisor of the {CHANNELS} channels"):
        short_conv(**_conv_arguments(), unit_width=width)


def _wrong_leaves(leaf: torch.Tensor) -> dict[str, Any]:
    """Invalid values for a tensor of a State."""
    other = torch.int64 if leaf.is_floating_point() else torch.float32
    return {
        "tuple": (leaf,),
        "list": leaf.tolist(),
        "dict": {"h": leaf},
        "text": "zeros",
        "number": 0,
        "numpy": leaf.numpy(),
        "dtype": leaf.to(other),
        "precision": leaf.double() if leaf.is_floating_point() else leaf.to(torch.int8),
        "device": leaf.to("meta"),
        "batch": torch.cat((leaf, leaf)),
        "fewer dimensions": leaf[0],
        "more dimensions": leaf[None],
        "last dimension": torch.cat((leaf, leaf), dim=-1),
    }


def _refused(call: Callable[[], Any], name: str) -> str:
    with pytest.raises(KernelError) as refusal:
        call()
    text = str(refusal.value)
    assert "\n" not in text
    assert re.match(rf"{name.split('-')[0]}: (initial_state|state|tail)\b.* (is|has) .*expected ", text), text
    return text


@pytest.mark.parametrize("recurrence", RECURRENCES, ids=str)
def test_a_state_that_does_not_fit_is_refused(recurrence: Recurrence):
    """Each tensor of it, and where a State has several what holds them, by the name of the op, with what was expected."""
    inputs, state = recurrence.example(seeded(0), 2, 5, torch.float32, wide=False)
    pos = no_starts(recurrence, 2, 5)
    op = recurrence.name.removeprefix("gated_") if "delta_rule" in recurrence.name else recurrence.name
    op = op.replace("full_", "window_")
    for name, leaf in state.items():
        for kind, wrong in _wrong_leaves(leaf).items():
            text = _refused(lambda name=name, wrong=wrong: recurrence.run(inputs, pos, {**state, name: wrong}), op)
            of_tensors = {"numpy": "ndarray", "text": "str", "number": "int", "device": "meta"}
            assert of_tensors.get(kind, "") in text, (kind, text)
    if len(state) == 1:
        return
    for name in state:
        _refused(lambda name=name: recurrence.run(inputs, pos, {**state, name: None}), op)
        assert name in _refused(lambda name=name: recurrence.run(inputs, pos, {n: x for n, x in state.items() if n != name}), op)
    first = next(iter(state.values()))
    for wrong in (tuple(state.values()), list(state.values()), first, first.numpy(), "zeros", 0, {}, {**state, 3: first}):
        text = _refused(lambda wrong=wrong: recurrence.run(inputs, pos, wrong), op)
        assert str(sorted(state)) in text
        assert type(wrong).__name__ in text or isinstance(wrong, dict)


def test_the_measure_of_these_tests_measures():
    a = torch.tensor([3.0, 4.0])
    assert relative_error(a, a) == 0.0
    assert relative_error(a * 1.1, a) == pytest.approx(0.1)
    assert relative_error(a, torch.zeros(2)) == 5.0
    assert relative_error(torch.tensor([float("nan")]), torch.ones(1)) != relative_error(a, a)
    with pytest.raises(ValueError, match="cannot compare"):
        relative_error(a, a[:1])
