"""Settings of RWKV-7's time mixing."""

from typing import ClassVar, Literal

from pydantic import Field

from baton.models.initializers import Constant, Ramp, linear
from baton.models.settings import MixerConfig
from baton.models.settings.cost_model import (
    DELTA_RULE_CHUNK,
    GENERALIZED_DELTA_RULE_CHUNK,
    MixerCosts,
    RecurrenceCosts,
    SavedTensor,
)
from baton.models.settings.declarations import (
    ParameterDeclaration,
    StateDeclaration,
    column,
    low_rank_column,
    output,
    replicated,
    shift_mix,
    split,
)

V_FIRST = "v_first"
"""Name of the tensor that layers with a value residual share."""


def _rank(size: float) -> int:
    """A multiple of 32 near `size`."""
    return max(32, 32 * round(size / 32))


class RWKV7Config(MixerConfig):
    """RWKV-7's time mixing: a matrix state whose transition is diagonal plus low rank, with token shift (Peng et al. 2025, "RWKV-7
    'Goose' with Expressive Dynamic State Evolution")."""

    mixes: ClassVar[dict[str, float]] = {"r": 0.2, "w": 0.9, "k": 0.7, "v": 0.7, "a": 0.9, "g": 0.2}
    """Exponents of the initial token shift, by what is projected, as in the authors' code for the first layer."""

    kind: Literal["rwkv7"] = "rwkv7"
    heads: int | None = Field(None, ge=1, description="number of heads; null: d_model / d_key")
    d_key: int = Field(64, ge=2, description="width of a head's receptance, keys and decays; 64 in the paper")
    d_value: int = Field(64, ge=2, description="width of a head's values; 64 in the paper")
    decay_low_rank_dim: int | None = Field(
        None, ge=1, description="rank of the decay's projection; null: 1.8 sqrt(d_model) to a multiple of 32, as in the paper"
    )
    a_low_rank_dim: int | None = Field(
        None,
        ge=1,
        description="rank of the projection of a, the in-context learning rate; null: 1.8 sqrt(d_model) to a multiple of 32",
    )
    v_low_rank_dim: int | None = Field(
        None, ge=1, description="rank of the value residual's projection; null: 1.3 sqrt(d_model) to a multiple of 32"
    )
    gate_low_rank_dim: int | None = Field(
        None, ge=1, description="rank of the output gate's projection; null: 0.6 d_model^0.8 to a multiple of 32"
    )
    value_residual: Literal["none", "first", "later"] = Field(
        "none",
        description="later: values are mixed with those of the layer that has `first`, as in the paper, whose first layer is that "
        "layer. Give the two a name each in the pattern, `[first_layer+channel_mix, rwkv7+channel_mix*23]`; not with "
        "layout.pipeline above 1",
    )

    def head_count(self, d_model: int) -> int:
        """The number of heads. Raises ValueError if it is not set and does not follow from d_model."""
        if self.heads is None and d_model % self.d_key:
            raise ValueError(f"d_model / d_key is {d_model} / {self.d_key}, not a number of heads; set heads or another d_key")
        return self.heads or d_model // self.d_key

    def ranks(self, d_model: int) -> dict[str, int]:
        """Ranks of the low-rank projections by what they compute."""
        found = {
            "decay": self.decay_low_rank_dim or _rank(1.8 * d_model**0.5),
            "rate": self.a_low_rank_dim or _rank(1.8 * d_model**0.5),
            "gate": self.gate_low_rank_dim or _rank(0.6 * d_model**0.8),
        }
        return found | ({"residual": self.v_low_rank_dim or _rank(1.3 * d_model**0.5)} if self.value_residual == "later" else {})

    def sizes(self, d_model: int) -> dict[str, int]:
        return {"heads": self.head_count(d_model)}

    @property
    def longest_tail(self) -> int:
        return 1

    def check(self, d_model: int) -> None:
        self.head_count(d_model)

    def hands_on(self, d_model: int) -> dict[str, int]:
        return {V_FIRST: self.head_count(d_model) * self.d_value} if self.value_residual == "first" else {}

    def reads(self, d_model: int) -> dict[str, int]:
        return {V_FIRST: self.head_count(d_model) * self.d_value} if self.value_residual == "later" else {}

    def parameters(self, d_model: int) -> tuple[ParameterDeclaration, ...]:
        heads, ranks = self.head_count(d_model), self.ranks(d_model)
        keys, values = heads * self.d_key, heads * self.d_value
        widths = {"decay": keys, "rate": keys, "gate": values, "residual": values}
        codes = (
            declaration
            for name, rank in ranks.items()
            for declaration in (
                replicated(f"{name}_code_proj", d_model, rank),
                low_rank_column(f"{name}_proj", rank, widths[name], init=linear(rank, 0.1)),
            )
        )
        return (
            *(shift_mix(f"shift_mix.{name}", d_model, exponent) for name, exponent in self.mixes.items()),
            column("r_proj", d_model, keys),
            column("k_proj", d_model, keys),
            column("v_proj", d_model, values),
            *codes,
            split("decay_bias", keys, init=Ramp(-5.5, 0.5, zigzag=2.5, period=self.d_key)),
            split("rate_bias", keys, init=Ramp(-0.39, 0.01, zigzag=0.3, period=self.d_key)),
            *((split("residual_bias", values, init=Ramp(0.93, 0.53)),) if "residual" in ranks else ()),
            split("k_k", keys, init=Ramp(0.76, 0.66)),
            split("k_a", keys, init=Constant(1.02)),
            split("r_k", heads, self.d_key, init=Constant(-0.04)),
            split("norm_weight", values, init=Constant(1.0)),
            split("norm_bias", values, init=Constant(0.0)),
            output("out_proj", values, d_model),
        )

    def state(self, d_model: int) -> tuple[StateDeclaration, ...]:
        return (
            StateDeclaration("shift", (1, d_model), "compute", tp=None),
            StateDeclaration("S", (self.head_count(d_model), self.d_key, self.d_value), "float32", tp=0),
        )

    def activation_costs(self, d_model: int) -> MixerCosts:
        heads, ranks, chunk = self.head_count(d_model), self.ranks(d_model), GENERALIZED_DELTA_RULE_CHUNK
        keys, values = heads * self.d_key, heads * self.d_value
        shift, S = self.state(d_model)
        saved = [
            SavedTensor("input", d_model, "compute", split=False),
            SavedTensor("difference to the token before", d_model, "compute", split=False),
            SavedTensor("mixed inputs", len(self.mixes) * d_model, "compute", split=False),
            SavedTensor("codes", sum(ranks.values()), "compute", split=False),
            SavedTensor("r, k and replaced k", 3 * keys, "compute"),
            SavedTensor("decays, and their logarithms", 2 * keys, "float32"),
            SavedTensor("rates, and factors of k", 2 * keys, "float32"),
            SavedTensor("scaled k", keys, "float32"),
            SavedTensor("scale of scaled k", heads, "float32"),
            SavedTensor("unit k", keys, "compute"),
            SavedTensor("b", keys, "float32"),
            SavedTensor("v", values, "compute"),
            # of two tokens for each; stored as two bfloat16 numbers where products are computed in bfloat16
            SavedTensor("chunks' triangular inverses", 2 * heads * DELTA_RULE_CHUNK, "float32", in_recurrence="kernel"),
            SavedTensor("norm input and normalised", 2 * values, "float32"),
            SavedTensor("norm mean and scale", 2 * heads, "float32"),
            SavedTensor("products of r and k", keys, "compute"),
            SavedTensor("bonus", heads, "float32"),
            SavedTensor("gate", values, "compute"),
            SavedTensor("gate's factor", values, "float32"),
            SavedTensor("out_proj input", values, "compute"),
        ]
        if self.value_residual == "later":
            saved += [
                SavedTensor("share of the first layer's v", values, "float32"),
                SavedTensor("difference to the first layer's v", values, "compute"),
            ]
        return MixerCosts(
            saved=tuple(saved),
            handed_on=sum(self.hands_on(d_model).values()),
            recurrences=(
                RecurrenceCosts("short_conv", (shift,), chunk=0),
                RecurrenceCosts(
                    "generalized_delta_rule",
                    (S,),
                    chunk=chunk,
                    recomputed_on_gpu=True,
                    transition=((heads, self.d_key, self.d_key),),
                ),
            ),
            # the delta rule's kernels, for which a token is two
            matrix_flops=2 * heads * (2 * DELTA_RULE_CHUNK * (3 * self.d_key + 2 * self.d_value) + 6 * self.d_key * self.d_value),
        )

    @classmethod
    def small(cls) -> "RWKV7Config":
        return cls(heads=4, d_key=6, d_value=5, decay_low_rank_dim=3, a_low_rank_dim=2, gate_low_rank_dim=7, v_low_rank_dim=5)
