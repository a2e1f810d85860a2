"""flash-linear-attention's models of a recurrence and a gated MLP in each layer: GLA, GSA and RetNet, those of the delta rule in
`fla_delta_rule`, HGRN2 in `fla_hgrn2`; and its Transformer, which is read alone: Baton writes one in transformers' formats, which
need no FlashAttention.

Read are those settings with which fla's layer computes what Baton's mixer does; others are refused by key and value. A model of
Baton's has one norm_eps, and fla's code has constants beside its own: GSA's output norm and the norms of the Transformer's queries
and keys have 1e-5, the lengths of the delta rule's queries and keys have 1e-6, whatever config.json says.
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from baton.models.config import ModelConfig
from baton.models.interchange.family import Family, only, required
from baton.models.interchange.mapping import InterchangeError, TensorMap, one
from baton.models.settings import MixerConfig
from baton.models.settings.attention import AttentionConfig
from baton.models.settings.gla import GLAConfig
from baton.models.settings.gsa import GSAConfig
from baton.models.settings.retnet import RetNetConfig
from baton.models.settings.swiglu import SwiGLUConfig
from baton.models.weight_shapes import parameters

FEATURE_MAPS = {None: "identity", "relu": "relu", "silu": "silu", "swish": "silu"}


class Fla(Family):
    """What the models have in common: the layer's frame and the MLP."""

    needed: ClassVar[dict[str, tuple[Any, Any]]]
    """By key of config.json: the value that Baton's mixer has, and fla's where there is none."""
    default_norm_eps = 1e-6
    default_hidden_ratio = 4
    embedding = "model.embeddings.weight"
    final_norm = "model.norm.weight"

    def reads(self, config: Mapping[str, Any]) -> bool:
        return super().reads(config) or (not config.get("architectures") and config.get("model_type") == self.model_type)

    def model(self, config: Mapping[str, Any]) -> dict[str, Any]:
        for key, (value, default) in {"attn": (None, None), "attnres_block_size": (None, None), **self.needed}.items():
            only(config, key, value, default)
        only(config, "hidden_act", "swish", "swish")
        width, hidden = required(config, "hidden_size"), config.get("intermediate_size")
        if hidden is None:
            # fla rounds 2/3 of the ratio up to a multiple of 256
            ratio = config.get("hidden_ratio", self.default_hidden_ratio)
            hidden = -(-int(width * (4 if ratio is None else ratio) * 2 / 3) // 256) * 256
        kind = self.kinds[0]
        return {
            "d_model": width,
            "n_layers": required(config, "num_hidden_layers"),
            "vocab_size": required(config, "vocab_size"),
            "tie_embeddings": config.get("tie_word_embeddings", False),
            "norm_eps": config.get("norm_eps", self.default_norm_eps),
            "pattern": [f"{kind}+swiglu"],
            "mixers": {kind: {"kind": kind, **self._mixer(config, width)}, "swiglu": {"kind": "swiglu", "hidden": hidden}},
        }

    def config(self, model: ModelConfig) -> dict[str, Any]:
        mixer, swiglu = _parts(model, 0)
        return {
            **self.sizes(model),
            "norm_eps": model.norm_eps,
            "intermediate_size": swiglu.width(model.d_model),
            "hidden_act": "swish",
            "attn": None,
            **{key: value for key, (value, _) in self.needed.items()},
            **self._config(mixer, model.d_model),
        }

    def fits(self, model: ModelConfig) -> bool:
        return super().fits(model) and self._says(_parts(model, 0)[0], model.d_model, model.norm_eps)

    def layer(self, model: ModelConfig, number: int) -> Iterator[TensorMap]:
        mixer, swiglu = _parts(model, number)
        one_name, two_name = model.layers[number]
        width, hidden = model.d_model, swiglu.width(model.d_model)
        theirs, ours = f"model.layers.{number}", f"layers.{number}"
        yield one(f"{theirs}.attn_norm.weight", f"{ours}.{one_name}.norm.weight", width)
        for name, own, shape, axis in self._tensors(mixer, width):
            yield one(f"{theirs}.attn.{name}", f"{ours}.{one_name}.mixer.{own}", *shape, axis=axis)
        yield one(f"{theirs}.mlp_norm.weight", f"{ours}.{two_name}.norm.weight", width)
        for part in ("gate", "up"):
            yield one(f"{theirs}.mlp.{part}_proj.weight", f"{ours}.{two_name}.mixer.in_proj.{part}.weight", hidden, width)
        yield one(f"{theirs}.mlp.down_proj.weight", f"{ours}.{two_name}.mixer.out_proj.weight", width, hidden)

    @abstractmethod
    def _mixer(self, config: Mapping[str, Any], width: int) -> dict[str, Any]:
        """Settings of Baton's mixer."""

    @abstractmethod
    def _config(self, mixer: MixerConfig, width: int) -> dict[str, Any]:
        """Keys of config.json."""

    @abstractmethod
    def _says(self, mixer: MixerConfig, width: int, norm_eps: float) -> bool:
        """Whether config.json can say a mixer's settings."""

    def _tensors(self, mixer: MixerConfig, width: int) -> Iterator[tuple[str, str, tuple[int, ...], int | None]]:
        """(their name, ours, shape, axis as in TensorMap) of a mixer's tensors."""
        for own, shape, _ in parameters(mixer, width):
            yield self.names[own], own, shape, 1 if own.startswith("conv_weights.") else None

    names: ClassVar[dict[str, str]]
    """Their names of a mixer's tensors, by ours."""


QKV = {f"in_proj.{part}.weight": f"{part}_proj.weight" for part in "qkv"} | {"out_proj.weight": "o_proj.weight"}


class _FlaLinearAttention(Fla):
    """Linear attention with an output gate, or without one."""

    needed: ClassVar[dict[str, tuple[Any, Any]]] = {
        "use_short_conv": (False, False),
        "elementwise_affine": (True, True),
        "fuse_norm": (True, True),
    }
    names: ClassVar[dict[str, str]] = {**QKV, "in_proj.gate.weight": "g_proj.weight", "norm.weight": "g_norm_swish_gate.weight"}
    default_heads: ClassVar[int]
    default_expansions: ClassVar[tuple[float, float]]
    """Widths of all keys and of all values, of d_model."""

    def _mixer(self, config: Mapping[str, Any], width: int) -> dict[str, Any]:
        heads = int(required({"num_heads": self.default_heads, **config}, "num_heads"))
        if config.get("num_kv_heads") is not None:
            only(config, "num_kv_heads", heads, heads)
        mapped, (of_keys, of_values) = config.get("feature_map"), self.default_expansions
        if mapped not in FEATURE_MAPS:
            raise InterchangeError(f"config.json: feature_map={mapped!r}: Baton reads {', '.join(map(str, FEATURE_MAPS))}")
        return {
            "heads": heads,
            "d_key": per_head(config, "expand_k", of_keys, width, heads),
            "d_value": per_head(config, "expand_v", of_values, width, heads),
            "feature_map": FEATURE_MAPS[mapped],
            "output_gate": config.get("use_output_gate", True),
        }

    def _config(self, mixer: MixerConfig, width: int) -> dict[str, Any]:
        assert isinstance(mixer, GLAConfig | RetNetConfig)
        mapped = None if mixer.feature_map == "identity" else mixer.feature_map
        named = {"feature_map": mapped, "use_output_gate": mixer.output_gate}
        return {**expansions(*mixer.head_sizes(width), width), **named}

    def _tensors(self, mixer: MixerConfig, width: int) -> Iterator[tuple[str, str, tuple[int, ...], int | None]]:
        assert isinstance(mixer, GLAConfig | RetNetConfig)
        for theirs, own, shape, axis in super()._tensors(mixer, width):
            # a norm that is not fused with a gate has another name
            yield theirs if mixer.output_gate or own != "norm.weight" else "g_norm.weight", own, shape, axis


class FlaGLA(_FlaLinearAttention):
    library = "flash-linear-attention, GLAForCausalLM"
    architectures: ClassVar[tuple[str, ...]] = ("GLAForCausalLM",)
    model_type = "gla"
    kinds = ("gla", "swiglu")
    needed: ClassVar[dict[str, tuple[Any, Any]]] = {**_FlaLinearAttention.needed, "clamp_min": (None, None)}
    names: ClassVar[dict[str, str]] = {
        **_FlaLinearAttention.names,
        "code_proj.weight": "gk_proj.0.weight",
        "decay_proj.weight": "gk_proj.1.weight",
        "decay_bias": "gk_proj.1.bias",
    }
    default_heads, default_expansions = 4, (0.5, 1.0)

    def _mixer(self, config: Mapping[str, Any], width: int) -> dict[str, Any]:
        # fla's model leaves the rank and the normaliser at its layer's defaults, whatever config.json says
        return {**super()._mixer(config, width), "gate_low_rank_dim": 16, "gate_logit_normalizer": 16.0}

    def _says(self, mixer: MixerConfig, width: int, norm_eps: float) -> bool:
        assert isinstance(mixer, GLAConfig)
        fixed = mixer.gate_low_rank_dim == 16 and mixer.gate_logit_normalizer == 16
        return fixed and mixer.feature_map in FEATURE_MAPS.values()


class FlaGSA(Fla):
    library = "flash-linear-attention, GSAForCausalLM"
    architectures: ClassVar[tuple[str, ...]] = ("GSAForCausalLM",)
    model_type = "gsa"
    kinds = ("gsa", "swiglu")
    needed: ClassVar[dict[str, tuple[Any, Any]]] = {
        "use_short_conv": (False, False),
        "feature_map": ("swish", "swish"),
        "elementwise_affine": (True, True),
        "expand_k": (1, 1),
        "expand_v": (1, 1),
        "norm_eps": (1e-5, 1e-6),
    }
    names: ClassVar[dict[str, str]] = {**QKV, "in_proj.alpha.weight": "f_proj.weight", "norm.weight": "g_norm.weight"}

    def _mixer(self, config: Mapping[str, Any], width: int) -> dict[str, Any]:
        heads = _heads(config, 4, width)
        slots = config.get("num_slots", 64)
        return {
            **heads,
            "slots": heads["head_dim"] if slots is None else slots,
            "gate_logit_normalizer": config.get("gate_logit_normalizer", 8),
        }

    def _config(self, mixer: MixerConfig, width: int) -> dict[str, Any]:
        assert isinstance(mixer, GSAConfig)
        heads, kv_heads = mixer.head_counts(width)
        found = {"num_heads": heads, "num_kv_heads": kv_heads, "num_slots": mixer.slots, "norm_eps": 1e-5}
        return {**found, "gate_logit_normalizer": mixer.gate_logit_normalizer}

    def _says(self, mixer: MixerConfig, width: int, norm_eps: float) -> bool:
        assert isinstance(mixer, GSAConfig)
        whole = mixer.head_counts(width)[0] * mixer.head_dim == width
        fixed = mixer.fused and mixer.output_activation == "silu" and mixer.slot_activation == "softmax"
        return whole and fixed and norm_eps == 1e-5


class FlaRetNet(_FlaLinearAttention):
    library = "flash-linear-attention, RetNetForCausalLM"
    architectures: ClassVar[tuple[str, ...]] = ("RetNetForCausalLM",)
    model_type = "retnet"
    kinds = ("retnet", "swiglu")
    default_hidden_ratio = 2
    default_heads, default_expansions = 8, (1.0, 2.0)

    def _says(self, mixer: MixerConfig, width: int, norm_eps: float) -> bool:
        assert isinstance(mixer, RetNetConfig)
        return (mixer.decay_exponent, mixer.rope_theta) == (5, 1e4) and mixer.feature_map in FEATURE_MAPS.values()


class FlaTransformer(Fla):
    library = "flash-linear-attention, TransformerForCausalLM"
    architectures: ClassVar[tuple[str, ...]] = ("TransformerForCausalLM",)
    model_type = "transformer"
    kinds = ("attention", "swiglu")
    needed: ClassVar[dict[str, tuple[Any, Any]]] = {"elementwise_affine": (True, True)}
    names: ClassVar[dict[str, str]] = {
        **QKV,
        **{f"qkv_bias.{part}": f"{part}_proj.bias" for part in "qkv"},
        **{f"{part}_norm.weight": f"{part}_norm.weight" for part in "qk"},
    }

    def _mixer(self, config: Mapping[str, Any], width: int) -> dict[str, Any]:
        heads = _heads(config, 32, width)
        if config.get("qk_norm"):
            only(config, "norm_eps", 1e-5, 1e-6)
        return {
            **heads,
            "window": config.get("window_size"),
            "rope_theta": float(config.get("rope_theta") or 1e4),
            "qkv_bias": config.get("qkv_bias", False),
            "qk_norm": config.get("qk_norm", False),
        }

    def _config(self, mixer: MixerConfig, width: int) -> dict[str, Any]:
        assert isinstance(mixer, AttentionConfig)
        heads, kv_heads = mixer.head_counts(width)
        names = {"num_heads": heads, "num_kv_heads": kv_heads, "window_size": mixer.window, "rope_theta": mixer.rope_theta}
        return {**names, "qkv_bias": mixer.qkv_bias, "qk_norm": mixer.qk_norm}

    def _says(self, mixer: MixerConfig, width: int, norm_eps: float) -> bool:
        return False


def _heads(config: Mapping[str, Any], default: int, width: int) -> dict[str, int]:
    """Heads that together are as wide as the model. Raises InterchangeError where their number does not divide its width."""
    heads = required({"num_heads": default, **config}, "num_heads")
    if width % heads:
        raise InterchangeError(f"config.json: num_heads={heads} does not divide hidden_size={width}")
    return {"heads": heads, "kv_heads": config.get("num_kv_heads") or heads, "head_dim": width // heads}


def expansions(heads: int, d_key: int, d_value: int, width: int) -> dict[str, Any]:
    return {"num_heads": heads, "expand_k": heads * d_key / width, "expand_v": heads * d_value / width}


def per_head(config: Mapping[str, Any], key: str, default: float, width: int, heads: int) -> int:
    """width x ratio / heads. Raises InterchangeError where it is not a whole number."""
    ratio = config.get(key, default)
    total = round(width * ratio)
    if abs(total - width * ratio) > 1e-6 * total or total % heads:
        raise InterchangeError(f"config.json: {key}={ratio!r} does not give {heads} heads of a whole width")
    return total // heads


def _parts(model: ModelConfig, number: int) -> tuple[MixerConfig, SwiGLUConfig]:
    mixer, swiglu = (model.mixers[name] for name in model.layers[number])
    assert isinstance(swiglu, SwiGLUConfig)
    return mixer, swiglu
