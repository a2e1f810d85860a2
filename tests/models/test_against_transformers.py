"""Mamba, and layers of attention beside Mamba-2, compared with Hugging Face transformers: the same weights give the same logits and
gradients."""

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


def test_attention_beside_mamba2_is_falcon_h1s_layer(single_mesh):
    """Falcon-H1 with its norm behind the gate and multipliers of 1, two groups of B and C, two query heads for each key head."""
    from transformers import FalconH1Config, FalconH1ForCausalLM

    width, heads, groups, dim, inner, states, hidden = 48, 4, 2, 12, 96, 8, 64
    mixers = {
        "attention": {"heads": heads, "kv_heads": groups, "head_dim": dim, "window": None, "rope_theta": 100.0},
        "mamba2": {"expand": 2, "head_dim": 16, "d_state": states, "n_groups": groups},
        "swiglu": {"hidden": hidden},
    }
    config = ModelConfig(d_model=width, n_layers=2, vocab_size=64, pattern=["attention|mamba2+swiglu"], mixers=mixers)
    ours = LanguageModel(config)
    initialize_parameters(ours, seed=0, tensor_rank=0, tensor_size=1)
    sizes = {"mamba_d_ssm": inner, "mamba_n_heads": inner // 16, "mamba_d_head": 16, "mamba_d_state": states}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": groups, "intermediate_size": hidden, "hidden_size": width}
    rope = {"rope_type": "default", "rope_theta": 100.0}
    norms = {"mamba_rms_norm": True, "mamba_norm_before_gate": False}
    settings = {"num_hidden_layers": 2, "vocab_size": 64, "mamba_n_groups": groups, "mamba_chunk_size": 8, "rope_parameters": rope}
    whole = FalconH1Config(**sizes, **norms, **settings, tie_word_embeddings=True, attn_implementation="eager")
    theirs = FalconH1ForCausalLM(whole).eval()

    def as_theirs(p):
        found = {"model.embed_tokens.weight": p["embedding.weight"], "model.final_layernorm.weight": p["norm.weight"]}
        for number in range(2):
            place, at = f"model.layers.{number}", f"layers.{number}"
            found[f"{place}.input_layernorm.weight"] = p[f"{at}.attention.norm.weight"]
            found |= attention_as_theirs(p, f"{at}.attention.mixer.", f"{place}.self_attn.", (heads * dim, groups * dim))
            found |= {f"{place}.mamba.{name}": x for name, x in mamba2_as_theirs(p, f"{at}.mamba2.mixer.").items()}
            found |= mlp_as_theirs(p, number, hidden)
        return found

    def mamba2_as_theirs(p, at):
        """They fuse z, x, B, C and dt, and have all groups' B in front of all groups' C."""
        z, x, dt, bc = p[f"{at}in_proj.weight"].split([inner, inner, inner // 16, 2 * groups * states])

        def by_kind(x):
            return torch.cat((*x.split(states)[::2], *x.split(states)[1::2]))

        return {
            "in_proj.weight": torch.cat((z, x, by_kind(bc), dt)),
            "conv1d.weight": torch.cat((p[f"{at}conv_weight"], by_kind(p[f"{at}bc_conv_weight"]))).unsqueeze(1),
            "conv1d.bias": torch.cat((p[f"{at}conv_bias"], by_kind(p[f"{at}bc_conv_bias"]))),
            **{name: p[f"{at}{name}"] for name in ("A_log", "D", "dt_bias", "norm.weight", "out_proj.weight")},
        }

    same_logits_and_gradients(ours, theirs, as_theirs)


def test_a_dense_jamba_is_jamba(single_mesh):
    """A layer of Mamba with weighted norms of its step sizes' code, B and C, and one of attention without positions."""
    from transformers import JambaConfig, JambaForCausalLM

    width, heads, groups, dim, rank, states, hidden = 48, 4, 2, 12, 5, 8, 64
    mixers = {
        "mamba": {"d_state": states, "dt_rank": rank, "projection_norm_eps": 1e-3, "projection_norm_weights": True},
        "attention": {"heads": heads, "kv_heads": groups, "head_dim": dim, "window": None, "rope_theta": None},
        "swiglu": {"hidden": hidden},
    }
    values = {"d_model": width, "n_layers": 2, "vocab_size": 64, "norm_eps": 1e-3, "tie_embeddings": False}
    ours = LanguageModel(ModelConfig(**values, pattern=["mamba+swiglu", "attention+swiglu"], mixers=mixers))
    initialize_parameters(ours, seed=0, tensor_rank=0, tensor_size=1)
    theirs = JambaForCausalLM(
        JambaConfig(
            vocab_size=64, hidden_size=width, intermediate_size=hidden, num_hidden_layers=2, num_attention_heads=heads,
            num_key_value_heads=groups, rms_norm_eps=1e-3, num_experts=1, attn_layer_period=2, attn_layer_offset=1,
            mamba_d_state=states, mamba_dt_rank=rank, use_mambapy=False, attn_implementation="eager",
        )
    ).eval()  # fmt: skip
    plain = ("A_log", "D", "in_proj.weight", "x_proj.weight", "dt_proj.weight", "out_proj.weight")

    def as_theirs(p):
        found = {"model.embed_tokens.weight": p["embedding.weight"], "model.final_layernorm.weight": p["norm.weight"]}
        found["lm_head.weight"] = p["head.weight"]
        for number, kind in enumerate(("mamba", "attention")):
            place, at = f"model.layers.{number}", f"layers.{number}.{kind}."
            found[f"{place}.input_layernorm.weight"] = p[f"{at}norm.weight"]
            if kind == "mamba":
                mixer, mamba = f"{at}mixer.", f"{place}.mamba."
                found |= {f"{mamba}{name}": p[f"{mixer}{name}"] for name in plain}
                found |= {f"{mamba}{name.lower()}_layernorm.weight": p[f"{mixer}{name}_norm"] for name in ("dt", "B", "C")}
                found[f"{mamba}conv1d.weight"] = p[f"{mixer}conv_weight"].unsqueeze(1)
                found |= {f"{mamba}conv1d.bias": p[f"{mixer}conv_bias"], f"{mamba}dt_proj.bias": p[f"{mixer}dt_bias"]}
            else:
                found |= attention_as_theirs(p, f"{at}mixer.", f"{place}.self_attn.", (heads * dim, groups * dim))
            found |= mlp_as_theirs(p, number, hidden)
        return found

    same_logits_and_gradients(ours, theirs, as_theirs)


def attention_as_theirs(p, ours, theirs, widths):
    """widths: of the queries, and of the keys."""
    qkv = p[f"{ours}in_proj.weight"].split([widths[0], widths[1], widths[1]])
    found = {f"{theirs}{name}_proj.weight": x for name, x in zip("qkv", qkv, strict=True)}
    return found | {f"{theirs}o_proj.weight": p[f"{ours}out_proj.weight"]}


def mlp_as_theirs(p, number, hidden):
    place, at = f"model.layers.{number}", f"layers.{number}.swiglu"
    mlp = p[f"{at}.mixer.in_proj.weight"].split(hidden)
    found = {f"{place}.feed_forward.{name}_proj.weight": x for name, x in zip(("gate", "up"), mlp, strict=True)}
    found[f"{place}.feed_forward.down_proj.weight"] = p[f"{at}.mixer.out_proj.weight"]
    return found | {f"{place}.pre_ff_layernorm.weight": p[f"{at}.norm.weight"]}


def same_logits_and_gradients(ours, theirs, as_theirs):
    """With our weights, away from their initial values. as_theirs: our parameters, or their gradients, under their names."""
    torch.manual_seed(0)
    with torch.no_grad():
        for p in ours.parameters():
            p.add_(0.05 * torch.randn_like(p))
    weights = as_theirs({name: p.detach() for name, p in ours.named_parameters()})
    assert weights.keys() == dict(theirs.named_parameters()).keys()
    theirs.load_state_dict(weights, strict=False)
    tokens = torch.randint(1, 64, (2, 50))  # 0 is their padding, without a gradient
    hidden_vectors, _ = ours(tokens, torch.arange(50, dtype=torch.int32).expand(2, -1))
    logits, expected = ours.logits(hidden_vectors), theirs(tokens, use_cache=False).logits
    assert relative_error(logits, expected) <= 1e-5
    cotangent = torch.randn_like(expected)
    logits.backward(cotangent)
    expected.backward(cotangent)
    grads = as_theirs({name: p.grad for name, p in ours.named_parameters()})
    for name, p in theirs.named_parameters():
        assert relative_error(grads[name], p.grad) <= 2e-5, name
