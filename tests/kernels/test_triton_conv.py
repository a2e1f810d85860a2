"""The short convolution's Triton kernels against the reference in float64; in Triton's interpreter where there is no GPU."""

import os

import pytest
import torch
from support.compare import relative_error
from support.long_form import every_pair, some
from support.prefetch_trace import asking_watched
from support.recurrences import positions, seeded

from baton.kernels.short_conv import op, recurrence
from baton.kernels.short_conv.reference import short_conv_reference
from baton.kernels.short_conv.triton_launch import LaunchConfig, short_conv_step_triton, short_conv_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAUNCH_CONFIG = LaunchConfig(block_d=8, block_t=4, span=8, block_t_backward=4, span_backward=8)
LIMITS = {torch.float32: 1e-6, torch.bfloat16: 5e-3}  # bfloat16: what comes out is rounded to it


@pytest.fixture(autouse=True)
def unasked():
    """Checks in every test that prefetched addresses exist, and records which other addresses are loaded."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield None
        return
    with asking_watched() as found:
        yield found


def example(length, width, *, tail, starts, dtype, channels=11, batch=2):
    """Inputs in float64, exactly representable in `dtype`; positions that begin inside a document; cotangents."""
    g = seeded(length + width)

    def randn(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype).double()

    given = {"x": randn(batch, length, channels), "weight": randn(channels, width), "bias": randn(channels)}
    given["tail"] = randn(batch, width - 1, channels) if tail else None
    pos = positions(g, batch, length, 0.2) if starts else None
    return given, pos, (randn(batch, length, channels), randn(batch, width - 1, channels))


def with_gradients(function, given, pos, cotangents, **options):
    leaves = {name: x.detach().clone().requires_grad_() for name, x in given.items() if x is not None}
    y, leaving = function(leaves["x"], leaves["weight"], leaves["bias"], pos=pos, tail=leaves.get("tail"), **options)
    grads = torch.autograd.grad([y, leaving], list(leaves.values()), [dx.to(y.device, y.dtype) for dx in cotangents])
    return {"y": y, "leaving": leaving, **dict(zip(leaves, grads))}


def compare(length, width, *, tail, starts, silu, dtype=torch.float32, config=LAUNCH_CONFIG, channels=11, unit=None, pos=None):
    """pos: others than the example's."""
    batch = 2 if pos is None else len(pos)
    given, own, cotangents = example(length, width, tail=tail, starts=starts, dtype=dtype, channels=channels, batch=batch)
    pos = own if pos is None else pos
    options = {"activation": "silu" if silu else None, "unit_width": unit and unit[0], "unit_eps": unit[1] if unit else 0.0}
    expected = with_gradients(short_conv_reference, given, pos, cotangents, **options)
    rounded = {name: None if x is None else x.to(DEVICE, dtype) for name, x in given.items()}
    own_pos = None if pos is None else pos.to(DEVICE)
    found = with_gradients(short_conv_triton, rounded, own_pos, cotangents, silu=silu, unit=unit, config=config)
    for name, value in expected.items():
        assert relative_error(found[name].double().cpu(), value) <= LIMITS[dtype], (name, length, width)


@pytest.mark.parametrize(("tail", "starts", "silu"), every_pair((False, True), (False, True), (False, True)))
def test_outputs_and_gradients_are_the_definitions(tail, starts, silu):
    """Within a span, over spans with a short last one, and segments shorter than the tail."""
    for length, width in ((8, 4), (21, 4), (2, 4), (16, 3), (5, 1), (9, 2)):
        if width > 1 or not tail:
            compare(length, width, tail=tail, starts=starts, silu=silu)


@pytest.mark.parametrize(("tail", "unit"), [(False, None), (True, (4, 1e-6))])
def test_a_document_starts_at_any_token_of_a_span_or_in_none(tail, unit):
    """Spans of one document are computed without positions. Each row has one start, from the row's first token to behind the second
    span; and there are rows that begin with a document's first few tokens."""
    starts, t = torch.arange(-3, 20)[:, None], torch.arange(29)
    pos = torch.where(t < starts, t + 40, t - starts)
    compare(29, 4, tail=tail, starts=True, silu=True, channels=4, unit=unit, pos=pos)


def test_a_block_has_lines_of_channels_that_are_not():
    config = LaunchConfig(block_d=64, block_t=4, span=8, block_t_backward=8, span_backward=16)
    compare(9, 4, tail=True, starts=True, silu=True, config=config)


@pytest.mark.parametrize("silu", some((False, True), (True,)))
@pytest.mark.parametrize("starts", some((False, True), (True,)))
@pytest.mark.parametrize(("length", "channels", "head"), [(21, 12, 4), (9, 24, 8), (5, 48, 16), (9, 6, 1), (2, 12, 2)])
def test_heads_of_length_1(length, channels, head, starts, silu):
    """A block of several heads, of one, and one that is wider than the block; channels that are no whole blocks."""
    compare(length, 4, tail=True, starts=starts, silu=silu, channels=channels, unit=(head, 0.1))


