"""Settings of gated linear attention."""

from typing import Literal

from pydantic import Field

from baton.models.settings.linear_attention import FeatureMap, HeadSizes, LinearAttentionConfig, whole


class GLAConfig(LinearAttentionConfig):
    """Linear attention whose state decays by key channel (Yang et al., "Gated Linear Attention Transformers")."""

    kind: Literal["gla"] = "gla"
    heads: int = Field(4, ge=1, description="heads of queries, keys and values; 4 in every model of the paper")
    d_key: int | None = Field(None, ge=1, description="width of a head's queries and keys; null: d_model / (2 heads)")
    d_value: int | None = Field(None, ge=1, description="width of a head's values; null: d_model / heads")
    feature_map: FeatureMap = Field("identity", description="of queries and keys; the paper's models have none. elu is elu + 1")
    gate_rank: int = Field(16, ge=1, description="rank of the decays' projection; 16 in the paper")
    damping: float = Field(
        16.0, gt=0, description="the decay is sigmoid^(1 / damping): more begins with a longer memory; the paper's 16"
    )

    def head_sizes(self, d_model: int) -> HeadSizes:
        d_key = self.d_key or whole("d_key", "d_model / (2 heads)", d_model, 2 * self.heads)
        return HeadSizes(self.heads, d_key, self.d_value or whole("d_value", "d_model / heads", d_model, self.heads))

    @classmethod
    def small(cls) -> "GLAConfig":
        # a first token's output is (q . k) v; were q . k near 0, the norm behind it would make float32's rounding visible
        return cls(heads=4, d_key=7, d_value=5, feature_map="elu", gate_rank=3)
