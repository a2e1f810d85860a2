"""The language model: its loss compared with PyTorch's, decoding with the parallel form, dtypes of weights and gradients."""

import pytest
import torch
import torch.nn.functional as F
from support.compare import relative_error
from support.models import training

from baton.data_pipeline.packing import IGNORE_INDEX
from baton.models.config import ModelConfig
from baton.models.lm import LanguageModel
from baton.parallel.cast_weights import CastWeightCache, drop_cast_weights
from baton.parallel.param_layout import initialize_parameters
from baton.training.build import build_model

CONFIG = ModelConfig(d_model=16, n_layers=3, vocab_size=37, loss_chunk=7, mixers={"mamba": {"d_state": 4}})


def build(config=CONFIG, **settings):
    model = LanguageModel(config, **settings)
    initialize_parameters(model, seed=0, tensor_rank=0, tensor_size=1)
    return model


def batch(b=2, t=19):
    g = torch.Generator().manual_seed(0)
    tokens = torch.randint(37, (b, t), generator=g)
    labels = torch.randint(37, (b, t), generator=g)
    labels[0, :3] = IGNORE_INDEX
    pos = torch.arange(t, dtype=torch.int32).repeat(b, 1)
    pos[1, 8:] -= 8
    return tokens, labels, pos


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def test_chunked_loss_equals_pytorch_cross_entropy(single_mesh):
    model = build()
    tokens, labels, pos = batch()
    loss = model.loss(model(tokens, pos)[0], labels)
    ours = gradients(model, loss)
    hidden = model(tokens, pos)[0]
    plain = F.cross_entropy(
        (hidden @ model.embedding.weight.T)[..., : CONFIG.vocab_size].flatten(0, 1),
        labels.flatten(),
        ignore_index=IGNORE_INDEX,
        reduction="sum",
    )
    theirs = gradients(model, plain)
    assert relative_error(loss, plain) <= 1e-6
    for name in ours:
        assert relative_error(ours[name], theirs[name]) <= 1e-5, name


PADDED = CONFIG.model_copy(update={"pad_vocab_to": 128, "tie_embeddings": False})


def padded_loss(mesh):
    """Loss and this rank's gradient of the head, whose last ranks have nothing but padding."""
    model = build_model(PADDED, training(), mesh.device, mesh)
    initialize_parameters(model, 0, mesh.tensor_rank, mesh.layout.tensor)
    tokens, labels, pos = batch()
    loss = model.loss(model(tokens, pos)[0], labels)
    loss.backward()
    return float(loss.detach()), model.head.weight.grad


def test_padding_has_no_part_in_the_loss(pool, single_mesh):
    """Nor a gradient, on ranks that have nothing else too."""
    model = build(PADDED.model_copy(update={"pad_vocab_to": 1}))
    tokens, labels, pos = batch()
    with torch.no_grad():  # initial values are a function of the shape
        for mine, theirs in zip(model.parameters(), build(PADDED).parameters(), strict=True):
            mine.copy_(theirs[: len(mine)])
    loss = model.loss(model(tokens, pos)[0], labels)
    loss.backward()
    for tensor in (1, 4):
        found = pool.run(padded_loss, tensor=tensor)
        assert [one for one, _ in found] == pytest.approx([loss.item()] * tensor, rel=1e-6)
        gradient = torch.cat([part for _, part in found])
        assert relative_error(gradient[: CONFIG.vocab_size], model.head.weight.grad) <= 1e-5
        assert gradient[CONFIG.vocab_size :].count_nonzero() == 0


def test_vocabulary_is_padded_and_padding_is_never_a_label(single_mesh):
    assert CONFIG.padded_vocab_size == 40
    assert build().embedding.weight.shape == (40, 16)


