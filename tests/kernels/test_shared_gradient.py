"""Gradients of a projection's parts in one tensor: the same values as without, wherever the readers write them."""

from functools import partial

import pytest
import torch
from support.long_form import some
from support.recurrences import seeded
from torch import nn

from baton.kernels.diagonal_scan.triton_launch import ScanInputs, diagonal_scan_triton
from baton.kernels.eidetic_attention.chunked import Options
from baton.kernels.eidetic_attention.triton_launch import eidetic_attention_triton
from baton.kernels.gate.triton_launch import forget_gate_triton, gate_triton
from baton.kernels.gated_linear_attention.triton_launch import gla_triton
from baton.kernels.gated_norm.triton_launch import gated_norm_triton
from baton.kernels.gated_slot_attention.triton_launch import gsa_triton
from baton.kernels.rotary.triton_launch import rotary_triton
from baton.kernels.shared_gradient import SharedGradient, claim
from baton.kernels.short_conv.triton_launch import short_conv_triton
from baton.kernels.window_attention.op import empty
from baton.kernels.window_attention.triton_launch import window_attention_triton
from baton.parallel import linear as linears

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
B, T, IN = 2, 19, 32


def normal(*shape, seed=7):
    return torch.randn(*shape, generator=seeded(seed)).to(DEVICE)


def conv(x, width):
    return short_conv_triton(x, normal(width, 4), normal(width), pos=None, tail=None, silu=True)[0]


def convolutions(q, k, v, narrow):
    return [conv(x, 32) * (1 + n) for n, x in enumerate((q, k, v))] + [narrow * 2]


def retention(q, k, v, narrow):
    pos = torch.arange(T, dtype=torch.int32, device=DEVICE).expand(B, T)
    rates = torch.tensor([0.3, 0.1], dtype=torch.float64, device=DEVICE)
    q, k = rotary_triton(*(x.unflatten(2, (2, 16)) for x in (q, k)), pos, rates, 1.0)
    g = torch.full((B, T, 2), -0.1, device=DEVICE)
    y = gla_triton(q, k, v.unflatten(2, (2, 16)), g, gate="scalar", scale=0.25, pos=None, initial_state=None)[0]
    return [y, narrow * 2]


def linear_attention(q, k, v, narrow):
    heads = (x.unflatten(2, (2, 16)) for x in (q, k, v))
    return [gla_triton(*heads, None, gate="none", scale=0.25, pos=None, initial_state=None)[0], narrow * 2]


def norm_beside_gate(q, k, v, narrow):
    x = conv(q, 32).unflatten(2, (2, 16))
    gate_first = gated_norm_triton(x, v, normal(2, 16), 1e-5, q.dtype, gate_first=True, skip=(x, normal(2, seed=3)))
    return [gated_norm_triton(x, k, normal(16), 1e-5, q.dtype), gate_first, narrow * 2]


def gates(q, k, v, narrow):
    return [gate_triton(k, q, activation="silu", dtype=q.dtype), v * 3, narrow * 2]


def forget_gates(q, k, v, narrow):
    return [*forget_gate_triton(q, k, factor=0.7), v * 3, narrow * 2]


def scan(q, k, v, narrow):
    """Mamba's: of the convolved x and the gate."""
    x, (dt, b, c) = conv(q, 32), (normal(B, T, n, seed=n) for n in (32, 4, 5))
    inputs = ScanInputs(x, dt, -normal(32, 4).exp(), b, c[..., :4], normal(32, seed=2), k, None)
    return [diagonal_scan_triton(inputs, pos=None, initial_state=None)[0], v * 3, narrow * 2]


def slots(q, k, v, narrow):
    heads = [x.unflatten(2, (2, -1)) for x in (q, k, v, narrow)]
    return [gsa_triton(*heads, gate_logit_normalizer=8.0, scale=0.25, slot_activation="softmax", pos=None, initial_state=None)[0]]


def attention(q, k, v, narrow):
    """To whole documents, without positions: of k and v."""
    q, k, v = (x.unflatten(2, (2, 16)) for x in (q, k, v))
    return [window_attention_triton(q, k, v, window=None, pos=None, state=empty(k, v, 0), scale=0.25, fresh=True)[0], narrow * 2]


def attention_in_a_window(q, k, v, narrow):
    q, k, v = (x.unflatten(2, (2, 16)) for x in (conv(q, 32), conv(k, 32), v))
    return [window_attention_triton(q, k, v, window=6, pos=None, state=empty(k, v, 5), scale=0.25, fresh=True)[0], narrow * 2]


