"""What DeltaNet and Gated DeltaNet share."""

from fractions import Fraction
from typing import ClassVar

from pydantic import Field

from baton.models.settings import MixerConfig
from baton.models.settings.cost_model import (
    DELTA_RULE_CHUNK,
    Carrier,
    Dtype,
    Footprint,
    Kept,
    Parameter,
    StateLeaf,
    column,
    column_gradient,
    rms_norm,
    row,
    row_sum,
    scaled,
    split,
)


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

    @property
    def key_dtype(self) -> Dtype:
        """Of keys of length 1: rounded to bfloat16 one may be longer than 1 by 2^-8, and the state grows where beta |k|^2 is above
        2; with such strengths they are float32, and so are all products with them."""
        return "compute" if self.beta_max * (1 + 2**-8) ** 2 <= 2 else "float32"

    def sizes(self, d_model: int) -> dict[str, int]:
        return {"heads": self.head_count(d_model)}

    @property
    def longest_tail(self) -> int:
        return self.d_conv - 1

    def check(self, d_model: int) -> None:
        self.head_count(d_model)

    def footprint(self, d_model: int) -> Footprint:
        return self.skeleton(d_model, extra=0)

    def skeleton(self, d_model: int, extra: int) -> Footprint:
        """Everything but what a decay and a gate add. extra: width of their projections."""
        heads = self.head_count(d_model)
        keys, values = heads * self.d_key, heads * self.d_value
        widths = {"q": keys, "k": keys, "v": values}
        projected, chunk = 2 * keys + values + heads + extra, DELTA_RULE_CHUNK
        kept = [
            Kept("in_proj input", d_model, "compute", split=False),
            Kept("q, k, v and strengths", projected, "compute"),
            Kept("convolved v", values, "compute"),
            # a sigmoid, and what it is multiplied to
            Kept("strengths", 2 * heads, "float32"),
            # as two numbers of bfloat16 where products are of that
            Kept("inverses of chunks", heads * chunk, "float32", inside="kernel"),
            *rms_norm("norm", values, rows=heads),
            Kept("out_proj input", values, "compute"),
        ]
        for name in "qk":
            kept += [*scaled(f"length of {name}", keys, rows=heads), Kept(f"unit {name}", keys, self.key_dtype)]
        return Footprint(
            parameters=(
                column("in_proj", d_model, projected),
                *(split(f"conv_weights.{name}", width, self.d_conv) for name, width in widths.items()),
                Parameter("norm.weight", (self.d_value,), partial=True),
                row("out_proj", values, d_model),
            ),
            kept=tuple(kept),
            carriers=(
                *(
                    Carrier("short_conv", (StateLeaf(f"conv_{name}", (self.d_conv - 1, width), "compute", tp=1),), chunk=0)
                    for name, width in widths.items()
                ),
                Carrier(
                    "delta_rule",
                    (StateLeaf("S", (heads, self.d_key, self.d_value), "float32", tp=0),),
                    chunk=chunk,
                    remade=True,
                    transition=((heads, self.d_key, self.d_key),),
                ),
            ),
            reductions=(column_gradient("in_proj", d_model), row_sum("out_proj", d_model)),
            # two products of keys, the triangular solve and what is read with it; the state is read twice and written once
            matrix_flops=heads * (2 * chunk * (3 * self.d_key + 2 * self.d_value) + 6 * self.d_key * self.d_value),
        )

    @classmethod
    def small(cls) -> "DeltaRuleConfig":
        # products of narrower queries and keys come so near 0 that the norm behind them shows float32's rounding in the gradients
        return cls(heads=4, d_key=33, d_value=5)  # type: ignore[call-arg]
