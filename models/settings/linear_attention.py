"""Settings of plain linear attention, and those that it shares with GLA, RetNet and HGRN2. Their State is one matrix
[d_key, d_value] per head."""

from typing import Literal, NamedTuple

from pydantic import Field, model_validator

from baton.models.settings import MixerConfig
from baton.models.settings.cost_model import MixerCosts, SavedTensor, linear_attention_costs, linear_attention_flops
from baton.models.settings.declarations import ParameterDeclaration, StateDeclaration, column, head_norm, output
from baton.models.settings.saved_tensors import saved_before_gate, saved_by_gate, saved_by_norm, saved_scores

FeatureMap = Literal["identity", "silu", "relu", "elu"]
"""See baton.models.feature_map."""


class HeadSizes(NamedTuple):
    """Number of heads and widths of a mixer for a given d_model."""

    heads: int
    d_key: int
    d_value: int


class LinearAttentionConfig(MixerConfig):
    """Number of heads, and the widths of their keys and values. Subclasses derive sizes that are not set from d_model."""

    heads: int | None = Field(None, ge=1, description="number of heads")
    d_key: int | None = Field(None, ge=1, description="width of a head's queries and keys")
    d_value: int | None = Field(None, ge=1, description="width of a head's values")

    def head_sizes(self, d_model: int) -> HeadSizes:
        """Heads, d_key and d_value. Raises ValueError if one is not set and does not follow from d_model."""
        raise NotImplementedError

    def state(self, d_model: int) -> tuple[StateDeclaration, ...]:
        return (StateDeclaration("S", tuple(self.head_sizes(d_model)), "float32", tp=0),)

    def sizes(self, d_model: int) -> dict[str, int]:
        return {"heads": self.head_sizes(d_model).heads}

    def check(self, d_model: int) -> None:
        self.head_sizes(d_model)


def whole(name: str, formula: str, numerator: int, denominator: int) -> int:
    """numerator / denominator, the default of setting `name`. Raises ValueError if it is not a positive integer.

    formula: the quotient as text, for the error message.
    """
    if numerator % denominator or numerator < denominator:
        raise ValueError(f"{formula} = {numerator} / {denominator} is not a whole number; set {name}")
    return numerator // denominator


def saved_by_output_gate(width: int) -> tuple[SavedTensor, ...]:
    """Saved tensors of normalised outputs * silu(gate): the gate's projection and what it multiplies, and `saved_by_gate`."""
    return (SavedTensor("gate", width, "compute"), *saved_before_gate(width), *saved_by_gate("gate", width))


class PlainLinearAttentionConfig(LinearAttentionConfig):
    """Linear attention without decay or gates (Katharopoulos et al. 2020, "Transformers are RNNs"): the baseline of the papers of
    other recurrences. There is no position in it, so it needs a layer beside it that mixes neighbouring tokens, or a decay."""

    kind: Literal["linear_attention"] = "linear_attention"
    heads: int = Field(4, ge=1, description="number of heads; the paper's sizes are those of each task")
    d_key: int | None = Field(None, ge=1, description="width of a head's queries and keys; null: d_model / heads")
    d_value: int | None = Field(None, ge=1, description="width of a head's values; null: d_model / heads")
    feature_map: FeatureMap = Field(
        "elu", description="feature map of queries and keys; elu, which is elu(x) + 1, in the paper. identity: none"
    )
    normalization: Literal["sum", "rms"] = Field(
        "sum",
        description="what bounds the outputs. sum: division by the sum of all weights, equation 9, a further column of the state; "
        "only with feature maps that are not negative. rms: RMSNorm per head instead, as in GLA and RetNet",
    )

    @model_validator(mode="after")
    def _weights_that_are_summed_are_not_negative(self) -> "PlainLinearAttentionConfig":
        if self.normalization == "sum" and self.feature_map not in ("elu", "relu"):
            raise ValueError(
                f"feature_map={self.feature_map} has negative values, so the sum of weights may be 0; set feature_map to elu or "
                f"relu, or normalization: rms"
            )
        return self

    @property
    def summed(self) -> bool:
        """Whether the State has the sum of keys as a further column."""
        return self.normalization == "sum"

    def head_sizes(self, d_model: int) -> HeadSizes:
        d_key = self.d_key or whole("d_key", "d_model / heads", d_model, self.heads)
        return HeadSizes(self.heads, d_key, self.d_value or whole("d_value", "d_model / heads", d_model, self.heads))

    def state(self, d_model: int) -> tuple[StateDeclaration, ...]:
        heads, d_key, d_value = self.head_sizes(d_model)
        return (StateDeclaration("S", (heads, d_key, d_value + self.summed), "float32", tp=0),)

    def parameters(self, d_model: int) -> tuple[ParameterDeclaration, ...]:
        heads, d_key, d_value = self.head_sizes(d_model)
        keys, values = heads * d_key, heads * d_value
        return (
            column("in_proj", d_model, {"q": keys, "k": keys, "v": values}),
            *(() if self.summed else (head_norm("norm", d_value),)),
            output("out_proj", values, d_model),
        )

    def activation_costs(self, d_model: int) -> MixerCosts:
        heads, d_key, d_value = self.head_sizes(d_model)
        keys, values, read = heads * d_key, heads * d_value, heads * (d_value + self.summed)
        after: tuple[SavedTensor, ...] = saved_by_norm("norm", values, rows=heads)
        if self.summed:
            after = (
                SavedTensor("v and ones", read, "compute"),
                SavedTensor("outputs before division", read, "float32"),
                SavedTensor("sums of weights", heads, "float32"),
            )
        return MixerCosts(
            saved=(
                SavedTensor("in_proj input", d_model, "compute", split=False),
                SavedTensor("q, k and v", 2 * keys + values, "compute"),
                *((SavedTensor("mapped q and k", 2 * keys, "compute"),) if self.feature_map != "identity" else ()),
                *saved_scores(heads, keys, keys, read),
                *after,
                SavedTensor("out_proj input", values, "compute"),
            ),
            recurrences=(linear_attention_costs(*self.state(d_model), per_key=False, kept="compute"),),
            matrix_flops=linear_attention_flops(heads, d_key, d_value + self.summed),
        )

    @classmethod
    def small(cls) -> "PlainLinearAttentionConfig":
        return cls(heads=4, d_key=7, d_value=5)
