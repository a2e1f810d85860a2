"""Mamba compared with Hugging Face transformers: the same weights give the same logits and gradients."""

import pytest
import torch
from support.compare import relative_error

from baton.models.config import ModelConfig
from baton.models.lm import LanguageModel
from baton.parallel.param_layout import initialize_parameters

CONFIG = ModelConfig(d_model=48, n_layers=3, vocab_size=64, mixers={"mamba": {"d_state": 8, "dt_rank": 5}})


def theirs():
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(
        vocab_size=64,
        hidden_size=48,
        state_size=8,
        num_hidden_layers=3,
        expand=2,
        conv_kernel=4,
        time_step_rank=5,
        use_mambapy=False,
        use_cache=False,
        residual_in_fp32=True,
        tie_word_embeddings=True,
    )
    return MambaForCausalLM(config).eval()


def names(number):
    """(our name, their name) of a layer's parameters."""
    ours, other = f"layers.{number}.mamba.", f"backbone.layers.{number}."
    yield f"{ours}norm.weight", f"{other}norm.weight"
    for mine, yours in (
        ("in_proj.weight", "in_proj.weight"),
        ("x_proj.weight", "x_proj.weight"),
        ("dt_proj.weight", "dt_proj.weight"),
        ("dt_bias", "dt_proj.bias"),
        ("A_log", "A_log"),
        ("D", "D"),
        ("conv_weight", "conv1d.weight"),
        ("conv_bias", "conv1d.bias"),
        ("out_proj.weight", "out_proj.weight"),
    ):
        yield f"{ours}mixer.{mine}", f"{other}mixer.{yours}"


@pytest.fixture
def pair(single_mesh):
    torch.manual_seed(0)
    ours = LanguageModel(CONFIG)
    initialize_parameters(ours, seed=0, tensor_rank=0, tensor_size=1)
    other = theirs()
    table = [("embedding.weight", "backbone.embeddings.weight"), ("norm.weight", "backbone.norm_f.weight")]
    table += [pair for number in range(3) for pair in names(number)]
    mine, yours = dict(ours.named_parameters()), dict(other.named_parameters())
    assert {name for name, _ in table} == mine.keys()
    assert {name for _, name in table} == yours.keys()
    with torch.no_grad():
        for name, other_name in table:
            mine[name].add_(0.05 * torch.randn_like(mine[name]))
            yours[other_name].copy_(mine[name].view_as(yours[other_name]))
    return ours, other, table


def test_same_weights_same_logits_and_gradients(pair):
    ours, other, table = pair
    tokens = torch.randint(64, (2, 50))
    hidden, _ = ours(tokens, torch.arange(50, dtype=torch.int32).expand(2, -1))
    logits, expected = ours.logits(hidden), other(tokens).logits
    assert relative_error(logits, expected) <= 1e-5
    cotangent = torch.randn_like(expected)
    logits.backward(cotangent)
    expected.backward(cotangent)
    mine, yours = dict(ours.named_parameters()), dict(other.named_parameters())
    for name, other_name in table:
        assert relative_error(mine[name].grad.view_as(yours[other_name]), yours[other_name].grad) <= 2e-5, name


def test_decoding_from_our_state_continues_their_sequence(pair):
    ours, other, _ = pair
    tokens = torch.randint(64, (2, 20))
    with torch.no_grad():
        expected = other(tokens).logits
        hidden, states = ours(tokens[:, :11], torch.arange(11, dtype=torch.int32).expand(2, -1))
        for t in range(11, 20):
            hidden, states = ours(tokens[:, t : t + 1], torch.full((2, 1), t, dtype=torch.int32), states)
            assert relative_error(ours.logits(hidden)[:, 0], expected[:, t]) <= 1e-5
