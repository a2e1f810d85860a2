"""flash-linear-attention's own random models, imported and exported. Its layers run here with its plain recurrences in place of the
GPU's kernels, and with PyTorch's norms, convolutions and activations."""

import json
import math
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
import yaml
from safetensors.torch import load_file
from support.compare import relative_error
from support.interchange import assert_import_is_theirs, fla_models, logits_of, ours_of

from baton.launcher.cli import main
from baton.launcher.interchange import import_model
from baton.models.config import ModelConfig
from baton.models.interchange.mapping import to_theirs
from baton.models.interchange.registry import family_of_config, family_of_model

pytestmark = pytest.mark.skipif(find_spec("fla") is None, reason="flash-linear-attention is not installed")

SIZES = {"hidden_size": 48, "num_hidden_layers": 2, "vocab_size": 61, "intermediate_size": 40}
CASES = {
    "gla": ("GLA", {"num_heads": 2}),
    "gla, tied, with a feature map": ("GLA", {"num_heads": 4, "expand_v": 2.0, "feature_map": "relu", "tie_word_embeddings": True}),
    "gla, without a gate": ("GLA", {"num_heads": 2, "use_output_gate": False}),
    "gsa": ("GSA", {"num_heads": 4, "num_kv_heads": 2, "num_slots": 5, "norm_eps": 1e-5}),
    "gsa, tied": ("GSA", {"num_heads": 2, "num_slots": None, "norm_eps": 1e-5, "tie_word_embeddings": True}),
    "hgrn2": ("HGRN2", {"expand_ratio": 16, "norm_eps": 1e-5, "num_hidden_layers": 4}),
    "hgrn2, tied, without bounds": (
        "HGRN2",
        {"expand_ratio": None, "num_heads": 2, "norm_eps": 1e-5, "use_lower_bound": False, "tie_word_embeddings": True},
    ),
    "retnet": ("RetNet", {"num_heads": 2, "expand_v": 1.0}),
    "retnet, with a feature map": (
        "RetNet",
        {"num_heads": 4, "expand_k": 0.5, "feature_map": "swish", "tie_word_embeddings": True},
    ),
    "retnet, without a gate": ("RetNet", {"num_heads": 2, "use_output_gate": False}),
    "delta_net": ("DeltaNet", {"num_heads": 3}),
    "delta_net, tied, negative eigenvalues": (
        "DeltaNet",
        {"num_heads": 2, "expand_k": 0.5, "conv_size": 3, "allow_neg_eigval": True, "tie_word_embeddings": True},
    ),
    "gated_deltanet": ("GatedDeltaNet", {"num_heads": 3, "head_dim": 16}),
    "gated_deltanet, tied, negative eigenvalues": (
        "GatedDeltaNet",
        {"num_heads": 2, "head_dim": 16, "expand_v": 1.5, "conv_size": 3, "allow_neg_eigval": True, "tie_word_embeddings": True},
    ),
    "gated_deltanet, grouped values": ("GatedDeltaNet", {"num_heads": 2, "num_v_heads": 4, "head_dim": 8}),
    "kda": ("KDA", {"num_heads": 3, "head_dim": 16}),
    "kda, grouped values, negative eigenvalues": (
        "KDA",
        {"num_heads": 2, "num_v_heads": 4, "head_dim": 8, "expand_v": 1.5, "allow_neg_eigval": True, "tie_word_embeddings": True},
    ),
}
READ_ALONE = {
    "transformer": ("Transformer", {"num_heads": 4, "num_kv_heads": 2}),
    "transformer, all options": (
        "Transformer",
        {
            "num_heads": 4,
            "qkv_bias": True,
            "qk_norm": True,
            "norm_eps": 1e-5,
            "window_size": 6,
            "rope_theta": 500.0,
            "tie_word_embeddings": True,
        },
    ),
}


