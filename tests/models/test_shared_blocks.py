"""Blocks that several layers share: one set of weights, whose gradient is the sum over the layers, and a State for each layer."""

import pytest
import torch
from support.compare import relative_error
from support.models import step_batch

from baton.models.config import ModelConfig
from baton.models.lm import LanguageModel
from baton.models.settings import SMALL_WIDTH, kinds
from baton.parallel.linear import fused_grad_accumulation
from baton.parallel.param_layout import initialize_parameters

PATTERN = ["gla|attention+swiglu", "mamba", "gla|attention+swiglu", "mamba+swiglu"]
SHARED = ("gla", "attention", "swiglu")
"""A branch that shares its mixer alone, and sub-blocks that share the norm too; swiglu is in three layers."""


def config_of(shared=SHARED, **changes):
    mixers = {name: kinds()[name].small() for name in ("mamba", "gla", "attention", "swiglu")}
    values = {"d_model": SMALL_WIDTH, "n_layers": 4, "vocab_size": 61, "loss_chunk": 16, "pattern": PATTERN, "mixers": mixers}
    return ModelConfig(**values | {"shared": shared} | changes)


def models(dtype=torch.float64, **settings):
    """With shared blocks, and with copies of them in every layer."""
    settings["compute_dtype"] = dtype
    one, copies = LanguageModel(config_of(), **settings), LanguageModel(config_of(()), compute_dtype=dtype)
    initialize_parameters(one, 0, 0, 1)
    weights = dict(one.named_parameters())
    with torch.no_grad():
        for name, parameter in copies.named_parameters():
            parameter.copy_(weights[name_in_one(name)])
    return one.to(dtype), copies.to(dtype)


def name_in_one(name):
    """The name in the model with shared blocks of a parameter of the model with copies."""
    part = name.split(".")
    return ".".join(["shared", *part[2:]]) if part[0] == "layers" and part[2] in SHARED else name


def gradients(model, fused=False):
    batch = step_batch(0)
    for _ in range(2):  # the second adds to the first
        loss = model.loss(model(batch.tokens, batch.pos)[0], batch.labels)
        if fused:
            with fused_grad_accumulation():
                loss.backward()
        else:
            loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize(("recompute", "fused"), [("none", False), ("none", True), ("full", True), ("selective", True)])
def test_a_shared_block_is_one_with_equal_copies_and_its_gradient_their_sum(single_mesh, recompute, fused):
    one, copies = models(recompute=recompute)
    found, expected = gradients(one, fused), {}
    for name, grad in gradients(copies).items():
        expected[name_in_one(name)] = expected.get(name_in_one(name), 0) + grad
    assert found.keys() == expected.keys()
    assert {name.split(".")[1] for name in found if name.startswith("shared.")} == set(SHARED)
    for name, grad in found.items():
        assert relative_error(grad, expected[name]) <= 1e-12, name


def test_each_layer_has_its_own_state(single_mesh):
    """In two parts, and token by token, which writes over the State that it is given."""
    one, copies = models()
    batch = step_batch(1)
    hidden, states = copies(batch.tokens, batch.pos)
    first, carried = one(batch.tokens[:, :9], batch.pos[:, :9])
    for part in ([slice(9, 24)], [slice(n, n + 1) for n in range(9, 24)]):
        found, own = [first], carried
        for at in part:
            y, own = one(batch.tokens[:, at], batch.pos[:, at], own)
            found.append(y)
        assert relative_error(torch.cat(found, 1), hidden) <= 1e-12
        for number, state in states.items():
            assert own[number].keys() == state.keys()
            for name, x in state.items():
                if x.is_floating_point():
                    assert relative_error(own[number][name], x) <= 1e-12, (number, name)
    assert not torch.equal(states["0"]["attention.k"], states["2"]["attention.k"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shared": ("mlp",)}, r"shared: mlp is not in pattern=.*; known: attention, gla, mamba, swiglu"),
        (
            {"pattern": ["gla|attention", "mamba+swiglu", "attention"]},
            r"shared: attention is behind a \| in one layer, where it has no norm, and not in another; give the two a name each",
        ),
    ],
)
def test_what_cannot_be_shared_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        config_of(**changes)
