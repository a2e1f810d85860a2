"""Settings that GLA, RetNet and HGRN2 share. Their State is one matrix [d_key, d_value] per head."""

from typing import Literal, NamedTuple

from pydantic import Field

from baton.models.settings import MixerConfig
from baton.models.settings.cost_model import SavedTensor, saved_by_gate
from baton.models.settings.declarations import StateDeclaration

FeatureMap = Literal["identity", "silu", "relu", "elu"]
"""See baton.models.feature_map."""


class HeadSizes(NamedTuple):
    """Number of heads and widths of a mixer for a given d_model."""

    heads: int
    d_key: int
    d_value: int


class LinearAttentionConfig(MixerConfig):
    """Number of heads, and the widths of their keys and values. Subclasses derive sizes that are not set from d_model."""

    heads: int | None = Field(None, ge=1, description="number of heads")
    d_key: int | None = Field(None, ge=1, description="width of a head's queries and keys")
    d_value: int | None = Field(None, ge=1, description="width of a head's values")

    def head_sizes(self, d_model: int) -> HeadSizes:
        """Heads, d_key and d_value. Raises ValueError if one is not set and does not follow from d_model."""
        raise NotImplementedError

    def state(self, d_model: int) -> tuple[StateDeclaration, ...]:
        return (StateDeclaration("S", tuple(self.head_sizes(d_model)), "float32", tp=0),)

    def sizes(self, d_model: int) -> dict[str, int]:
        return {"heads": self.head_sizes(d_model).heads}

    def check(self, d_model: int) -> None:
        self.head_sizes(d_model)


def whole(name: str, formula: str, numerator: int, denominator: int) -> int:
    """numerator / denominator, the default of setting `name`. Raises ValueError if it is not a positive integer.

    formula: the quotient as text, for the error message.
    """
    if numerator % denominator or numerator < denominator:
        raise ValueError(f"{formula} = {numerator} / {denominator} is not a whole number; set {name}")
    return numerator // denominator


def saved_by_output_gate(width: int) -> tuple[SavedTensor, ...]:
    """Saved tensors of normalised outputs * silu(gate): the gate's projection and what it multiplies, and `saved_by_gate`."""
    projected = SavedTensor("gate", width, "compute")
    return (projected, SavedTensor("normalised output", width, "float32"), *saved_by_gate("gate", width))
