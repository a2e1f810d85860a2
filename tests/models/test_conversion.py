"""A Transformer's weights as the beginning of a recurrent model."""

import pytest
import torch
import torch.nn.functional as F
import yaml
from safetensors.torch import load_file
from support.compare import relative_error
from support.interchange import HEADS, transformers_model
from support.recurrences import seeded

from baton.kernels.short_conv.recurrence import ShortConv
from baton.launcher.cli import main
from baton.models.config import ModelConfig
from baton.models.interchange.conversion import convert
from baton.models.interchange.mapping import InterchangeError
from baton.models.library import language_model, mixer
from baton.parallel.param_layout import named_layouts


def names_of(model):
    built = language_model(model)
    return {block.name for name, _, layout in named_layouts(built) for block in layout.shard_boxes(name, 0, 1)}


@pytest.mark.parametrize("keep", [None, "1/2"])
def test_what_a_transformer_has_is_kept_and_the_gates_are_new(keep, tmp_path, capsys):
    theirs = transformers_model("Llama", **HEADS)
    theirs.save_pretrained(tmp_path / "llama")
    words = [] if keep is None else ["--keep-attention", keep]
    assert main(["import", str(tmp_path / "llama"), "--out", str(tmp_path / "start"), "--to", "gsa", *words]) == 0
    assert "missing: initialise" in capsys.readouterr().out
    model = ModelConfig.model_validate(yaml.safe_load((tmp_path / "start.yaml").read_text()))
    weights = load_file(tmp_path / "start.safetensors")
    assert model.layers == ((("gsa", "swiglu"),) * 2 if keep is None else (("gsa", "swiglu"), ("attention", "swiglu")))
    gsa = model.mixers["gsa"]
    assert (gsa.head_dim, gsa.heads, gsa.kv_heads, gsa.slots) == (12, 4, 2, 64)
    layers = range(1 if keep else 2)
    assert names_of(model) - set(weights) == {f"layers.{n}.gsa.mixer.norm.weight" for n in layers}
    normed = F.rms_norm(torch.randn(200, model.d_model, generator=seeded(1)), (model.d_model,))
    for n in layers:  # slots differ from the first step on
        logits = normed @ weights[f"layers.{n}.gsa.mixer.in_proj.alpha.weight"].mT
        assert 3 < logits.std() < 5
    assert set(weights) <= names_of(model)
    for number, layer in enumerate(theirs.model.layers):
        name, scale = ("gsa", 12**-0.5) if number in layers else ("attention", 1.0)
        place = f"layers.{number}.{name}"
        assert torch.equal(weights[f"{place}.norm.weight"], layer.input_layernorm.weight)
        assert torch.equal(weights[f"{place}.mixer.in_proj.q.weight"], layer.self_attn.q_proj.weight * scale)
        for part in "kv":
            assert torch.equal(weights[f"{place}.mixer.in_proj.{part}.weight"], getattr(layer.self_attn, f"{part}_proj").weight)
        assert torch.equal(weights[f"{place}.mixer.out_proj.weight"], layer.self_attn.o_proj.weight)
        assert torch.equal(weights[f"layers.{number}.swiglu.mixer.in_proj.up.weight"], layer.mlp.up_proj.weight)
    assert torch.equal(weights["embedding.weight"][:61], theirs.model.embed_tokens.weight)


NEW = {
    "gla": {"code_proj.weight", "decay_proj.weight", "decay_bias", "norm.weight"},
    "retnet": {"norm.weight"},
    "gated_delta_net": {"in_proj.beta.weight", "in_proj.dt.weight", "in_proj.gate.weight", "A_log", "dt_bias", "norm.weight"},
}


