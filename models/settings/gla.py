"""Settings of gated linear attention."""

from typing import Literal

from pydantic import Field

from baton.models.initializers import Constant, Projection
from baton.models.settings.cost_model import MixerCosts, SavedTensor, linear_attention_costs, linear_attention_flops
from baton.models.settings.declarations import (
    ParameterDeclaration,
    column,
    head_norm,
    low_rank_column,
    output,
    replicated,
    split,
)
from baton.models.settings.linear_attention import FeatureMap, HeadSizes, LinearAttentionConfig, saved_by_output_gate, whole
from baton.models.settings.saved_tensors import saved_by_log_sigmoid, saved_by_norm, saved_decays, saved_scores


class GLAConfig(LinearAttentionConfig):
    """Linear attention with a decay per key channel (Yang et al. 2023, "Gated Linear Attention Transformers")."""

    kind: Literal["gla"] = "gla"
    heads: int = Field(4, ge=1, description="number of heads; 4 in every model of the paper")
    d_key: int | None = Field(None, ge=1, description="width of a head's queries and keys; null: d_model / (2 heads)")
    d_value: int | None = Field(None, ge=1, description="width of a head's values; null: d_model / heads")
    feature_map: FeatureMap = Field(
        "identity", description="feature map of queries and keys; identity in the paper's models. elu is elu(x) + 1"
    )
    output_gate: bool = Field(
        True,
        description="whether outputs are multiplied by silu of a projection of the layer's input, as in the paper. A Transformer "
        "that is finetuned into a recurrent model (T2R) has none",
    )
    gate_low_rank_dim: int = Field(16, ge=1, description="rank of the decay's low-rank projection; 16 in the paper")
    gate_logit_normalizer: float = Field(
        16.0,
        gt=0,
        description="the decay is sigmoid(x)^(1 / gate_logit_normalizer); a larger value gives a longer memory at initialization. "
        "The paper's 16",
    )

    def head_sizes(self, d_model: int) -> HeadSizes:
        d_key = self.d_key or whole("d_key", "d_model / (2 heads)", d_model, 2 * self.heads)
        return HeadSizes(self.heads, d_key, self.d_value or whole("d_value", "d_model / heads", d_model, self.heads))

    def parameters(self, d_model: int) -> tuple[ParameterDeclaration, ...]:
        heads, d_key, d_value = self.head_sizes(d_model)
        keys, values = heads * d_key, heads * d_value
        return (
            column("in_proj", d_model, {"q": keys, "k": keys, "v": values} | ({"gate": values} if self.output_gate else {})),
            replicated("code_proj", d_model, self.gate_low_rank_dim),
            low_rank_column("decay_proj", self.gate_low_rank_dim, keys, init=Projection(self.gate_low_rank_dim)),
            split("decay_bias", keys, init=Constant(0.0)),
            head_norm("norm", d_value),
            output("out_proj", values, d_model),
        )

    def activation_costs(self, d_model: int) -> MixerCosts:
        heads, d_key, d_value = self.head_sizes(d_model)
        keys, values = heads * d_key, heads * d_value
        mapped = () if self.feature_map == "identity" else (SavedTensor("mapped q and k", 2 * keys, "compute"),)
        return MixerCosts(
            saved=(
                SavedTensor("in_proj input", d_model, "compute", split=False),
                SavedTensor("q, k and v", 2 * keys + values, "compute"),
                *mapped,
                SavedTensor("code", self.gate_low_rank_dim, "compute", split=False),
                *saved_by_log_sigmoid("decays", keys, bias=True, view=False),
                SavedTensor("decays", keys, "float32"),
                *saved_scores(heads, keys, keys, values),
                *saved_decays(keys, keys),
                *saved_by_norm("norm", values, rows=heads),
                *(saved_by_output_gate(values) if self.output_gate else ()),
                SavedTensor("out_proj input", values, "compute"),
            ),
            recurrences=(linear_attention_costs(*self.state(d_model), per_key=True, kept="compute"),),
            matrix_flops=linear_attention_flops(heads, d_key, d_value),
        )

    @classmethod
    def small(cls) -> "GLAConfig":
        # elu + 1 keeps q . k positive: the first token's output is (q . k) v, and where q . k is near 0 the norm that follows would
        # amplify float32 rounding errors
        return cls(heads=4, d_key=7, d_value=5, feature_map="elu", gate_low_rank_dim=3)
