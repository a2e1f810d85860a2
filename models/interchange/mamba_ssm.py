"""The files of mamba_ssm: Mamba and Mamba-2 as released by their authors. They are read; written is transformers' format."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from baton.models.config import ModelConfig
from baton.models.interchange.family import required
from baton.models.interchange.mamba import Mamba, Mamba2
from baton.models.interchange.mapping import InterchangeError, TensorMap, one

_WHOLE = {"d_intermediate": 0, "attn_layer_idx": [], "attn_cfg": {}}
"""Keys of models with other layers too, and their values where there are none."""


class _Released:
    """config.json has d_model, n_layer, vocab_size and ssm_cfg, the arguments of the layers. The embedding has padded rows."""

    embedding = "backbone.embedding.weight"
    layer_name: ClassVar[str]
    names: ClassVar[Mapping[str, tuple[str, Any]]]
    """Key of ssm_cfg to that of transformers' config.json, and its default."""

    def reads(self, config: Mapping[str, Any]) -> bool:
        return "ssm_cfg" in config and (config["ssm_cfg"] or {}).get("layer", "Mamba1") == self.layer_name

    def model(self, config: Mapping[str, Any]) -> dict[str, Any]:
        for key, value in _WHOLE.items():
            if config.get(key, value) != value:
                raise InterchangeError(f"config.json: {key}={config[key]!r}: hybrids of mamba_ssm are not read")
        if not config.get("rms_norm", True):
            raise InterchangeError("config.json: rms_norm=false: Baton's models have RMSNorm alone")
        layers = {key: value for key, value in (config["ssm_cfg"] or {}).items() if key != "layer"}
        if unknown := sorted(set(layers) - set(self.names)):
            raise InterchangeError(f"config.json: ssm_cfg.{unknown[0]}={layers[unknown[0]]!r} is not read")
        values = {theirs: layers.get(key, default) for key, (theirs, default) in self.names.items()}
        width = required(config, "d_model")
        found = {
            "hidden_size": width,
            "num_hidden_layers": required(config, "n_layer"),
            "vocab_size": required(config, "vocab_size"),
            "tie_word_embeddings": config.get("tie_embeddings", True),
            "n_groups": 1,
            **values,
        }
        if "head_dim" in found:
            found["num_heads"] = found["expand"] * width // found["head_dim"]
        return super().model(found) | {"pad_vocab_to": config.get("pad_vocab_size_multiple", 8)}  # type: ignore[misc]

    def fits(self, model: ModelConfig) -> bool:
        return False

    def maps(self, model: ModelConfig) -> list[TensorMap]:
        rows = model.padded_vocab_size, model.d_model
        layers = (found for number in range(model.n_layers) for found in self.layer(model, number))
        ends = [one(self.embedding, "embedding.weight", *rows), one("backbone.norm_f.weight", "norm.weight", model.d_model)]
        return [*ends, *layers] + ([] if model.tie_embeddings else [one("lm_head.weight", "head.weight", *rows)])

    def layer(self, model: ModelConfig, number: int) -> Iterator[TensorMap]:
        return super().layer(model, number)  # type: ignore[misc]


class ReleasedMamba(_Released, Mamba):
    library = "mamba_ssm, Mamba"
    architectures = ()
    layer_name = "Mamba1"
    names: ClassVar = {
        "d_state": ("state_size", 16),
        "d_conv": ("conv_kernel", 4),
        "expand": ("expand", 2),
        "dt_rank": ("time_step_rank", "auto"),
    }


class ReleasedMamba2(_Released, Mamba2):
    library = "mamba_ssm, Mamba2"
    architectures = ()
    layer_name = "Mamba2"
    names: ClassVar = {
        "d_state": ("state_size", 128),
        "d_conv": ("conv_kernel", 4),
        "expand": ("expand", 2),
        "headdim": ("head_dim", 64),
        "ngroups": ("n_groups", 1),
    }
