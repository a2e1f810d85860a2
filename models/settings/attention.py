"""Settings of softmax attention, and what B'MOJO's shares with it."""

from typing import Literal

from pydantic import Field

from baton.models.settings import MixerConfig
from baton.models.settings.cost_model import (
    WINDOW_BLOCK,
    Carrier,
    Footprint,
    Kept,
    StateLeaf,
    column,
    column_gradient,
    row,
    row_sum,
)


class HeadsConfig(MixerConfig):
    """Query heads and the key heads that they share."""

    head_dim: int = Field(64, ge=1, description="width of a head")
    heads: int | None = Field(None, ge=1, description="query heads; null: d_model / head_dim")
    kv_heads: int | None = Field(None, ge=1, description="key and value heads, each shared by heads / kv_heads; null: heads")

    def head_counts(self, d_model: int) -> tuple[int, int]:
        """Query heads and key heads."""
        heads = self.heads or d_model // self.head_dim
        return heads, self.kv_heads or heads

    def sizes(self, d_model: int) -> dict[str, int]:
        heads, kv_heads = self.head_counts(d_model)
        return {"heads": heads, "kv_heads": kv_heads}

    def check(self, d_model: int) -> None:
        if self.heads is None and d_model % self.head_dim:
            raise ValueError(f"head_dim={self.head_dim} does not divide d_model={d_model}; set heads, or another head_dim")
        heads, kv_heads = self.head_counts(d_model)
        if heads % kv_heads:
            raise ValueError(f"kv_heads={kv_heads} does not divide heads={heads}")


class AttentionConfig(HeadsConfig):
    """Softmax attention with rotary positions, over the whole document or a sliding window (Transformer++, Mistral)."""

    kind: Literal["attention"] = "attention"
    window: int | None = Field(None, ge=1, description="tokens that a query sees, itself included; null: all of its document")
    rope_theta: float | None = Field(1e4, gt=0, description="base of the rotary angles; null: no positions")

    @property
    def state_grows(self) -> bool:
        return self.window is None

    @property
    def longest_tail(self) -> int:
        return 0 if self.window is None else self.window - 1

    def check(self, d_model: int) -> None:
        super().check(d_model)
        if self.rope_theta is not None and self.head_dim % 2:
            raise ValueError(
                f"head_dim={self.head_dim} is odd, and rotary positions turn pairs; make it even or set rope_theta=null"
            )

    def footprint(self, d_model: int) -> Footprint:
        heads, kv_heads = self.head_counts(d_model)
        width, kv_width = heads * self.head_dim, kv_heads * self.head_dim
        whole = self.window is None
        shape = (0 if self.window is None else self.window - 1, kv_heads, self.head_dim)
        kept = [
            Kept("in_proj input", d_model, "compute", split=False),
            # the values are a view of it, so all of it stays; a GPU's kernels read each in one piece
            Kept("q, k and v", width + 2 * kv_width, "compute", device="cpu"),
            Kept("v", kv_width, "compute", device="gpu"),
            Kept("sums of weights", heads, "float32", device="gpu"),
            Kept("out_proj input", width, "compute"),
        ]
        if self.rope_theta is not None:
            # a cosine and a sine per pair, the same for queries and keys and for all heads
            kept += [
                Kept("cosines and sines", self.head_dim, "float32", split=False),
                Kept("turned q and k", width + kv_width, "compute"),
            ]
        else:
            kept += [Kept("q and k", width + kv_width, "compute", device="gpu")]
        return Footprint(
            parameters=(column("in_proj", d_model, width + 2 * kv_width), row("out_proj", width, d_model)),
            kept=tuple(kept),
            carriers=(
                Carrier(
                    "window_attention",
                    (
                        StateLeaf("k", shape, "compute", tp=1, grows=whole),
                        StateLeaf("v", shape, "compute", tp=1, grows=whole),
                        StateLeaf("seen", (), "int64", tp=None, grad=False),
                    ),
                    chunk=None if self.window is None else max(WINDOW_BLOCK, self.window),
                ),
            ),
            reductions=(column_gradient("in_proj", d_model), row_sum("out_proj", d_model)),
            attended=((width, self.window),),
            masks=whole,
        )

    @classmethod
    def small(cls) -> "AttentionConfig":
        return cls(head_dim=6, heads=8, kv_heads=4, window=4)
