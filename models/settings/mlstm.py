"""Settings of mLSTM."""

from typing import Literal

from pydantic import Field, model_validator

from baton.models.initializers import Constant, Ramp
from baton.models.settings.cost_model import MixerCosts, SavedTensor, linear_attention_costs, linear_attention_flops
from baton.models.settings.declarations import ParameterDeclaration, StateDeclaration, column, output, split
from baton.models.settings.linear_attention import HeadSizes, LinearAttentionConfig, whole
from baton.models.settings.saved_tensors import saved_scores

RELEASED_HEAD = 512
"""Width of a head's values in xLSTM 7B and in the smaller models of its authors' training code."""


class MLSTMConfig(LinearAttentionConfig):
    """mLSTM: xLSTM's matrix memory with exponential input gates and a normalizer (Beck et al. 2024, "xLSTM: Extended Long
    Short-Term Memory"), as a layer of xLSTM 7B (Beck et al. 2025, "xLSTM 7B: A Recurrent LLM for Fast and Efficient Inference")."""

    kind: Literal["mlstm"] = "mlstm"
    heads: int | None = Field(None, ge=1, description="number of heads; null: d_model / 512, as in xLSTM 7B")
    d_key: int | None = Field(None, ge=1, description="width of a head's queries and keys; null: d_model / (2 heads)")
    d_value: int | None = Field(None, ge=2, description="width of a head's values; null: d_model / heads")
    gate_soft_cap: float = Field(
        15.0,
        gt=0,
        le=30,
        description="both gates' logits x become cap tanh(x / cap); 15 in xLSTM 7B. The first paper has no cap; its input gates, "
        "which are exponentials, would overflow float32 without one",
    )
    input_gate_bias: float = Field(-10.0, description="initial logit of the input gates; -10 in xLSTM 7B")
    forget_gate_bias_min: float = Field(3.0, description="initial logit of the first head's forget gates; 3 in the papers")
    forget_gate_bias_max: float = Field(6.0, description="initial logit of the last head's forget gates; 6 in the papers")

    @model_validator(mode="after")
    def _forget_gate_biases_are_in_order(self) -> "MLSTMConfig":
        if self.forget_gate_bias_min > self.forget_gate_bias_max:
            raise ValueError(
                f"forget_gate_bias_min={self.forget_gate_bias_min} is more than forget_gate_bias_max={self.forget_gate_bias_max}"
            )
        return self

    def head_sizes(self, d_model: int) -> HeadSizes:
        heads = self.heads or whole("heads", "d_model / 512", d_model, RELEASED_HEAD)
        d_key = self.d_key or whole("d_key", "d_model / (2 heads)", d_model, 2 * heads)
        return HeadSizes(heads, d_key, self.d_value or whole("d_value", "d_model / heads", d_model, heads))

    def parameters(self, d_model: int) -> tuple[ParameterDeclaration, ...]:
        heads, d_key, d_value = self.head_sizes(d_model)
        keys, values = heads * d_key, heads * d_value
        return (
            column("in_proj", d_model, {"q": keys, "k": keys, "v": values, "gate": values}),
            column("gates_proj", d_model, {"i": heads, "f": heads}, init=Constant(0.0)),
            split("input_gate_bias", heads, init=Constant(self.input_gate_bias)),
            split("forget_gate_bias", heads, init=Ramp(self.forget_gate_bias_min, self.forget_gate_bias_max)),
            split("norm_weight", values, init=Constant(1.0)),
            output("out_proj", values, d_model),
        )

    def state(self, d_model: int) -> tuple[StateDeclaration, ...]:
        heads, d_key, d_value = self.head_sizes(d_model)
        return (StateDeclaration("C", (heads, d_key, d_value + 1), "float32", tp=0),)

    def activation_costs(self, d_model: int) -> MixerCosts:
        heads, d_key, d_value = self.head_sizes(d_model)
        keys, values, read = heads * d_key, heads * d_value, heads * (d_value + 1)
        # of PyTorch's operators around the kernel, on every device
        forms: tuple[Literal["graph", "kernel"], ...] = ("graph", "kernel")
        return MixerCosts(
            saved=(
                SavedTensor("in_proj input", d_model, "compute", split=False),
                SavedTensor("q, k, v and gate", 2 * keys + 2 * values, "compute"),
                SavedTensor("tanh of both gates' logits", 2 * heads, "float32"),
                SavedTensor("logits of forget gates", heads, "float32"),
                SavedTensor("exponentials of forget gates", heads, "float32", device="cpu"),
                SavedTensor("forget gates", heads, "float32"),
                SavedTensor("queries in float32", keys, "float32", cast=True, in_recurrence="graph"),
                SavedTensor("gated keys, v and ones", keys + read, "float32", in_recurrence="graph"),
                SavedTensor("gated keys, v and ones", keys + read, "compute", in_recurrence="kernel"),
                *(SavedTensor("input gates, read, normalizers", read + 3 * heads, "float32", in_recurrence=form) for form in forms),
                *saved_scores(heads, keys, keys, read),
                SavedTensor("norm input, normalised and weighted", 3 * values, "float32", device="cpu"),
                SavedTensor("norm input", values, "compute", device="gpu"),
                SavedTensor("norm mean and scale", 2 * heads, "float32"),
                SavedTensor("sigmoid of the gate", values, "float32", device="cpu"),
                SavedTensor("out_proj input", values, "compute"),
            ),
            recurrences=(linear_attention_costs(*self.state(d_model), per_key=False),),
            matrix_flops=linear_attention_flops(heads, d_key, d_value + 1),
        )

    @classmethod
    def small(cls) -> "MLSTMConfig":
        # Where the norm's epsilon is nothing beside the outputs, the norm cancels the gradient of the input gates' bias to a few
        # float32 digits; and norms over few values cost others theirs.
        return cls(heads=4, d_key=6, d_value=17, input_gate_bias=-6.0)
