"""Settings of gated slot attention."""

from typing import Literal

from pydantic import Field

from baton.models.initializers import Normal
from baton.models.settings.attention import HeadsConfig
from baton.models.settings.cost_model import (
    LINEAR_ATTENTION_CHUNK,
    MixerCosts,
    RecurrenceCosts,
    SavedTensor,
    linear_attention_costs,
    linear_attention_flops,
)
from baton.models.settings.declarations import ParameterDeclaration, StateDeclaration, column, output, split, split_norm
from baton.models.settings.linear_attention import FeatureMap
from baton.models.settings.saved_tensors import saved_by_log_sigmoid, saved_by_split_norm, saved_decays, saved_scores


class GSAConfig(HeadsConfig):
    """Attention over a fixed number of slots that are updated with gates (Zhang et al. 2024, "Gated Slot Attention")."""

    kind: Literal["gsa"] = "gsa"
    head_dim: int = Field(512, ge=1, description="width of a head; 512 in the paper's 1.3B and 2.7B models")
    slots: int = Field(64, ge=1, description="number of slots per key head; 64 in the paper")
    gate_logit_normalizer: float = Field(
        8.0,
        gt=0,
        description="a slot's forget gate is sigmoid(x)^(1 / gate_logit_normalizer); a larger value gives a longer memory at "
        "initialization. The paper's 8",
    )
    gate: Literal["data_dependent", "data_independent", "abc"] = Field(
        "data_dependent",
        description="forget gates of slots. data_dependent: a projection of the token, the paper's; data_independent: a parameter "
        "for each slot; abc: none, as in attention with bounded memory (Peng et al. 2022): a slot is the mean of all tokens, "
        "weighted by the exponential of the projection. The last two are ablations of table 2",
    )
    slot_activation: Literal["softmax", "identity", "silu", "relu", "relu2"] = Field(
        "softmax", description="activation that turns scores into weights of slots; all but softmax are the paper's ablations"
    )

    feature_map: FeatureMap = Field(
        "silu",
        description="activation of queries and keys; silu in the paper's models. In a model that is converted from a Transformer "
        "(section 4.2) identity is nearest to its attention. elu is elu(x) + 1",
    )
    value_activation: Literal["silu"] | None = Field(
        "silu", description="activation of values; silu in the paper's models, null in a model that is converted from a Transformer"
    )
    output_activation: Literal["silu"] | None = Field(
        "silu", description="activation before the output norm; silu in the paper's models, null: none"
    )

    @property
    def fused(self) -> bool:
        """Whether the activations and gates are those that the kernels compute themselves."""
        return self.gate == "data_dependent" and self.feature_map == "silu" and self.value_activation == "silu"

    def parameters(self, d_model: int) -> tuple[ParameterDeclaration, ...]:
        heads, kv_heads = self.head_counts(d_model)
        width, kv_width, gates = heads * self.head_dim, kv_heads * self.head_dim, kv_heads * self.slots
        fixed = self.gate == "data_independent"
        return (
            column("in_proj", d_model, {"q": width, "k": kv_width, "v": kv_width} | ({} if fixed else {"alpha": gates})),
            # the paper gives no initial values; equal ones would keep all slots of a head equal
            *((split("decay_bias", gates, init=Normal(2.0)),) if fixed else ()),
            split_norm("norm", width),
            output("out_proj", width, d_model),
        )

    def state(self, d_model: int) -> tuple[StateDeclaration, ...]:
        kv_heads = self.head_counts(d_model)[1]
        return (
            StateDeclaration("k", (kv_heads, self.head_dim, self.slots), "float32", tp=0),
            StateDeclaration("v", (kv_heads, self.slots, self.head_dim), "float32", tp=0),
            # of abc: sums of weights
            *((StateDeclaration("z", (kv_heads, 1, self.slots), "float32", tp=0),) if self.gate == "abc" else ()),
        )

    def activation_costs(self, d_model: int) -> MixerCosts:
        heads, kv_heads = self.head_counts(d_model)
        dim, slots = self.head_dim, self.slots
        width, kv_width, gates = heads * dim, kv_heads * dim, kv_heads * slots
        qkv = width + 2 * kv_width
        k, v, *sums = self.state(d_model)
        if self.fused:
            activated: tuple[SavedTensor, ...] = (
                # the CPU implementation recomputes these chunk by chunk
                SavedTensor("activated q, k and v", qkv, "compute", device="gpu", in_recurrence="kernel", recomputed=True),
                SavedTensor("gates", gates, "float32", in_recurrence="kernel"),
            )
        else:
            mapped = (self.feature_map != "identity") * (width + kv_width) + (self.value_activation is not None) * kv_width
            activated = (
                *((SavedTensor("activated q, k and v", mapped, "compute"),) if mapped else ()),
                *self._saved_by_gates(kv_heads),
                # data_independent: those of all tokens are views of a parameter's
                *(() if self.gate == "data_independent" else (SavedTensor("gates", gates, "float32"),)),
            )
        projected = gates * (self.gate != "data_independent")
        return MixerCosts(
            saved=(
                SavedTensor("in_proj input", d_model, "compute", split=False),
                SavedTensor("q, k, v and alpha", qkv + projected, "compute"),
                *activated,
                SavedTensor("scores of slots", heads * slots, "float32", in_recurrence="kernel"),
                *saved_scores(heads, width, kv_width, gates),
                *saved_scores(heads, heads * slots, gates, kv_width),
                # of the pass over slots' values
                *saved_decays(heads * slots, gates),
                # without silu the norm saves it in float32
                SavedTensor("output", width, "compute", device=None if self.output_activation else "gpu"),
                # on one rank the GPU kernel of the norm reads the output itself, and the norm is recomputed
                *(s for s in saved_by_split_norm("norm", width) if not (s.device == "gpu" and s.width == width)),
                SavedTensor("out_proj input", width, "compute", device="gpu", ranks="one", recomputed=True),
                SavedTensor("out_proj input", width, "compute", device="gpu", ranks="several"),
                SavedTensor("out_proj input", width, "compute", device="cpu"),
            ),
            recurrences=(
                *(linear_attention_costs(z, per_key=False) for z in sums),
                RecurrenceCosts(
                    "gated_slot_attention",
                    (k, v),
                    chunk=LINEAR_ATTENTION_CHUNK,
                    recomputed_on_gpu=True,
                    kept="compute",
                    factors_kept=("v",),
                    transition=((kv_heads, 1, slots), (kv_heads, slots, 1)),
                ),
            ),
            # two passes, over the slots' keys and over their values
            matrix_flops=linear_attention_flops(heads, dim, slots) + linear_attention_flops(heads, slots, dim),
        )

    def _saved_by_gates(self, kv_heads: int) -> tuple[SavedTensor, ...]:
        """What is saved on the way to the log decays, where the kernels do not compute them."""
        gates = kv_heads * self.slots
        if self.gate == "data_dependent":
            return saved_by_log_sigmoid("gates", gates)
        if self.gate == "data_independent":
            return ()
        return (
            SavedTensor("logits", gates, "float32", cast=True),
            SavedTensor("weights", gates, "float32"),
            SavedTensor("ones", kv_heads, "float32"),
            SavedTensor("sums of weights", gates, "float32"),
            SavedTensor("shares", 2 * gates, "float32"),
        )

    @classmethod
    def small(cls) -> "GSAConfig":
        return cls(head_dim=7, heads=8, kv_heads=4, slots=5)
