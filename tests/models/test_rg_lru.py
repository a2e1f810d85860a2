"""Griffin's recurrent block compared with transformers' RecurrentGemma, and its settings."""

import pytest
import torch
from pydantic import ValidationError
from support.compare import relative_error
from support.recurrences import seeded

from baton.models.initializers import LogitOfRoot
from baton.models.mixer import build_mixer
from baton.models.mixer_context import MixerContext
from baton.models.settings.rg_lru import RGLRUConfig
from baton.parallel.param_layout import initialize_parameters
from baton.parallel.tensor import megatron_config

B, T, M, D, BLOCKS = 2, 29, 12, 20, 4


@pytest.mark.usefixtures("single_mesh")
def test_the_block_is_recurrent_gemmas_with_gradients():
    """The same weights, with biases of 0 in theirs that ours does not have, and GELU instead of its approximation."""
    # here, since every process of the tests imports this file
    from transformers.models.recurrent_gemma.configuration_recurrent_gemma import RecurrentGemmaConfig
    from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRecurrentBlock

    mixer = build_mixer(RGLRUConfig(lru_width=D, blocks=BLOCKS), MixerContext(M, 3, 1e-5, megatron_config(1), torch.float32))
    initialize_parameters(mixer, seed=1, tensor_rank=0, tensor_size=1)
    for number, p in enumerate(mixer.parameters()):
        p.data.add_(0.1 * torch.randn(p.shape, generator=seeded(number)))
    sizes = {"hidden_size": M, "lru_width": D, "num_attention_heads": BLOCKS, "num_hidden_layers": 1, "intermediate_size": M}
    theirs = RecurrentGemmaRecurrentBlock(RecurrentGemmaConfig(**sizes, hidden_activation="gelu"), 0)
    rg_lru = theirs.rg_lru
    weights = {
        "in_proj.weight": [theirs.linear_x.weight, theirs.linear_y.weight],
        "conv_weight": [theirs.conv_1d.weight],
        "conv_bias": [theirs.conv_1d.bias],
        "W_a": [rg_lru.recurrent_gate_weight],
        "b_a": [rg_lru.recurrent_gate_bias],
        "W_x": [rg_lru.input_gate_weight],
        "b_x": [rg_lru.input_gate_bias],
        "Lambda": [rg_lru.recurrent_param],
        "out_proj.weight": [theirs.linear_out.weight],
    }
    ours = dict(mixer.named_parameters())
    assert ours.keys() == weights.keys()
    for linear in (theirs.linear_x, theirs.linear_y, theirs.linear_out):
        linear.bias.data.zero_()
    for name, parts in weights.items():
        values = -ours[name].data if name == "Lambda" else ours[name].data  # theirs is softplus's argument
        for part, value in zip(parts, values.chunk(len(parts)), strict=True):
            part.data.copy_(value.reshape(part.shape))
    x, cotangent = (torch.randn(B, T, M, generator=seeded(n)) for n in (50, 51))
    # one document in each row: their convolution sees the one before
    pos = torch.arange(T).repeat(B, 1)
    found = []
    for run in (lambda x: mixer(x, pos, None)[0], lambda x: theirs(x, pos, None, use_cache=False)[0]):
        leaf = x.clone().requires_grad_()
        y = run(leaf)
        y.backward(cotangent)
        found.append((y.detach(), leaf.grad))
    for a, b in zip(*found, strict=True):
        assert relative_error(a, b) <= 1e-5
    for name, parts in weights.items():
        gradient = torch.cat([part.grad.reshape(-1) for part in parts]) * (-1 if name == "Lambda" else 1)
        assert relative_error(ours[name].grad.reshape(-1), gradient) <= 1e-5, name


def test_initial_decays_are_uniform_between_their_bounds():
    Lambda = torch.empty(20_000)
    LogitOfRoot(0.9, 0.999, 8.0)(Lambda, seeded(1))
    decays = torch.sigmoid(Lambda.double()).pow(8).sort().values
    assert (decays - torch.linspace(0.9, 0.999, len(decays))).abs().max() <= 2e-3


def test_settings_that_do_not_fit_are_refused_with_what_to_change():
    with pytest.raises(ValueError, match="lru_width / blocks = 20 / 3 is not a whole number; set blocks"):
        RGLRUConfig(lru_width=20, blocks=3).check(M)
    with pytest.raises(ValidationError, match=r"decay_min=0.9995 exceeds decay_max=0.999"):
        RGLRUConfig(decay_min=0.9995)
