"""B'MOJO's attention in Triton against its definition in float64; on a CPU the same kernels are interpreted."""

from dataclasses import replace

import pytest
import torch
from support.compare import relative_error
from support.recurrences import positions, seeded

from baton.kernels.check import gradients, moving
from baton.kernels.eidetic_attention import innovation
from baton.kernels.eidetic_attention.chunked import Options, leave
from baton.kernels.eidetic_attention.published import publish
from baton.kernels.eidetic_attention.recurrence import RECURRENCES, EideticAttention
from baton.kernels.eidetic_attention.triton import eidetic_attention_triton, innovation_triton
from baton.kernels.window_attention.fused import Tiles

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SMALL = Tiles(queries=16, keys=16, queries_back=16, keys_back=16, memory=16)
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def compare(recurrence: EideticAttention, length: int, tiles: Tiles, *, wide: bool, dtype=torch.float32, starts=0.15):
    """Output, State that leaves and every gradient; a State that a document before has left enters, documents start within."""
    inputs, state = recurrence.example(seeded(0), 2, length, torch.float32, wide=wide)
    pos = positions(seeded(1), 2, length, starts)
    # the first lane goes on with the document that the State is of
    pos[0] = torch.arange(length) + 2 * recurrence.window + 3
    # scores are compared in float32 whatever the others are in
    inputs = (*(x.to(dtype) for x in inputs[:5]), inputs[5].float())
    state = {leaf.name: state[leaf.name].to(leaf.dtype) for leaf in recurrence.leaves(inputs)}
    scale = inputs[0].shape[-1] ** -0.5
    options = Options(recurrence.window, recurrence.n_fading, recurrence.n_eidetic, recurrence.sliding, scale)

    def run(defined: bool):
        place, cast = ("cpu", torch.float64) if defined else (DEVICE, None)
        own = [x.to(place, cast or x.dtype).requires_grad_() for x in inputs]
        entering = {
            name: x.to(place, cast or x.dtype).requires_grad_() if x.is_floating_point() else x.to(place)
            for name, x in state.items()
        }
        # scores have no gradient
        own[5] = own[5].detach()
        if defined:
            y, leaving = recurrence.reference(tuple(own), pos, entering)
        else:
            y, leaving = eidetic_attention_triton(tuple(own), options, pos=pos.to(place), state=entering, tiles=tiles)
        leaves = [*own[:5], *(x for name, x in moving(entering).items() if name != "score")]
        outputs = [y, *(x for name, x in moving(leaving).items() if name != "score")]
        grads = gradients(outputs, leaves, seeded(2))
        return [y, *leaving.values(), *grads], [str(n) for n in range(1 + len(leaving) + len(grads))]

    (expected, names), (found, _) = run(True), run(False)
    for name, want, have in zip(names, expected, found, strict=True):
        assert relative_error(have.double().cpu(), want.double()) <= LIMITS[dtype], name


@pytest.mark.parametrize("recurrence", RECURRENCES, ids=str)
def test_outputs_and_gradients_are_the_definitions(recurrence):
    compare(recurrence, 21, SMALL, wide=recurrence.n_fading == 2)


@pytest.mark.parametrize("sliding", [False, True])
def test_bfloat16(sliding):
    compare(EideticAttention(6, 0 if sliding else 2, 5, sliding), 29, SMALL, wide=False, dtype=torch.bfloat16)


def test_longer_than_tiles():
    """A window of several tiles, memories of more rows than one, many publications of a document."""
    compare(EideticAttention(20, 3, 18), 95, SMALL, wide=False, starts=0.02)


