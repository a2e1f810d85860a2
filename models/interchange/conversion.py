"""A Transformer's weights as the beginning of a recurrent model, to be finetuned (T2R).

Source: Zhang et al. 2024, "Gated Slot Attention", section 4.2, after Kasai et al. 2021. Embeddings, MLPs, norms and the projections
of queries, keys, values and outputs are kept; gates and decays, the norm of the outputs and convolutions are new. There is no gate
of the outputs where a mixer can do without. The gates of GSA's slots begin with larger weights than from scratch (`_slot_gates`).
As in the paper, queries and keys of GLA and RetNet go through relu, since softmax attention has no negative scores either; those of
GSA are as they are. Mamba-2's C, B and x are queries, keys and values, a group for each head; its gate, which nothing in a
Transformer is like, is new. Rotary positions are left out, but RetNet has them too.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from baton.models.config import ModelConfig
from baton.models.interchange.mapping import InterchangeError
from baton.models.settings.attention import AttentionConfig

Widths = tuple[int, int, int]
"""Numbers of query heads and of key heads, and the width of a head."""


def _gsa(attention: AttentionConfig, sizes: Widths, d_model: int) -> dict[str, Any]:
    heads, kv_heads, width = sizes
    activations = {"feature_map": "identity", "value_activation": None, "output_activation": None}
    return {"head_dim": width, "heads": heads, "kv_heads": kv_heads, **activations}


def _linear(attention: AttentionConfig, sizes: Widths, d_model: int) -> dict[str, Any]:
    heads, _, width = sizes
    return {"heads": heads, "d_key": width, "d_value": width, "feature_map": "relu", "output_gate": False}


def _retnet(attention: AttentionConfig, sizes: Widths, d_model: int) -> dict[str, Any]:
    if attention.rope_theta is None:
        raise InterchangeError("attention without positions is not converted to retnet, which has rotary ones; choose gla")
    if attention.rope_fraction != 1 or attention.rope_scaling is not None:
        raise InterchangeError(
            "attention with rope_fraction or rope_scaling is not converted to retnet, which has neither; choose gla"
        )
    return {**_linear(attention, sizes, d_model), "rope_theta": attention.rope_theta}


def _delta_rule(attention: AttentionConfig, sizes: Widths, d_model: int) -> dict[str, Any]:
    heads, _, width = sizes
    return {"heads": heads, "d_key": width, "d_value": width}


def _state_space(attention: AttentionConfig, sizes: Widths, d_model: int) -> dict[str, Any]:
    heads, _, width = sizes
    if heads * width % d_model:
        raise InterchangeError(
            f"heads that are together {heads * width} wide are not converted to mamba2, whose are a multiple of d_model={d_model}"
        )
    return {"expand": heads * width // d_model, "head_dim": width, "d_state": width, "n_groups": heads}


TARGETS: dict[str, Callable[[AttentionConfig, Widths, int], dict[str, Any]]] = {
    "gsa": _gsa,
    "gla": _linear,
    "retnet": _retnet,
    "gated_delta_net": _delta_rule,
    "mamba2": _state_space,
}
"""Settings of the mixer by its kind."""


def convert(
    model: ModelConfig, weights: dict[str, Tensor], target: str, keep_attention: int = 0
) -> tuple[ModelConfig, dict[str, Tensor]]:
    """The recurrent model, and those of its weights that come from the Transformer.

    Args:
        model: layers of attention and a MLP (`baton import` of Llama or Mistral).
        weights: with Baton's names; they are not changed.
        target: one of TARGETS. Keys and values that several heads share are repeated for each, but for gsa, whose heads share them.
        keep_attention: of every so many layers the last keeps its attention; 0: none does.

    Raises InterchangeError for another model, and for attention that has biases, norms, a gate, sinks or a soft cap.
    """
    if target not in TARGETS:
        raise InterchangeError(f"there is no conversion to {target}; known: {', '.join(TARGETS)}")
    names = {name for name, settings in model.mixers.items() if settings.kind == "attention"}
    one = len(model.period) == 1 and len(model.period[0]) == 2 and not model.is_parallel and not model.shared
    if not one or len(names) != 1 or model.period[0][0] not in names:
        raise InterchangeError("only a model whose layers are all attention and a MLP is converted")
    (name,) = names
    attention, mlp = model.mixers[name], model.period[0][1]
    assert isinstance(attention, AttentionConfig)
    if attention.qkv_bias or attention.qk_norm or attention.output_gate or attention.sinks or attention.score_soft_cap:
        raise InterchangeError(
            "attention with qkv_bias, qk_norm, output_gate, sinks or score_soft_cap is not converted: "
            "a recurrent mixer has none of them"
        )
    sizes = (*attention.head_counts(model.d_model), attention.head_dim)
    kept = [number for number in range(model.n_layers) if keep_attention and (number + 1) % keep_attention == 0]
    if keep_attention and not kept:
        raise InterchangeError(f"keep_attention=1/{keep_attention} keeps that of none of {model.n_layers} layers; leave it out")
    pattern = [f"{target}+{mlp}"] * max(1, keep_attention)
    if kept:
        pattern[-1] = f"{name}+{mlp}"
    if len(kept) == model.n_layers:
        raise InterchangeError(f"keep_attention={keep_attention} keeps the attention of every layer; keep that of fewer")
    mixers = {target: {"kind": target, **TARGETS[target](attention, sizes, model.d_model)}, mlp: model.mixers[mlp].model_dump()}
    mixers |= {name: attention.model_dump()} if kept else {}
    converted = ModelConfig.model_validate(model.model_dump() | {"pattern": pattern, "mixers": mixers})
    found = {}
    for key, x in weights.items():
        part = key.split(".")
        if part[0] == "layers" and part[2] == name and int(part[1]) not in kept:
            part[2] = target
            x = _projection(x, ".".join(part[4:]), target, sizes)
        found[".".join(part)] = x
    if target == "mamba2":
        _group(found, sizes, sorted(set(range(model.n_layers)) - set(kept)))
    if target in ("gated_delta_net", "mamba2"):
        found |= _convolutions(converted, target, kept)
    if target == "gsa":
        found |= _slot_gates(converted, target, kept)
    return converted, found


def _projection(x: Tensor, name: str, target: str, sizes: Widths) -> Tensor:
    heads, kv_heads, width = sizes
    if target == "gsa":
        return x * width**-0.5 if name == "in_proj.q.weight" else x  # of the scores, which GSA does not scale
    if name in ("in_proj.k.weight", "in_proj.v.weight") and kv_heads < heads:
        return x.unflatten(0, (kv_heads, width)).repeat_interleave(heads // kv_heads, dim=0).flatten(0, 1)
    return x


def _convolutions(model: ModelConfig, target: str, kept: list[int]) -> dict[str, Tensor]:
    """Short convolutions that begin as each token's own value."""
    found = {}
    for number in set(range(model.n_layers)) - set(kept):
        for declared in model.mixers[target].parameters(model.d_model):
            if "conv_" in declared.name:
                taps = torch.zeros(declared.shape)
                if not declared.name.endswith("_bias"):
                    taps[:, -1] = 1
                found[f"layers.{number}.{target}.mixer.{declared.name}"] = taps
    return found