@pytest.fixture
def plain(monkeypatch):
    """fla's layers in plain PyTorch."""
    fla_models()
    from fla.layers import attn, delta_net, gated_deltanet, gla, gsa, hgrn2, kda, multiscale_retention
    from fla.modules import FusedRMSNormGated, GatedMLP, RMSNorm, RotaryEmbedding, ShortConvolution
    from fla.modules.feature_map import SwishFeatureMap
    from fla.ops.delta_rule.naive import delta_rule_recurrence
    from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule
    from fla.ops.gla.naive import naive_recurrent_gla
    from fla.ops.gsa.naive import naive_recurrent_gsa
    from fla.ops.kda.gate import naive_kda_gate
    from fla.ops.kda.naive import naive_recurrent_kda
    from fla.ops.retention.naive import naive_retention

    def norm(self, x, residual=None, prenorm=False, **_):
        x = x if residual is None else x + residual
        y = F.rms_norm(x, x.shape[-1:], self.weight, self.eps)
        return (y, x) if prenorm else y

    def conv(x, weight, bias, activation, backend):
        assert (bias, activation) in ((None, "silu"), (None, "swish"))
        taps = weight.shape[1]
        padded = F.pad(x.transpose(1, 2), (taps - 1, 0))
        return F.silu(F.conv1d(padded, weight[:, None], groups=len(weight))).transpose(1, 2), None

    def turned(self, q, k, **_):
        angles = torch.arange(q.shape[1])[:, None] * self.base ** (-torch.arange(0, q.shape[3], 2) / q.shape[3])
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]

        def turn(x):
            a, b = x.chunk(2, dim=-1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

        return turn(q), turn(k)

    def heads_first(recurrence):
        return lambda q, k, v, **words: (recurrence(*(x.transpose(1, 2) for x in (q, k, v)), **words).transpose(1, 2), None)

    def ungated_delta_rule(q, k, v, beta, use_qk_l2norm_in_kernel, **_):
        assert use_qk_l2norm_in_kernel
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        return delta_rule_recurrence(*(x.transpose(1, 2) for x in (q, k, v, beta)))[0].transpose(1, 2), None

    def attention(q, k, v, causal, window_size):
        """Of FlashAttention: window_size counts tokens before a query's own."""
        behind = torch.arange(q.shape[1])[:, None] - torch.arange(q.shape[1])
        seen = (behind >= 0) & (behind <= (window_size[0] if window_size[0] >= 0 else q.shape[1]))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True).transpose(1, 2)

    def delta_rule(q, k, v, g, beta, A_log, dt_bias, allow_neg_eigval, **_):
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], dim=2) for x in (q, k))
        beta = (2 if allow_neg_eigval else 1) * beta.sigmoid()
        return naive_recurrent_gated_delta_rule(q, k, v, beta, -A_log.exp() * F.softplus(g + dt_bias))

    def channel_delta_rule(q, k, v, g, beta, A_log, dt_bias, allow_neg_eigval, **_):
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        return naive_recurrent_kda(q, k, v, naive_kda_gate(g, A_log, dt_bias), (2 if allow_neg_eigval else 1) * beta.sigmoid())

    def gated_norm(self, x, g):
        return norm(self, x) * (torch.sigmoid(g) if self.activation == "sigmoid" else F.silu(g))

    def norm_linear(x, weight, bias, linear_weight, linear_bias, eps=1e-5):
        return F.linear(F.rms_norm(x, x.shape[-1:], weight, eps), linear_weight)

    monkeypatch.setattr(RMSNorm, "forward", norm)
    monkeypatch.setattr(FusedRMSNormGated, "forward", gated_norm)
    monkeypatch.setattr(GatedMLP, "forward", lambda self, x, **_: self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)))
    monkeypatch.setattr(SwishFeatureMap, "forward", lambda self, x: F.silu(x))
    monkeypatch.setattr(RotaryEmbedding, "forward", turned)
    monkeypatch.setattr(
        ShortConvolution, "forward", lambda self, x, **_: conv(x, self.weight[:, 0], self.bias, self.activation, None)
    )
    monkeypatch.setattr(attn, "flash_attn_func", attention)
    monkeypatch.setattr(delta_net, "fused_recurrent_delta_rule", ungated_delta_rule)
    monkeypatch.setattr(multiscale_retention, "ACT2FN", {"swish": F.silu, "silu": F.silu})
    monkeypatch.setattr(multiscale_retention, "chunk_retention", lambda q, k, v, **_: heads_first(naive_retention)(q, k, v))
    monkeypatch.setattr(gla, "ACT2FN", {"relu": F.relu, "swish": F.silu})
    monkeypatch.setattr(gla, "fused_recurrent_gla", lambda q, k, v, gk, **_: naive_recurrent_gla(q, k, v, gk))
    monkeypatch.setattr(hgrn2, "swish", F.silu)
    monkeypatch.setattr(hgrn2, "rms_norm_linear", norm_linear)
    monkeypatch.setattr(hgrn2, "fused_recurrent_gla", lambda q, k, v, gk, **_: naive_recurrent_gla(q, k, v, gk))
    monkeypatch.setattr(gsa, "fused_recurrent_gsa", lambda q, k, v, s, g, scale, **_: naive_recurrent_gsa(q, k, v, s, g, scale))
    monkeypatch.setattr(gsa, "rms_norm_linear", norm_linear)
    monkeypatch.setattr(gated_deltanet, "causal_conv1d", conv)
    monkeypatch.setattr(gated_deltanet, "chunk_gated_delta_rule", delta_rule)
    monkeypatch.setattr(kda, "chunk_kda", channel_delta_rule)


