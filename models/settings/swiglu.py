"""Settings of the SwiGLU MLP."""

from typing import Literal

from pydantic import Field

from baton.models.settings import MixerConfig
from baton.models.settings.cost_model import MixerCosts, SavedTensor
from baton.models.settings.declarations import ParameterDeclaration, column, output


class SwiGLUConfig(MixerConfig):
    """The gated MLP of Llama (Shazeer 2020, "GLU Variants Improve Transformer")."""

    kind: Literal["swiglu"] = "swiglu"
    hidden: int | None = Field(None, ge=1, description="hidden width; null: 8/3 d_model rounded up to a multiple of `multiple_of`")
    multiple_of: int = Field(256, ge=1, description="the default hidden width is rounded up to a multiple of this; 256 as in Llama")

    def width(self, d_model: int) -> int:
        """The hidden width."""
        return self.hidden or -(-8 * d_model // (3 * self.multiple_of)) * self.multiple_of

    def sizes(self, d_model: int) -> dict[str, int]:
        return {"hidden": self.width(d_model)}

    def parameters(self, d_model: int) -> tuple[ParameterDeclaration, ...]:
        hidden = self.width(d_model)
        return (column("in_proj", d_model, {"gate": hidden, "up": hidden}), output("out_proj", hidden, d_model))

    def activation_costs(self, d_model: int) -> MixerCosts:
        hidden = self.width(d_model)
        return MixerCosts(
            saved=(
                SavedTensor("in_proj input", d_model, "compute", split=False),
                SavedTensor("gate and up", 2 * hidden, "compute", device="gpu"),
                SavedTensor("gate and up", 2 * hidden, "float32", device="cpu"),
                SavedTensor("activated gate", hidden, "float32", device="cpu"),
                SavedTensor("out_proj input", hidden, "compute", device="gpu", recomputed=True),
                SavedTensor("out_proj input", hidden, "compute", device="cpu"),
            )
        )

    @classmethod
    def small(cls) -> "SwiGLUConfig":
        return cls(hidden=20)
