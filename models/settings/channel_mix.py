"""Settings of RWKV's channel mixing."""

from dataclasses import replace
from typing import Literal

from pydantic import Field

from baton.models.settings import MixerConfig
from baton.models.settings.cost_model import MixerCosts, RecurrenceCosts, SavedTensor
from baton.models.settings.declarations import ParameterDeclaration, StateDeclaration, column, output, shift_mix, whole


class ChannelMixConfig(MixerConfig):
    """RWKV's MLP: a squared ReLU of the token mixed with the one before it (Peng et al. 2025, "RWKV-7 'Goose' with Expressive
    Dynamic State Evolution", section 4.2), in RWKV-6 with a gate (Peng et al. 2024, "Eagle and Finch", section 4)."""

    kind: Literal["channel_mix"] = "channel_mix"
    hidden: int | None = Field(None, ge=1, description="hidden width; null: 4 d_model, as in RWKV-7. RWKV-6 has 3.5 d_model")
    receptance: bool = Field(
        False, description="whether the output is multiplied by the sigmoid of a projection of the input, as in RWKV-6"
    )

    def width(self, d_model: int) -> int:
        """The hidden width."""
        return self.hidden or 4 * d_model

    def sizes(self, d_model: int) -> dict[str, int]:
        return {"hidden": self.width(d_model)}

    @property
    def longest_tail(self) -> int:
        return 1

    def parameters(self, d_model: int) -> tuple[ParameterDeclaration, ...]:
        hidden = self.width(d_model)
        return (
            shift_mix("shift_mix.k", d_model, 1.0),
            column("in_proj", d_model, hidden),
            output("out_proj", hidden, d_model),
            *((shift_mix("shift_mix.r", d_model, 1.0), whole("receptance_proj", d_model, d_model)) if self.receptance else ()),
        )

    def state(self, d_model: int) -> tuple[StateDeclaration, ...]:
        return (StateDeclaration("shift", (1, d_model), "compute", tp=None),)

    def activation_costs(self, d_model: int) -> MixerCosts:
        hidden = self.width(d_model)
        return MixerCosts(
            saved=(
                SavedTensor("input", d_model, "compute", split=False),
                SavedTensor("difference to the token before", d_model, "compute", split=False),
                SavedTensor("mixed input", d_model, "compute", split=False),
                SavedTensor("positive part", hidden, "compute"),
                SavedTensor("out_proj input", hidden, "compute"),
                *(self._saved_by_receptance(d_model) if self.receptance else ()),
            ),
            recurrences=(RecurrenceCosts("short_conv", self.state(d_model), chunk=0),),
        )

    def _saved_by_receptance(self, d_model: int) -> tuple[SavedTensor, ...]:
        gate = (
            SavedTensor("mixed input of the receptance", d_model, "compute"),
            SavedTensor("receptance, and out_proj output", 2 * d_model, "compute", device="gpu"),
            SavedTensor("sigmoid of the receptance, and out_proj output", 2 * d_model, "float32", device="cpu"),
        )
        return tuple(replace(saved, split=False, residual_stream=True) for saved in gate)

    @classmethod
    def small(cls) -> "ChannelMixConfig":
        return cls(hidden=20)
