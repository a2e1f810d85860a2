"""DeltaNet, Gated DeltaNet and KDA compared with their papers' equations, composed of other libraries' parts; parameter counts."""

import sys

import pytest
import torch
import torch.nn.functional as F
from support.compare import relative_error
from support.fla import naive

from baton.kernels.delta_rule.recurrence import DeltaRule
from baton.models.mixer import build_mixer
from baton.models.mixer_context import MixerContext
from baton.models.mixers.gated_delta_net import GatedDeltaNet
from baton.models.settings.delta_net import DeltaNetConfig
from baton.models.settings.gated_delta_net import GatedDeltaNetConfig
from baton.models.settings.kda import KDAConfig
from baton.parallel.param_layout import initialize_parameters, parameter_count
from baton.parallel.tensor import megatron_config

# so small an eps that keys have length 1 to rounding, as in the papers' equations
D_MODEL, EPS = 24, 1e-9


def _built(config, dtype=torch.float32, d_model=D_MODEL, eps=EPS):
    layer = build_mixer(config, MixerContext(d_model, 3, eps, megatron_config(1), dtype))
    initialize_parameters(layer, seed=1, tensor_rank=0, tensor_size=1)
    return layer


def _convolved(x, weight):
    """SiLU of the causal depthwise convolution, by torch's."""
    width = weight.shape[1]
    y = F.conv1d(F.pad(x.transpose(1, 2), (width - 1, 0)), weight[:, None], groups=weight.shape[0])
    return F.silu(y).transpose(1, 2)


@pytest.mark.parametrize(("beta_max", "keys"), [(1.0, 4), (2.0, 4), (1.0, 2)])
@pytest.mark.parametrize("config", [DeltaNetConfig, GatedDeltaNetConfig, KDAConfig])
def test_the_mixer_is_the_papers(config, beta_max, keys, single_mesh):
    """Also where a head of keys serves two heads of values."""
    heads, d_key, d_value = 4, 6, 10
    layer = _built(config(heads=keys, v_heads=heads, d_key=d_key, d_value=d_value, beta_max=beta_max))
    x = torch.randn(2, 50, D_MODEL, generator=torch.Generator().manual_seed(2))
    pos = torch.arange(50, dtype=torch.int32).expand(2, 50)
    with torch.no_grad():
        layer.norm.weight.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(3))
        if config is KDAConfig:
            layer.dt_bias.add_(2.0)  # as initialised decays are so weak that which channel has which would hardly show
        y, leaving = layer(x, pos, None)
        widths = [keys * d_key, keys * d_key, heads * d_value, heads]
        weights = layer.in_proj.weight.split([*widths, *([heads, heads * d_value] if config is GatedDeltaNetConfig else [])])
        q, k, v = (_convolved(x @ w.T, layer.conv_weights[name]) for w, name in zip(weights, "qkv"))
        q, k = (F.normalize(u.view(2, 50, keys, d_key), dim=-1).repeat_interleave(heads // keys, dim=2) for u in (q, k))
        v, beta = v.view(2, 50, heads, d_value), beta_max * torch.sigmoid(x @ weights[3].T)
        if config is DeltaNetConfig:
            o, S = naive("delta_rule").delta_rule_recurrence(*(u.transpose(1, 2) for u in (q, k, v, beta)))
            o = o.transpose(1, 2)
        elif config is KDAConfig:
            logits = x @ layer.decay_code_proj.weight.T @ layer.decay_proj.weight.T + layer.dt_bias
            g = -layer.A_log.exp()[:, None] * F.softplus(logits.view(2, 50, heads, d_key))
            o, S = naive("kda").naive_recurrent_kda(q, k, v, g, beta, output_final_state=True)
        else:
            g = -layer.A_log.exp() * F.softplus(x @ weights[4].T + layer.dt_bias)
            o, S = naive("gated_delta_rule").naive_recurrent_gated_delta_rule(q, k, v, beta, g, output_final_state=True)
        o = o / (o.square().mean(-1, keepdim=True) + EPS).sqrt() * layer.norm.weight
        if config is GatedDeltaNetConfig:
            o = o * F.silu(x @ weights[5].T).view(o.shape)
        elif config is KDAConfig:
            o = o * torch.sigmoid(x @ layer.gate_code_proj.weight.T @ layer.gate_proj.weight.T).view(o.shape)
        expected = o.flatten(2) @ layer.out_proj.weight.T
    assert relative_error(leaving["S"], S) <= 2e-6
    assert relative_error(y, expected) <= 2e-6


def test_the_gated_mixer_is_qwen3_nexts_layer_with_the_same_weights(single_mesh, monkeypatch):
    """Of two heads of keys that serve three heads of values each: output, and the gradients of the input and of every parameter."""
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "fla", None)  # which takes seconds, and registers a class for transformers' Mamba
        from transformers.models.qwen3_next import modeling_qwen3_next as modeling

    for function in ("torch_chunk_gated_delta_rule", "causal_conv1d_fn"):  # not fla's kernels, which need a GPU
        monkeypatch.setattr(modeling, function, getattr(modeling, function).__wrapped__)
    keys, per_key, d_key, d_value = 2, 3, 6, 10
    values = keys * per_key
    ours = _built(GatedDeltaNetConfig(heads=keys, v_heads=values, d_key=d_key, d_value=d_value), eps=1e-6)
    with torch.no_grad():
        ours.norm.weight.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(3))
    sizes = {"linear_num_key_heads": keys, "linear_num_value_heads": values, "linear_conv_kernel_dim": 4, "rms_norm_eps": 1e-6}
    widths = {"hidden_size": D_MODEL, "linear_key_head_dim": d_key, "linear_value_head_dim": d_value, "num_hidden_layers": 1}
    settings = modeling.Qwen3NextConfig(**sizes, **widths, layer_types=["linear_attention"])
    theirs = modeling.Qwen3NextGatedDeltaNet(settings, layer_idx=0)
    rows = [keys * d_key, keys * d_key, values * d_value, values, values, values * d_value]

    def as_theirs(p):
        """Our parameters, or their gradients, under their names: what belongs to a head of keys lies together in theirs."""
        q, k, v, beta, dt, gate = (w.unflatten(0, (keys, -1)) for w in p["in_proj.weight"].split(rows))
        return {
            "in_proj_qkvz.weight": torch.cat((q, k, v, gate), dim=1).flatten(0, 1),
            "in_proj_ba.weight": torch.cat((beta, dt), dim=1).flatten(0, 1),
            "conv1d.weight": torch.cat([p[f"conv_weights.{name}"] for name in "qkv"]).unsqueeze(1),
            **{name: p[name] for name in ("A_log", "dt_bias", "norm.weight", "out_proj.weight")},
        }

    theirs.load_state_dict(as_theirs({name: p.detach() for name, p in ours.named_parameters()}), strict=True)
    x = torch.randn(2, 70, D_MODEL, generator=torch.Generator().manual_seed(2))
    found, expected = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, other = ours(found, torch.arange(70, dtype=torch.int32).expand(2, -1), None)[0], theirs(expected)
    assert relative_error(y, other) <= 1e-5
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(4))
    y.backward(dy)
    other.backward(dy)
    assert relative_error(found.grad, expected.grad) <= 2e-5
    grads = as_theirs({name: p.grad for name, p in ours.named_parameters()})
    for name, p in theirs.named_parameters():
        assert relative_error(grads[name], p.grad) <= 2e-5, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_are_never_longer_than_one(dtype, single_mesh):
    """Whatever the matmuls are computed in: with beta_max = 2 a longer key would make the state grow for ever. With less a key may
    be longer by a rounding."""
    scales = torch.tensor([0.0, 1e-6, 1e-2, 1.0, 1e3, 1e6])
    x = torch.randn(6, 5, D_MODEL, generator=torch.Generator().manual_seed(4)) * scales[:, None, None]
    lengths = {}
    for beta_max in (1.0, 2.0):
        layer, read = _built(DeltaNetConfig(heads=4, d_key=6, d_value=10, beta_max=beta_max), dtype), []
        run = layer.run_recurrence

        def watched(recurrence, inputs, *others, read=read, run=run):
            if isinstance(recurrence, DeltaRule):
                read += inputs[:2]
            return run(recurrence, inputs, *others)

        layer.run_recurrence = watched
        layer(x.to(dtype), torch.arange(5, dtype=torch.int32).expand(6, -1), None)
        assert {of.dtype for of in read} == {torch.float32 if beta_max == 2 else dtype}
        lengths[beta_max] = torch.stack([of.float().norm(dim=-1) for of in read])
    assert (lengths[2.0] <= 1 + 1e-6).all()
    assert (lengths[1.0] <= 1 + (2**-8 if dtype == torch.bfloat16 else 1e-6)).all()
    for length in lengths.values():
        # of large negative sums nothing is left, and of a head of them none of its length
        assert length[:, 4:].median() >= 1 - 1e-2
        assert not length[:, 0].any()


