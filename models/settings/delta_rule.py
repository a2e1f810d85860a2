"""Settings that DeltaNet and Gated DeltaNet share."""

from fractions import Fraction
from typing import ClassVar

from pydantic import Field

from baton.models.initializers import linear
from baton.models.settings import MixerConfig
from baton.models.settings.cost_model import (
    DELTA_RULE_CHUNK,
    MixerCosts,
    RecurrenceCosts,
    SavedTensor,
    saved_by_norm,
    saved_by_unit,
)
from baton.models.settings.declarations import (
    Dtype,
    ParameterDeclaration,
    StateDeclaration,
    column,
    head_norm,
    output,
    split,
)


class DeltaRuleConfig(MixerConfig):
    """The shared block: projections, short convolutions, normalised keys, the delta rule, a norm per head, projection."""

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

    @property
    def gates(self) -> dict[str, int]:
        """Rows per head of further projections that are fused with those of q, k, v and beta, by name."""
        return {}

    def _widths(self, d_model: int) -> dict[str, int]:
        heads = self.head_count(d_model)
        return {"q": heads * self.d_key, "k": heads * self.d_key, "v": heads * self.d_value}

    def parameters(self, d_model: int) -> tuple[ParameterDeclaration, ...]:
        heads, widths = self.head_count(d_model), self._widths(d_model)
        gates = {name: heads * rows for name, rows in self.gates.items()}
        convs = (
            split(f"conv_weights.{name}", width, self.d_conv, init=linear(self.d_conv), decay=True)
            for name, width in widths.items()
        )
        return (
            column("in_proj", d_model, {**widths, "beta": heads, **gates}),
            *convs,
            head_norm("norm", self.d_value),
            output("out_proj", widths["v"], d_model),
        )

    def state(self, d_model: int) -> tuple[StateDeclaration, ...]:
        # a tail of each: one that held all three would not split by heads
        convs = (
            StateDeclaration(f"conv_{name}", (self.d_conv - 1, width), "compute", tp=1)
            for name, width in self._widths(d_model).items()
        )
        return (*convs, StateDeclaration("S", (self.head_count(d_model), self.d_key, self.d_value), "float32", tp=0))

    def activation_costs(self, d_model: int) -> MixerCosts:
        heads, widths = self.head_count(d_model), self._widths(d_model)
        keys, values, chunk = widths["k"], widths["v"], DELTA_RULE_CHUNK
        *convs, S = self.state(d_model)
        saved = [
            SavedTensor("in_proj input", d_model, "compute", split=False),
            SavedTensor("in_proj output", 2 * keys + values + heads * (1 + sum(self.gates.values())), "compute"),
            SavedTensor("convolved v", values, "compute"),
            # a sigmoid and the factor's other side
            SavedTensor("beta", 2 * heads, "float32"),
            # as two bfloat16 numbers where products are in that type
            SavedTensor("chunks' triangular inverses", heads * chunk, "float32", in_recurrence="kernel"),
            *saved_by_norm("norm", values, rows=heads),
            SavedTensor("out_proj input", values, "compute"),
        ]
        for name in "qk":
            saved += [*saved_by_unit(f"length of {name}", keys, rows=heads), SavedTensor(f"unit {name}", keys, self.key_dtype)]
        return MixerCosts(
            saved=tuple(saved),
            recurrences=(
                *(RecurrenceCosts("short_conv", (conv,), chunk=0) for conv in convs),
                RecurrenceCosts(
                    "delta_rule",
                    (S,),
                    chunk=chunk,
                    recomputed_on_gpu=True,
                    transition=((heads, self.d_key, self.d_key),),
                ),
            ),
            # two products of keys, the triangular solve and what is read with it; the state is read twice and written once
            matrix_flops=heads * (2 * chunk * (3 * self.d_key + 2 * self.d_value) + 6 * self.d_key * self.d_value),
        )

    @classmethod
    def small(cls) -> "DeltaRuleConfig":
        # products of narrower queries and keys come so near 0 that the norm behind them shows float32's rounding in the gradients
        return cls(heads=4, d_key=33, d_value=5)  # type: ignore[call-arg]
