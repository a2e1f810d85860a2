"""RWKV-7's layers against flash-linear-attention's, with the same weights, and the value residual in a model."""

from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from support.compare import relative_error
from support.fla import naive
from support.interchange import fla_models
from support.recurrences import gradients, seeded

from baton.models.config import ModelConfig
from baton.models.forward_context import ForwardContext
from baton.models.lm import LanguageModel
from baton.models.mixer import Mixer, build_mixer
from baton.models.mixer_context import MixerContext
from baton.models.settings import MixerConfig
from baton.models.settings.channel_mix import ChannelMixConfig
from baton.models.settings.rwkv7 import V_FIRST, RWKV7Config
from baton.models.stages import partition_layers
from baton.parallel.errors import LayoutError
from baton.parallel.param_layout import initialize_parameters
from baton.parallel.tensor import megatron_config

B, T, M = 2, 37, 24
NAMES = {"decay": "w_lora", "rate": "a_lora", "gate": "g_lora", "residual": "v_lora"}


@pytest.fixture
def plain(monkeypatch):
    """fla's layers in plain PyTorch, with the naive recurrence of its tests."""
    fla_models()
    from fla.layers import rwkv7 as layers
    from fla.models.rwkv7 import modeling_rwkv7 as models
    from fla.ops.rwkv7.fused_addcmul import torch_addcmul_rwkv7
    from fla.ops.rwkv7.fused_k_update import k_update_ref
    from fla.ops.rwkv7.gate_output_correction import gate_output_correction_ref

    def shift(x, cu_seqlens, output_cache, **_):
        return F.pad(x, (0, 0, 1, -1)) - x, None

    def recurrence(r, w, k, v, a, b, scale, **_):
        assert scale == 1.0
        inputs = (x.transpose(1, 2) for x in (r * r.shape[-1] ** 0.5, k, v, a, b, w))
        o, S = naive("generalized_delta_rule/dplr").dplr_recurrence(*inputs)
        return o.transpose(1, 2), S

    for module in (layers, models):
        monkeypatch.setattr(module, "token_shift", shift)
    monkeypatch.setattr(models, "ACT2FN", {"sqrelu": lambda x: F.relu(x).square()})
    monkeypatch.setattr(layers, "fused_addcmul_rwkv7", torch_addcmul_rwkv7)
    monkeypatch.setattr(layers, "fused_k_rwkv7", k_update_ref)
    monkeypatch.setattr(layers, "chunk_rwkv7", recurrence)
    monkeypatch.setattr(layers, "gate_output_correction", gate_output_correction_ref)
    return layers, models


def _built(config: MixerConfig) -> Mixer:
    mixer = build_mixer(config, MixerContext(M, 3, 1e-5, megatron_config(1), torch.float32))
    initialize_parameters(mixer, seed=1, tensor_rank=0, tensor_size=1)
    with torch.no_grad():
        for p in mixer.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=seeded(2)))
    return mixer


def _theirs(name: str) -> str:
    """Name in fla's layer of a parameter of RWKV7 or ChannelMix."""
    first, _, rest = name.partition(".")
    if first == "shift_mix":
        return f"x_{rest}"
    kind, _, part = first.partition("_")
    if kind in NAMES:
        return f"{NAMES[kind]}.lora.{ {'code_proj': '0.weight', 'proj': '2.weight', 'bias': '2.bias'}[part] }"
    renamed = {"norm_weight": "g_norm.weight", "norm_bias": "g_norm.bias", "out_proj": "o_proj.weight"}
    return renamed.get(first, name)


def _loaded(layer, mixer, names):
    """Gives fla's layer the mixer's weights."""
    theirs = dict(layer.named_parameters())
    assert set(theirs) == set(names.values())
    with torch.no_grad():
        for ours, name in names.items():
            theirs[name].copy_(mixer.get_parameter(ours).view_as(theirs[name]))
    return [theirs[name] for name in names.values()]