def fla_model(name, **changes):
    """A random model of fla, in float32."""
    torch.manual_seed(5)
    model = getattr(fla_models(), f"{name}ForCausalLM")(getattr(fla_models(), f"{name}Config")(**(SIZES | changes))).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    return model


@pytest.mark.parametrize("case", CASES)
def test_a_model_of_fla_is_theirs_and_is_written_as_it_was_read(case, plain, tmp_path):
    """Logits, all gradients, tensors to the bit, and the configuration when fla has read it. From one file, or several."""
    name, changes = CASES[case]
    theirs = fla_model(name, **changes)
    model = assert_import_is_theirs(theirs, tmp_path, shard="20KB" if theirs.config.tie_word_embeddings else "5GB", use_cache=False)
    stored = {key: x for file in (tmp_path / "theirs").glob("*.safetensors") for key, x in load_file(file).items()}
    assert (tmp_path / "theirs" / "model.safetensors.index.json").exists() == model.tie_embeddings
    family = family_of_model(model)
    assert family.model_type == theirs.config.model_type

    written = to_theirs(family.maps(model), load_file(tmp_path / "ours.safetensors"))
    for key, x in stored.items():
        if key == "model.lower_bounds":  # through sigmoids, and known but for what a softmax does not see
            assert relative_error(written[key], x - x.mean(0)) <= 1e-5
        else:
            assert torch.equal(written[key], x), key
    again = getattr(fla_models(), f"{name}ForCausalLM")(type(theirs.config)(**family.config(model)))
    missing, unexpected = again.load_state_dict(written, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"] if model.tie_embeddings else [], [])
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(family.config(model)))
    assert import_model(tmp_path / "theirs", tmp_path / "twice")[0] == model


def test_lower_bounds_that_decrease_with_depth_leave_with_code(tmp_path):
    """fla's cannot."""
    fla_model(*CASES["hgrn2"][:1], **CASES["hgrn2"][1]).save_pretrained(tmp_path / "theirs")
    model, _ = import_model(tmp_path / "theirs", tmp_path / "ours")
    weights = load_file(tmp_path / "ours.safetensors")
    bounds = [f"layers.{n}.hgrn2.mixer.bound" for n in (1, 2)]
    assert family_of_model(model, weights).model_type == "hgrn2"
    assert (weights[bounds[0]] < weights[bounds[1]]).all()
    weights[bounds[0]][3] = weights[bounds[1]][3] + 0.1
    assert family_of_model(model, weights).library.startswith("transformers with trust_remote_code")


@pytest.mark.parametrize("case", READ_ALONE)
def test_a_transformer_of_fla_is_theirs_and_leaves_in_another_format(case, plain, tmp_path):
    name, changes = READ_ALONE[case]
    model = assert_import_is_theirs(fla_model(name, **changes), tmp_path, use_cache=False)
    assert not family_of_model(model).library.startswith("flash")
    assert family_of_config(json.loads((tmp_path / "theirs" / "config.json").read_text())).model_type == "transformer"