def _group(found: dict[str, Tensor], sizes: Widths, layers: Sequence[int]) -> None:
    """Make queries, keys and values C, B and x of Mamba-2: B and C of a head lie beside each other."""
    heads, _, width = sizes
    for number in layers:
        place = f"layers.{number}.mamba2.mixer"
        if f"{place}.in_proj.q.weight" not in found:
            continue
        q, k, v = (found.pop(f"{place}.in_proj.{part}.weight") for part in "qkv")
        both = torch.cat([x.unflatten(0, (heads, width)) for x in (k, q)], dim=1).flatten(0, 1)
        found |= {f"{place}.in_proj.x.weight": v, f"{place}.{'in_proj.bc' if heads > 1 else 'bc_proj'}.weight": both}


_GATE_LOGITS = 4.0
"""Standard deviation of the logits of a converted GSA's gates. With initial values as from scratch, for a width of 256 about 0.3,
all slots of a head hold nearly the same mean of keys, and queries cannot tell them apart before the gates have learnt to differ."""


def _slot_gates(model: ModelConfig, target: str, kept: list[int]) -> dict[str, Tensor]:
    """Weights of the gates, the same for equal models, for inputs whose mean square is 1."""
    found, generator = {}, torch.Generator().manual_seed(0)
    for number in sorted(set(range(model.n_layers)) - set(kept)):
        for declared in model.mixers[target].parameters(model.d_model):
            if declared.name.startswith("in_proj."):
                rows = dict(declared.fused_splits)["alpha"]
                x = torch.randn(rows, model.d_model, generator=generator)
                found[f"layers.{number}.{target}.mixer.in_proj.alpha.weight"] = x * _GATE_LOGITS * model.d_model**-0.5
    return found
