"""Split invariance of B'MOJO's mixer in its hardest cases: selected tokens over four ranks and in recomputation."""

import itertools

import pytest
import torch
from support.compare import relative_error
from support.long_form import alternating
from support.recurrences import positions, seeded

from baton.kernels.eidetic_attention import recurrence
from baton.models.config import ModelConfig
from baton.models.lm import LanguageModel
from baton.models.mixer import build_mixer
from baton.models.mixer_context import MixerContext
from baton.models.mixers import bmojo
from baton.models.settings import SMALL_WIDTH
from baton.models.settings.bmojo import BMojoConfig
from baton.parallel.param_layout import initialize_parameters
from baton.parallel.tensor import megatron_config

SMALL = BMojoConfig.small()


def mixer(config, dtype):
    layer = build_mixer(config, MixerContext(SMALL_WIDTH, 1, 1e-5, megatron_config(1), dtype))
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


@pytest.mark.parametrize(("cuts", "fading"), alternating([[16, 32, 48], [13, 30, 51], [1, 2, 63]], ["chunk", "sliding"]), ids=str)
def test_four_ranks_choose_the_same_tokens_by_themselves(single_mesh, fading, cuts):
    """Free choice: each piece scores its own outputs. Documents begin anywhere; what is kept is equal entry for entry."""
    layer = mixer(SMALL.model_copy(update={"fading": fading}), torch.float64)
    for seed in range(3):
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

        def innovation(y, weights, pos, tail, **settings):
            calls.append(len(calls))
            # the same operators both times, on tokens in another order the second time
            orders = [torch.arange(y.shape[1]), torch.arange(y.shape[1]).flip(0)]
            return original(y.index_select(1, orders[len(calls) > 2]), weights, pos, tail, **settings)

        monkeypatch.setattr(recurrence, "innovation", innovation)
    loss = model.loss(model(tokens, pos)[0], tokens)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}, len(calls)


def test_recomputation_keeps_the_tokens_that_were_chosen(single_mesh, monkeypatch):
    """Even if the scores came out differently the second time, which is made to happen here."""
    loss, grads, _ = losses_and_gradients(recompute="none")
    again, recomputed, calls = losses_and_gradients(recompute="full", monkeypatch=monkeypatch)
    assert calls == 4, "two layers, forwards and again"
    assert torch.equal(again, loss)
    for name, grad in grads.items():
        assert torch.equal(recomputed[name], grad), name


def test_the_test_above_would_see_another_choice(single_mesh, monkeypatch):
    _, grads, _ = losses_and_gradients(recompute="none")
    monkeypatch.setattr(bmojo.BMojo, "recompute_keeps", ())
    _, recomputed, _ = losses_and_gradients(recompute="full", monkeypatch=monkeypatch)
    assert any(not torch.equal(recomputed[name], grad) for name, grad in grads.items())


@pytest.mark.parametrize("fading_norm", [True, False])
@pytest.mark.parametrize("weights", ["halved", "uniform"])
@pytest.mark.parametrize("norm", ["l2", "l1", "max"])
def test_the_memory_keeps_what_the_settings_call_the_largest_innovation(single_mesh, norm, weights, fading_norm):
    """Scores by hand, from the state space's outputs, of one document that ends at a multiple of the window."""
    changes = {"innovation_norm": norm, "predictor_weights": weights, "predictor": 3, "fading_norm": fading_norm}
    config = SMALL.model_copy(update=changes)
    layer, length = mixer(config, torch.float64), 4 * SMALL.window
    x = torch.randn(1, length, SMALL_WIDTH, generator=seeded(3), dtype=torch.float64)
    pos = torch.arange(length)[None]
    with torch.no_grad():
        outputs = layer.ssm(x, pos, None)[0][0]
        state = layer(x, pos, None)[1]
    if fading_norm:
        outputs = outputs / (outputs.square().mean(-1, keepdim=True) + layer.context.norm_eps).sqrt()
    shares = {"halved": [4 / 7, 2 / 7, 1 / 7], "uniform": [1 / 3, 1 / 3, 1 / 3]}[weights]
    scores = []
    for t in range(length):
        foretold = sum(share * outputs[t - j] for j, share in enumerate(shares, 1) if j <= t)
        missed = outputs[t] - foretold
        scores.append({"l2": missed.square().mean().sqrt(), "l1": missed.abs().mean(), "max": missed.abs().max()}[norm])
    best = torch.stack(scores).topk(config.eidetic)
    assert sorted(state["where"][0].tolist()) == sorted(best.indices.tolist())
    assert relative_error(state["score"][0].sort().values, best.values.sort().values) <= 1e-6  # the weights are fp32


