"""RWKV-6's recurrence and layers against flash-linear-attention's, with the same weights."""

from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from support.compare import relative_error
from support.fla import naive
from support.interchange import fla_models
from support.recurrences import gradients, seeded
from torch import nn

from baton.kernels.wkv6 import wkv6
from baton.kernels.wkv6.recurrence import WKV6
from baton.models.mixer import build_mixer
from baton.models.mixer_context import MixerContext
from baton.models.settings.channel_mix import ChannelMixConfig
from baton.models.settings.rwkv6 import RWKV6Config
from baton.parallel.param_layout import initialize_parameters
from baton.parallel.tensor import megatron_config

B, T, M = 2, 37, 24


def _theirs(r, k, v, w, u, initial_state=None, **_):
    """fla's naive recurrence; its layout is (batch, heads, time, dim)."""
    peer, inputs = naive("rwkv6", "recurrent_naive"), (x.transpose(1, 2) for x in (r, k, v, w))
    o, S = peer.naive_recurrent_rwkv6(*inputs, u, scale=1.0, initial_state=initial_state, output_final_state=True)
    return o.transpose(1, 2), S


def test_the_recurrence_is_flash_linear_attentions_and_so_are_its_gradients():
    inputs, state = WKV6().example(seeded(1), 2, 70, torch.float32, wide=True)
    found = []
    for function in (wkv6, _theirs):
        leaves = [x.clone().requires_grad_() for x in (*inputs, state["S"])]
        outputs = function(*leaves[:-1], initial_state=leaves[-1])
        found.append([*outputs, *gradients(outputs, leaves, seeded(2))])
    for ours, theirs in zip(*found, strict=True):
        assert relative_error(ours, theirs) <= 1e-5


@pytest.mark.parametrize("strong", [-150.0, -1e6])
def test_a_decay_to_nothing_within_a_token_is_exact(strong):
    """No decay is divided by: a token after it reads the token with the decay alone, and all gradients are finite."""
    (r, k, v, _, u), state = WKV6().example(seeded(3), 2, 70, torch.float32, wide=False)
    g = torch.zeros_like(k).index_fill_(1, torch.tensor([40]), strong)
    leaves = [x.clone().requires_grad_() for x in (r, k, v, g, u, state["S"])]
    y, S = wkv6(*leaves[:-1], initial_state=leaves[-1])
    own = (r[:, 41] * k[:, 40]).sum(-1, keepdim=True) * v[:, 40] + (r[:, 41] * k[:, 41] * u).sum(-1, keepdim=True) * v[:, 41]
    assert relative_error(y[:, 41], own) <= 1e-6
    assert relative_error(S, torch.einsum("bthk,bthv->bhkv", k[:, 40:], v[:, 40:])) <= 1e-5
    assert all(x.isfinite().all() for x in gradients((y, S), leaves, seeded(4)))


class _GroupNorm(nn.GroupNorm):
    """torch's, with the arguments of fla's."""

    def __init__(self, num_groups, hidden_size, elementwise_affine, bias, eps):
        super().__init__(num_groups, hidden_size, eps)

    def forward(self, x):
        return super().forward(x.flatten(0, 1)).view_as(x)


@pytest.fixture
def plain(monkeypatch):
    """fla's layers in plain PyTorch, with the naive recurrence of its tests."""
    fla_models()
    from fla.layers import rwkv6 as layers
    from fla.models.rwkv6 import modeling_rwkv6 as models

    for module in (layers, models):
        monkeypatch.setattr(module, "token_shift", lambda x, _: F.pad(x, (0, 0, 1, -1)) - x)
        monkeypatch.setattr(module, "ACT2FN", {"sqrelu": lambda x: F.relu(x).square(), "swish": F.silu})
    monkeypatch.setattr(layers, "GroupNorm", _GroupNorm)
    monkeypatch.setattr(layers, "fused_recurrent_rwkv6", _theirs)
    return layers, models


