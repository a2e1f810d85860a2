"""Settings of softmax attention, and `HeadsConfig`, which B'MOJO and GSA share."""

from dataclasses import replace
from typing import Literal

from pydantic import Field

from baton.models.initializers import Constant
from baton.models.settings import MixerConfig
from baton.models.settings.cost_model import WINDOW_BLOCK, MixerCosts, RecurrenceCosts, SavedTensor, saved_by_norm
from baton.models.settings.declarations import ParameterDeclaration, StateDeclaration, column, head_norm, output, split


class HeadsConfig(MixerConfig):
    """Numbers of heads, for grouped-query attention."""

    head_dim: int = Field(64, ge=1, description="width of a head")
    heads: int | None = Field(None, ge=1, description="number of query heads; null: d_model / head_dim")
    kv_heads: int | None = Field(
        None, ge=1, description="number of key and value heads, each shared by heads / kv_heads query heads; null: heads"
    )

    def head_counts(self, d_model: int) -> tuple[int, int]:
        """The numbers of query heads and of key heads."""
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
    """Softmax attention with rotary positions (RoPE) over the whole document or a sliding window (Transformer++, Mistral)."""

    kind: Literal["attention"] = "attention"
    window: int | None = Field(
        None, ge=1, description="tokens that a query attends to, including its own; null: the whole document up to it"
    )
    rope_theta: float | None = Field(1e4, gt=0, description="base of the rotary angles; null: no rotary positions")
    qkv_bias: bool = Field(False, description="whether the projections of queries, keys and values have biases, as in Qwen2")
    qk_norm: bool = Field(
        False, description="whether RMSNorm over each head of queries and of keys precedes the rotary positions, as in Qwen3"
    )

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
                f"head_dim={self.head_dim} is odd, and rotary positions rotate pairs; make it even or set rope_theta=null"
            )

    def parameters(self, d_model: int) -> tuple[ParameterDeclaration, ...]:
        heads, kv_heads = self.head_counts(d_model)
        width, kv_width = heads * self.head_dim, kv_heads * self.head_dim
        widths = {"q": width, "k": kv_width, "v": kv_width}
        biases = (split(f"qkv_bias.{name}", rows, init=Constant(0.0)) for name, rows in widths.items())
        norms = (head_norm(f"{name}_norm", self.head_dim) for name in "qk")
        return (
            column("in_proj", d_model, widths),
            *(biases if self.qkv_bias else ()),
            *(norms if self.qk_norm else ()),
            output("out_proj", width, d_model),
        )

    def state(self, d_model: int) -> tuple[StateDeclaration, ...]:
        grows = self.window is None
        shape = (0 if self.window is None else self.window - 1, self.head_counts(d_model)[1], self.head_dim)
        return (
            StateDeclaration("k", shape, "compute", tp=1, grows=grows),
            StateDeclaration("v", shape, "compute", tp=1, grows=grows),
            StateDeclaration("seen", (), "int64", tp=None, grad=False),
        )

    def activation_costs(self, d_model: int) -> MixerCosts:
        heads, kv_heads = self.head_counts(d_model)
        width, kv_width = heads * self.head_dim, kv_heads * self.head_dim
        saved = [
            SavedTensor("in_proj input", d_model, "compute", split=False),
            # without a bias v is a view of the projection, which keeps all of it in memory; GPU kernels read contiguous copies
            SavedTensor("q, k and v", kv_width if self.qkv_bias else width + 2 * kv_width, "compute", device="cpu"),
            SavedTensor("v", kv_width, "compute", device="gpu"),
            SavedTensor("log-sum-exp", heads, "float32", device="gpu"),
            SavedTensor("out_proj input", width, "compute"),
        ]
        if self.window is None:
            saved += [SavedTensor("outputs for other ranks", width, "compute", dealt=True)]
        if self.qk_norm:
            for name, channels, rows in (("q_norm", width, heads), ("k_norm", kv_width, kv_heads)):
                norm = saved_by_norm(name, channels, rows=rows)
                # without a bias the input in float32 is a view of the projection
                saved += [replace(s, cast=not self.qkv_bias) if s.name.endswith("input") and s.device == "cpu" else s for s in norm]
        if self.rope_theta is not None:
            # a cosine and a sine per pair of channels, shared by queries and keys and by all heads
            saved += [
                SavedTensor("cosines and sines", self.head_dim, "float32", split=False),
                SavedTensor("rotated q and k", width + kv_width, "compute"),
            ]
        else:
            views = not (self.qkv_bias or self.qk_norm)
            saved += [SavedTensor("q and k", width + kv_width, "compute", device="gpu" if views else None)]
        chunk = None if self.window is None else max(WINDOW_BLOCK, self.window)
        return MixerCosts(
            saved=tuple(saved),
            recurrences=(RecurrenceCosts("window_attention", self.state(d_model), chunk=chunk),),
            attended=((width, self.window),),
            masks=self.window is None,
        )

    @classmethod
    def small(cls) -> "AttentionConfig":
        return cls(head_dim=6, heads=8, kv_heads=4, window=4)