def attention_to_memories(q, k, v, narrow):
    """Of tokens q; k and v, as keys and values of the fading memory, are read in memories alone."""
    q, k, v = (x.unflatten(2, (2, 16)) for x in (conv(q, 32), k, v))
    options = Options(window=6, n_fading=3, n_eidetic=4, sliding=False, scale=0.25)
    pos = torch.arange(T, dtype=torch.int32, device=DEVICE).expand(B, T)
    inputs = (q, q * 2, q * 3, k, v, normal(B, T))
    y, _ = eidetic_attention_triton(inputs, options, pos=pos, state={}, fresh=True, need_final_state=False)
    return [y, narrow * 2]


OF_ATTENTION = (attention, attention_in_a_window, attention_to_memories)
READERS = (convolutions, retention, linear_attention, norm_beside_gate, gates, forget_gates, scan, slots, *OF_ATTENTION)


class Projection:
    """A projection with parts of 32, 32, 32 and 8 columns: what its backward pass multiplies, and its gradients."""

    def __init__(self, monkeypatch, widths=(32, 32, 32, 8), return_input=False):
        self.widths, self.return_input = widths, return_input
        self.x, self.parameter = normal(B, T, IN).requires_grad_(), nn.Parameter(normal(sum(widths), IN, seed=5))
        runs = linears._runs
        self.runs = []

        def seen(*arguments):
            self.runs.append(runs(*arguments))
            return self.runs[-1]

        monkeypatch.setattr(linears, "_runs", seen)

    def parts(self):
        found = linears.linear(
            self.x, self.parameter, self.parameter.detach(), split_sizes=self.widths, return_input=self.return_input
        )
        return found[int(self.return_input) :]

    def gradients(self, reader, *, claimed, **options):
        """Of the parts, of x and of the weight. claimed: whether readers can tell that they read parts of a projection."""
        self.runs.clear()
        parts = self.parts()
        outputs = reader(*(parts if claimed else [part.clone() for part in parts]))
        cotangents = [normal(*y.shape, seed=n).to(y.dtype) for n, y in enumerate(outputs)]
        found = torch.autograd.grad(outputs, [self.x, self.parameter], cotangents, **options)
        return [torch.cat([dy for _, dy in self.runs[-1]], 1), *found]