def test_initial_decays_are_mamba_2s(single_mesh):
    config = GatedDeltaNetConfig(heads=2000, d_key=1, d_value=1)
    layer = _built(config)
    assert isinstance(layer, GatedDeltaNet)
    rates, steps = layer.A_log.detach().exp(), F.softplus(layer.dt_bias.detach())
    assert ((rates >= config.A_init_min) & (rates <= config.A_init_max)).all()
    assert abs(float(rates.mean()) - 8.5) < 0.5
    assert ((steps >= config.dt_min * 0.999) & (steps <= config.dt_max * 1.001)).all()
    assert abs(float(steps.log().mean()) - float(torch.tensor([1e-3, 1e-1]).log().mean())) < 0.15


def test_the_released_sizes():
    """At d_model 2048 DeltaNet's projections have 4 d_model^2 parameters, Gated DeltaNet's 6; heads and convolutions few."""
    d = 2048
    with torch.device("meta"):
        plain, gated = (_meta(config()) for config in (DeltaNetConfig, GatedDeltaNetConfig))
    assert [mixer.config.head_count(d) for mixer in (plain, gated)] == [16, 6]
    assert parameter_count(plain) == 4 * d * d + 16 * d + 3 * d * 4 + 128
    assert parameter_count(gated) == 6 * d * d + 2 * 6 * d + (1536 + 1536 + 3072) * 4 + 512 + 2 * 6


def _meta(config):
    return build_mixer(config, MixerContext(2048, 48, EPS, megatron_config(1), torch.float32))


def test_a_width_that_makes_no_whole_number_of_heads_is_refused():
    with pytest.raises(ValueError, match=r"1 d_model / d_key is 125/8, not a number of heads; set heads or another d_key"):
        DeltaNetConfig().check(2000)
    with pytest.raises(ValueError, match=r"3/4 d_model / d_key is 3/2, not a number"):
        GatedDeltaNetConfig().check(512)
    assert DeltaNetConfig(heads=5).sizes(2000) == {"heads": 5}


def test_bounds_in_the_wrong_order_are_refused():
    with pytest.raises(ValueError, match=r"A_init_min=20.0 exceeds A_init_max=16.0"):
        GatedDeltaNetConfig(A_init_min=20.0)
    with pytest.raises(ValueError, match=r"dt_min=1.0 exceeds dt_max=0.1"):
        GatedDeltaNetConfig(dt_min=1.0)
