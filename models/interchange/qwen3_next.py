"""Gated DeltaNet and gated attention with MLPs, in any order of layers: transformers' Qwen3-Next without experts.

Its weights lie otherwise: rows of several projections are in one tensor by head, and the weights of all norms but that of Gated
DeltaNet's outputs are less by 1 (y = x (1 + w)). The latter is rounded, in float32 to 6e-8; everything else is kept to the bit.
"""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from baton.models.config import ModelConfig
from baton.models.interchange.family import Family, only, required
from baton.models.interchange.mapping import InterchangeError, TensorMap, one
from baton.models.interchange.rope import read_rope, write_rope
from baton.models.settings import MixerConfig
from baton.models.settings.attention import AttentionConfig
from baton.models.settings.gated_delta_net import GatedDeltaNetConfig
from baton.models.settings.swiglu import SwiGLUConfig

MIXERS = {"linear_attention": "gated_delta_net", "full_attention": "attention"}
"""Kinds by the names in layer_types."""
EPS = 1e-6
"""Of the lengths of Gated DeltaNet's queries and keys in their code. Baton's model has one epsilon."""


class Qwen3Next(Family):
    library = "transformers, Qwen3NextForCausalLM"
    architectures: ClassVar[tuple[str, ...]] = ("Qwen3NextForCausalLM",)
    model_type = "qwen3_next"
    kinds = ("gated_delta_net or attention", "swiglu")
    embedding = "model.embed_tokens.weight"
    final_norm = "model.norm.weight"
    final_norm_offset = 1.0

    def model(self, config: Mapping[str, Any]) -> dict[str, Any]:
        n_layers = required(config, "num_hidden_layers")
        only(config, "attention_bias", False, False)
        only(config, "hidden_act", "silu", "silu")
        only(config, "rms_norm_eps", EPS, EPS)
        dense = config.get("num_experts", 512) == 0 or set(config.get("mlp_only_layers") or []) >= set(range(n_layers))
        if not dense:
            raise InterchangeError(f"config.json: num_experts={config.get('num_experts', 512)!r}: Baton's model has no experts")
        every = config.get("full_attention_interval", 4)
        names = config.get("layer_types") or [
            "linear_attention" if (number + 1) % every else "full_attention" for number in range(n_layers)
        ]
        if unknown := set(names) - set(MIXERS):
            raise InterchangeError(f"config.json: layer_types has {sorted(unknown)[0]!r}; known: {', '.join(MIXERS)}")
        pattern = [f"{MIXERS[name]}+swiglu" for name in names]
        mixers: dict[str, dict[str, Any]] = {
            "gated_delta_net": {
                "heads": config.get("linear_num_key_heads", 16),
                "v_heads": config.get("linear_num_value_heads", 32),
                "d_key": config.get("linear_key_head_dim", 128),
                "d_value": config.get("linear_value_head_dim", 128),
                "d_conv": config.get("linear_conv_kernel_dim", 4),
            },
            "attention": {
                "heads": required(config, "num_attention_heads"),
                "kv_heads": config.get("num_key_value_heads", 2) or required(config, "num_attention_heads"),
                "head_dim": config.get("head_dim") or 256,
                "qk_norm": True,
                "output_gate": True,
                **read_rope(config, fraction=0.25),
            },
            "swiglu": {"hidden": required(config, "intermediate_size")},
        }
        used = {name for entry in pattern for name in entry.split("+")}
        return {
            "d_model": required(config, "hidden_size"),
            "n_layers": n_layers,
            "vocab_size": required(config, "vocab_size"),
            "tie_embeddings": config.get("tie_word_embeddings", False),
            "norm_eps": EPS,
            "pattern": _shortest_period(pattern),
            "mixers": {name: {"kind": name, **settings} for name, settings in mixers.items() if name in used},
        }

    def config(self, model: ModelConfig) -> dict[str, Any]:
        by_kind = {settings.kind: settings for settings in model.mixers.values()}
        delta, attention, swiglu = (by_kind[kind] for kind in ("gated_delta_net", "attention", "swiglu"))
        assert isinstance(delta, GatedDeltaNetConfig)
        assert isinstance(attention, AttentionConfig)
        assert isinstance(swiglu, SwiGLUConfig)
        heads, kv_heads = attention.head_counts(model.d_model)
        rope = write_rope(attention)
        # a key that is missing is 0.25 there
        rope["rope_parameters"]["partial_rotary_factor"] = attention.rope_fraction
        return {
            **self.sizes(model),
            "rms_norm_eps": model.norm_eps,
            "layer_types": [
                next(name for name, kind in MIXERS.items() if kind == model.mixers[layer[0]].kind) for layer in model.layers
            ],
            "intermediate_size": swiglu.width(model.d_model),
            "num_experts": 0,
            "attention_bias": False,
            "hidden_act": "silu",
            "linear_num_key_heads": delta.head_count(model.d_model),
            "linear_num_value_heads": delta.value_head_count(model.d_model),
            "linear_key_head_dim": delta.d_key,
            "linear_value_head_dim": delta.d_value,
            "linear_conv_kernel_dim": delta.d_conv,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": attention.head_dim,
            **rope,
        }

    def fits(self, model: ModelConfig) -> bool:
        kinds = sorted(settings.kind for settings in model.mixers.values())
        layers = {tuple(model.mixers[name].kind for name in layer) for layer in model.layers}
        return (
            # their cache takes no model without attention
            layers == {("gated_delta_net", "swiglu"), ("attention", "swiglu")}
            and len(kinds) == len(set(kinds))
            and model.norm_eps == EPS
            and all(_says(settings) for settings in model.mixers.values())
        )

    def layer(self, model: ModelConfig, number: int) -> Iterator[TensorMap]:
        name, mlp_name = model.layers[number]
        mixer, swiglu, d = model.mixers[name], model.mixers[mlp_name], model.d_model
        theirs, ours = f"model.layers.{number}", f"layers.{number}"
        yield TensorMap(f"{theirs}.input_layernorm.weight", ((f"{ours}.{name}.norm.weight", (d,)),), offset=1.0)
        if isinstance(mixer, GatedDeltaNetConfig):
            yield from _delta_net(mixer, d, f"{theirs}.linear_attn", f"{ours}.{name}.mixer")
        else:
            assert isinstance(mixer, AttentionConfig)
            yield from _attention(mixer, d, f"{theirs}.self_attn", f"{ours}.{name}.mixer")
        yield TensorMap(f"{theirs}.post_attention_layernorm.weight", ((f"{ours}.{mlp_name}.norm.weight", (d,)),), offset=1.0)
        assert isinstance(swiglu, SwiGLUConfig)
        hidden, place = swiglu.width(d), f"{ours}.{mlp_name}.mixer"
        for part in ("gate", "up"):
            yield one(f"{theirs}.mlp.{part}_proj.weight", f"{place}.in_proj.{part}.weight", hidden, d)
        yield one(f"{theirs}.mlp.down_proj.weight", f"{place}.out_proj.weight", d, hidden)


