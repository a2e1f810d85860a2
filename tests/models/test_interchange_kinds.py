"""A config.json with values of another kind: refused by the key, whichever family would compute with it."""

import json

import pytest

from baton.launcher.errors import ConfigError
from baton.launcher.interchange import read_model
from baton.models.interchange.fla import Fla
from baton.models.interchange.kinds import INNER
from baton.models.interchange.registry import FAMILIES

WRONG = (None, "64", 0, 1.5, True, float("nan"), 10**9, [], ["a"], {"a": 1})
ROPE = {"rope_type": "yarn", "rope_theta": 5e4, "factor": 4.0, "original_max_position_embeddings": 64, "partial_rotary_factor": 1.0}
ANY = {
    "hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 61, "intermediate_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_heads": 4, "head_dim": 16, "expand_ratio": 8, "n_groups": 2, "num_experts": 0,
    "rope_parameters": ROPE, "time_step_limit": [0.0, {"__float__": "Infinity"}],
}  # fmt: skip
"""Settings that every family has a model for, with those below."""
LAYERS = ("num_hidden_layers", "n_layer")
SIZES = (*LAYERS, "hidden_size", "d_model", "vocab_size")
OWN = {
    "baton": {"baton": {"d_model": 32, "n_layers": 2, "vocab_size": 61, "pattern": ["mamba"]}},
    "mamba_ssm, Mamba": {"d_model": 32, "n_layer": 2, "ssm_cfg": {"d_state": 8, "dt_rank": "auto"}},
    "mamba_ssm, Mamba2": {"d_model": 32, "n_layer": 2, "ssm_cfg": {"layer": "Mamba2", "headdim": 16, "d_conv": 4}},
}


class Noted(dict):
    """Keeps which keys are asked for."""

    def __init__(self, values, asked):
        super().__init__(values)
        self.asked = asked

    def __getitem__(self, key):
        self.asked.add(key)
        return super().__getitem__(key)

    def get(self, key, default=None):
        self.asked.add(key)
        return super().get(key, default)

    def __contains__(self, key):
        self.asked.add(key)
        return super().__contains__(key)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda one: one.library)
def test_a_value_of_another_kind_is_refused_by_its_key(family, tmp_path):
    """Of every key that the family asks for. The folder has no weights: what accepts a configuration ends by saying so."""
    found = {"architectures": list(family.architectures)} | ANY
    found |= {key: value for key, (value, _) in family.needed.items()} if isinstance(family, Fla) else {}
    found |= OWN.get(family.library, OWN["baton"] if family.model_type == "baton" else {})
    (tmp_path / "config.json").write_text(json.dumps(found))
    with pytest.raises(ConfigError, match="no weights"):
        read_model(tmp_path)
    asked = set()
    assert family.reads(Noted(found, asked))
    family.model(Noted(found, asked))
    inner = {(key, one) for key, kinds in INNER.items() if found.get(key) for one in kinds}
    for key, one in sorted({(key, None) for key in asked} | inner, key=str):
        for value in WRONG:
            changed = found | {key: value if one is None else found[key] | {one: value}}
            (tmp_path / "config.json").write_text(json.dumps(changed))
            with pytest.raises(ConfigError) as refused:
                read_model(tmp_path)
            assert "no weights" in str(refused.value) or "config.json" in str(refused.value), (key, one, value)
            assert "\n" not in str(refused.value)
            if key in SIZES and (value != 10**9 or key in LAYERS):
                assert key in str(refused.value), (key, value)


def test_heads_that_follow_from_another_setting_may_be_null(tmp_path):
    """As older versions of fla wrote HGRN2's; where nothing else says how many there are, null is refused."""
    folder = tmp_path / "config.json"
    for architecture, needle in (("HGRN2ForCausalLM", "no weights"), ("GLAForCausalLM", "config.json has no num_heads")):
        family = next(one for one in FAMILIES if architecture in one.architectures)
        needed = {key: value for key, (value, _) in family.needed.items()}
        folder.write_text(json.dumps(ANY | needed | {"architectures": [architecture], "num_heads": None}))
        with pytest.raises(ConfigError, match=needle):
            read_model(tmp_path)
