"""Selective recomputation: the same bits, with less kept."""

import weakref

import pytest
import torch
from support.models import SMALL_WIDTH, model_of, step_batch

from baton.models import selective_recompute
from baton.models.lm import LanguageModel
from baton.models.selective_recompute import recompute_in_backward
from baton.models.settings import kinds
from baton.parallel.param_layout import initialize_parameters


def test_what_is_named_is_not_kept_and_made_once():
    """For two readers, one of them of a view; in between it is gone, and so it is afterwards."""
    x, made = torch.randn(4, 3, requires_grad=True), []

    def make():
        assert not torch.is_grad_enabled()
        made.append(x * 2)
        return made[-1]

    with recompute_in_backward(True) as discard:
        u = x * 2  # whose own backward pass needs no u
        discard(u, make)
        y = (u * u).sum() + (u.view_as(u) * 3.0).square().sum()
    gone = weakref.ref(u.untyped_storage())
    del u
    assert gone() is None
    y.backward()
    torch.testing.assert_close(x.grad, (2 * (2 * x) + 18 * (2 * x)).detach() * 2)
    assert len(made) == 1


def test_off_everything_is_kept():
    x = torch.randn(3, requires_grad=True)
    with recompute_in_backward(False) as discard:
        u = x.exp()
        discard(u, lambda: pytest.fail("made again"))
        y = (u * u).sum()
    y.backward()


MADE_AGAIN = {"hybrid"} | {
    name
    for name, kind in kinds().items()
    if any(kept.cheap and kept.device != "gpu" for kept in kind.small().footprint(SMALL_WIDTH).kept)
}
"""On a CPU."""


ALSO_BFLOAT16 = {"bmojo", "gsa", "hybrid"}
"""Models of which the default suite has both types."""


@pytest.mark.parametrize(
    ("mixer", "dtype"),
    [
        pytest.param(mixer, dtype, marks=[] if dtype == torch.float32 or mixer in ALSO_BFLOAT16 else pytest.mark.long)
        for mixer in [*sorted(kinds()), "hybrid"]
        for dtype in (torch.float32, torch.bfloat16)
    ],
    ids=str,
)
def test_losses_and_gradients_have_the_same_bits(mixer, dtype, monkeypatch, single_mesh):
    batch, found, notes = step_batch(0), [], []

    class Note(selective_recompute._Note):
        def __init__(self, make):
            super().__init__(make)
            notes.append(self)

    monkeypatch.setattr(selective_recompute, "_Note", Note)
    for selective in (False, True):
        model = LanguageModel(model_of(mixer), compute_dtype=dtype, selective_recompute=selective)
        initialize_parameters(model, 0, 0, 1)
        hidden, _ = model(batch.tokens, batch.pos)
        loss = model.loss(hidden, batch.labels)
        assert any(note.readers for note in notes) == (selective and mixer in MADE_AGAIN)
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
    assert all(note.readers == 0 and note.made is None for note in notes)
    for plain, again in zip(*found, strict=True):
        assert torch.equal(plain, again)


def test_a_layer_that_is_run_again_has_no_notes():
    model = LanguageModel(model_of("mamba"), recompute=True, selective_recompute=True)
    assert not any(getattr(module, "_selective", False) for module in model.modules())