@pytest.mark.parametrize("sliding", [False, True])
def test_rows_that_nothing_was_read_into_need_not_be_there(sliding):
    """To the bit, outputs, leaving State and gradients."""
    recurrence = EideticAttention(20, 0 if sliding else 3, 18, sliding)
    (*inputs, score), _ = recurrence.example(seeded(0), 2, 47, torch.float32, wide=False)
    inputs = [x.to(DEVICE).requires_grad_() for x in inputs]
    score, pos = score.to(DEVICE), positions(seeded(1), 2, 47, 0.02).to(DEVICE)
    options = Options(20, recurrence.n_fading, 18, sliding, 0.4)
    state = recurrence.initial((*inputs, score))

    def run(fresh):
        y, leaving = eidetic_attention_triton((*inputs, score), options, pos=pos, state=state, fresh=fresh, tiles=SMALL)
        return [y, *leaving.values(), *gradients([y, leaving["k"], leaving["v"]], inputs, seeded(2))]

    for found, expected in zip(run(True), run(False), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("entered", [False, True])
@pytest.mark.parametrize("sizes", [(20, 3, 18), (20, 3, 0), (20, 0, 18), (20, 0, 18, True)], ids=str)
def test_a_state_that_is_not_wanted_changes_nothing(sizes, entered):
    """To the bit, outputs and gradients."""
    recurrence = EideticAttention(*sizes)
    (*inputs, score), state = recurrence.example(seeded(0), 2, 47, torch.float32, wide=False)
    inputs = [x.to(DEVICE).requires_grad_() for x in inputs]
    score, pos = score.to(DEVICE), positions(seeded(1), 2, 47, 0.02).to(DEVICE)
    options = Options(20, recurrence.n_fading, recurrence.n_eidetic, recurrence.sliding, 0.4)
    state = {name: x.to(DEVICE).requires_grad_(x.is_floating_point() and name != "score") for name, x in state.items()}
    wanted = [*inputs, *(x for x in state.values() if entered and x.requires_grad)]

    def run(state_wanted):
        given = {"state": state} if entered else {"state": recurrence.initial((*inputs, score)), "fresh": True}
        y, leaving = eidetic_attention_triton((*inputs, score), options, pos=pos, tiles=SMALL, state_wanted=state_wanted, **given)
        assert bool(leaving) == state_wanted
        return [y, *gradients([y], wanted, seeded(2))]

    for found, expected in zip(run(False), run(True), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sliding", [False, True])
def test_the_tiles_of_runs(sliding, dtype):
    recurrence = EideticAttention(150, 0 if sliding else 16, 64, sliding)
    compare(recurrence, 700, Tiles(), wide=True, dtype=dtype, starts=0.004)
    compare(recurrence, 700, replace(Tiles(), queries=64, warps=4), wide=True, dtype=dtype, starts=0.004)


def test_what_is_chosen_at_once_is_what_is_chosen_by_doubling():
    """To the bit, leaving States too: equal scores, negative ones, both zeros; documents that begin before the span and within."""
    recurrence, length = EideticAttention(8, 3, 24), 70
    inputs, state = recurrence.example(seeded(0), 3, length, torch.float32, wide=False)
    score = torch.randint(-3, 4, (3, length), generator=seeded(1)) * 0.25
    score[score == 0] *= torch.randint(0, 2, (int((score == 0).sum()),), generator=seeded(2)) * 2.0 - 1
    assert torch.signbit(score[score == 0]).any()
    inputs = tuple(x.to(DEVICE) for x in (*inputs[:5], score))
    state = {name: x.to(DEVICE) for name, x in state.items()}
    pos = torch.stack([torch.arange(length) + state["seen"].cpu()[0], *positions(seeded(3), 2, length, 0.03)]).to(DEVICE)
    options = Options(8, 3, 24, sliding=False, scale=1.0)
    given = {"window": 8, "n_fading": 3, "n_eidetic": 24, "pos": pos, "state": state}
    by_doubling, at_once = (publish(*inputs[1:], **given, at_once=fused) for fused in (False, True))
    for name in ("k", "v", "valid", "slot", "begin"):
        assert torch.equal(getattr(by_doubling, name), getattr(at_once, name)), name
    expected = leave(inputs, options, pos=pos, state=state)
    _, found = eidetic_attention_triton(inputs, options, pos=pos, state=state, tiles=SMALL)
    for name, leaf in expected.items():
        assert torch.equal(found[name], leaf), name
        assert found[name].dtype == leaf.dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("length", "channels", "k", "cut"), [(37, 300, 4, 21), (3, 17, 5, 1)])
def test_innovation_is_its_definitions_and_the_same_bits_over_any_cut(length, channels, k, cut, dtype):
    """Also in pieces shorter than what is foretold from. What is of another document is not read: it is NaN."""
    y, tail = (torch.randn(2, n, channels, generator=seeded(n)).to(dtype) for n in (length, k))
    weights, pos = torch.rand(k, generator=seeded(1)), positions(seeded(2), 2, length, 0.1)
    pos[1] = torch.arange(length)  # a document that begins with the span
    tail[1] = torch.nan
    expected, _ = innovation(y.double(), weights.double(), pos, tail.double().nan_to_num())
    y, weights, pos, tail = (x.to(DEVICE) for x in (y, weights, pos, tail))
    found = innovation_triton(y, weights, pos, tail)
    assert found.dtype == torch.float32
    assert relative_error(found.double().cpu(), expected) <= 1e-6
    before = torch.cat((tail, y[:, :cut]), dim=1)[:, -k:]
    pieces = (
        innovation_triton(y[:, :cut], weights, pos[:, :cut], tail),
        innovation_triton(y[:, cut:], weights, pos[:, cut:], before),
    )
    assert torch.equal(torch.cat(pieces, dim=1), found)
