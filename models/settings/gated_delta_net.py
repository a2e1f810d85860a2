"""Settings of Gated DeltaNet."""

from dataclasses import replace
from fractions import Fraction
from typing import ClassVar, Literal

from pydantic import Field

from baton.models.initializers import InverseSoftplusLogUniform, LogUniform
from baton.models.settings.cost_model import MixerCosts, SavedTensor
from baton.models.settings.declarations import ParameterDeclaration, split
from baton.models.settings.delta_rule import DecayingDeltaRuleConfig
from baton.models.settings.saved_tensors import saved_before_gate, saved_by_gate


class GatedDeltaNetConfig(DecayingDeltaRuleConfig):
    """The delta rule with a decay per head and a gated output (Yang, Kautz & Hatamizadeh 2024, "Gated Delta Networks")."""

    default_keys: ClassVar[Fraction] = Fraction(3, 4)

    kind: Literal["gated_delta_net"] = "gated_delta_net"
    heads: int | None = Field(
        None,
        ge=1,
        description="number of heads; null: 3/4 d_model / d_key, which gives 6 d_model^2 parameters, as in the released models",
    )
    d_key: int = Field(256, ge=1, description="width of a head's queries and keys; 256 as released")
    d_value: int = Field(512, ge=1, description="width of a head's values; twice d_key as released")

    @property
    def gates(self) -> dict[str, int]:
        return {"dt": 1, "gate": self.d_value}

    def parameters(self, d_model: int) -> tuple[ParameterDeclaration, ...]:
        heads = self.value_head_count(d_model)
        return (
            *super().parameters(d_model),
            split("A_log", heads, init=LogUniform(self.A_init_min, self.A_init_max)),
            split("dt_bias", heads, init=InverseSoftplusLogUniform(self.dt_min, self.dt_max, self.dt_floor)),
        )

    def activation_costs(self, d_model: int) -> MixerCosts:
        heads, costs = self.value_head_count(d_model), super().activation_costs(d_model)
        saved = (
            # softplus's input and output, and the decay
            SavedTensor("decays", 3 * heads, "float32"),
            *saved_before_gate(heads * self.d_value),
            *saved_by_gate("gate", heads * self.d_value),
        )
        return replace(costs, saved=(*costs.saved, *saved))
