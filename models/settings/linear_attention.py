"""Settings that GLA, RetNet and HGRN2 share, whose state is a matrix per head."""

from typing import Literal, NamedTuple

from pydantic import Field

from baton.models.settings import MixerConfig
from baton.models.settings.declarations import StateDeclaration

FeatureMap = Literal["identity", "silu", "relu", "elu"]
"""See baton.models.feature_map."""


class HeadSizes(NamedTuple):
    """Heads and widths of one mixer at one d_model."""

    heads: int
    d_key: int
    d_value: int


class LinearAttentionConfig(MixerConfig):
    """Heads, and the widths of their keys and values. Subclasses derive from d_model those that are not given."""

    heads: int | None = Field(None, ge=1, description="heads of queries, keys and values")
    d_key: int | None = Field(None, ge=1, description="width of a head's queries and keys")
    d_value: int | None = Field(None, ge=1, description="width of a head's values")

    def head_sizes(self, d_model: int) -> HeadSizes:
        """Heads, d_key and d_value. Raises ValueError where one does not follow from d_model."""
        raise NotImplementedError

    def state(self, d_model: int) -> tuple[StateDeclaration, ...]:
        return (StateDeclaration("S", tuple(self.head_sizes(d_model)), "float32", tp=0),)

    def sizes(self, d_model: int) -> dict[str, int]:
        return {"heads": self.head_sizes(d_model).heads}

    def check(self, d_model: int) -> None:
        self.head_sizes(d_model)


def whole(name: str, formula: str, numerator: int, denominator: int) -> int:
    """numerator / denominator as the default of a setting. Raises ValueError where it is not a positive whole number."""
    if numerator % denominator or numerator < denominator:
        raise ValueError(f"{formula} = {numerator} / {denominator} is not a whole number; set {name}")
    return numerator // denominator
