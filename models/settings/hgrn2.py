"""Settings of HGRN2."""

import math
from typing import Literal

from pydantic import Field, model_validator

from baton.models.initializers import Constant
from baton.models.settings.cost_model import MixerCosts, SavedTensor, linear_attention_costs, linear_attention_flops
from baton.models.settings.declarations import ParameterDeclaration, column, output, split, split_norm
from baton.models.settings.linear_attention import HeadSizes, LinearAttentionConfig, whole
from baton.models.settings.saved_tensors import saved_by_log_sigmoid, saved_by_split_norm, saved_decays, saved_scores


class HGRN2Config(LinearAttentionConfig):
    """A gated linear RNN with outer-product states (Qin et al. 2024, "HGRN2: Gated Linear RNNs with State Expansion")."""

    kind: Literal["hgrn2"] = "hgrn2"
    heads: int | None = Field(None, ge=1, description="number of heads; null: d_model / d_key")
    d_key: int = Field(128, ge=1, description="forget gates per head, the paper's expansion ratio; 128 in its language models")
    d_value: int | None = Field(None, ge=1, description="width of a head's input; null: d_model / heads")
    lower_bound: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="lower bound of the forget gate. The paper's increase with depth from 0; here, give deeper layers of the "
        "pattern a name of their own with a larger bound",
    )
    bounds: Literal["fixed", "learned"] = Field(
        "fixed",
        description="fixed: lower_bound itself. learned: a bound for each channel, which begins as lower_bound. The paper's "
        "are sums of a softmax over the layers; here each layer's are its own, so that they may also decrease with depth",
    )
    scale_queries: bool = Field(
        False,
        description="divide queries by sqrt(d_key), as flash-linear-attention does; of that the output norm leaves nothing but "
        "another share of norm_eps",
    )

    @model_validator(mode="after")
    def _a_bound_that_is_learned_is_above_0(self) -> "HGRN2Config":
        if self.bounds == "learned" and not self.lower_bound:
            raise ValueError("bounds=learned needs lower_bound > 0, with which they begin; leave layers without one fixed")
        return self

    def head_sizes(self, d_model: int) -> HeadSizes:
        heads = self.heads or whole("heads", "d_model / d_key", d_model, self.d_key)
        return HeadSizes(heads, self.d_key, self.d_value or whole("d_value", "d_model / heads", d_model, heads))

    def parameters(self, d_model: int) -> tuple[ParameterDeclaration, ...]:
        heads, d_key, d_value = self.head_sizes(d_model)
        return (
            column("in_proj", d_model, {"q": heads * d_key, "f": heads * d_key, "v": heads * d_value}),
            *((split("bound", heads * d_key, init=Constant(self._logit)),) if self.bounds == "learned" else ()),
            split_norm("norm", heads * d_value),
            output("out_proj", heads * d_value, d_model),
        )

    @property
    def _logit(self) -> float:
        """Of which lower_bound is the sigmoid."""
        return math.log(self.lower_bound / (1 - self.lower_bound))

    def activation_costs(self, d_model: int) -> MixerCosts:
        heads, d_key, d_value = self.head_sizes(d_model)
        keys, values = heads * d_key, heads * d_value
        # with a lower bound, the logarithm of the gate itself is computed instead of a log-sigmoid
        logarithm = (SavedTensor("-k", keys, "float32", device="cpu"),) if self.lower_bound else saved_by_log_sigmoid("f", keys)
        return MixerCosts(
            saved=(
                SavedTensor("in_proj input", d_model, "compute", split=False),
                SavedTensor("q, f and v", 2 * keys + values, "compute"),
                SavedTensor("activated q", keys, "compute"),
                # a GPU computes everything again from q and f
                SavedTensor("sigmoid of f", keys, "float32", device="cpu"),
                SavedTensor("k", keys, "compute"),
                *logarithm,
                SavedTensor("decays", keys, "float32"),
                *saved_scores(heads, keys, keys, values),
                *saved_decays(keys, keys),
                *saved_by_split_norm("norm", values),
                SavedTensor("out_proj input", values, "compute"),
            ),
            recurrences=(linear_attention_costs(*self.state(d_model), per_key=True, kept="compute"),),
            matrix_flops=linear_attention_flops(heads, d_key, d_value),
        )

    @classmethod
    def small(cls) -> "HGRN2Config":
        return cls(heads=4, d_key=7, d_value=5, lower_bound=0.25)
