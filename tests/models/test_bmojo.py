"""B'MOJO's mixer where its law is hardest: tokens that it chooses itself, over four ranks and in recomputation."""

import itertools

import pytest
import torch
from support.compare import relative_error
from support.recurrences import positions, seeded

from baton.kernels.eidetic_attention import recurrence
from baton.models.config import ModelConfig
from baton.models.lm import LanguageModel
from baton.models.mixer import Site, build_mixer
from baton.models.mixers import bmojo
from baton.models.settings import SMALL_WIDTH
from baton.models.settings.bmojo import BMojoConfig
from baton.parallel.layout import initialize_parameters
from baton.parallel.tensor import megatron_config

SMALL = BMojoConfig.small()


def mixer(config, dtype):
    layer = build_mixer(config, Site(SMALL_WIDTH, 1, 1e-5, megatron_config(1), dtype))
    initialize_parameters(layer, seed=0, tensor_rank=0, tensor_size=1)
    return layer.to(dtype)


def run(layer, x, pos, cuts, dy):
    """Outputs and gradients over pieces, and what each piece found worth keeping."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    state, outputs, kept = None, [], []
    for begin, end in itertools.pairwise([0, *cuts, x.shape[1]]):
        y, state = layer(x[:, begin:end], pos[:, begin:end], state)
        outputs.append(y)
        kept.append(state["where"])
    torch.cat(outputs, dim=1).backward(dy)
    grads = {"x": x.grad, **{name: p.grad.clone() for name, p in layer.named_parameters()}}
    return torch.cat(outputs, dim=1).detach(), grads, kept


@pytest.mark.parametrize("fading", ["chunk", "sliding"])
@pytest.mark.parametrize("cuts", [[16, 32, 48], [13, 30, 51], [1, 2, 63]], ids=str)
def test_four_ranks_choose_the_same_tokens_by_themselves(single_mesh, fading, cuts):
    """Free choice: each piece scores its own outputs. Documents begin anywhere; what is kept is equal entry for entry."""
    layer = mixer(SMALL.model_copy(update={"fading": fading}), torch.float64)
    for seed in range(5):
        generator = seeded(seed)
        x, dy = (torch.randn(3, 64, SMALL_WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
        pos = positions(generator, 3, 64, 0.04)
        whole, grads, (last,) = run(layer, x, pos, [], dy)
        split, split_grads, kept = run(layer, x, pos, cuts, dy)
        assert torch.equal(kept[-1], last)
        assert relative_error(split, whole) <= 1e-12
        for name, grad in grads.items():
            assert relative_error(split_grads[name], grad) <= 1e-10, name


def test_tokens_in_float32_are_those_of_float64(single_mesh):
    """Scores in float32 choose what exact ones choose, unless two are closer than their rounding: here none are."""
    x = torch.randn(4, 200, SMALL_WIDTH, generator=seeded(7), dtype=torch.float64)
    pos = torch.arange(200).expand(4, -1)
    layer = mixer(SMALL, torch.float64)
    with torch.no_grad():
        exact = layer(x, pos, None)[1]
    single = mixer(SMALL, torch.float32)
    with torch.no_grad():
        rounded = single(x.float(), pos, None)[1]
    assert torch.equal(exact["where"], rounded["where"])
    assert relative_error(rounded["score"], exact["score"]) <= 1e-5


def losses_and_gradients(recompute, monkeypatch=None):
    """A model of two layers; with monkeypatch, scoring sees other numbers in recomputation, as another rounding would make them."""
    config = ModelConfig(d_model=SMALL_WIDTH, n_layers=2, vocab_size=32, pattern=["bmojo"], mixers={"bmojo": SMALL})
    model = LanguageModel(config, recompute=recompute)
    initialize_parameters(model, seed=0, tensor_rank=0, tensor_size=1)
    tokens = torch.randint(32, (2, 50), generator=seeded(1))
    pos = positions(seeded(2), 2, 50, 0.03)
    calls = []
    if monkeypatch is not None:
        original = recurrence.innovation

        def innovation(y, weights, pos, tail):
            calls.append(len(calls))
            # the same operators both times, on tokens in another order the second time
            orders = [torch.arange(y.shape[1]), torch.arange(y.shape[1]).flip(0)]
            return original(y.index_select(1, orders[len(calls) > 2]), weights, pos, tail)

        monkeypatch.setattr(recurrence, "innovation", innovation)
    loss = model.loss(model(tokens, pos)[0], tokens)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}, len(calls)


def test_recomputation_keeps_the_tokens_that_were_chosen(single_mesh, monkeypatch):
    """Even if the scores came out differently the second time, which is made to happen here."""
    loss, grads, _ = losses_and_gradients(recompute=False)
    again, recomputed, calls = losses_and_gradients(recompute=True, monkeypatch=monkeypatch)
    assert calls == 4, "two layers, forwards and again"
    assert torch.equal(again, loss)
    for name, grad in grads.items():
        assert torch.equal(recomputed[name], grad), name


def test_the_test_above_would_see_another_choice(single_mesh, monkeypatch):
    _, grads, _ = losses_and_gradients(recompute=False)
    monkeypatch.setattr(bmojo.BMojo, "kept_operators", ())
    _, recomputed, _ = losses_and_gradients(recompute=True, monkeypatch=monkeypatch)
    assert any(not torch.equal(recomputed[name], grad) for name, grad in grads.items())