def by_the_equations(layer, x):
    """The mixer's output for one document x [T, M], token by token. The state space is the layer's own."""
    config, dim, y = layer.config, layer.config.head_dim, layer.ssm(x[None], torch.arange(len(x))[None], None)[0][0]
    if config.fading_norm:
        y = y / (y.square().mean(-1, keepdim=True) + layer.context.norm_eps).sqrt()
    keys, values = layer.kv_proj.weight.chunk(2)
    q, k, v = ((x @ weight.T).unflatten(1, (-1, dim)) for weight in (layer.q_proj.weight, keys, values))
    fading_k, fading_v = ((y @ weight.T).unflatten(1, (-1, dim)) for weight in (keys, values))
    if config.d_conv is not None:
        # the last tap is the token's own
        taps = [layer.conv_weights[name].T.flip(0).unflatten(1, (-1, dim)) for name in "kv"]
        k, v = (
            torch.stack([sum(tap * rows[t - j] for j, tap in enumerate(of_rows) if j <= t) for t in range(len(x))])
            for of_rows, rows in zip(taps, (k, v), strict=True)
        )
    shares = [2.0**-j for j in range(1, config.predictor + 1)]
    scores = []
    for t in range(len(x)):
        foretold = sum(share / sum(shares) * y[t - j] for j, share in enumerate(shares, 1) if j <= t)
        scores.append(float((y[t] - foretold).detach().square().mean().sqrt()))
    outputs = []
    for t in range(len(x)):
        published, begin = t // config.window * config.window, max(0, t + 1 - config.window)
        best = sorted(range(published), key=lambda s: (-scores[s], s))[: config.eidetic]
        fading = slice(max(0, published - config.fading_tokens), published)
        all_k, all_v = (
            torch.cat((rows[begin : t + 1], of_y[fading], rows[best])).repeat_interleave(q.shape[1] // rows.shape[1], dim=1)
            for rows, of_y in ((k, fading_k), (v, fading_v))
        )
        weights = torch.einsum("hk,jhk->hj", q[t], all_k).mul(dim**-0.5).softmax(-1)
        outputs.append(torch.einsum("hj,jhk->hk", weights, all_v).flatten())
    return torch.stack(outputs) @ layer.out_proj.weight.T + (y if config.add_ssm_output else 0)


@pytest.mark.parametrize("changes", [{"d_conv": None}, {"add_ssm_output": True}, {"fading_norm": False}], ids=str)
def test_outputs_and_gradients_are_the_equations(single_mesh, changes):
    layer = mixer(SMALL.model_copy(update=changes), torch.float64)
    x, dy = (torch.randn(19, SMALL_WIDTH, generator=seeded(seed), dtype=torch.float64) for seed in (5, 6))
    y, grads, _ = run(layer, x[None], torch.arange(19)[None], [], dy[None])
    layer.zero_grad()
    x.requires_grad_()
    expected = by_the_equations(layer, x)
    expected.backward(dy)
    assert relative_error(y[0], expected.detach()) <= 1e-12
    assert relative_error(grads["x"][0], x.grad) <= 1e-12
    for name, parameter in layer.named_parameters():
        assert relative_error(grads[name], parameter.grad) <= 1e-10, name


def test_the_default_innovation_is_the_one_it_was():
    assert (SMALL.innovation_norm, SMALL.predictor_weights) == ("l2", "halved")


@pytest.mark.parametrize(
    "changes", [{}, {"fading": "sliding"}, {"eidetic": 0}, {"fading_tokens": 0}, {"add_ssm_output": True}], ids=str
)
def test_a_state_space_learns_only_from_documents_that_are_longer_than_the_window(single_mesh, changes):
    """Its gradients are exactly 0 up to the window's length and not one token later; without fading tokens they always are, and
    where the state space's output is added to the attention's they never are. The note is there where they are."""
    config = SMALL.model_copy(update=changes)
    layer = mixer(config, torch.float64)
    for tokens in (config.window, config.window + 1):
        # two documents in a row, so that what is packed before one does not count either
        x = torch.randn(2, 2 * tokens, SMALL_WIDTH, generator=seeded(4), dtype=torch.float64)
        layer.zero_grad()
        layer(x, torch.arange(tokens).repeat(2, 2), None)[0].square().sum().backward()
        gradients = {name: p.grad for name, p in layer.ssm.named_parameters()}
        learns = any(grad is not None and grad.any() for grad in gradients.values())
        assert learns == (config.note(tokens) is None)
        expected = tokens > config.window and changes != {"fading_tokens": 0}
        assert learns == (expected or changes == {"add_ssm_output": True})