def _built(config):
    mixer = build_mixer(config, MixerContext(M, 3, 1e-5, megatron_config(1), torch.float32))
    initialize_parameters(mixer, seed=1, tensor_rank=0, tensor_size=1)
    with torch.no_grad():
        for p in mixer.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=seeded(2)))
    return mixer


def _compare(mixer, layer, names, joined=()):
    """Outputs and gradients. names: ours to theirs; joined: parameters of theirs that are made of several of ours, and how."""
    theirs = dict(layer.named_parameters())
    assert set(theirs) == {*names.values(), *(name for name, *_ in joined)}
    with torch.no_grad():
        for ours, name in names.items():
            theirs[name].copy_(mixer.get_parameter(ours).view_as(theirs[name]))
        for name, parts, join in joined:
            theirs[name].copy_(join([mixer.get_parameter(part) for part in parts]))
    x, pos = torch.randn(B, T, M, generator=seeded(3)), torch.arange(T, dtype=torch.int32).repeat(B, 1)
    found = []
    for module in (mixer, layer):
        leaf = x.clone().requires_grad_()
        y = mixer(leaf, pos, None)[0] if module is mixer else layer(leaf)[0]
        leaves = [leaf, *module.parameters()]
        grads = dict(zip(["x", *(name for name, _ in module.named_parameters())], gradients([y], leaves, seeded(4)), strict=True))
        found.append((y, grads))
    (y, ours), (their_y, their) = found
    assert relative_error(y, their_y) <= 1e-5
    used = {*names, *(part for _, parts, _ in joined for part in parts)}
    assert used == set(ours) - {"x"}
    pairs = {name: (ours[name], their[other].view_as(ours[name])) for name, other in {"x": "x", **names}.items()}
    pairs |= {name: (join([ours[part] for part in parts]), their[name]) for name, parts, join in joined}
    for name, (a, b) in pairs.items():
        assert relative_error(a, b) <= 1e-5, name


@pytest.mark.skipif(find_spec("fla") is None, reason="flash-linear-attention is not installed")
def test_time_mixing_is_flash_linear_attentions_and_so_are_its_gradients(plain, single_mesh):
    mixer = _built(RWKV6Config(heads=4, d_key=6, d_value=3, mix_low_rank_dim=2, decay_low_rank_dim=5))
    layer = plain[0].RWKV6Attention(
        hidden_size=M, expand_k=1.0, expand_v=0.5, num_heads=4, proj_low_rank_dim=2, gate_low_rank_dim=5, norm_eps=3e-5
    )
    names = {
        "shift_mix.x": "x_proj.0.mu",
        "mix_code_proj.weight": "x_proj.0.linear.weight",
        **{f"{ours}_proj.weight": f"{ours[0]}_proj.linear.weight" for ours in ("r", "k", "v", "gate")},
        "decay_code_proj.weight": "w_proj.linear.lora.0.weight",
        "decay_proj.weight": "w_proj.linear.lora.2.weight",
        "decay_bias": "w_proj.linear.lora.2.bias",
        "bonus": "bonus",
        "norm_weight": "g_norm.weight",
        "norm_bias": "g_norm.bias",
        "out_proj.weight": "o_proj.weight",
    }
    joined = [
        ("x_bias", [f"shift_mix.{name}" for name in "rwkvg"], torch.stack),
        ("x_proj.2.weight", [f"mix_{name}_proj.weight" for name in "rwkvg"], lambda parts: torch.cat(parts, 1)),
    ]
    _compare(mixer, layer, names, joined)


@pytest.mark.skipif(find_spec("fla") is None, reason="flash-linear-attention is not installed")
def test_channel_mixing_is_flash_linear_attentions_and_so_are_its_gradients(plain, single_mesh):
    names = {
        "shift_mix.k": "key.mu",
        "in_proj.weight": "key.linear.weight",
        "out_proj.weight": "value.weight",
        "shift_mix.r": "receptance.mu",
        "receptance_proj.weight": "receptance.linear.weight",
    }
    layer = plain[1].RWKV6FeedForward(hidden_size=M, intermediate_size=64)
    _compare(_built(ChannelMixConfig(hidden=64, receptance=True)), layer, names)
