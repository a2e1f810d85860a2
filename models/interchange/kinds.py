"""The kind of value that each key of a config.json has: a value of another kind is refused by its key before a family computes
with it.

Keys that a family compares alone (`family.only`), and those that are of one kind in one format and of another in the next, are not
here.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from baton.models.interchange.mapping import InterchangeError

MOST_LAYERS = 10_000
"""More are a damaged number, and take minutes before a tensor is found to be missing."""

Kind = tuple[str, Callable[[Any], bool]]


def _is_whole(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and x >= 1


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and 0 < x < math.inf


def _is_limit(x: Any) -> bool:
    # transformers 5 writes infinity as {"__float__": "Infinity"}
    return x == {"__float__": "Infinity"} or (isinstance(x, int | float) and not isinstance(x, bool))


WHOLE: Kind = "a whole number from 1", _is_whole
NUMBER: Kind = "a number above 0", _is_number
FLAG: Kind = "true or false", lambda x: isinstance(x, bool)
TEXT: Kind = "a text", lambda x: isinstance(x, str)
TEXTS: Kind = "a list of texts", lambda x: isinstance(x, list) and all(isinstance(one, str) for one in x)
OBJECT: Kind = "an object", lambda x: isinstance(x, dict)
LAYERS: Kind = f"a whole number from 1 to {MOST_LAYERS}", lambda x: _is_whole(x) and x <= MOST_LAYERS
RANK: Kind = "a whole number from 1 or 'auto'", lambda x: x == "auto" or _is_whole(x)
WHOLES: Kind = "a list of whole numbers", lambda x: isinstance(x, list) and all(type(one) is int for one in x)
LIMITS: Kind = "a list of two numbers", lambda x: isinstance(x, list) and len(x) == 2 and all(map(_is_limit, x))


def _or_null(kind: Kind) -> Kind:
    return f"{kind[0]}, or null", lambda x: x is None or kind[1](x)


def _of(kind: Kind, names: str) -> dict[str, Kind]:
    return dict.fromkeys(names.split(), kind)


KINDS: dict[str, Kind] = {
    **_of(LAYERS, "num_hidden_layers n_layer"),
    **_of(WHOLE, "hidden_size d_model vocab_size num_attention_heads state_size conv_kernel expand n_groups conv_size"),
    **_of(WHOLE, "pad_vocab_size_multiple full_attention_interval linear_num_key_heads linear_num_value_heads"),
    **_of(WHOLE, "linear_key_head_dim linear_value_head_dim linear_conv_kernel_dim"),
    **_of(_or_null(WHOLE), "num_key_value_heads num_kv_heads num_v_heads head_dim intermediate_size sliding_window window_size"),
    **_of(_or_null(WHOLE), "num_heads num_slots expand_ratio max_position_embeddings original_max_position_embeddings"),
    **_of(NUMBER, "rms_norm_eps layer_norm_epsilon mixer_rms_eps norm_eps expand_k expand_v gate_logit_normalizer"),
    **_of(_or_null(NUMBER), "hidden_ratio rope_theta partial_rotary_factor"),
    **_of(FLAG, "tie_word_embeddings tie_embeddings rms_norm use_output_gate use_lower_bound qkv_bias allow_neg_eigval"),
    **_of(_or_null(TEXT), "model_type feature_map output_gate_activation"),
    **_of(_or_null(TEXTS), "architectures layer_types"),
    **_of(_or_null(WHOLES), "mlp_only_layers"),
    **_of(_or_null(OBJECT), "rope_parameters rope_scaling ssm_cfg"),
    "baton": OBJECT,
    "time_step_rank": RANK,
    "time_step_limit": LIMITS,
}
_ROPE: dict[str, Kind] = {
    **_of(TEXT, "rope_type type"),
    **_of(_or_null(NUMBER), "rope_theta partial_rotary_factor factor low_freq_factor high_freq_factor beta_fast beta_slow"),
    **_of(_or_null(NUMBER), "attention_factor mscale mscale_all_dim original_max_position_embeddings"),
    **_of(_or_null(FLAG), "truncate"),
}
INNER: dict[str, dict[str, Kind]] = {
    "rope_parameters": _ROPE,
    "rope_scaling": _ROPE,
    "ssm_cfg": {"layer": TEXT, **_of(WHOLE, "d_state d_conv expand headdim ngroups"), "dt_rank": RANK},
}
"""By key: those of its object."""


def check_kinds(config: Mapping[str, Any]) -> None:
    """Raises InterchangeError for the first key of a config.json whose value is of another kind."""
    _check(config, KINDS, "")
    for key, kinds in INNER.items():
        _check(config.get(key) or {}, kinds, f"{key}.")


def _check(values: Mapping[str, Any], kinds: Mapping[str, Kind], where: str) -> None:
    for key, value in values.items():
        name, fits = kinds.get(key, ("", None))
        if fits is not None and not fits(value):
            raise InterchangeError(
                f"config.json: {where}{key}={_shown(value)} is not {name}; correct it, or download the file again"
            )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