@pytest.mark.skipif(find_spec("fla") is None, reason="flash-linear-attention is not installed")
@pytest.mark.parametrize("residual", ["first", "later"])
def test_time_mixing_is_flash_linear_attentions_and_so_are_its_gradients(residual, plain, single_mesh):
    ranks = {"decay_low_rank_dim": 3, "a_low_rank_dim": 2, "gate_low_rank_dim": 7, "v_low_rank_dim": 5}
    config = RWKV7Config(d_key=6, d_value=6, **ranks, value_residual=residual)
    mixer, generator = _built(config), seeded(3)
    layer = plain[0].RWKV7Attention(hidden_size=M, head_dim=6, **ranks, layer_idx=int(residual == "later"), num_hidden_layers=2)
    names = {name: _theirs(name) for name, _ in mixer.named_parameters()}
    weights = _loaded(layer, mixer, names)
    x, v_first = torch.randn(B, T, M, generator=generator), torch.randn(B, T, M, generator=generator)
    pos = torch.arange(T, dtype=torch.int32).repeat(B, 1)
    found = []
    for parameters in ([mixer.get_parameter(name) for name in names], weights):
        x1, v1 = x.clone().requires_grad_(), v_first.clone().requires_grad_()
        if parameters is weights:
            y, _, _, shared = layer(x1, v_first=v1)
        else:
            context = ForwardContext(shared={V_FIRST: v1} if residual == "later" else {})
            y, _ = mixer(x1, pos, None, context)
            shared = context.shared[V_FIRST]
        leaves = [x1, *parameters, *((v1,) if residual == "later" else ())]
        found.append([y, shared, *gradients([y, shared], leaves, seeded(4))])
    for name, ours, theirs in zip(["y", V_FIRST, "x", *names, "v1"], *found, strict=False):
        assert relative_error(ours, theirs.view_as(ours)) <= 1e-5, name


@pytest.mark.skipif(find_spec("fla") is None, reason="flash-linear-attention is not installed")
def test_channel_mixing_is_flash_linear_attentions_and_so_are_its_gradients(plain, single_mesh):
    mixer = _built(ChannelMixConfig(hidden=64))
    layer = plain[1].RWKV7FeedForward(hidden_size=M, intermediate_size=64, layer_idx=0, num_hidden_layers=2)
    names = {"shift_mix.k": "x_k", "in_proj.weight": "key.weight", "out_proj.weight": "value.weight"}
    weights = _loaded(layer, mixer, names)
    x, pos = torch.randn(B, T, M, generator=seeded(3)), torch.arange(T, dtype=torch.int32).repeat(B, 1)
    found = []
    for parameters in ([mixer.get_parameter(name) for name in names], weights):
        leaf = x.clone().requires_grad_()
        y, _ = layer(leaf) if parameters is weights else mixer(leaf, pos, None)
        found.append([y, *gradients([y], [leaf, *parameters], seeded(4))])
    for ours, theirs in zip(*found, strict=True):
        assert relative_error(ours, theirs) <= 1e-5


FIRST, LATER = RWKV7Config.small().model_copy(update={"value_residual": "first"}), {"value_residual": "later"}
MODEL = {
    "d_model": 12, "n_layers": 3, "vocab_size": 64, "pattern": ["first+channel_mix", "rwkv7+channel_mix*2"],
    "mixers": {"first": FIRST.model_dump(), "rwkv7": FIRST.model_dump() | LATER, "channel_mix": {"hidden": 20}},
}  # fmt: skip


def _gradients(recompute):
    """Of one segment, or of two whose layers run again."""
    model = LanguageModel(ModelConfig(**MODEL), compute_dtype=torch.float64, recompute=recompute)
    initialize_parameters(model, seed=1, tensor_rank=0, tensor_size=1)
    model.double()
    tokens = torch.randint(0, 64, (2, 20), generator=seeded(5))
    pos, states, loss = torch.arange(20, dtype=torch.int32).repeat(2, 1), None, 0.0
    for piece in (slice(0, 7), slice(7, 20)) if recompute == "full" else (slice(0, 20),):
        hidden, states = model(tokens[:, piece], pos[:, piece], states)
        loss = loss + model.loss(hidden, tokens[:, piece])
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def test_the_value_residual_is_the_same_in_segments_whose_layers_run_again(single_mesh):
    """The first layer's gradient comes from all later ones, beside the residual stream."""
    whole, pieces = (_gradients(recompute=recompute) for recompute in ("none", "full"))
    assert relative_error(pieces[0], whole[0]) <= 1e-12
    assert whole[1]["layers.2.rwkv7.mixer.residual_proj.weight"].any()
    for name, gradient in whole[1].items():
        assert relative_error(pieces[1][name], gradient) <= 1e-10, name


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (["rwkv7", "first"], "rwkv7 reads v_first of width 20, which is handed on by no layer before it"),
        (["first", "rwkv7", "first"], "first hands on v_first a second time"),
        (["narrow", "rwkv7"], "rwkv7 reads v_first of width 20, which is handed on with width 8"),
    ],
)
def test_values_that_no_layer_hands_on_are_refused(pattern, message):
    mixers = MODEL["mixers"] | {"narrow": MODEL["mixers"]["first"] | {"d_value": 2}}
    with pytest.raises(ValueError, match=message):
        ModelConfig(**MODEL | {"pattern": pattern, "mixers": {name: mixers[name] for name in pattern}})


def test_stages_with_a_value_residual_are_refused():
    with pytest.raises(LayoutError, match=r"layout.pipeline=2: model.mixers.rwkv7 reads v_first .* set layout.pipeline=1, or"):
        partition_layers(ModelConfig(**MODEL), 2, 64)
