"""Settings of RetNet's retention."""

from typing import Literal

from pydantic import Field

from baton.models.settings.cost_model import MixerCosts, SavedTensor, linear_attention_costs, linear_attention_flops
from baton.models.settings.declarations import ParameterDeclaration, column, head_norm, output
from baton.models.settings.linear_attention import FeatureMap, HeadSizes, LinearAttentionConfig, saved_by_output_gate, whole
from baton.models.settings.saved_tensors import saved_by_norm, saved_scores


class RetNetConfig(LinearAttentionConfig):
    """Linear attention with rotary positions and a fixed decay per head (Sun et al. 2023, "Retentive Network")."""

    kind: Literal["retnet"] = "retnet"
    heads: int | None = Field(None, ge=1, description="number of heads; null: d_model / d_key")
    d_key: int = Field(256, ge=2, description="width of a head's queries and keys, even; 256 in the paper")
    d_value: int | None = Field(None, ge=1, description="width of a head's values; null: 2 d_key, as in the paper")
    feature_map: FeatureMap = Field(
        "identity", description="feature map of queries and keys; identity in the paper's models. elu is elu(x) + 1"
    )
    output_gate: bool = Field(
        True,
        description="whether outputs are multiplied by silu of a projection of the layer's input, as in the paper. A Transformer "
        "that is finetuned into a recurrent model (T2R) has none",
    )
    decay_exponent: float = Field(
        5.0, gt=0, description="the decay of head h per token is 1 - 2^-(decay_exponent + h), h from 0; the paper's 5"
    )
    rope_theta: float = Field(1e4, gt=0, description="base of the rotary angles; 1e4 in the paper")

    def head_sizes(self, d_model: int) -> HeadSizes:
        heads = self.heads or whole("heads", "d_model / d_key", d_model, self.d_key)
        return HeadSizes(heads, self.d_key, self.d_value or 2 * self.d_key)

    def check(self, d_model: int) -> None:
        super().check(d_model)
        if self.d_key % 2:
            raise ValueError(f"d_key={self.d_key} is odd, and rotary positions rotate pairs; make it even")

    def parameters(self, d_model: int) -> tuple[ParameterDeclaration, ...]:
        heads, d_key, d_value = self.head_sizes(d_model)
        keys, values = heads * d_key, heads * d_value
        return (
            column("in_proj", d_model, {"q": keys, "k": keys, "v": values} | ({"gate": values} if self.output_gate else {})),
            head_norm("norm", d_value),
            output("out_proj", values, d_model),
        )

    def activation_costs(self, d_model: int) -> MixerCosts:
        heads, d_key, d_value = self.head_sizes(d_model)
        keys, values = heads * d_key, heads * d_value
        # relu saves its output; the other feature maps save their input, a view of the projection
        mapped = (SavedTensor("mapped q and k", 2 * keys, "compute"),) if self.feature_map == "relu" else ()
        return MixerCosts(
            saved=(
                SavedTensor("in_proj input", d_model, "compute", split=False),
                SavedTensor("q, k and v", 2 * keys + values, "compute"),
                *mapped,
                # a cosine and a sine per pair of channels, shared by queries and keys and by all heads
                SavedTensor("cosines and sines", d_key, "float32", split=False),
                SavedTensor("rotated q and k", 2 * keys, "compute"),
                *saved_scores(heads, keys, keys, values),
                *saved_by_norm("norm", values, rows=heads),
                *(saved_by_output_gate(values) if self.output_gate else ()),
                SavedTensor("out_proj input", values, "compute"),
            ),
            recurrences=(linear_attention_costs(*self.state(d_model), per_key=False, kept="compute"),),
            matrix_flops=linear_attention_flops(heads, d_key, d_value),
        )

    @classmethod
    def small(cls) -> "RetNetConfig":
        # elu + 1 keeps q . k positive: the first token's output is (q . k) v, and where q . k is near 0 the norm that follows would
        # amplify float32 rounding errors
        return cls(heads=4, d_key=10, d_value=9, feature_map="elu", decay_exponent=1.0)
