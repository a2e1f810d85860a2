"""Small random models of transformers, and Baton's with their weights."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
import yaml
from safetensors.torch import load_file

from baton.launcher.cli import main
from baton.models.config import ModelConfig
from baton.models.interchange.mapping import TensorMap
from baton.models.interchange.registry import family_of_config
from baton.models.library import language_model
from baton.parallel.param_layout import named_layouts
from support.compare import relative_error

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 61}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 40, "head_dim": 12}


def transformers_model(name, **changes):
    """A random model of transformers, in float32."""
    import transformers

    config_class, cls = getattr(transformers, f"{name}Config"), getattr(transformers, f"{name}ForCausalLM")
    torch.manual_seed(5)
    config = config_class(**SIZES, **changes, bos_token_id=1, eos_token_id=2, pad_token_id=None)
    model = cls(config).eval()
    with torch.no_grad():
        for p in model.parameters():  # norms begin at 1, biases at 0
            p.add_(0.05 * torch.randn_like(p))
    return model


def ours_of(model: ModelConfig, weights: Path, **place):
    """Baton's model with the weights of a file. place: its dtype and device."""
    built, found = language_model(model, **place), load_file(weights)
    with torch.no_grad():
        for name, parameter, layout in named_layouts(built):
            for block in layout.shard_boxes(name, 0, 1):
                parameter[block.local_row : block.local_row + block.extent[0]].copy_(found.pop(block.name))
    assert not found
    return built


def logits_of(model, tokens):
    pos = torch.arange(tokens.shape[1], dtype=torch.int32, device=tokens.device)
    hidden, _ = model(tokens, pos.expand(len(tokens), -1))
    return model.logits(hidden)[..., : model.config.vocab_size]


def assert_import_is_theirs(theirs, folder, shard="5GB", **words):
    """Save their model in folder/theirs, import it as folder/ours and compare; returns the settings. shard: size of a file at most.
    words: of their forward."""
    theirs.save_pretrained(folder / "theirs", max_shard_size=shard)
    assert main(["import", str(folder / "theirs"), "--out", str(folder / "ours")]) == 0
    model = ModelConfig.model_validate(yaml.safe_load((folder / "ours.yaml").read_text()))
    tokens = torch.randint(61, (2, 19), generator=torch.Generator().manual_seed(0))
    family = family_of_config(json.loads((folder / "theirs" / "config.json").read_text()))
    assert_same(theirs, theirs(tokens, **words).logits, ours_of(model, folder / "ours.safetensors"), tokens, family)
    return model


def assert_same(theirs, expected, ours, tokens, family):
    """Logits, and the gradients of every parameter by one scalar of all logits. theirs, expected: their model and its logits.
    family: of their format."""
    found = logits_of(ours, tokens)
    assert relative_error(found, expected) <= 1e-5
    cotangent = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    found.backward(cotangent)
    expected.backward(cotangent)
    gradients = {}
    for name, parameter, layout in named_layouts(ours):
        for block in layout.shard_boxes(name, 0, 1):
            gradients[block.name] = parameter.grad[block.local_row : block.local_row + block.extent[0]]
    others = dict(theirs.named_parameters())
    for one in family.maps(ours.config):
        assert relative_error(gradient_of(one, gradients, others[one.theirs]), others[one.theirs].grad) <= 2e-5, one.theirs


def gradient_of(one, gradients, theirs):
    """Of a tensor of theirs, from those of ours."""
    if type(one) is TensorMap:
        # a constant beside a weight has no part in its gradient
        return replace(one, offset=0.0).to_theirs(gradients)
    x = theirs.detach().clone().requires_grad_()
    ours = one.to_ours({one.theirs: x})
    return torch.autograd.grad(list(ours.values()), x, [gradients[name] for name in ours])[0]


@cache
def fla_models():
    """fla.models, imported when a test needs it, which takes seconds. It registers a class for transformers' Mamba too, which every
    later test of this process would load: that is undone."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

    registered = [mapping._extra_content for mapping in (CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING)]
    before = [dict(one) for one in registered]
    import fla.models

    for one, content in zip(registered, before, strict=True):
        one.clear()
        one.update(content)
    return fla.models
