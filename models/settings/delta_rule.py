"""What DeltaNet and Gated DeltaNet share."""

from fractions import Fraction
from typing import ClassVar

from pydantic import Field

from baton.models.settings import MixerConfig


class DeltaRuleConfig(MixerConfig):
    """The skeleton: projections, short convolutions, normalised keys, the delta rule, a norm per head, projection."""

    default_keys: ClassVar[Fraction]
    """All heads' d_key together, over d_model, where heads is not given."""

    heads: int | None = Field(None, ge=1, description="heads of keys and values")
    d_key: int = Field(ge=1, description="width of a head's queries and keys")
    d_value: int = Field(ge=1, description="width of a head's values")
    d_conv: int = Field(4, ge=2, description="tokens that the causal convolutions of q, k and v see; 4 in both papers")
    beta_max: float = Field(
        1.0,
        gt=0,
        le=2,
        description="largest writing strength; 1 in both papers, above 1 transitions have negative eigenvalues (Grazzi et al.)",
    )

    def head_count(self, d_model: int) -> int:
        """The number of heads. Raises ValueError where d_model leaves it open."""
        heads = self.default_keys * d_model / self.d_key
        if self.heads is None and heads.denominator != 1:
            raise ValueError(f"{self.default_keys} d_model / d_key is {heads}, not a number of heads; set heads or another d_key")
        return self.heads or int(heads)

    def sizes(self, d_model: int) -> dict[str, int]:
        return {"heads": self.head_count(d_model)}

    def check(self, d_model: int) -> None:
        self.head_count(d_model)

    @classmethod
    def small(cls) -> "DeltaRuleConfig":
        # products of narrower queries and keys come so near 0 that the norm behind them shows float32's rounding in the gradients
        return cls(heads=4, d_key=33, d_value=5)  # type: ignore[call-arg]
