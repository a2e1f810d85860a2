"""Settings of gated slot attention."""

from typing import Literal

from pydantic import Field

from baton.models.settings.attention import HeadsConfig


class GSAConfig(HeadsConfig):
    """Attention over a few slots that are written by gated averages (Zhang et al., "Gated Slot Attention")."""

    kind: Literal["gsa"] = "gsa"
    head_dim: int = Field(512, ge=1, description="width of a head; 512 in the paper's 1.3B and 2.7B models")
    slots: int = Field(64, ge=1, description="slots of keys and values per head; 64 in the paper")
    damping: float = Field(
        8.0, gt=0, description="a slot keeps sigmoid^(1 / damping): more begins with a longer memory; the paper's 8"
    )
    link: Literal["softmax", "identity", "silu", "relu", "relu2"] = Field(
        "softmax", description="what makes weights of slots out of scores; the others are the paper's ablations"
    )

    @classmethod
    def small(cls) -> "GSAConfig":
        return cls(head_dim=7, heads=8, kv_heads=4, slots=5)
