"""Settings of RWKV's channel mixing."""

from typing import Literal

from pydantic import Field

from baton.models.settings import MixerConfig
from baton.models.settings.cost_model import MixerCosts, RecurrenceCosts, SavedTensor
from baton.models.settings.declarations import ParameterDeclaration, StateDeclaration, column, output, shift_mix


class ChannelMixConfig(MixerConfig):
    """RWKV-7's MLP: a squared ReLU of the token mixed with the one before it (Peng et al. 2025, "RWKV-7 'Goose' with Expressive
    Dynamic State Evolution", section 4.2)."""

    kind: Literal["channel_mix"] = "channel_mix"
    hidden: int | None = Field(None, ge=1, description="hidden width; null: 4 d_model, as in the paper")

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
            ),
            recurrences=(RecurrenceCosts("short_conv", self.state(d_model), chunk=0),),
        )

    @classmethod
    def small(cls) -> "ChannelMixConfig":
        return cls(hidden=20)
