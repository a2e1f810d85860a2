"""transformers' Qwen3-Next without experts: imported, compared with theirs, exported, and loaded again."""

import json
import sys
from importlib.resources import files

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from support.compare import relative_error
from support.interchange import HEADS, assert_import_is_theirs, transformers_model

from baton.launcher.cli import main
from baton.launcher.interchange import import_model
from baton.models.config import ModelConfig
from baton.models.interchange.mapping import to_theirs
from baton.models.interchange.registry import family_of_model

DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 6, "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 3,
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
SETTINGS = {**HEADS, **DELTA, "num_experts": 0, "rope_parameters": ROPE}


@pytest.fixture
def plain_kernels(monkeypatch):
    """Their layers in plain PyTorch: without fla, whose kernels need a GPU and whose import takes seconds."""
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "fla", None)
        from transformers.models.qwen3_next import modeling_qwen3_next as modeling
    for function in ("torch_chunk_gated_delta_rule", "causal_conv1d_fn"):
        monkeypatch.setattr(modeling, function, getattr(modeling, function).__wrapped__)


def test_a_dense_model_is_theirs_and_is_written_as_it_was_read(plain_kernels, tmp_path):
    """Logits and every parameter's gradient. Norms, to whose weights they add 1, are written to a rounding of 1, all else to the
    bit; and what is written is read again as the same."""
    theirs = transformers_model("Qwen3Next", **SETTINGS, layer_types=["linear_attention", "full_attention"])
    model = assert_import_is_theirs(theirs, tmp_path)
    assert model.pattern == ("gated_delta_net+swiglu", "attention+swiglu")
    family = family_of_model(model)
    written = to_theirs(family.maps(model), load_file(tmp_path / "ours.safetensors"))
    for key, x in load_file(tmp_path / "theirs" / "model.safetensors").items():
        moved = key.endswith("norm.weight") and "linear_attn" not in key
        assert torch.equal(written[key], x) or (moved and (written[key] - x).abs().max() <= 2**-24), key
    (tmp_path / "again").mkdir()
    save_file(written, tmp_path / "again" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "again" / "config.json").write_text(json.dumps(family.config(model) | {"torch_dtype": "float32"}))
    loaded, report = type(theirs).from_pretrained(tmp_path / "again", output_loading_info=True, dtype=torch.float32)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    tokens = torch.randint(61, (2, 19), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert relative_error(loaded.eval()(tokens).logits, theirs(tokens).logits) <= 1e-6
    assert import_model(tmp_path / "again", tmp_path / "twice")[0] == model
    one, two = (load_file(tmp_path / f"{name}.safetensors") for name in ("ours", "twice"))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[key], two[key]) for key in one)


@pytest.mark.parametrize(
    ("changes", "needle"),
    [
        ({"num_experts": 4}, "num_experts=4: Baton's model has no experts"),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps=1e-05"),
        ({"attention_bias": True}, "attention_bias=True"),
        (
            {"layer_types": ["linear_attention", "sliding_attention"]},
            "layer_types has 'sliding_attention'; known: linear_attention",
        ),
    ],
)
def test_what_baton_has_not_is_refused_by_name(changes, needle, tmp_path, capsys):
    sizes = {"architectures": ["Qwen3NextForCausalLM"], "hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 61}
    (tmp_path / "config.json").write_text(json.dumps({**sizes, **SETTINGS, **changes}))
    assert main(["import", str(tmp_path), "--out", str(tmp_path / "ours")]) == 2
    assert needle in capsys.readouterr().err


def test_a_model_with_other_settings_is_exported_with_code():
    def library(**changes):
        attention = {"head_dim": 8, "qk_norm": True, "output_gate": True} | changes.pop("attention", {})
        mixers = {"attention": attention, "gated_delta_net": {"heads": 2, "d_key": 4, "d_value": 4} | changes.pop("delta", {})}
        pattern = ["gated_delta_net+swiglu", "attention+swiglu"]
        settings = {"d_model": 32, "n_layers": 2, "vocab_size": 61, "norm_eps": 1e-6, "pattern": pattern, **changes}
        return family_of_model(ModelConfig(**settings, mixers=mixers)).model_type

    shipped = yaml.safe_load((files("baton.configs") / "models" / "qwen3-next-dense-1.3b.yaml").read_text())
    assert family_of_model(ModelConfig(**shipped)).model_type == library() == "qwen3_next"
    others = [{"norm_eps": 1e-5}, {"attention": {"qk_norm": False}}, {"attention": {"sinks": True}}, {"attention": {"window": 4}}]
    others += [{"attention": {"score_soft_cap": 50.0}}, {"delta": {"beta_max": 2.0}}, {"attention": {"rope_theta": None}}]
    assert {library(**changes) for changes in others} == {"baton"}
