"""What Mamba and Longhorn share."""

from pydantic import Field

from baton.models.settings import MixerConfig


class GatedScanConfig(MixerConfig):
    """The skeleton: projection, short convolution, gated diagonal scan, projection."""

    expand: int = Field(2, ge=1, description="d_inner / d_model; 2 in every model of both papers")
    d_state: int = Field(16, ge=1, description="numbers of state per channel; 16 in every model of both papers")
    d_conv: int = Field(4, ge=2, description="tokens that the causal convolution sees; 4 as released, the papers do not say")
    dt_rank: int | None = Field(None, ge=1, description="rank of the step sizes' projection; null: d_model / 16, rounded up")

    def sizes(self, d_model: int) -> dict[str, int]:
        return {"expand * model.d_model": self.expand * d_model}

    @classmethod
    def small(cls) -> "GatedScanConfig":
        return cls(expand=3, d_state=5, d_conv=4, dt_rank=2)  # type: ignore[call-arg]
