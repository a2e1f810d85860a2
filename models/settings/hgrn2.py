"""Settings of HGRN2."""

from typing import Literal

from pydantic import Field

from baton.models.settings.linear_attention import HeadSizes, LinearAttentionConfig, whole


class HGRN2Config(LinearAttentionConfig):
    """A gated recurrent network with outer-product states (Qin et al., "HGRN2: Gated Linear RNNs with State Expansion")."""

    kind: Literal["hgrn2"] = "hgrn2"
    heads: int | None = Field(None, ge=1, description="heads; null: d_model / d_key")
    d_key: int = Field(128, ge=1, description="forget gates of a head, the paper's expansion ratio; 128 in its language models")
    d_value: int | None = Field(None, ge=1, description="width of a head's inputs; null: d_model / heads")
    lower_bound: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="the least that a forget gate keeps. The paper learns it, rising from 0 with depth: give deeper layers of the "
        "pattern a name of their own, with a larger one",
    )

    def head_sizes(self, d_model: int) -> HeadSizes:
        heads = self.heads or whole("heads", "d_model / d_key", d_model, self.d_key)
        return HeadSizes(heads, self.d_key, self.d_value or whole("d_value", "d_model / heads", d_model, heads))

    @classmethod
    def small(cls) -> "HGRN2Config":
        return cls(heads=4, d_key=7, d_value=5, lower_bound=0.25)
