"""Angles of rotary positions: how far each pair of channels turns from one token to the next, also of contexts that were extended.

Source: Su et al. 2021, "RoFormer", section 3.2.2; Chen et al. 2023, "Extending Context Window of Large Language Models via
Positional Interpolation", equation 4 (linear); Llama 3.1's released code (llama3); Peng et al. 2023, "YaRN", section 3.4 (yarn).

Without torch, and without other modules of Baton's: exported models have this text in their code.
"""

import math
from collections.abc import Mapping
from functools import cache
from typing import Any

Rates = tuple[float, ...]
"""Radians per position of each pair of channels, the fastest first."""


@cache
def rope_rates(theta: float, channels: int) -> Rates:
    """theta^(-2 i / channels) of the pairs i = 0 .. channels / 2 - 1. channels: even, those that are rotated."""
    return tuple(theta ** (-2 * i / channels) for i in range(channels // 2))


def scaled_rope(theta: float, channels: int, scaling: Mapping[str, Any] | None) -> tuple[Rates, float]:
    """The rates of a scaling, and by what rotated queries and keys are multiplied.

    scaling: `kind` and the fields of its class in models.settings.rope_scaling; None: none. Slow pairs turn `factor` times slower.
    linear: all pairs do. llama3: those do that turn less than low_freq_factor times within the original context, and those that
    turn more than high_freq_factor times keep their rates; between them the share is linear in the number of turns. yarn: likewise
    with beta_slow and beta_fast turns, and linear in the number of the pair.
    """
    rates = rope_rates(theta, channels)
    if scaling is None:
        return rates, 1.0
    factor = scaling["factor"]
    if scaling["kind"] == "linear":
        return tuple(rate / factor for rate in rates), 1.0
    context = scaling["original_max_position_embeddings"]
    if scaling["kind"] == "llama3":
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        kept = [_clamped((context * rate / math.tau - low) / (high - low)) for rate in rates]
        magnitude = 1.0
    else:
        first, last = (_pair_that_turns(scaling[beta], context, theta, channels) for beta in ("beta_fast", "beta_slow"))
        if scaling["truncate"]:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, channels - 1)
        width = last - first or 1e-3
        kept = [1 - _clamped((i - first) / width) for i in range(len(rates))]
        given = scaling["attention_factor"]
        magnitude = (0.1 * math.log(factor) + 1 if factor > 1 else 1.0) if given is None else given
    return tuple(rate * (share + (1 - share) / factor) for rate, share in zip(rates, kept, strict=True)), magnitude


def _pair_that_turns(times: float, context: int, theta: float, channels: int) -> float:
    """The number of the pair that turns so many times within the context, between whole numbers."""
    return channels * math.log(context / (times * math.tau)) / (2 * math.log(theta))


def _clamped(share: float) -> float:
    return min(max(share, 0.0), 1.0)
