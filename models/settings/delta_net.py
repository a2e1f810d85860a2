"""Settings of DeltaNet."""

from fractions import Fraction
from typing import ClassVar, Literal

from pydantic import Field

from baton.models.settings.delta_rule import DeltaRuleConfig


class DeltaNetConfig(DeltaRuleConfig):
    """The delta rule without a gate (Yang et al., "Parallelizing Linear Transformers with the Delta Rule")."""

    default_keys: ClassVar[Fraction] = Fraction(1)

    kind: Literal["delta_net"] = "delta_net"
    heads: int | None = Field(None, ge=1, description="number of heads; null: d_model / d_key, as in the paper")
    d_key: int = Field(128, ge=1, description="width of a head's queries and keys; 128 in the released 1.3B model")
    d_value: int = Field(128, ge=1, description="width of a head's values; 128 in the released 1.3B model")
