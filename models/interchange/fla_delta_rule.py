"""flash-linear-attention's models of the delta rule and a gated MLP in each layer: DeltaNet, Gated DeltaNet and KDA."""

from collections.abc import Mapping
from typing import Any, ClassVar

from baton.models.interchange.family import only, required
from baton.models.interchange.fla import QKV, Fla, expansions, per_head
from baton.models.settings import MixerConfig
from baton.models.settings.delta_net import DeltaNetConfig
from baton.models.settings.delta_rule import DecayingDeltaRuleConfig
from baton.models.settings.gated_delta_net import GatedDeltaNetConfig
from baton.models.settings.kda import KDAConfig


class _FlaDeltaRule(Fla):
    """Convolutions of queries, keys and values, whose lengths are 1, and the writing strength beta."""

    needed: ClassVar[dict[str, tuple[Any, Any]]] = {"use_short_conv": (True, True), "norm_eps": (1e-6, 1e-6)}
    names: ClassVar[dict[str, str]] = {
        **QKV,
        **{f"conv_weights.{part}": f"{part}_conv1d.weight" for part in "qkv"},
        "in_proj.beta.weight": "b_proj.weight",
        "norm.weight": "o_norm.weight",
    }

    def _strength(self, config: Mapping[str, Any]) -> dict[str, Any]:
        return {"d_conv": config.get("conv_size", 4), "beta_max": 2.0 if config.get("allow_neg_eigval") else 1.0}


class FlaDeltaNet(_FlaDeltaRule):
    library = "flash-linear-attention, DeltaNetForCausalLM"
    architectures: ClassVar[tuple[str, ...]] = ("DeltaNetForCausalLM",)
    model_type = "delta_net"
    kinds = ("delta_net", "swiglu")
    needed: ClassVar[dict[str, tuple[Any, Any]]] = {
        **_FlaDeltaRule.needed,
        "use_gate": (False, False),
        "use_beta": (True, True),
        "use_output_norm": (True, True),
        "qk_norm": ("l2", "l2"),
        "qk_activation": ("silu", "silu"),
    }

    def _mixer(self, config: Mapping[str, Any], width: int) -> dict[str, Any]:
        heads = required({"num_heads": 16, **config}, "num_heads")
        widths = {name: per_head(config, key, 1.0, width, heads) for name, key in (("d_key", "expand_k"), ("d_value", "expand_v"))}
        return {"heads": heads, **widths, **self._strength(config)}

    def _config(self, mixer: MixerConfig, width: int) -> dict[str, Any]:
        assert isinstance(mixer, DeltaNetConfig)
        expanded = expansions(mixer.head_count(width), mixer.d_key, mixer.d_value, width)
        return {**expanded, "conv_size": mixer.d_conv, "allow_neg_eigval": mixer.beta_max == 2}

    def _says(self, mixer: MixerConfig, width: int, norm_eps: float) -> bool:
        assert isinstance(mixer, DeltaNetConfig)
        grouped = mixer.value_head_count(width) != mixer.head_count(width)
        return mixer.beta_max in (1, 2) and norm_eps == 1e-6 and not grouped


class FlaGatedDeltaNet(_FlaDeltaRule):
    library = "flash-linear-attention, GatedDeltaNetForCausalLM"
    architectures: ClassVar[tuple[str, ...]] = ("GatedDeltaNetForCausalLM",)
    model_type = "gated_deltanet"
    kinds = ("gated_delta_net", "swiglu")
    float32_only = ("A_log", "dt_bias")
    needed: ClassVar[dict[str, tuple[Any, Any]]] = {**_FlaDeltaRule.needed, "use_gate": (True, True)}
    names: ClassVar[dict[str, str]] = {
        **_FlaDeltaRule.names,
        "in_proj.dt.weight": "a_proj.weight",
        "in_proj.gate.weight": "g_proj.weight",
        "A_log": "A_log",
        "dt_bias": "dt_bias",
    }

    def _mixer(self, config: Mapping[str, Any], width: int) -> dict[str, Any]:
        heads, d_key = (required({key: default, **config}, key) for key, default in (("num_heads", 6), ("head_dim", 256)))
        if config.get("output_gate_activation", "swish") != "silu":
            only(config, "output_gate_activation", "swish", "swish")
        return {
            "heads": heads,
            "v_heads": config.get("num_v_heads"),
            "d_key": d_key,
            "d_value": per_head(config, "expand_v", 2.0, d_key, 1),
            **self._strength(config),
        }

    def _config(self, mixer: MixerConfig, width: int) -> dict[str, Any]:
        assert isinstance(mixer, GatedDeltaNetConfig)
        return _heads_of_rule(mixer, width)

    def _says(self, mixer: MixerConfig, width: int, norm_eps: float) -> bool:
        assert isinstance(mixer, GatedDeltaNetConfig)
        return _says_heads_of_rule(mixer, norm_eps)


class FlaKDA(_FlaDeltaRule):
    library = "flash-linear-attention, KDAForCausalLM"
    architectures: ClassVar[tuple[str, ...]] = ("KDAForCausalLM",)
    model_type = "kda"
    kinds = ("kda", "swiglu")
    float32_only = ("A_log", "dt_bias")
    needed: ClassVar[dict[str, tuple[Any, Any]]] = {
        **_FlaDeltaRule.needed,
        "safe_gate": (False, False),
        "lower_bound": (None, None),
    }
    names: ClassVar[dict[str, str]] = {
        **_FlaDeltaRule.names,
        "decay_code_proj.weight": "f_proj.0.weight",
        "decay_proj.weight": "f_proj.1.weight",
        "gate_code_proj.weight": "g_proj.0.weight",
        "gate_proj.weight": "g_proj.1.weight",
        "gate_bias": "g_proj.1.bias",
        "A_log": "A_log",
        "dt_bias": "dt_bias",
    }

    def _mixer(self, config: Mapping[str, Any], width: int) -> dict[str, Any]:
        d_key = required({"head_dim": 128, **config}, "head_dim")
        return {
            "heads": required({"num_heads": 16, **config}, "num_heads"),
            "v_heads": config.get("num_v_heads"),
            "d_key": d_key,
            "d_value": per_head(config, "expand_v", 1.0, d_key, 1),
            "gate_bias": True,
            **self._strength(config),
        }

    def _config(self, mixer: MixerConfig, width: int) -> dict[str, Any]:
        assert isinstance(mixer, KDAConfig)
        return _heads_of_rule(mixer, width)

    def _says(self, mixer: MixerConfig, width: int, norm_eps: float) -> bool:
        assert isinstance(mixer, KDAConfig)
        return mixer.gate_bias and mixer.rank == mixer.d_value and _says_heads_of_rule(mixer, norm_eps)


def _heads_of_rule(mixer: DecayingDeltaRuleConfig, width: int) -> dict[str, Any]:
    return {
        "num_heads": mixer.head_count(width),
        "num_v_heads": mixer.v_heads,
        "head_dim": mixer.d_key,
        "expand_v": mixer.d_value / mixer.d_key,
        "conv_size": mixer.d_conv,
        "allow_neg_eigval": mixer.beta_max == 2,
    }


def _says_heads_of_rule(mixer: DecayingDeltaRuleConfig, norm_eps: float) -> bool:
    # fla cuts d_key * expand_v off to a whole number
    whole = int(mixer.d_key * (mixer.d_value / mixer.d_key)) == mixer.d_value
    return whole and mixer.beta_max in (1, 2) and norm_eps == 1e-6