@pytest.mark.parametrize(("width", "unit"), [(6, None), (8, (64, 1e-5)), (7, (128, 1e-5))])
def test_long_filters(width, unit):
    """Whose programs have several warps backwards: heads lie within one, and across four."""
    compare(37, width, tail=True, starts=True, silu=True, config=LaunchConfig(), channels=256, unit=unit)


@pytest.mark.parametrize("width", [4, 6])
def test_heads_that_the_kernels_do_not_have_are_normalized_behind_them(width, monkeypatch):
    """As torch normalizes, of a sequence and of a step; 6 is no power of two."""
    for module in (op, recurrence):
        monkeypatch.setattr(module, "use_triton", lambda x: True)
    given, _, _ = example(9, 4, tail=True, starts=False, dtype=torch.float32, channels=12)
    x, weight, bias, tail = (given[name].to(DEVICE, torch.float32) for name in ("x", "weight", "bias", "tail"))
    plain, _ = short_conv_reference(*(given[name] for name in ("x", "weight", "bias")), tail=given["tail"], activation="silu")
    expected = torch.nn.functional.normalize(plain.unflatten(2, (-1, width)), dim=3).flatten(2)
    conv = recurrence.ShortConv("silu", width, 0.0)
    y, _ = conv.run((x, weight, bias), None, {"conv": tail})
    assert relative_error(y.double().cpu(), expected) <= 1e-6
    y, _ = conv.step((x[:, :1], weight, bias), None, {"conv": tail.clone()})
    assert relative_error(y.double().cpu(), expected[:, :1]) <= 1e-6


def test_heads_of_zeros_stay_zeros_and_have_gradients():
    given, _, (dy, _) = example(9, 4, tail=False, starts=False, dtype=torch.float32, channels=8)
    x = torch.zeros_like(given["x"], dtype=torch.float32, device=DEVICE).requires_grad_()
    weight, bias = given["weight"].to(x), torch.zeros(8, device=DEVICE)
    y, _ = short_conv_triton(x, weight, bias, pos=None, tail=None, silu=True, unit=(4, 1e-5), config=LAUNCH_CONFIG)
    (dx,) = torch.autograd.grad(y, x, dy.to(y))
    assert not y.any()
    assert dx.isfinite().all()
    assert dx.any()


def test_bfloat16_is_rounded_once():
    compare(21, 4, tail=True, starts=True, silu=True, dtype=torch.bfloat16, channels=12, unit=(4, 1e-5))
    compare(21, 4, tail=True, starts=True, silu=True, dtype=torch.bfloat16)


@pytest.mark.parametrize("tail", some((False, True), (True,)))
def test_a_tail_that_is_not_wanted_or_not_taken_changes_nothing(tail):
    """Outputs and gradients have the bits of a run with a zero cotangent; spans that are whole blocks, and one that is not."""
    for length in (2, 16, 21):
        given, pos, (dy, dleaving) = example(length, 4, tail=tail, starts=True, dtype=torch.float32)
        given = {name: None if x is None else x.float().to(DEVICE).requires_grad_() for name, x in given.items()}
        leaves, found = [x for x in given.values() if x is not None], []
        for wanted, used in ((True, True), (True, False), (False, False)):
            y, leaving = short_conv_triton(**given, pos=pos.to(DEVICE), silu=True, config=LAUNCH_CONFIG, need_tail=wanted)
            assert leaving.shape[1] == 3 * wanted
            outputs = [(y, dy), (leaving, 0 * dleaving)][: 1 + used]
            cotangents = [dx.to(x.device, x.dtype) for x, dx in outputs]
            found.append([y, *torch.autograd.grad([x for x, _ in outputs], leaves, cotangents)])
        for expected, *others in zip(*found, strict=True):
            assert all(torch.equal(x, expected) for x in others)


def test_a_tail_alone_has_gradients():
    given, pos, (_, dleaving) = example(9, 4, tail=True, starts=True, dtype=torch.float32)
    found = {}
    for run, options in (
        (short_conv_triton, {"silu": True, "config": LAUNCH_CONFIG}),
        (short_conv_reference, {"activation": "silu"}),
    ):
        leaves = {name: x.float().to(DEVICE).requires_grad_() for name, x in given.items()}
        _, leaving = run(*(leaves[n] for n in ("x", "weight", "bias")), pos=pos.to(DEVICE), tail=leaves["tail"], **options)
        own = [leaves["x"], leaves["tail"]]
        cotangent = dleaving.to(leaving.device, leaving.dtype)
        found[run] = torch.autograd.grad(leaving, own, cotangent, allow_unused=True, materialize_grads=True)
    for a, b in zip(*found.values(), strict=True):
        assert torch.equal(a, b)


