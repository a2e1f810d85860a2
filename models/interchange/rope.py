"""Rotary positions in transformers' configurations: `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (4)."""

import math
from collections.abc import Mapping
from typing import Any

from baton.models.interchange.family import required
from baton.models.interchange.mapping import InterchangeError
from baton.models.settings.attention import AttentionConfig

FIELDS = {
    "linear": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "truncate"),
}
"""By rope_type: the keys that Baton's settings have under the same name."""


def read_rope(config: Mapping[str, Any], *, fraction: float = 1.0) -> dict[str, Any]:
    """The settings of rotary positions that a config.json has. fraction: the class's default share of rotated channels.

    Raises InterchangeError for a rope_type that Baton's attention does not have, and for a context's length that is nowhere.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    share = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    found = {
        "rope_theta": float(rope.get("rope_theta") or config.get("rope_theta") or 1e4),
        "rope_fraction": fraction if share is None else share,
    }
    if kind == "default":
        return found
    if kind not in FIELDS:
        raise InterchangeError(f"config.json: rope_type={kind!r}: Baton's attention has default, {', '.join(FIELDS)}")
    scaling = {"kind": kind, **{key: rope[key] for key in FIELDS[kind] if rope.get(key) is not None}}
    if kind != "linear":
        # the key beside the group is stronger, and without both it is the model's whole context, as transformers takes them
        given = config.get("original_max_position_embeddings") or scaling.get("original_max_position_embeddings")
        scaling["original_max_position_embeddings"] = given or config.get("max_position_embeddings")
        if scaling["original_max_position_embeddings"] is None:
            raise InterchangeError("config.json has no original_max_position_embeddings, which its rope_type needs")
    mscale, mscale_all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    if kind == "yarn" and "attention_factor" not in scaling and mscale and mscale_all_dim:
        logarithm = 0.1 * math.log(max(1.0, required(rope, "factor")))
        scaling["attention_factor"] = (mscale * logarithm + 1) / (mscale_all_dim * logarithm + 1)
    return found | {"rope_scaling": scaling}


def write_rope(attention: AttentionConfig) -> dict[str, Any]:
    """Keys of config.json for attention with rotary positions."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": attention.rope_theta}
    found = {"rope_theta": attention.rope_theta, "rope_parameters": rope}
    if attention.rope_fraction != 1:
        rope["partial_rotary_factor"] = attention.rope_fraction
    if attention.rope_scaling is not None:
        scaling = attention.rope_scaling.model_dump(exclude_none=True)
        rope |= {"rope_type": scaling.pop("kind"), **scaling}
        if (context := scaling.get("original_max_position_embeddings")) is not None:
            found["max_position_embeddings"] = round(context * scaling["factor"])
    return found
