"""B'MOJO's attention in Triton against its definition in float64; on a CPU the same kernels are interpreted."""

from dataclasses import replace

import pytest
import torch
from support.compare import relative_error
from support.recurrences import positions, seeded

from baton.kernels.check import gradients, moving
from baton.kernels.eidetic_attention.chunked import Options
from baton.kernels.eidetic_attention.recurrence import RECURRENCES, EideticAttention
from baton.kernels.eidetic_attention.triton import Tiles, eidetic_attention_triton

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SMALL = Tiles(queries=16, keys=16, queries_back=16, keys_back=16, memory=16)
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def compare(recurrence: EideticAttention, length: int, tiles: Tiles, *, wide: bool, dtype=torch.float32, starts=0.15):
    """Output, State that leaves and every gradient; a State that a document before has left enters, documents start within."""
    inputs, state = recurrence.example(seeded(0), 2, length, torch.float32, wide=wide)
    pos = positions(seeded(1), 2, length, starts)
    # the first lane goes on with the document that the State is of
    pos[0] = torch.arange(length) + 2 * recurrence.window + 3
    inputs = tuple(x.to(dtype) for x in inputs)
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


def test_longer_than_tiles():
    """A window of several tiles, memories of more rows than one, many publications of a document."""
    compare(EideticAttention(20, 3, 18), 95, SMALL, wide=False, starts=0.02)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sliding", [False, True])
def test_the_tiles_of_runs(sliding, dtype):
    recurrence = EideticAttention(150, 0 if sliding else 16, 64, sliding)
    compare(recurrence, 700, Tiles(), wide=True, dtype=dtype, starts=0.004)
    compare(recurrence, 700, replace(Tiles(), queries=64, warps=4), wide=True, dtype=dtype, starts=0.004)
