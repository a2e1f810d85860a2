"""Settings of RetNet's retention."""

from typing import Literal

from pydantic import Field

from baton.models.settings.cost_model import (
    LINEAR_ATTENTION_CHUNK,
    Carrier,
    Footprint,
    Kept,
    Parameter,
    StateLeaf,
    activated,
    column,
    column_gradient,
    linear_attention_flops,
    rms_norm,
    row,
    row_sum,
    scores_kept,
)
from baton.models.settings.linear_attention import FeatureMap, HeadSizes, LinearAttentionConfig, whole


class RetNetConfig(LinearAttentionConfig):
    """Linear attention with rotary positions and a fixed decay per head (Sun et al., "Retentive Network")."""

    kind: Literal["retnet"] = "retnet"
    heads: int | None = Field(None, ge=1, description="heads of queries, keys and values; null: d_model / d_key")
    d_key: int = Field(256, ge=2, description="width of a head's queries and keys, even; 256 in the paper")
    d_value: int | None = Field(None, ge=1, description="width of a head's values; null: 2 d_key, as in the paper")
    feature_map: FeatureMap = Field("identity", description="of queries and keys; the paper's models have none. elu is elu + 1")
    decay_exponent: float = Field(
        5.0, gt=0, description="head h keeps 1 - 2^-(decay_exponent + h) of its state per token; the paper's 5"
    )
    rope_theta: float = Field(1e4, gt=0, description="base of the rotary angles; 1e4 in the paper")

    def head_sizes(self, d_model: int) -> HeadSizes:
        heads = self.heads or whole("heads", "d_model / d_key", d_model, self.d_key)
        return HeadSizes(heads, self.d_key, self.d_value or 2 * self.d_key)

    def check(self, d_model: int) -> None:
        super().check(d_model)
        if self.d_key % 2:
            raise ValueError(f"d_key={self.d_key} is odd, and rotary positions turn pairs; make it even")

    def footprint(self, d_model: int) -> Footprint:
        heads, d_key, d_value = self.head_sizes(d_model)
        keys, values, chunk = heads * d_key, heads * d_value, LINEAR_ATTENTION_CHUNK
        # of the feature maps only relu keeps its result; the others keep what they read, a view of the projection
        mapped = (Kept("mapped q and k", 2 * keys, "compute"),) if self.feature_map == "relu" else ()
        return Footprint(
            parameters=(
                column("in_proj", d_model, 2 * keys + 2 * values),
                Parameter("norm.weight", (d_value,), partial=True),
                row("out_proj", values, d_model),
            ),
            kept=(
                Kept("in_proj input", d_model, "compute", split=False),
                Kept("q, k, v and gate", 2 * keys + 2 * values, "compute"),
                *mapped,
                # a cosine and a sine per pair, the same for queries and keys and for all heads
                Kept("cosines and sines", d_key, "float32", split=False),
                Kept("turned q and k", 2 * keys, "compute"),
                *scores_kept(heads, keys, keys, values),
                *rms_norm("norm", values, rows=heads),
                Kept("normalised output", values, "float32"),
                *activated("gate", values),
                Kept("out_proj input", values, "compute"),
            ),
            carriers=(
                Carrier(
                    "gated_linear_attention",
                    (StateLeaf("S", (heads, d_key, d_value), "float32", tp=0),),
                    chunk=chunk,
                    remade=True,
                    transition=((heads, 1, 1),),
                ),
            ),
            reductions=(column_gradient("in_proj", d_model), row_sum("out_proj", d_model)),
            matrix_flops=linear_attention_flops(heads, d_key, d_value, chunk),
        )

    @classmethod
    def small(cls) -> "RetNetConfig":
        # a first token's output is (q . k) v; were q . k near 0, the norm behind it would make float32's rounding visible
        return cls(heads=4, d_key=10, d_value=9, feature_map="elu", decay_exponent=1.0)