@pytest.mark.parametrize(
    ("name", "changes", "needle"),
    [
        ("GLA", {"num_heads": 2, "use_short_conv": True}, "use_short_conv=True"),
        ("GLA", {"num_heads": 4, "num_kv_heads": 2}, "num_kv_heads=2"),
        ("GSA", {"num_heads": 4}, "norm_eps=1e-06"),
        ("HGRN2", {"expand_ratio": 16}, "norm_eps=1e-06"),
        ("HGRN2", {"expand_ratio": 16, "norm_eps": 1e-5, "use_short_conv": True}, "use_short_conv=True"),
        ("RetNet", {"num_heads": 4, "num_kv_heads": 2}, "num_kv_heads=2"),
        ("DeltaNet", {"num_heads": 4, "use_gate": True}, "use_gate=True"),
        ("DeltaNet", {"num_heads": 4, "qk_norm": "sum"}, "qk_norm='sum'"),
        ("GatedDeltaNet", {"num_heads": 2, "head_dim": 16, "use_gate": False}, "use_gate=False"),
        ("KDA", {"num_heads": 2, "head_dim": 16, "lower_bound": -5.0}, "lower_bound=-5.0"),
        ("GatedDeltaNet", {"num_heads": 4, "head_dim": 16, "num_v_heads": 2}, "v_heads=2 is not a multiple of heads=4"),
    ],
)
def test_what_baton_has_not_is_refused_by_name(name, changes, needle, tmp_path, capsys):
    fla_model(name, **changes).save_pretrained(tmp_path / "theirs")
    assert main(["import", str(tmp_path / "theirs"), "--out", str(tmp_path / "ours")]) == 2
    assert needle in capsys.readouterr().err


GPU_SIZES = {"hidden_size": 96, "intermediate_size": 256}


@pytest.fixture
def untuned(monkeypatch):
    """Kernels of fla in the first configuration that fits the GPU. Finding the fastest takes minutes, and each has to be right."""
    from triton.runtime.autotuner import Autotuner

    prune, bench = Autotuner.prune_configs, Autotuner._bench

    def begin(self, arguments):
        self.found, self.cache_results = False, False  # on disk, this choice would be taken for the fastest
        return prune(self, arguments)

    def until_one_fits(self, *arguments, **named):
        if self.found:
            return [math.inf] * 3
        times = bench(self, *arguments, **named)
        self.found = times[0] < math.inf
        return times

    monkeypatch.setattr(Autotuner, "prune_configs", begin)
    monkeypatch.setattr(Autotuner, "_bench", until_one_fits)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_logits_in_bfloat16_are_nearer_to_float32_than_those_of_flas_kernels(case, untuned, tmp_path):
    """Our float32 logits are theirs to 1e-5 (above). Both bfloat16 passes round after each operation: on an H100 that is 0.7 to
    1.6 % of our logits and 0.9 to 2.2 % of fla's, so the two cannot be compared with each other more closely than that
    (benchmarks/results/test_gpu_interchange_fla.log)."""
    name, changes = CASES[case]
    theirs = fla_model(name, **(GPU_SIZES | changes | {"fuse_cross_entropy": False}))
    theirs.save_pretrained(tmp_path / "theirs")
    assert main(["import", str(tmp_path / "theirs"), "--out", str(tmp_path / "ours")]) == 0
    model = ModelConfig.model_validate(yaml.safe_load((tmp_path / "ours.yaml").read_text()))
    tokens = torch.randint(61, (2, 200), generator=torch.Generator().manual_seed(0)).cuda()
    with torch.no_grad():
        exact, found = (
            logits_of(ours_of(model, tmp_path / "ours.safetensors", dtype=dtype, device="cuda"), tokens).float()
            for dtype in (torch.float32, torch.bfloat16)
        )
        other = theirs.cuda().to(torch.bfloat16)(tokens, use_cache=False).logits.float()
    assert relative_error(found, exact) <= relative_error(other, exact)
