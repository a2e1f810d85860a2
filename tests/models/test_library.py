"""Mixers and models as plain modules: no process group is needed, values equal a run's, and States carry gradients or are
detached."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.compare import relative_error
from support.models import model_of

from baton.models.library import detach, language_model, mixer
from baton.models.lm import LanguageModel
from baton.parallel.param_layout import initialize_parameters

ALONE = """
import torch, torch.distributed as dist
from baton.models.library import language_model, mixer
from baton.models.settings import SMALL_WIDTH, kinds
from support.models import model_of
pos = torch.arange(12, dtype=torch.int32).expand(2, -1)
for kind, settings in kinds().items():
    layer = mixer(kind, SMALL_WIDTH, seed=3, **settings.small().model_dump(exclude={"kind"}))
    y, state = layer(torch.randn(2, 12, SMALL_WIDTH), pos, None)
    y.square().sum().backward()
    assert all(p.grad is not None for p in layer.parameters()), kind
for name in ("mamba", "hybrid"):
    model = language_model(model_of(name))
    tokens = torch.randint(61, (2, 12))
    hidden, states = model(tokens, pos, None)
    model.loss(hidden, tokens).backward()
    assert all(p.grad is not None for p in model.parameters()), name
    assert model.logits(hidden).shape == (2, 12, model.config.padded_vocab_size)
assert not dist.is_initialized()
"""


def test_modules_need_no_process_group():
    """Every kind of mixer, and models with a tied and an untied head, forwards and backwards in a process that makes no group."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-P", "-c", ALONE], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_model_has_a_runs_values(single_mesh):
    config = model_of("hybrid")
    own, runs = language_model(config, seed=7), LanguageModel(config)
    initialize_parameters(runs, 7, 0, 1)
    tokens = torch.arange(24).view(2, 12)
    pos = torch.arange(12, dtype=torch.int32).expand(2, -1)
    assert torch.equal(own(tokens, pos, None)[0], runs(tokens, pos, None)[0])


@pytest.mark.parametrize("cut", [False, True], ids=["uncut", "cut"])
def test_detach_is_where_the_gradient_ends(single_mesh, cut):
    layer = mixer("mamba", 16, d_state=4)
    x = torch.randn(2, 20, 16, requires_grad=True)
    pos = torch.arange(20, dtype=torch.int32).expand(2, -1)
    _, state = layer(x[:, :12], pos[:, :12], None)
    y, _ = layer(x[:, 12:], pos[:, 12:], detach(state) if cut else state)
    (of_pieces,) = torch.autograd.grad(y.square().sum(), x)
    (of_whole,) = torch.autograd.grad(layer(x, pos, None)[0][:, 12:].square().sum(), x)
    if cut:
        assert of_pieces[:, :12].count_nonzero() == 0
    else:
        assert relative_error(of_pieces, of_whole) < 1e-5
    states = detach({"0": state, "1": state})
    assert not any(leaf.requires_grad for one in states.values() for leaf in one.values())


def test_an_unknown_kind_or_setting_is_named():
    with pytest.raises(ValueError, match=r"kind='mamba9': no such mixer; known: .*mamba2"):
        mixer("mamba9", 16)
    with pytest.raises(ValueError, match="d_stat"):
        mixer("mamba", 16, d_stat=4)
