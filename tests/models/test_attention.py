"""Softmax attention's options: angles, gates, sinks and a cap compared with transformers' layers; settings that do not fit."""

import sys

import pytest
import torch
from pydantic import ValidationError
from support.compare import relative_error
from support.recurrences import seeded

from baton.models.config import ModelConfig
from baton.models.mixer import build_mixer
from baton.models.mixer_context import MixerContext
from baton.models.settings.attention import AttentionConfig
from baton.parallel.param_layout import initialize_parameters
from baton.parallel.tensor import megatron_config

CONTEXT = {"original_max_position_embeddings": 512}
SCALINGS = {
    "default": {},
    "linear": {"factor": 3.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **CONTEXT},
    "llama3, other bounds": {"factor": 32.0, "low_freq_factor": 0.3, "high_freq_factor": 20.0, **CONTEXT},
    "yarn": {"factor": 4.0, **CONTEXT},
    "yarn, other bounds": {"factor": 16.0, "beta_fast": 20.0, "beta_slow": 0.2, "attention_factor": 1.7, **CONTEXT},
    "yarn, not rounded": {"factor": 0.5, "truncate": False, **CONTEXT},
}


@pytest.fixture(scope="module")
def qwen3_next():
    """transformers' module. Where there is fla it imports that, which takes seconds and registers a class for its Mamba."""
    with pytest.MonkeyPatch.context() as without:
        without.setitem(sys.modules, "fla", None)
        from transformers.models.qwen3_next import modeling_qwen3_next
    return modeling_qwen3_next


@pytest.mark.parametrize("share", [1.0, 0.25, 0.7])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_angles_are_transformers(scaling, share, qwen3_next):
    """Each pair's, to the rounding of theirs, which are float32; and the factor of what is rotated."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind, fields = scaling.split(",")[0], SCALINGS[scaling]
    rope = {"rope_type": kind, "rope_theta": 3e4, "partial_rotary_factor": share, **fields}
    theirs = qwen3_next.Qwen3NextConfig(head_dim=80, max_position_embeddings=2048, rope_parameters=rope)
    angles = {"default": qwen3_next.Qwen3NextRotaryEmbedding.compute_default_rope_parameters, **ROPE_INIT_FUNCTIONS}[kind]
    expected, factor = angles(theirs)
    ours = {"rope_theta": 3e4, "rope_fraction": share, "rope_scaling": {"kind": kind, **fields} if fields else None}
    rates, magnitude = AttentionConfig(head_dim=80, **ours).rope
    assert len(rates) == len(expected) == int(80 * share) // 2
    assert ((torch.tensor(rates, dtype=torch.float64) - expected) / expected).abs().max() <= 2e-6
    assert magnitude == pytest.approx(factor, rel=1e-12)


def built(config, width, eps=1e-6):
    """A layer whose norms and biases are not what they are at first."""
    layer = build_mixer(config, MixerContext(width, 1, eps, megatron_config(1), torch.float32))
    initialize_parameters(layer, seed=1, tensor_rank=0, tensor_size=1)
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(0.2 * torch.randn(p.shape, generator=seeded(p.numel())))
    return layer


def compare(ours, run, as_theirs, theirs, width, shifted=()):
    """Outputs, and gradients of the input and of every parameter. run: their output of an input. shifted: names of theirs to which
    their layer adds 1."""
    weights = as_theirs({name: p.detach() for name, p in ours.named_parameters()})
    theirs.load_state_dict({name: w - 1 if name in shifted else w for name, w in weights.items()}, strict=True)
    x = torch.randn(2, 37, width, generator=seeded(2))
    found, expected = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, other = ours(found, torch.arange(37, dtype=torch.int32).expand(2, -1), None)[0], run(expected)
    assert relative_error(y, other) <= 1e-5
    dy = torch.randn(y.shape, generator=seeded(4))
    y.backward(dy)
    other.backward(dy)
    assert relative_error(found.grad, expected.grad) <= 2e-5
    grads = as_theirs({name: p.grad for name, p in ours.named_parameters()})
    for name, p in theirs.named_parameters():
        assert not p.requires_grad or relative_error(grads[name], p.grad) <= 2e-5, name


def test_the_gated_mixer_is_qwen3_nexts_layer(single_mesh, qwen3_next):
    """With a part of each head rotated, norms of queries and keys, and grouped heads."""
    heads, groups, dim, width = 6, 2, 20, 24
    sizes = {"hidden_size": width, "num_attention_heads": heads, "num_key_value_heads": groups, "head_dim": dim}
    rope = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.3}
    settings = qwen3_next.Qwen3NextConfig(**sizes, rope_parameters=rope, num_hidden_layers=1, attn_implementation="eager")
    theirs, angles = qwen3_next.Qwen3NextAttention(settings, 0), qwen3_next.Qwen3NextRotaryEmbedding(settings)
    ours = {"heads": heads, "kv_heads": groups, "head_dim": dim, "rope_theta": 100.0, "rope_fraction": 0.3}
    layer = built(AttentionConfig(**ours, qk_norm=True, output_gate=True), width)
    norms = ("q_norm.weight", "k_norm.weight")
    rows = [heads * dim, groups * dim, groups * dim, heads * dim]

    def as_theirs(p):
        """A head's gate lies behind its queries in theirs."""
        q, k, v, gate = p["in_proj.weight"].split(rows)
        return {
            "q_proj.weight": torch.cat([x.unflatten(0, (heads, dim)) for x in (q, gate)], dim=1).flatten(0, 1),
            "k_proj.weight": k,
            "v_proj.weight": v,
            "o_proj.weight": p["out_proj.weight"],
            **{name: p[name] for name in norms},
        }

    mask = torch.full((37, 37), -torch.inf).triu(1)[None, None]
    pos = torch.arange(37)[None]
    compare(layer, lambda x: theirs(x, angles(x, pos), mask)[0], as_theirs, theirs, width, norms)


