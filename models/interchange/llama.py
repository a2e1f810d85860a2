"""Transformers with grouped attention, rotary positions and a gated MLP: transformers' Llama, Mistral, Qwen2 and Qwen3."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from baton.models.config import ModelConfig
from baton.models.interchange.family import Family, only, required
from baton.models.interchange.mapping import InterchangeError, TensorMap, one
from baton.models.interchange.rope import read_rope, write_rope
from baton.models.settings.attention import AttentionConfig
from baton.models.settings.swiglu import SwiGLUConfig

PLAIN: dict[str, Any] = {
    "qkv_bias": False, "qk_norm": False, "output_gate": False, "sinks": False, "rope_fraction": 1.0, "score_soft_cap": None,
}  # fmt: skip
"""Settings of attention that some formats cannot say, with the values they have there."""


class Llama(Family):
    library = "transformers, LlamaForCausalLM"
    architectures: ClassVar[tuple[str, ...]] = ("LlamaForCausalLM",)
    model_type = "llama"
    kinds = ("attention", "swiglu")
    options: ClassVar[dict[str, Any]] = PLAIN
    """Settings of the attention in this format, which has no other values of them."""
    default_kv_heads: ClassVar[int | None] = None
    """Where config.json has no num_key_value_heads; None: as many as heads."""
    embedding = "model.embed_tokens.weight"
    final_norm = "model.norm.weight"

    def model(self, config: Mapping[str, Any]) -> dict[str, Any]:
        only(config, "attention_bias", False, False)
        only(config, "mlp_bias", False, False)
        only(config, "hidden_act", "silu", "silu")
        width, heads = required(config, "hidden_size"), required(config, "num_attention_heads")
        # null is as many as heads, a missing key is the class's default
        kv_heads = config.get("num_key_value_heads", self.default_kv_heads) or heads
        rope = read_rope(config)
        if rope["rope_fraction"] != 1:
            raise InterchangeError(
                f"config.json: partial_rotary_factor={rope['rope_fraction']!r}: {self.library} ignores it; remove it"
            )
        attention = {
            "kind": "attention",
            "head_dim": config.get("head_dim") or width // heads,
            "heads": heads,
            "kv_heads": kv_heads,
            **rope,
            "window": self._window(config),
            **self.options,
        }
        return {
            "d_model": width,
            "n_layers": required(config, "num_hidden_layers"),
            "vocab_size": required(config, "vocab_size"),
            "tie_embeddings": config.get("tie_word_embeddings", False),
            "norm_eps": config.get("rms_norm_eps", 1e-6),
            "pattern": ["attention+swiglu"],
            "mixers": {"attention": attention, "swiglu": {"kind": "swiglu", "hidden": required(config, "intermediate_size")}},
        }

    def _window(self, config: Mapping[str, Any]) -> int | None:
        return None

    def config(self, model: ModelConfig) -> dict[str, Any]:
        attention, swiglu = _parts(model, 0)
        heads = attention.head_counts(model.d_model)
        return {
            **self.sizes(model),
            "rms_norm_eps": model.norm_eps,
            "num_attention_heads": heads[0],
            "num_key_value_heads": heads[1],
            "head_dim": attention.head_dim,
            **write_rope(attention),
            "intermediate_size": swiglu.width(model.d_model),
            "attention_bias": False,
            "mlp_bias": False,
            "hidden_act": "silu",
        }

    def fits(self, model: ModelConfig) -> bool:
        return self._has_options(model) and _parts(model, 0)[0].window is None

    def _has_options(self, model: ModelConfig) -> bool:
        if not Family.fits(self, model):
            return False
        attention = _parts(model, 0)[0]
        return attention.rope_theta is not None and all(getattr(attention, key) == on for key, on in self.options.items())

    def layer(self, model: ModelConfig, number: int) -> Iterator[TensorMap]:
        attention, swiglu = _parts(model, number)
        one_name, two_name = model.layers[number]
        width, hidden = model.d_model, swiglu.width(model.d_model)
        heads, kv_heads = attention.head_counts(model.d_model)
        theirs, ours = f"model.layers.{number}", f"layers.{number}"
        yield one(f"{theirs}.input_layernorm.weight", f"{ours}.{one_name}.norm.weight", width)
        for part, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            rows = count * attention.head_dim
            yield one(f"{theirs}.self_attn.{part}_proj.weight", f"{ours}.{one_name}.mixer.in_proj.{part}.weight", rows, width)
            if attention.qkv_bias:
                yield one(f"{theirs}.self_attn.{part}_proj.bias", f"{ours}.{one_name}.mixer.qkv_bias.{part}", rows)
            if attention.qk_norm and part != "v":
                names = f"{theirs}.self_attn.{part}_norm.weight", f"{ours}.{one_name}.mixer.{part}_norm.weight"
                yield one(*names, attention.head_dim)
        inner = heads * attention.head_dim
        yield one(f"{theirs}.self_attn.o_proj.weight", f"{ours}.{one_name}.mixer.out_proj.weight", width, inner)
        yield one(f"{theirs}.post_attention_layernorm.weight", f"{ours}.{two_name}.norm.weight", width)
        for part in ("gate", "up"):
            yield one(f"{theirs}.mlp.{part}_proj.weight", f"{ours}.{two_name}.mixer.in_proj.{part}.weight", hidden, width)
        yield one(f"{theirs}.mlp.down_proj.weight", f"{ours}.{two_name}.mixer.out_proj.weight", width, hidden)


class Mistral(Llama):
    """Llama whose queries may see a window of tokens only."""

    library = "transformers, MistralForCausalLM"
    architectures: ClassVar[tuple[str, ...]] = ("MistralForCausalLM",)
    model_type = "mistral"
    default_kv_heads = 8

    def _window(self, config: Mapping[str, Any]) -> int | None:
        # transformers takes 4096 where the key is missing
        return int(found) if (found := config.get("sliding_window", 4096)) is not None else None

    def config(self, model: ModelConfig) -> dict[str, Any]:
        found = super().config(model) | {"sliding_window": _parts(model, 0)[0].window}
        return {key: value for key, value in found.items() if key not in ("attention_bias", "mlp_bias")}

    def fits(self, model: ModelConfig) -> bool:
        return self._has_options(model)


class Qwen2(Llama):
    """Llama with biases of the queries, keys and values."""

    library = "transformers, Qwen2ForCausalLM"
    architectures: ClassVar[tuple[str, ...]] = ("Qwen2ForCausalLM",)
    model_type = "qwen2"
    options: ClassVar[dict[str, Any]] = PLAIN | {"qkv_bias": True}
    default_kv_heads = 32

    def _window(self, config: Mapping[str, Any]) -> int | None:
        only(config, "use_sliding_window", False, False)
        if set(kinds := config.get("layer_types") or []) - {"full_attention"}:
            raise InterchangeError(f"config.json: layer_types={kinds}: Baton's model has one kind of attention, full_attention")
        return None

    def config(self, model: ModelConfig) -> dict[str, Any]:
        found = super().config(model) | {"use_sliding_window": False, "sliding_window": None}
        return {key: value for key, value in found.items() if key not in ("attention_bias", "mlp_bias")}


class Qwen3(Qwen2):
    """Llama with a norm over each head of the queries and of the keys."""

    library = "transformers, Qwen3ForCausalLM"
    architectures: ClassVar[tuple[str, ...]] = ("Qwen3ForCausalLM",)
    model_type = "qwen3"
    options: ClassVar[dict[str, Any]] = PLAIN | {"qk_norm": True}

    def model(self, config: Mapping[str, Any]) -> dict[str, Any]:
        return super().model({"head_dim": 128, **config})

    def config(self, model: ModelConfig) -> dict[str, Any]:
        return super().config(model) | {"attention_bias": False}


def _parts(model: ModelConfig, number: int) -> tuple[AttentionConfig, SwiGLUConfig]:
    attention, swiglu = (model.mixers[name] for name in model.layers[number])
    assert isinstance(attention, AttentionConfig)
    assert isinstance(swiglu, SwiGLUConfig)
    return attention, swiglu
