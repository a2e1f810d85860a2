"""Properties of the short convolution: equality with torch's, tails, widths, and isolation of documents."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.compare import relative_error
from support.memory import LargestTensor
from support.recurrences import gradients, law, positions, seeded, seeds

from baton.kernels.short_conv import short_conv
from baton.kernels.short_conv.reference import short_conv_reference


def _arguments(seed: int, batch: int, length: int, channels: int, width: int) -> list[torch.Tensor]:
    """x, weight, bias, tail."""
    generator = seeded(seed)
    shapes = ((batch, length, channels), (channels, width), (channels,), (batch, width - 1, channels))
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]


@pytest.mark.parametrize("activation", [None, "silu"])
@law(max_examples=12)
@given(
    seed=seeds,
    batch=st.integers(1, 2),
    length=st.integers(1, 12),
    channels=st.integers(1, 6),
    width=st.integers(1, 6),
    packed=st.booleans(),
)
def test_any_width_equals_the_definition(
    activation: str | None, seed: int, batch: int, length: int, channels: int, width: int, packed: bool
):
    arguments = _arguments(seed, batch, length, channels, width)
    pos = positions(seeded(seed), batch, length, 0.3) if packed else None
    results = []
    for function in (short_conv, short_conv_reference):
        leaves = [x.clone().requires_grad_() for x in arguments]
        outputs = function(*leaves[:3], pos=pos, tail=leaves[3], activation=activation)
        results.append([*outputs, *gradients(outputs, leaves, seeded(seed))])
    for fast, definition in zip(*results, strict=True):
        assert relative_error(fast, definition) <= 1e-10


def test_one_document_from_its_start_is_the_causal_convolution_of_torch():
    x, weight, bias, _ = _arguments(1, 2, 21, 5, 4)
    y, _ = short_conv(x, weight, bias, pos=torch.arange(21).expand(2, 21))
    padded = torch.nn.functional.pad(x.transpose(1, 2), (3, 0))
    expected = torch.nn.functional.conv1d(padded, weight[:, None, :], bias, groups=5).transpose(1, 2)
    assert relative_error(y, expected) <= 1e-14


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_the_new_tail_is_the_last_tokens_of_tail_and_piece(length: int):
    x, weight, bias, tail = _arguments(2, 2, length, 3, 4)
    _, new_tail = short_conv(x, weight, bias, tail=tail)
    assert torch.equal(new_tail, torch.cat((tail, x), dim=1)[:, -3:])
    _, from_nothing = short_conv(x, weight, bias)
    assert torch.equal(from_nothing, torch.cat((torch.zeros_like(tail), x), dim=1)[:, -3:])


def test_the_new_tail_does_not_keep_the_piece_alive():
    x, weight, bias, tail = _arguments(3, 2, 50, 3, 4)
    _, new_tail = short_conv(x, weight, bias, tail=tail)
    assert new_tail.untyped_storage().nbytes() == new_tail.numel() * new_tail.element_size()


def test_a_spoilt_document_does_not_spoil_the_next():
    """Infinities and NaN do not cross a document boundary either: nothing is multiplied by a mask."""
    x, weight, bias, tail = _arguments(4, 1, 8, 3, 4)
    pos = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    y, _ = short_conv(x, weight, bias, pos=pos, tail=tail, activation="silu")
    spoilt = x.clone()
    spoilt[:, :2], spoilt[:, 2] = float("inf"), float("nan")
    leaf = spoilt.requires_grad_()
    y_spoilt, _ = short_conv(leaf, weight, bias, pos=pos, tail=torch.full_like(tail, float("nan")), activation="silu")
    assert torch.equal(y_spoilt[:, 3:], y[:, 3:])
    (grad,) = torch.autograd.grad(y_spoilt[:, 3:].sum(), leaf)
    assert grad[:, 3:].isfinite().all()
    assert y_spoilt[:, :3].isnan().any()


def test_silu_of_very_large_and_very_small_sums():
    bias = torch.tensor([-1e30, -200.0, -1e-20, 0.0, 40.0, 1e30])
    x, weight = torch.zeros(1, 1, 6, requires_grad=True), torch.ones(6, 2)
    y, _ = short_conv(x, weight, bias, activation="silu")
    assert torch.equal(y[0, 0], torch.nn.functional.silu(bias))
    y.sum().backward()
    assert x.grad is not None
    assert torch.allclose(x.grad[0, 0], torch.tensor([0.0, 0.0, 0.5, 0.5, 1.0, 1.0]))


def test_memory_is_a_few_times_the_piece():
    x, weight, bias, tail = (x.float().requires_grad_() for x in _arguments(5, 2, 300, 16, 4))
    with LargestTensor() as largest:
        outputs = short_conv(x, weight, bias, pos=positions(seeded(6), 2, 300, 0.1), tail=tail, activation="silu")
        gradients(outputs, (x, weight, bias, tail), seeded(7))
    assert largest.numel <= x.numel() + 64
