"""Settings of HGRN2."""

from typing import Literal

from pydantic import Field

from baton.models.settings.cost_model import (
    LINEAR_ATTENTION_CHUNK,
    Carrier,
    Footprint,
    Kept,
    StateLeaf,
    column,
    column_gradient,
    linear_attention_flops,
    log_sigmoid,
    row,
    row_sum,
    scores_kept,
    split,
    split_norm,
)
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

    def footprint(self, d_model: int) -> Footprint:
        heads, d_key, d_value = self.head_sizes(d_model)
        keys, values, chunk = heads * d_key, heads * d_value, LINEAR_ATTENTION_CHUNK
        norm, norm_sums = split_norm("norm", values)
        # the logarithm of the forget gate is taken of the gate itself where it has a bound
        logarithm = (Kept("shares taken in, negative", keys, "float32"),) if self.lower_bound else log_sigmoid("f", keys)
        return Footprint(
            parameters=(
                column("in_proj", d_model, 2 * keys + values),
                split("norm.weight", values),
                row("out_proj", values, d_model),
            ),
            kept=(
                Kept("in_proj input", d_model, "compute", split=False),
                Kept("q, f and v", 2 * keys + values, "compute"),
                Kept("activated q", keys, "compute"),
                Kept("sigmoid of f", keys, "float32"),
                Kept("shares taken in", keys, "compute"),
                *logarithm,
                Kept("decays", keys, "float32"),
                *scores_kept(heads, keys, keys, values),
                *norm,
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
            reductions=(column_gradient("in_proj", d_model), *norm_sums, row_sum("out_proj", d_model)),
            matrix_flops=linear_attention_flops(heads, d_key, d_value, chunk),
        )

    @classmethod
    def small(cls) -> "HGRN2Config":
        return cls(heads=4, d_key=7, d_value=5, lower_bound=0.25)