def _delta_net(mixer: GatedDeltaNetConfig, d: int, theirs: str, ours: str) -> Iterator[TensorMap]:
    heads, v_heads = mixer.head_count(d), mixer.value_head_count(d)
    keys, values = heads * mixer.d_key, v_heads * mixer.d_value
    rows = {"q": keys, "k": keys, "v": values, "gate": values, "beta": v_heads, "dt": v_heads}

    def projections(*parts: str) -> tuple[tuple[str, tuple[int, int]], ...]:
        return tuple((f"{ours}.in_proj.{part}.weight", (rows[part], d)) for part in parts)

    yield TensorMap(f"{theirs}.in_proj_qkvz.weight", projections("q", "k", "v", "gate"), by_head=heads)
    yield TensorMap(f"{theirs}.in_proj_ba.weight", projections("beta", "dt"), by_head=heads)
    convolutions = tuple((f"{ours}.conv_weights.{part}", (rows[part], mixer.d_conv)) for part in "qkv")
    yield TensorMap(f"{theirs}.conv1d.weight", convolutions, axis=1)
    for name in ("A_log", "dt_bias"):
        yield one(f"{theirs}.{name}", f"{ours}.{name}", v_heads)
    yield one(f"{theirs}.norm.weight", f"{ours}.norm.weight", mixer.d_value)
    yield one(f"{theirs}.out_proj.weight", f"{ours}.out_proj.weight", d, values)


def _attention(mixer: AttentionConfig, d: int, theirs: str, ours: str) -> Iterator[TensorMap]:
    heads, kv_heads = mixer.head_counts(d)
    width = heads * mixer.head_dim
    queries = tuple((f"{ours}.in_proj.{part}.weight", (width, d)) for part in ("q", "gate"))
    yield TensorMap(f"{theirs}.q_proj.weight", queries, by_head=heads)
    for part in "kv":
        yield one(f"{theirs}.{part}_proj.weight", f"{ours}.in_proj.{part}.weight", kv_heads * mixer.head_dim, d)
    for part in "qk":
        norm = ((f"{ours}.{part}_norm.weight", (mixer.head_dim,)),)
        yield TensorMap(f"{theirs}.{part}_norm.weight", norm, offset=1.0)
    yield one(f"{theirs}.o_proj.weight", f"{ours}.out_proj.weight", d, width)


def _says(settings: MixerConfig) -> bool:
    if isinstance(settings, AttentionConfig):
        plain = settings.window is None and not settings.qkv_bias and not settings.sinks and settings.rope_theta is not None
        plain = plain and settings.score_soft_cap is None
        return plain and settings.qk_norm and settings.output_gate
    return not isinstance(settings, GatedDeltaNetConfig) or settings.beta_max == 1


def _shortest_period(pattern: list[str]) -> list[str]:
    """The layers that, repeated and cut off, are the pattern."""
    lengths = range(1, len(pattern) + 1)
    return next(pattern[:n] for n in lengths if all(entry == pattern[i % n] for i, entry in enumerate(pattern)))
