"""Settings of RWKV-6's time mixing."""

from typing import ClassVar, Literal

from pydantic import Field

from baton.models.initializers import Constant, Ramp, linear
from baton.models.settings import MixerConfig
from baton.models.settings.cost_model import (
    MixerCosts,
    RecurrenceCosts,
    SavedTensor,
    linear_attention_costs,
    linear_attention_flops,
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
    whole,
)
from baton.models.settings.saved_tensors import saved_scores


class RWKV6Config(MixerConfig):
    """RWKV-6's time mixing: a matrix state with a decay per key channel, read before the token is written, with a token shift that
    depends on the token (Peng et al. 2024, "Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence")."""

    mixes: ClassVar[dict[str, float]] = {"r": 0.5, "w": 1.0, "k": 1.0, "v": 1.0, "g": 0.5}
    """Exponents of the initial token shift, by what is projected, as in the authors' code for the first layer."""

    kind: Literal["rwkv6"] = "rwkv6"
    heads: int | None = Field(None, ge=1, description="number of heads; null: d_model / d_key")
    d_key: int = Field(64, ge=2, description="width of a head's receptance, keys and decays; 64 in the paper")
    d_value: int = Field(64, ge=2, description="width of a head's values; 64 in the paper")
    mix_low_rank_dim: int = Field(
        32, ge=1, description="rank of what the token adds to each of the five shares of the token before; 32 in the paper's models"
    )
    decay_low_rank_dim: int = Field(64, ge=1, description="rank of the decay's projection; 64 in the paper's models")

    def head_count(self, d_model: int) -> int:
        """The number of heads. Raises ValueError if it is not set and does not follow from d_model."""
        if self.heads is None and d_model % self.d_key:
            raise ValueError(f"d_model / d_key is {d_model} / {self.d_key}, not a number of heads; set heads or another d_key")
        return self.heads or d_model // self.d_key

    def sizes(self, d_model: int) -> dict[str, int]:
        return {"heads": self.head_count(d_model)}

    @property
    def longest_tail(self) -> int:
        return 1

    def check(self, d_model: int) -> None:
        self.head_count(d_model)

    def parameters(self, d_model: int) -> tuple[ParameterDeclaration, ...]:
        heads, rank, decay_rank = self.head_count(d_model), self.mix_low_rank_dim, self.decay_low_rank_dim
        keys, values = heads * self.d_key, heads * self.d_value
        return (
            shift_mix("shift_mix.x", d_model, 1.0),
            *(shift_mix(f"shift_mix.{name}", d_model, exponent) for name, exponent in self.mixes.items()),
            whole("mix_code_proj", d_model, len(self.mixes) * rank),
            *(whole(f"mix_{name}_proj", rank, d_model, init=linear(rank, 0.1)) for name in self.mixes),
            column("r_proj", d_model, keys),
            column("k_proj", d_model, keys),
            column("v_proj", d_model, values),
            column("gate_proj", d_model, values),
            replicated("decay_code_proj", d_model, decay_rank),
            low_rank_column("decay_proj", decay_rank, keys, init=linear(decay_rank, 0.1)),
            split("decay_bias", keys, init=Ramp(-6.0, -1.0, exponent=0.7)),
            split("bonus", keys, init=Ramp(0.5, 0.0)),
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
        heads, mixes = self.head_count(d_model), len(self.mixes)
        keys, values = heads * self.d_key, heads * self.d_value
        shift, S = self.state(d_model)
        return MixerCosts(
            saved=(
                SavedTensor("input", d_model, "compute", split=False),
                SavedTensor("difference to the token before", d_model, "compute", split=False),
                SavedTensor("mixed inputs, and shares", (1 + 2 * mixes) * d_model, "compute", split=False),
                SavedTensor("codes", mixes * self.mix_low_rank_dim + self.decay_low_rank_dim, "compute", split=False),
                SavedTensor("r, k and the next token's r", 3 * keys, "compute"),
                SavedTensor("decays, and their logarithms", 3 * keys, "float32"),
                SavedTensor("v", values, "compute"),
                SavedTensor("products of r and k", keys, "compute"),
                SavedTensor("bonus", heads, "float32"),
                *saved_scores(heads, keys, keys, values),
                SavedTensor("norm input and normalised", 2 * values, "float32"),
                SavedTensor("norm mean and scale", 2 * heads, "float32"),
                SavedTensor("gate", values, "compute", device="gpu"),
                SavedTensor("normalised output", values, "float32"),
                SavedTensor("gate in float32, and activated", 2 * values, "float32", device="cpu"),
                SavedTensor("out_proj input", values, "compute"),
            ),
            recurrences=(RecurrenceCosts("short_conv", (shift,), chunk=0), linear_attention_costs(S, per_key=True)),
            matrix_flops=linear_attention_flops(heads, self.d_key, self.d_value),
        )

    @classmethod
    def small(cls) -> "RWKV6Config":
        # a norm over few values of little difference would cost float32 digits
        return cls(heads=4, d_key=6, d_value=17, mix_low_rank_dim=3, decay_low_rank_dim=7)
