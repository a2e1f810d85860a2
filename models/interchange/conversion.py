"""A Transformer's weights as the beginning of a recurrent model, to be finetuned.

Source: Zhang et al. 2024, "Gated Slot Attention", section 4.2 (T2R), after Kasai et al. 2021. Embeddings, MLPs, norms and the
projections of queries, keys, values and outputs are kept; the gates and the norm of the outputs are new. Queries, keys and values
have no activation, and rotary positions are left out.
"""

from torch import Tensor

from baton.models.config import ModelConfig
from baton.models.interchange.mapping import InterchangeError
from baton.models.settings.attention import AttentionConfig

TARGETS = ("gsa",)


def convert(
    model: ModelConfig, weights: dict[str, Tensor], target: str, keep_attention: int = 0
) -> tuple[ModelConfig, dict[str, Tensor]]:
    """The recurrent model, and those of its weights that come from the Transformer.

    Args:
        model: layers of attention and a MLP (`baton import` of Llama or Mistral).
        weights: with Baton's names; they are not changed.
        target: one of TARGETS.
        keep_attention: of every so many layers the last keeps its attention; 0: none does.

    Raises InterchangeError for another model, and for attention that has biases or norms of its own.
    """
    if target not in TARGETS:
        raise InterchangeError(f"there is no conversion to {target}; known: {', '.join(TARGETS)}")
    names = {name for name, settings in model.mixers.items() if settings.kind == "attention"}
    if len(model.period) != 1 or len(model.period[0]) != 2 or len(names) != 1 or model.period[0][0] not in names:
        raise InterchangeError("only a model whose layers are all attention and a MLP is converted")
    (name,) = names
    attention, mlp = model.mixers[name], model.period[0][1]
    assert isinstance(attention, AttentionConfig)
    if attention.qkv_bias or attention.qk_norm:
        raise InterchangeError("attention with qkv_bias or qk_norm is not converted: a recurrent mixer has neither")
    heads, kv_heads = attention.head_counts(model.d_model)
    own = {"kind": "gsa", "head_dim": attention.head_dim, "heads": heads, "kv_heads": kv_heads}
    own |= {"feature_map": "identity", "value_activation": None, "output_activation": None}
    kept = [number for number in range(model.n_layers) if keep_attention and (number + 1) % keep_attention == 0]
    pattern = [f"{target}+{mlp}"] * max(1, keep_attention)
    if kept:
        pattern[-1] = f"{name}+{mlp}"
    if len(kept) == model.n_layers:
        raise InterchangeError(f"keep_attention={keep_attention} keeps the attention of every layer; keep that of fewer")
    mixers = {target: own, mlp: model.mixers[mlp].model_dump()} | ({name: attention.model_dump()} if kept else {})
    converted = ModelConfig.model_validate(model.model_dump() | {"pattern": pattern, "mixers": mixers})
    found = {}
    for key, x in weights.items():
        part = key.split(".")
        if part[0] == "layers" and part[2] == name and int(part[1]) not in kept:
            if key.endswith("in_proj.q.weight"):
                x = x * attention.head_dim**-0.5  # of the scores, which GSA does not scale
            part[2] = target
        found[".".join(part)] = x
    return converted, found
