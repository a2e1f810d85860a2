"""Settings of softmax attention, and `HeadsConfig`, which B'MOJO and GSA share."""

from dataclasses import replace
from functools import cache
from typing import Literal

from pydantic import Field

from baton.models.initializers import Constant
from baton.models.rope import Rates, scaled_rope
from baton.models.settings import MixerConfig
from baton.models.settings.cost_model import WINDOW_BLOCK, MixerCosts, RecurrenceCosts, SavedTensor
from baton.models.settings.declarations import ParameterDeclaration, StateDeclaration, column, head_norm, output, split
from baton.models.settings.rope_scaling import RopeScaling, YarnScaling
from baton.models.settings.saved_tensors import saved_by_norm


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
    """Softmax attention over the whole document or a sliding window, with rotary positions (RoPE) or none (Transformer++, Mistral,
    Qwen3-Next)."""

    kind: Literal["attention"] = "attention"
    window: int | None = Field(
        None, ge=1, description="tokens that a query attends to, including its own; null: the whole document up to it"
    )
    rope_theta: float | None = Field(1e4, gt=0, description="base of the rotary angles; null: no rotary positions")
    rope_fraction: float = Field(
        1.0,
        gt=0,
        le=1,
        description="share of a head's channels that is rotated, the first ones; transformers' partial_rotary_factor, 0.25 in "
        "Qwen3-Next",
    )
    rope_scaling: RopeScaling | None = Field(
        None, description="how the rotary angles of a longer context are those of the one trained with; null: they are not scaled"
    )
    qkv_bias: bool = Field(False, description="whether the projections of queries, keys and values have biases, as in Qwen2")
    qk_norm: bool = Field(
        False, description="whether RMSNorm over each head of queries and of keys precedes the rotary positions, as in Qwen3"
    )
    output_gate: bool = Field(
        False,
        description="whether the attention's output is multiplied by the sigmoid of a projection of the input, a gate per channel, "
        "as in Qwen3-Next",
    )

    sinks: bool = Field(
        False,
        description="whether the softmax's sum has the exponential of a learned logit per head beside those of the scores, so that "
        "a head may attend to nothing, as in gpt-oss",
    )
    score_soft_cap: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="scores s, after their scale, become cap tanh(s / cap) before the softmax, as in Gemma 2, where the cap is 50; "
        "null: they are not capped",
    )

    @property
    def state_grows(self) -> bool:
        return self.window is None

    @property
    def rope_channels(self) -> int:
        """Channels of a head that are rotated; 0 without rotary positions."""
        return 0 if self.rope_theta is None else int(self.head_dim * self.rope_fraction)

    @property
    def rope(self) -> tuple[Rates, float]:
        """Radians per position of each rotated pair, and the factor of rotated channels. With rotary positions alone."""
        assert self.rope_theta is not None
        return _rope(self.rope_theta, self.rope_channels, self.rope_scaling)

    @property
    def longest_tail(self) -> int:
        return 0 if self.window is None else self.window - 1

    def check(self, d_model: int) -> None:
        super().check(d_model)
        if self.rope_theta is None:
            for name in ("rope_fraction", "rope_scaling"):
                if (value := getattr(self, name)) != type(self).model_fields[name].default:
                    raise ValueError(f"{name}={value} without rotary positions; set rope_theta, or leave {name} out")
        elif self.rope_channels % 2 or not self.rope_channels:
            if self.rope_fraction < 1:
                raise ValueError(
                    f"rope_fraction={self.rope_fraction} of head_dim={self.head_dim} is {self.rope_channels} channels, and rotary "
                    f"positions rotate pairs; choose another fraction"
                )
            raise ValueError(
                f"head_dim={self.head_dim} is odd, and rotary positions rotate pairs; make it even or set rope_theta=null"
            )
        elif isinstance(self.rope_scaling, YarnScaling) and self.rope_theta <= 1:
            raise ValueError(f"rope_theta={self.rope_theta} is not above 1, so that yarn has no fast and slow pairs; raise it")

    def parameters(self, d_model: int) -> tuple[ParameterDeclaration, ...]:
        heads, kv_heads = self.head_counts(d_model)
        width, kv_width = heads * self.head_dim, kv_heads * self.head_dim
        widths = {"q": width, "k": kv_width, "v": kv_width}
        biases = (split(f"qkv_bias.{name}", rows, init=Constant(0.0)) for name, rows in widths.items())
        norms = (head_norm(f"{name}_norm", self.head_dim) for name in "qk")
        return (
            column("in_proj", d_model, widths | ({"gate": width} if self.output_gate else {})),
            *(biases if self.qkv_bias else ()),
            *(norms if self.qk_norm else ()),
            *((split("sinks", heads, init=Constant(0.0)),) if self.sinks else ()),
            output("out_proj", width, d_model),
        )

    def state(self, d_model: int) -> tuple[StateDeclaration, ...]:
        grows = self.window is None
        shape = (0 if self.window is None else self.window - 1, self.head_counts(d_model)[1], self.head_dim)
        return (
            StateDeclaration("k", shape, "compute", tp=1, grows=grows, tail=not grows),
            StateDeclaration("v", shape, "compute", tp=1, grows=grows, tail=not grows),
            StateDeclaration("seen", (), "int64", tp=None, grad=False),
        )

    def activation_costs(self, d_model: int) -> MixerCosts:
        heads, kv_heads = self.head_counts(d_model)
        width, kv_width = heads * self.head_dim, kv_heads * self.head_dim
        projected = (2 if self.output_gate else 1) * width + 2 * kv_width
        saved = [
            SavedTensor("in_proj input", d_model, "compute", split=False),
            # without a bias v is a view of the projection, which keeps all of it in memory; GPU kernels read contiguous copies
            SavedTensor("q, k and v", kv_width if self.qkv_bias else projected, "compute", device="cpu"),
            SavedTensor("v", kv_width, "compute", device="gpu"),
            SavedTensor("log-sum-exp", heads, "float32", device="gpu"),
            SavedTensor("out_proj input", width, "compute"),
        ]
        if self.output_gate:
            saved += [
                # the gate is a view of it
                SavedTensor("projection", projected, "compute", device="gpu"),
                SavedTensor("gated output", width, "compute", device="gpu"),
                SavedTensor("gated output", width, "float32", device="cpu"),
                SavedTensor("activated gate", width, "float32", device="cpu"),
            ]
        if self.window is None:
            saved += [SavedTensor("outputs for other ranks", width, "compute", dealt=True)]
            saved += [SavedTensor("sinks for other ranks", heads, "float32", dealt=True)] if self.sinks else []
        if self.qk_norm:
            for name, channels, rows in (("q_norm", width, heads), ("k_norm", kv_width, kv_heads)):
                norm = saved_by_norm(name, channels, rows=rows)
                # without a bias the input in float32 is a view of the projection
                saved += [replace(s, cast=not self.qkv_bias) if s.name.endswith("input") and s.device == "cpu" else s for s in norm]
        if self.rope_theta is not None:
            # a cosine and a sine per pair of channels, shared by queries and keys and by all heads
            saved += [
                SavedTensor("cosines and sines", self.rope_channels, "float32", split=False),
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


@cache
def _rope(theta: float, channels: int, scaling: RopeScaling | None) -> tuple[Rates, float]:
    return scaled_rope(theta, channels, None if scaling is None else scaling.model_dump())