@pytest.mark.parametrize("target", NEW)
def test_other_mixers_repeat_what_heads_share(target, tmp_path):
    theirs = transformers_model("Llama", **HEADS)
    theirs.save_pretrained(tmp_path / "llama")
    words = ["--to", target, "--keep-attention", "1/2"]
    assert main(["import", str(tmp_path / "llama"), "--out", str(tmp_path / "start"), *words]) == 0
    model = ModelConfig.model_validate(yaml.safe_load((tmp_path / "start.yaml").read_text()))
    assert model.layers == ((target, "swiglu"), ("attention", "swiglu"))
    weights = load_file(tmp_path / "start.safetensors")
    place = f"layers.0.{target}.mixer"
    assert names_of(model) - set(weights) == {f"{place}.{name}" for name in NEW[target]}
    assert set(weights) <= names_of(model)
    layouts = [(name, layout) for name, _, layout in named_layouts(language_model(model))]
    shapes = {block.name: block.extent for name, layout in layouts for block in layout.shard_boxes(name, 0, 1)}
    assert all(tuple(x.shape) == shapes[name] for name, x in weights.items())
    attention = theirs.model.layers[0].self_attn
    assert torch.equal(weights[f"{place}.in_proj.q.weight"], attention.q_proj.weight)
    for part in "kv":  # heads 0 and 1 share the first of two, 2 and 3 the second
        shared = getattr(attention, f"{part}_proj").weight.unflatten(0, (2, 12))
        found = weights[f"{place}.in_proj.{part}.weight"].unflatten(0, (4, 12))
        assert all(torch.equal(found[head], shared[head // 2]) for head in range(4))
    if target == "gated_delta_net":
        x, taps = torch.randn(1, 9, 48), weights[f"{place}.conv_weights.v"]
        pos = torch.arange(9, dtype=torch.int32)[None]
        y, _ = ShortConv("silu").run((x, taps, torch.zeros(48)), pos, None)
        torch.testing.assert_close(y, F.silu(x))


def test_mamba2_reads_with_queries_and_writes_values_by_keys(tmp_path):
    """Four heads of 16 of which two share keys and values: four groups. What its convolutions give to the recurrence."""
    theirs = transformers_model("Llama", **HEADS | {"head_dim": 16})
    theirs.save_pretrained(tmp_path / "llama")
    assert main(["import", str(tmp_path / "llama"), "--out", str(tmp_path / "start"), "--to", "mamba2"]) == 0
    model = ModelConfig.model_validate(yaml.safe_load((tmp_path / "start.yaml").read_text()))
    weights = load_file(tmp_path / "start.safetensors")
    new = {"in_proj.z.weight", "in_proj.dt.weight", "A_log", "dt_bias", "D", "norm.weight"}
    assert names_of(model) - set(weights) == {f"layers.{n}.mamba2.mixer.{name}" for n in range(2) for name in new}
    assert set(weights) <= names_of(model)
    built = language_model(model, seed=0)
    with torch.no_grad():
        for name, parameter, layout in named_layouts(built):
            for block in layout.shard_boxes(name, 0, 1):
                if block.name in weights:
                    parameter[block.local_row : block.local_row + block.extent[0]].copy_(weights[block.name])
    found, own = built.layers["1"]["mamba2"].mixer, theirs.model.layers[1].self_attn
    x = torch.randn(1, 7, 32, generator=seeded(2))
    with torch.no_grad():
        y, _ = found(x, torch.arange(7, dtype=torch.int32)[None], None)
        q, k, v = (F.silu(part(x[0])).unflatten(-1, (-1, 16)) for part in (own.q_proj, own.k_proj, own.v_proj))
        z, _, dt, _ = found.in_proj(x[0], found.in_proj.local_splits)
        step, gate, expected = F.softplus(dt + found.dt_bias), F.silu(z).unflatten(-1, (4, 16)), torch.zeros(7, 4, 16)
        for head in range(4):
            S = torch.zeros(16, 16)
            for t in range(7):
                given = step[t, head] * torch.outer(k[t, head // 2], v[t, head // 2])
                S = torch.exp(-found.A_log[head].exp() * step[t, head]) * S + given
                expected[t, head] = q[t, head] @ S + found.D[head] * v[t, head // 2]
        expected = F.rms_norm(expected * gate, (16,), eps=model.norm_eps).flatten(1) * found.norm.weight
        assert relative_error(y[0], own.o_proj(expected)) <= 1e-5


def test_an_odd_width_is_not_mamba2s(tmp_path, capsys):
    transformers_model("Llama", **HEADS).save_pretrained(tmp_path / "llama")
    assert main(["import", str(tmp_path / "llama"), "--out", str(tmp_path / "start"), "--to", "mamba2"]) == 2
    assert "heads that are together 48 wide are not converted to mamba2" in capsys.readouterr().err


def test_retnet_has_rotary_positions(tmp_path, capsys):
    model = ModelConfig(
        d_model=16, n_layers=1, vocab_size=8, pattern=["attention+swiglu"],
        mixers={"attention": {"kind": "attention", "head_dim": 8, "rope_theta": None}, "swiglu": {"kind": "swiglu", "hidden": 16}},
    )  # fmt: skip
    with pytest.raises(InterchangeError, match="which has rotary ones; choose gla"):
        convert(model, {}, "retnet")
    assert convert(model, {}, "gla")[0].mixers["gla"].output_gate is False


def test_with_a_slot_for_every_token_it_is_attention_without_positions():
    """Slots that are written once and kept are the keys and values: what the converted mixer computes is then attention."""
    heads, dim, slots = 2, 8, 11
    settings = {"feature_map": "identity", "value_activation": None, "output_activation": None}
    gsa = mixer("gsa", 16, head_dim=dim, heads=heads, slots=slots, **settings)
    g = torch.Generator().manual_seed(0)
    x, pos = torch.randn(1, slots, 16, generator=g), torch.arange(slots, dtype=torch.int32)[None]
    q, k, v, _ = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in gsa.in_proj(x, gsa.in_proj.local_splits))
    from baton.kernels.gated_slot_attention.op import gated_slot_attention

    # token t goes into slot t alone
    log_keep = torch.zeros(1, slots, heads, slots)
    log_keep[0, range(slots), :, range(slots)] = -40.0
    with torch.no_grad():
        o, _ = gated_slot_attention(*(a.transpose(1, 2).contiguous() for a in (q, k, v)), log_keep, pos=pos)
        last = F.scaled_dot_product_attention(q, k, v, scale=1.0)[:, :, -1]
    assert relative_error(o[:, -1], last) <= 1e-5


@pytest.mark.parametrize(
    ("name", "changes", "words", "needle"),
    [
        ("Mamba", {"state_size": 4}, [], "only a model whose layers are all attention and a MLP is converted"),
        ("Qwen2", HEADS, [], "attention with qkv_bias, qk_norm, output_gate, sinks or score_soft_cap is not converted"),
        ("Llama", HEADS, ["--keep-attention", "1/4"], "keep_attention=1/4 keeps that of none of 2 layers"),
    ],
)
def test_other_models_are_refused(name, changes, words, needle, tmp_path, capsys):
    transformers_model(name, **changes).save_pretrained(tmp_path / "theirs")
    assert main(["import", str(tmp_path / "theirs"), "--out", str(tmp_path / "start"), "--to", "gsa", *words]) == 2
    assert needle in capsys.readouterr().err
    assert not (tmp_path / "start.yaml").exists()


def test_a_share_is_one_of_so_many(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["import", str(tmp_path), "--out", "x", "--to", "gsa", "--keep-attention", "0.25"])
    assert "is not 1/N with a whole N" in capsys.readouterr().err