def test_cut_anywhere_the_bits_are_the_same():
    """Also where the segments have other spans."""
    given, pos, _ = example(21, 4, tail=True, starts=True, dtype=torch.float32)
    x, weight, bias, tail = (given[name].to(DEVICE, torch.float32) for name in ("x", "weight", "bias", "tail"))
    whole, last = short_conv_triton(x, weight, bias, pos=pos.to(DEVICE), tail=tail, silu=True, config=LAUNCH_CONFIG)
    for cut in (1, 2, 7, 19):
        first, between = short_conv_triton(
            x[:, :cut], weight, bias, pos=pos[:, :cut].to(DEVICE), tail=tail, silu=True, config=LAUNCH_CONFIG
        )
        second, leaving = short_conv_triton(
            x[:, cut:], weight, bias, pos=pos[:, cut:].to(DEVICE), tail=between, silu=True, config=LAUNCH_CONFIG
        )
        assert torch.equal(torch.cat((first, second), dim=1), whole)
        assert torch.equal(leaving, last)


def test_views_are_taken_and_equal_calls_give_equal_bits():
    given, pos, cotangents = example(21, 4, tail=True, starts=True, dtype=torch.float32)
    given = {name: x.to(DEVICE, torch.float32) for name, x in given.items()}
    wide = {**given, "x": torch.cat((given["x"], given["x"]), dim=-1)[..., : given["x"].shape[-1]]}
    pos = pos.to(DEVICE, torch.int32)
    of_longer = torch.cat((pos, torch.zeros_like(pos)), dim=1)[:, : pos.shape[1]]
    assert not any(x.is_contiguous() for x in (wide["x"], of_longer))
    found = [
        with_gradients(short_conv_triton, each, positions, cotangents, silu=True, config=LAUNCH_CONFIG)
        for each, positions in ((given, pos), (given, pos), (wide, of_longer))
    ]
    for other in found[1:]:
        assert all(torch.equal(other[name], value) for name, value in found[0].items())


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU nobody sees what is asked for")
@pytest.mark.parametrize(("length", "block_t"), [(64, 4), (61, 4), (64, 8)])
def test_what_is_loaded_was_asked_for(length, block_t, unasked):
    """In the backward pass every load was prefetched, except a program's first block and the inputs before it."""
    config = LaunchConfig(block_d=64, block_t_backward=block_t, span_backward=32)
    given, _, cotangents = example(length, 4, tail=False, starts=False, dtype=torch.float32, channels=64, batch=1)
    given = {name: None if x is None else x.float() for name, x in given.items()}
    with_gradients(short_conv_triton, given, None, cotangents, silu=True, config=config)
    first, window = {*range(block_t), *range(32, 32 + block_t)}, {*range(29, 32)}
    for name, tokens in (("x", first | window), ("dy", first)):
        # a row is two lines
        assert unasked["short_conv_backward_kernel", name] == {2 * t + line for t in tokens for line in range(2)}, name


@pytest.mark.parametrize(
    ("width", "silu", "dtype", "unit"),
    [
        (4, True, torch.bfloat16, None),
        (4, False, torch.float32, None),
        (2, True, torch.float32, None),
        (4, True, torch.float32, (4, 0.1)),
    ],
)
def test_a_step_is_one_token_whose_tail_is_written_over_the_one_before(width, silu, dtype, unit):
    """Also where a document starts, or has started within the tail; more channels than a program has."""
    g, limit = seeded(width), LIMITS[dtype]
    x, tail, weight, bias = (
        torch.randn(*shape, generator=g).to(DEVICE, dtype) for shape in ((4, 3, 300), (4, width - 1, 300), (300, width), (300,))
    )
    pos = torch.tensor([7, 0, 1, 2], dtype=torch.int32, device=DEVICE)[:, None]
    for own_pos in (pos, None):
        given, token = tail.clone(), x[:, 1:2]  # a view whose rows are further apart than its channels
        y, leaving = short_conv_step_triton(token, weight, bias, pos=own_pos, tail=given, silu=silu, unit=unit)
        expected, moved = short_conv_reference(
            token.double().cpu(), weight.double().cpu(), bias.double().cpu(), pos=None if own_pos is None else own_pos.cpu(),
            tail=tail.double().cpu(), activation="silu" if silu else None, unit_width=unit and unit[0],
            unit_eps=unit[1] if unit else 0.0,
        )  # fmt: skip
        assert relative_error(y.double().cpu(), expected) <= limit
        assert leaving.data_ptr() == given.data_ptr()
        assert torch.equal(given.double().cpu(), moved)
