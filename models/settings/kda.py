"""Settings of Kimi Delta Attention."""

from dataclasses import replace
from fractions import Fraction
from typing import ClassVar, Literal

from pydantic import Field

from baton.models.initializers import Constant, InverseSoftplusLogUniform, LogUniform, Projection
from baton.models.settings.cost_model import MixerCosts, SavedTensor
from baton.models.settings.declarations import ParameterDeclaration, low_rank_column, replicated, split
from baton.models.settings.delta_rule import DecayingDeltaRuleConfig
from baton.models.settings.saved_tensors import saved_before_gate


class KDAConfig(DecayingDeltaRuleConfig):
    """The delta rule with a decay per key channel and a gated output (Kimi Team 2025, "Kimi Linear: An Expressive, Efficient
    Attention Architecture")."""

    default_keys: ClassVar[Fraction] = Fraction(1)

    kind: Literal["kda"] = "kda"
    heads: int | None = Field(None, ge=1, description="number of heads; null: d_model / d_key")
    d_key: int = Field(128, ge=1, description="width of a head's queries and keys; 128 in the paper")
    d_value: int = Field(128, ge=1, description="width of a head's values; 128 in the paper")
    gate_low_rank_dim: int | None = Field(
        None,
        ge=1,
        description="rank of the low-rank projections of decay and output gate; null: d_value, a head's width as in the paper",
    )
    gate_bias: bool = Field(
        False,
        description="whether the output gate's projection has a bias, as in flash-linear-attention's layer; the paper's has none",
    )

    @property
    def rank(self) -> int:
        """Rank of either low-rank projection."""
        return self.gate_low_rank_dim or self.d_value

    def parameters(self, d_model: int) -> tuple[ParameterDeclaration, ...]:
        heads, rank = self.value_head_count(d_model), self.rank
        keys, values = heads * self.d_key, heads * self.d_value
        return (
            *super().parameters(d_model),
            replicated("decay_code_proj", d_model, rank),
            low_rank_column("decay_proj", rank, keys, init=Projection(rank)),
            replicated("gate_code_proj", d_model, rank),
            low_rank_column("gate_proj", rank, values, init=Projection(rank)),
            split("A_log", heads, init=LogUniform(self.A_init_min, self.A_init_max)),
            split("dt_bias", keys, init=InverseSoftplusLogUniform(self.dt_min, self.dt_max, self.dt_floor)),
            *((split("gate_bias", values, init=Constant(0.0)),) if self.gate_bias else ()),
        )

    def activation_costs(self, d_model: int) -> MixerCosts:
        heads, costs = self.value_head_count(d_model), super().activation_costs(d_model)
        keys, values = heads * self.d_key, heads * self.d_value
        saved = (
            SavedTensor("codes", 2 * self.rank, "compute", split=False),
            # softplus's input and output, and the decay
            SavedTensor("decays", 3 * keys, "float32"),
            *saved_before_gate(values),
            SavedTensor("gate", values, "compute", device="gpu"),
            SavedTensor("sigmoid of the gate", values, "float32", device="cpu"),
        )
        return replace(costs, saved=(*costs.saved, *saved))

    @classmethod
    def small(cls) -> "KDAConfig":
        return cls(heads=4, d_key=33, d_value=5, gate_low_rank_dim=3)
