"""Settings of B'MOJO."""

from typing import Literal

from pydantic import Field

from baton.models.settings.attention import HeadsConfig
from baton.models.settings.mamba import MambaConfig


class BMojoConfig(HeadsConfig):
    """Attention over a window, fading and eidetic tokens beside a state space (Zancato et al.). B'MOJO-F: eidetic=0.

    The paper gives the window and leaves the other sizes open.
    """

    kind: Literal["bmojo"] = "bmojo"
    window: int = Field(512, ge=1, description="tokens of the window, and between two publications of the memory; the paper's 512")
    fading: Literal["chunk", "sliding"] = Field(
        "chunk", description="chunk: the last outputs of the state space before the window's multiple, as in the paper; sliding: "
        "those one to two windows back, of every token"
    )  # fmt: skip
    fading_tokens: int = Field(
        16, ge=0, description="with fading=chunk: outputs in a memory; 1 is Algorithm 1, more train them better"
    )
    eidetic: int = Field(64, ge=0, description="tokens with the largest innovation that are kept verbatim; 0: B'MOJO-F")
    predictor: int = Field(4, ge=1, description="outputs that foretell the next one, weighted 2^-1, 2^-2, ... and normalised")
    ssm: MambaConfig = Field(default_factory=MambaConfig, description="the fading memory")

    @property
    def n_fading(self) -> int:
        """Fading rows in a published memory."""
        return self.fading_tokens if self.fading == "chunk" else 0

    def sizes(self, d_model: int) -> dict[str, int]:
        return {**super().sizes(d_model), **{f"ssm.{name}": size for name, size in self.ssm.sizes(d_model).items()}}

    def check(self, d_model: int) -> None:
        super().check(d_model)
        if self.n_fading > self.window:
            raise ValueError(f"fading_tokens={self.fading_tokens} exceeds window={self.window}: a memory would reach behind itself")

    @classmethod
    def small(cls) -> "BMojoConfig":
        ssm = MambaConfig(expand=3, d_state=5, d_conv=4, dt_rank=2)
        return cls(head_dim=3, heads=8, kv_heads=4, window=4, fading_tokens=2, eidetic=3, predictor=2, ssm=ssm)
