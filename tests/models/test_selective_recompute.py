"""Selective recomputation: the same bits with fewer saved tensors."""

import weakref

import pytest
import torch
from support.models import SMALL_WIDTH, model_of, step_batch

from baton.kernels.common import selective_recompute
from baton.kernels.common.selective_recompute import recompute_in_backward
from baton.models.lm import LanguageModel
from baton.models.settings import kinds
from baton.parallel.param_layout import initialize_parameters


def test_discarded_tensors_are_freed_and_recomputed_once():
    """With two readers, one of them through a view."""
    x, values = torch.randn(4, 3, requires_grad=True), []

    def recompute():
        assert not torch.is_grad_enabled()
        values.append(x * 2)
        return values[-1]

    with recompute_in_backward(True) as discard:
        u = x * 2  # its own backward pass does not read u
        discard(u, recompute)
        y = (u * u).sum() + (u.view_as(u) * 3.0).square().sum()
    gone = weakref.ref(u.untyped_storage())
    del u
    assert gone() is None
    y.backward()
    torch.testing.assert_close(x.grad, (2 * (2 * x) + 18 * (2 * x)).detach() * 2)
    assert len(values) == 1


def test_disabled_it_discards_nothing():
    x = torch.randn(3, requires_grad=True)
    with recompute_in_backward(False) as discard:
        u = x.exp()
        discard(u, lambda: pytest.fail("recomputed"))
        y = (u * u).sum()
    y.backward()


RECOMPUTED = {"hybrid"} | {
    name
    for name, kind in kinds().items()
    if any(saved.recomputed and saved.device != "gpu" for saved in kind.small().costs(SMALL_WIDTH).saved)
}
"""Models that recompute something on a CPU."""


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
    batch, results, placeholders = step_batch(0), [], []

    class Recorded(selective_recompute._Placeholder):
        def __init__(self, recompute):
            super().__init__(recompute)
            placeholders.append(self)

    monkeypatch.setattr(selective_recompute, "_Placeholder", Recorded)
    for selective in (False, True):
        model = LanguageModel(model_of(mixer), compute_dtype=dtype, recompute="selective" if selective else "none")
        initialize_parameters(model, 0, 0, 1)
        hidden, _ = model(batch.tokens, batch.pos)
        loss = model.loss(hidden, batch.labels)
        assert any(p.readers for p in placeholders) == (selective and mixer in RECOMPUTED)
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    assert all(p.readers == 0 and p.value is None for p in placeholders)
    for saved, recomputed in zip(*results, strict=True):
        assert torch.equal(saved, recomputed)
