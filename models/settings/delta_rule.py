"""Settings that DeltaNet, Gated DeltaNet and Kimi Delta Attention share."""

from dataclasses import replace
from fractions import Fraction
from typing import ClassVar

from pydantic import Field, model_validator

from baton.models.initializers import linear
from baton.models.settings import MixerConfig
from baton.models.settings.cost_model import DELTA_RULE_CHUNK, MixerCosts, RecurrenceCosts, SavedTensor
from baton.models.settings.declarations import (
    Dtype,
    ParameterDeclaration,
    StateDeclaration,
    column,
    head_norm,
    output,
    split,
)
from baton.models.settings.saved_tensors import saved_by_norm, saved_by_unit

UNIT_WIDTHS = tuple(2**n for n in range(9))
"""Widths of heads that the GPU kernel of a short convolution normalizes itself (kernels.short_conv.triton_launch.fits_in_block)."""


class DeltaRuleConfig(MixerConfig):
    """The block of DeltaNet, Gated DeltaNet and KDA: projections, short convolutions, normalized keys, the delta rule, a norm per
    head, projection."""

    default_keys: ClassVar[Fraction]
    """heads * d_key / d_model, which gives the number of heads where it is not set."""

    heads: int | None = Field(None, ge=1, description="number of heads")
    v_heads: int | None = Field(
        None,
        ge=1,
        description="number of heads of values, a multiple of heads: a head of queries and keys is that of v_heads / heads "
        "consecutive ones, as in Qwen3-Next; null: heads",
    )
    d_key: int = Field(ge=1, description="width of a head's queries and keys")
    d_value: int = Field(ge=1, description="width of a head's values")
    d_conv: int = Field(4, ge=2, description="width of the causal convolutions of q, k and v, in tokens; 4 in the papers")
    beta_max: float = Field(
        1.0,
        gt=0,
        le=2,
        description="upper bound of the writing strength beta; 1 in the papers. Above 1, transitions have negative eigenvalues "
        "(Grazzi et al.)",
    )

    def head_count(self, d_model: int) -> int:
        """The number of heads of queries and keys. Raises ValueError if it is not set and does not follow from d_model."""
        heads = self.default_keys * d_model / self.d_key
        if self.heads is None and heads.denominator != 1:
            raise ValueError(f"{self.default_keys} d_model / d_key is {heads}, not a number of heads; set heads or another d_key")
        return self.heads or int(heads)

    def value_head_count(self, d_model: int) -> int:
        """The number of heads of values, which is that of the states."""
        return self.v_heads or self.head_count(d_model)

    @property
    def key_dtype(self) -> Dtype:
        """Dtype of the normalized keys.

        The state grows without bound where beta |k|^2 exceeds 2. A key of norm 1 that is rounded to bfloat16 may have norm
        1 + 2^-8, so keys are float32, as are the products with them, if beta_max (1 + 2^-8)^2 > 2.
        """
        return "compute" if self.beta_max * (1 + 2**-8) ** 2 <= 2 else "float32"

    def sizes(self, d_model: int) -> dict[str, int]:
        return {"heads": self.head_count(d_model)}

    @property
    def longest_tail(self) -> int:
        return self.d_conv - 1

    def check(self, d_model: int) -> None:
        heads, v_heads = self.head_count(d_model), self.value_head_count(d_model)
        if v_heads % heads:
            raise ValueError(f"v_heads={v_heads} is not a multiple of heads={heads}; set v_heads")

    @property
    def gates(self) -> dict[str, int]:
        """Rows per head of values of the additional projections that are fused with those of q, k, v and beta, by name."""
        return {}

    def _widths(self, d_model: int) -> dict[str, int]:
        keys = self.head_count(d_model) * self.d_key
        return {"q": keys, "k": keys, "v": self.value_head_count(d_model) * self.d_value}

    def parameters(self, d_model: int) -> tuple[ParameterDeclaration, ...]:
        heads, widths = self.value_head_count(d_model), self._widths(d_model)
        gates = {name: heads * rows for name, rows in self.gates.items()}
        convs = (
            split(f"conv_weights.{name}", width, self.d_conv, init=linear(self.d_conv), decay=True)
            for name, width in widths.items()
        )
        return (
            column("in_proj", d_model, {**widths, "beta": heads, **gates}),
            *convs,
            head_norm("norm", self.d_value),
            output("out_proj", widths["v"], d_model),
        )

    def state(self, d_model: int) -> tuple[StateDeclaration, ...]:
        # one tail for each of q, k and v: a tail of all three together could not be split by heads
        convs = (
            StateDeclaration(f"conv_{name}", (self.d_conv - 1, width), "compute", tp=1)
            for name, width in self._widths(d_model).items()
        )
        return (*convs, StateDeclaration("S", (self.value_head_count(d_model), self.d_key, self.d_value), "float32", tp=0))

    def activation_costs(self, d_model: int) -> MixerCosts:
        heads, widths = self.value_head_count(d_model), self._widths(d_model)
        keys, values, chunk, kept = widths["k"], widths["v"], DELTA_RULE_CHUNK, self.key_dtype
        # where keys are float32 all products are, of half as many tokens
        width = heads * chunk // (2 if kept == "float32" else 1)
        *convs, S = self.state(d_model)
        fused = kept == "compute" and self.d_key in UNIT_WIDTHS
        saved = [
            SavedTensor("in_proj input", d_model, "compute", split=False),
            SavedTensor("in_proj output", 2 * keys + values + heads * (1 + sum(self.gates.values())), "compute"),
            SavedTensor("convolved v", values, "compute"),
            # the sigmoid, and the factor that beta is multiplied with
            SavedTensor("beta", 2 * heads, "float32"),
            # stored as two bfloat16 numbers where products are computed in bfloat16
            SavedTensor("chunks' triangular inverses", width, "float32", in_recurrence="kernel"),
            # of a sequence that is cut into pieces they are not kept
            SavedTensor("what tokens write", values, kept, in_recurrence="kernel", with_states=True),
            SavedTensor("scores in chunks", width, kept, in_recurrence="kernel", with_states=True),
            *saved_by_norm("norm", values, rows=heads),
            SavedTensor("out_proj input", values, "compute"),
        ]
        for name in ("q", "k"):
            of_length = saved_by_unit(f"length of {name}", keys, rows=keys // self.d_key)
            # a GPU's convolution normalizes what it writes, and computes it again from its input
            saved += [replace(tensor, device="cpu") for tensor in of_length if tensor.device != "gpu"] if fused else of_length
            saved.append(SavedTensor(f"unit {name}", keys, self.key_dtype))
        return MixerCosts(
            saved=tuple(saved),
            recurrences=(
                *(RecurrenceCosts("short_conv", (conv,), chunk=0) for conv in convs),
                RecurrenceCosts(
                    "delta_rule",
                    (S,),
                    chunk=chunk,
                    recomputed_on_gpu=True,
                    kept=kept,
                    transition=((heads, self.d_key, self.d_key),),
                ),
            ),
            # within a chunk: two products of keys, the triangular solve, the output; the state is read twice and written once
            matrix_flops=heads * (2 * chunk * (3 * self.d_key + 2 * self.d_value) + 6 * self.d_key * self.d_value),
        )

    @classmethod
    def small(cls) -> "DeltaRuleConfig":
        # with narrower queries and keys some dot products are near 0, and the norm that follows amplifies float32 rounding errors
        return cls(heads=4, d_key=33, d_value=5)  # type: ignore[call-arg]


class DecayingDeltaRuleConfig(DeltaRuleConfig):
    """As `DeltaRuleConfig`, with a decay exp(-exp(A_log) softplus(dt + dt_bias)) of the state; its initial values are Mamba-2's."""

    A_init_min: float = Field(
        1.0,
        gt=0,
        description="lower bound of the initial exp(A_log), which is uniform between A_init_min and A_init_max, as in Mamba-2",
    )
    A_init_max: float = Field(16.0, gt=0, description="upper bound of the initial exp(A_log)")
    dt_min: float = Field(
        1e-3, gt=0, description="lower bound of the initial softplus(dt_bias), which is log-uniform between dt_min and dt_max"
    )
    dt_max: float = Field(1e-1, gt=0, description="upper bound of the initial softplus(dt_bias)")
    dt_floor: float = Field(1e-4, gt=0, description="smaller initial values of softplus(dt_bias) are raised to this")

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> "DecayingDeltaRuleConfig":
        for name in ("A_init", "dt"):
            low, high = getattr(self, f"{name}_min"), getattr(self, f"{name}_max")
            if low > high:
                raise ValueError(f"{name}_min={low} exceeds {name}_max={high}; initial values lie between them")
        return self