@pytest.mark.parametrize("window", [None, 5])
def test_the_mixer_with_sinks_is_gpt_osss_layer(window, single_mesh):
    """With biases of queries, keys and values; theirs has one of the output too, which is 0 here."""
    from transformers.models.gpt_oss import modeling_gpt_oss as modeling

    heads, groups, dim, width = 6, 2, 20, 24
    sizes = {"hidden_size": width, "num_attention_heads": heads, "num_key_value_heads": groups, "head_dim": dim}
    rope = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "beta_fast": 2.0, "truncate": False}
    rope |= {"original_max_position_embeddings": 16}
    settings = modeling.GptOssConfig(**sizes, rope_parameters=rope, num_hidden_layers=1, attn_implementation="eager")
    theirs, angles = modeling.GptOssAttention(settings, 0), modeling.GptOssRotaryEmbedding(settings)
    scaling = {"kind": rope.pop("rope_type"), **rope}
    theta = scaling.pop("rope_theta")
    ours = {"heads": heads, "kv_heads": groups, "head_dim": dim, "rope_theta": theta, "rope_scaling": scaling, "window": window}
    layer = built(AttentionConfig(**ours, qkv_bias=True, sinks=True), width)

    def as_theirs(p):
        weights = p["in_proj.weight"].split([heads * dim, groups * dim, groups * dim])
        return {
            **{f"{n}_proj.weight": w for n, w in zip("qkv", weights, strict=True)},
            **{f"{n}_proj.bias": p[f"qkv_bias.{n}"] for n in "qkv"},
            "o_proj.weight": p["out_proj.weight"],
            "o_proj.bias": torch.zeros(width),
            "sinks": p["sinks"],
        }

    distance = torch.arange(37)[:, None] - torch.arange(37)
    mask = torch.zeros(37, 37).masked_fill((distance < 0) | (distance >= (window or 37)), -torch.inf)[None, None]
    theirs.o_proj.bias.requires_grad_(False)
    compare(layer, lambda x: theirs(x, angles(x, torch.arange(37)[None]), mask)[0], as_theirs, theirs, width)


@pytest.mark.parametrize("window", [None, 5])
def test_the_mixer_with_a_soft_cap_is_gemma_2s_layer(window, single_mesh):
    """Its layers take turns: every other one has a window. Theirs has a scale of its own, which is given ours."""
    from transformers.models.gemma2 import modeling_gemma2 as modeling

    heads, groups, dim, width = 6, 2, 20, 24
    sizes = {"hidden_size": width, "num_attention_heads": heads, "num_key_value_heads": groups, "head_dim": dim}
    rope = {"rope_type": "default", "rope_theta": 100.0}
    layers = {"num_hidden_layers": 1, "layer_types": ["full_attention" if window is None else "sliding_attention"]}
    capped = {"attn_logit_softcapping": 0.2, "query_pre_attn_scalar": dim, "sliding_window": window or 37}
    settings = modeling.Gemma2Config(**sizes, **layers, **capped, rope_parameters=rope, attn_implementation="eager")
    theirs, angles = modeling.Gemma2Attention(settings, 0), modeling.Gemma2RotaryEmbedding(settings)
    ours = {"heads": heads, "kv_heads": groups, "head_dim": dim, "rope_theta": 100.0, "window": window}
    layer = built(AttentionConfig(**ours, score_soft_cap=0.2), width)

    def as_theirs(p):
        weights = p["in_proj.weight"].split([heads * dim, groups * dim, groups * dim])
        return {
            **{f"{n}_proj.weight": w for n, w in zip("qkv", weights, strict=True)},
            "o_proj.weight": p["out_proj.weight"],
        }

    distance = torch.arange(37)[:, None] - torch.arange(37)
    mask = torch.zeros(37, 37).masked_fill((distance < 0) | (distance >= (window or 37)), -torch.inf)[None, None]
    compare(layer, lambda x: theirs(x, angles(x, torch.arange(37)[None]), mask)[0], as_theirs, theirs, width)


@pytest.mark.parametrize(
    ("settings", "needle"),
    [
        (
            {"rope_fraction": 0.5},
            "rope_fraction=0.5 of head_dim=6 is 3 channels, and rotary positions rotate pairs; choose another",
        ),
        ({"rope_fraction": 0.1}, "rope_fraction=0.1 of head_dim=6 is 0 channels"),
        ({"rope_fraction": 0.5, "rope_theta": None}, "rope_fraction=0.5 without rotary positions; set rope_theta, or leave"),
        ({"rope_scaling": {"kind": "linear", "factor": 2.0}, "rope_theta": None}, "without rotary positions; set rope_theta"),
        ({"rope_scaling": {"kind": "yarn", "factor": 2.0, **CONTEXT}, "rope_theta": 1.0}, "rope_theta=1.0 is not above 1"),
        (
            {"rope_scaling": {"kind": "llama3", "factor": 2.0, **CONTEXT, "low_freq_factor": 4.0}},
            "low_freq_factor=4.0 is not below",
        ),
        (
            {"rope_scaling": {"kind": "yarn", "factor": 2.0, **CONTEXT, "beta_slow": 40.0}},
            "beta_slow=40.0 is not below beta_fast=32",
        ),
    ],
)
def test_settings_that_do_not_fit_are_one_line(settings, needle):
    with pytest.raises(ValidationError, match=r".+") as refused:
        ModelConfig(d_model=12, n_layers=1, vocab_size=8, pattern=["attention"], mixers={"attention": {"head_dim": 6, **settings}})
    (problem,) = refused.value.errors()
    assert needle in problem["msg"]
    assert "\n" not in problem["msg"]