@pytest.mark.parametrize("first", [1, 6])
def test_decoding_a_token_at_a_time_equals_the_parallel_form(single_mesh, first):
    model = build()
    tokens, _, pos = batch()
    with torch.no_grad():
        whole, leaving = model(tokens, pos)
        pieces, states = [], None
        for a, b in [(0, first), *((t, t + 1) for t in range(first, tokens.shape[1]))]:
            hidden, states = model(tokens[:, a:b], pos[:, a:b], states)
            pieces.append(hidden)
    assert relative_error(torch.cat(pieces, dim=1), whole) <= 1e-6
    for number, state in leaving.items():
        for name, leaf in state.items():
            assert relative_error(states[number][name], leaf) <= 1e-6


def test_recomputing_blocks_changes_no_bit(single_mesh):
    tokens, labels, pos = batch()
    kept, recomputed = build(), build(recompute="full")
    results = [gradients(m, m.loss(m(tokens, pos)[0], labels)) for m in (kept, recomputed)]
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_bfloat16_matmuls_leave_parameters_gradients_and_states_in_float32(single_mesh):
    tokens, labels, pos = batch()
    model = build(compute_dtype=torch.bfloat16)
    hidden, states = model(tokens, pos)
    found = gradients(model, model.loss(hidden, labels))
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert all(g.dtype == torch.float32 for g in found.values())
    assert hidden.dtype == torch.bfloat16, "as the head reads it"
    assert all(s["mamba.h"].dtype == torch.float32 for s in states.values())
    exact = build()
    expected = gradients(exact, exact.loss(exact(tokens, pos)[0], labels))
    for name in expected:
        assert 0 < relative_error(found[name], expected[name]) <= 5e-2, name


def test_weights_are_cast_once_until_they_change(single_mesh):
    tokens, _, pos = batch()
    model = build(compute_dtype=torch.bfloat16)
    before, _ = model(tokens, pos)
    copies = [m._cast_weight_cache for m in model.modules() if isinstance(m, CastWeightCache)]
    again, _ = model(tokens, pos)
    assert all(m._cast_weight_cache is c for m, c in zip((m for m in model.modules() if isinstance(m, CastWeightCache)), copies))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)
    drop_cast_weights(model)
    after, _ = model(tokens, pos)
    assert torch.equal(before, again)
    assert not torch.equal(before, after)


def test_what_must_not_decay_does_not(single_mesh):
    kept = {name for name, p in build().named_parameters() if not p.baton_layout.decay}
    for name, _ in build().named_parameters():
        leaf = name.rpartition(".")[2]
        stays = leaf in ("A_log", "D", "dt_bias", "conv_bias") or "norm" in name or name.startswith("embedding")
        assert (name in kept) == stays, name


def test_initial_values_are_the_papers(single_mesh):
    model = build(ModelConfig(d_model=64, n_layers=4, vocab_size=512))
    mixer = model.layers["2"]["mamba"].mixer
    d_inner, rank = 128, 4
    assert torch.allclose(mixer.A_log.exp(), torch.arange(1.0, 17.0).expand(d_inner, 16))
    assert torch.equal(mixer.D, torch.ones(d_inner))
    steps = F.softplus(mixer.dt_bias)
    assert 1e-3 * 0.99 <= steps.min() < 2e-3
    assert 5e-2 < steps.max() <= 1e-1 * 1.01
    assert abs(steps.log().mean().item() - torch.tensor([1e-3, 1e-1]).log().mean().item()) < 0.3  # log-uniform
    for weight, bound in [
        (mixer.in_proj.weight, 64**-0.5),
        (mixer.x_proj.weight, d_inner**-0.5),
        (mixer.dt_proj.weight, rank**-0.5),
        (mixer.out_proj.weight, d_inner**-0.5 / 2.0),  # / sqrt(n_layers)
        (mixer.conv_weight, 0.5),
        (mixer.conv_bias, 0.5),
    ]:
        assert 0.95 * bound < weight.abs().max() <= bound
    assert abs(model.embedding.weight.std().item() - 0.02) < 1e-3