def same(found, expected):
    """The parts' gradients to the bit; products of them, whose sums are in another order, to rounding."""
    assert torch.equal(found[0], expected[0])
    for a, b in zip(found[1:], expected[1:], strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm()


@pytest.mark.parametrize("return_input", some([False, True], [False]))
@pytest.mark.parametrize("reader", READERS, ids=lambda of: of.__name__)
def test_gradients_of_parts_are_columns_of_one_tensor(monkeypatch, reader, return_input):
    monkeypatch.setattr(linears, "_NARROW", 0)  # else narrow parts are put together anyway
    projection = Projection(monkeypatch, return_input=return_input)
    expected = projection.gradients(reader, claimed=False)
    apart = len(projection.runs[-1])
    found = projection.gradients(reader, claimed=True)
    assert apart > 1
    assert len(projection.runs[-1]) == 1
    same(found, expected)


@pytest.mark.parametrize("reader", OF_ATTENTION, ids=lambda of: of.__name__)
def test_attention_writes_the_gradients_of_keys_and_values_in_their_places(monkeypatch, reader):
    places = []
    take = SharedGradient.take
    monkeypatch.setattr(SharedGradient, "take", lambda owner, part, like: places.append(part) or take(owner, part, like))
    Projection(monkeypatch).gradients(reader, claimed=True)
    assert {1, 2} <= set(places)


@pytest.mark.parametrize("reader", some(READERS, (slots, *OF_ATTENTION)), ids=lambda of: of.__name__)
def test_sequences_of_one_token_have_their_rows_apart(monkeypatch, reader):
    """A view's distance between the tokens of such sequences means nothing to PyTorch, but kernels multiply it by their length."""
    monkeypatch.setitem(globals(), "T", 1)
    projection = Projection(monkeypatch)
    same(projection.gradients(reader, claimed=True), projection.gradients(reader, claimed=False))


def test_wide_parts_that_nobody_claims_are_products_of_their_own(monkeypatch):
    monkeypatch.setattr(linears, "_NARROW", 0)
    projection = Projection(monkeypatch, (32, 32, 41, 8))
    reader = lambda q, k, v, narrow: [conv(q, 32), conv(k, 32), v * 3, narrow * 2]  # noqa: E731
    expected = projection.gradients(reader, claimed=False)
    found = projection.gradients(reader, claimed=True)
    assert [(begin, dy.shape[1]) for begin, dy in projection.runs[-1]] == [(0, 64), (64, 41), (105, 8)]
    same(found, expected)


def test_places_that_are_not_aligned_are_not_given(monkeypatch):
    projection = Projection(monkeypatch, (3, 32, 32, 8))
    reader = lambda a, q, k, narrow: [a * 2, conv(q, 32), conv(k, 32), narrow * 2]  # noqa: E731
    same(projection.gradients(reader, claimed=True), projection.gradients(reader, claimed=False))


def test_an_input_that_is_read_elsewhere_is_no_part(monkeypatch):
    """It is returned before the parts."""
    projection = Projection(monkeypatch, return_input=True)
    same(projection.gradients(gates, claimed=True), projection.gradients(gates, claimed=False))


def test_a_part_with_two_readers_has_the_sum_of_their_gradients(monkeypatch):
    """The second one that writes has memory of its own."""
    projection = Projection(monkeypatch)
    reader = lambda q, k, v, narrow: [conv(q, 32), 2 * conv(q, 32), conv(k, 32), v * 3, q * k, narrow]  # noqa: E731
    same(projection.gradients(reader, claimed=True), projection.gradients(reader, claimed=False))


def test_passes_that_come_again_and_passes_that_do_not_reach_the_projection(monkeypatch):
    projection = Projection(monkeypatch)
    expected = projection.gradients(convolutions, claimed=False)
    parts = projection.parts()
    outputs = convolutions(*parts)
    cotangents = [normal(*y.shape, seed=n) for n, y in enumerate(outputs)]
    again = partial(torch.autograd.grad, outputs, grad_outputs=cotangents, retain_graph=True)
    of_parts = again(inputs=parts)
    kept = [dy.clone() for dy in of_parts]
    for _ in range(2):
        found = again(inputs=[projection.x, projection.parameter])
        same([torch.cat([dy for _, dy in projection.runs[-1]], 1), *found], expected)
    assert all(torch.equal(a, b) for a, b in zip(of_parts, kept, strict=True)), "what was handed out is nobody else's"
    assert torch.equal(torch.cat(kept, 2).flatten(0, 1), expected[0])


def test_what_a_pass_handed_out_stays_as_it_was_in_the_next_one(monkeypatch):
    """Of which the first did not come as far as the projection, and the second has other values."""
    projection = Projection(monkeypatch)
    expected = [2 * x for x in projection.gradients(convolutions, claimed=False)]
    parts = projection.parts()
    outputs = convolutions(*parts)
    cotangents = [normal(*y.shape, seed=n) for n, y in enumerate(outputs)]
    of_parts = torch.autograd.grad(outputs, parts, cotangents, retain_graph=True)
    kept = [dy.clone() for dy in of_parts]
    found = torch.autograd.grad(outputs, [projection.x, projection.parameter], [2 * dy for dy in cotangents])
    same([torch.cat([dy for _, dy in projection.runs[-1]], 1), *found], expected)
    assert all(torch.equal(a, b) for a, b in zip(of_parts, kept, strict=True))


def test_a_view_that_one_of_two_readers_reads_has_that_readers_gradient(monkeypatch):
    projection = Projection(monkeypatch)
    part = projection.parts()[0]
    view = part.view(B, T, 32)
    outputs = [3 * conv(part, 32), conv(view, 32)]  # in the backward pass the last one comes first
    of_view, _ = torch.autograd.grad([y.sum() for y in outputs], [view, projection.x], retain_graph=True)
    assert torch.equal(of_view, torch.autograd.grad(outputs[1].sum(), view)[0])


@pytest.mark.parametrize("width", [1, 33])
def test_views_whose_rows_are_columns_of_several_tokens_have_no_place(monkeypatch, width):
    projection = Projection(monkeypatch, (width, 32) if width == 1 else (width,))
    z = normal(B, T * width, seed=9)
    reader = lambda part, *_: [gate_triton(part.view(B, T * width), z, activation="silu", dtype=z.dtype)]  # noqa: E731
    same(projection.gradients(reader, claimed=True), projection.gradients(reader, claimed=False))


def test_unread_parts_leave_no_trace(monkeypatch):
    projection = Projection(monkeypatch)
    reader = lambda q, k, v, narrow: [conv(q, 32), conv(v, 32)]  # noqa: E731
    expected = projection.gradients(reader, claimed=False)
    found = projection.gradients(reader, claimed=True)
    assert not any(dy.isnan().any() for dy in found)
    same(found, expected)


def test_memory_is_the_callers_when_the_pass_is_over():
    """A projection keeps nothing between passes, and what is no part of one has no place."""
    shared = SharedGradient((16, 16), copied=16)
    shared.claim(0)
    like = torch.zeros(5, 16)
    first = shared.take(0, like)
    assert shared.take(0, like) is None
    grads = shared.complete([first, torch.ones(5, 16)])
    assert grads[0] is not None
    assert grads[1].untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
    assert not shared._places
    second = shared.take(0, like)
    assert second.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
    assert claim(None, like, like.clone().requires_grad_() * 2) == (None, None, None)
