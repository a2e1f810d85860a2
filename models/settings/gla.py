"""Settings of gated linear attention."""

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
    log_sigmoid,
    replicated_gradient,
    rms_norm,
    row,
    row_sum,
    scores_kept,
    split,
)
from baton.models.settings.linear_attention import FeatureMap, HeadSizes, LinearAttentionConfig, whole


class GLAConfig(LinearAttentionConfig):
    """Linear attention whose state decays by key channel (Yang et al., "Gated Linear Attention Transformers")."""

    kind: Literal["gla"] = "gla"
    heads: int = Field(4, ge=1, description="heads of queries, keys and values; 4 in every model of the paper")
    d_key: int | None = Field(None, ge=1, description="width of a head's queries and keys; null: d_model / (2 heads)")
    d_value: int | None = Field(None, ge=1, description="width of a head's values; null: d_model / heads")
    feature_map: FeatureMap = Field("identity", description="of queries and keys; the paper's models have none. elu is elu + 1")
    gate_low_rank_dim: int = Field(16, ge=1, description="rank of the decays' projection; 16 in the paper")
    gate_logit_normalizer: float = Field(
        16.0, gt=0, description="the decay is sigmoid^(1 / gate_logit_normalizer): more begins with a longer memory; the paper's 16"
    )

    def head_sizes(self, d_model: int) -> HeadSizes:
        d_key = self.d_key or whole("d_key", "d_model / (2 heads)", d_model, 2 * self.heads)
        return HeadSizes(self.heads, d_key, self.d_value or whole("d_value", "d_model / heads", d_model, self.heads))

    def footprint(self, d_model: int) -> Footprint:
        heads, d_key, d_value = self.head_sizes(d_model)
        keys, values, chunk = heads * d_key, heads * d_value, LINEAR_ATTENTION_CHUNK
        mapped = () if self.feature_map == "identity" else (Kept("mapped q and k", 2 * keys, "compute"),)
        return Footprint(
            parameters=(
                column("in_proj", d_model, 2 * keys + 2 * values),
                Parameter("code_proj.weight", (self.gate_low_rank_dim, d_model), uses=1),
                column("decay_proj", self.gate_low_rank_dim, keys),
                split("decay_bias", keys),
                Parameter("norm.weight", (d_value,), partial=True),
                row("out_proj", values, d_model),
            ),
            kept=(
                Kept("in_proj input", d_model, "compute", split=False),
                Kept("q, k, v and gate", 2 * keys + 2 * values, "compute"),
                *mapped,
                Kept("code", self.gate_low_rank_dim, "compute", split=False),
                *log_sigmoid("decays", keys, view=False),
                Kept("decays", keys, "float32"),
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
                    transition=((heads, d_key, 1),),
                ),
            ),
            reductions=(
                column_gradient("in_proj", d_model),
                replicated_gradient("code", self.gate_low_rank_dim),
                row_sum("out_proj", d_model),
            ),
            matrix_flops=linear_attention_flops(heads, d_key, d_value, chunk),
        )

    @classmethod
    def small(cls) -> "GLAConfig":
        # a first token's output is (q . k) v; were q . k near 0, the norm behind it would make float32's rounding visible
        return cls(heads=4, d_key=7, d_value=5, feature_map="elu", gate_low_rank_dim=3)
