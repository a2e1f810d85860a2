"""Settings of Lattice."""

from typing import Literal

from pydantic import Field

from baton.models.initializers import Constant, OrthonormalColumns, linear
from baton.models.settings import MixerConfig
from baton.models.settings.cost_model import (
    LATTICE_GPU_CHUNK,
    LATTICE_QR_CHUNK,
    LATTICE_SEQUENTIAL_CHUNK,
    MixerCosts,
    RecurrenceCosts,
    SavedTensor,
)
from baton.models.settings.declarations import (
    ParameterDeclaration,
    StateDeclaration,
    column,
    output,
    split,
    split_norm,
)
from baton.models.settings.eager import Eager
from baton.models.settings.saved_tensors import saved_before_gate, saved_by_gate, saved_by_split_norm, saved_by_unit


class LatticeConfig(MixerConfig):
    """Memory slots that are updated only in directions orthogonal to themselves (Karami & Mirrokni 2025, "Lattice: Learning to
    Efficiently Compress the Memory").

    The paper gives the recurrence's equations, and of the block only a shared projection of q and k with a causal convolution each
    and a GELU gate after the recurrence. It does not give the widths of heads and convolutions or the norm. They are settings here,
    with defaults close to TTT's public code, whose data and batch sizes the paper uses. TTT's code differs in these points: its
    convolutions have a bias (conv_bias), its norm is LayerNorm, its gate is the tanh approximation of GELU, q and k have rotary
    positions, and the target is v - k. unit_keys and value_scale are not in the paper.
    """

    kind: Literal["lattice"] = "lattice"
    variant: Literal["dec", "enc", "sim"] = Field(
        "dec",
        description="objective of a token's update: decoding the value (dec), encoding it (enc), or their similarity (sim). dec is "
        "best or tied for best in most of the paper's results; in enc and sim, slots do not depend on each other",
    )
    project: bool = Field(
        True, description="normalize slots to the unit sphere after each update; false is the paper's OSR (table 4)"
    )
    heads: int | None = Field(None, ge=1, description="number of heads; null: d_model / head_dim")
    head_dim: int = Field(
        64,
        ge=1,
        description="width of a head's values and slots; not given in the paper, 64 gives the model sizes that it names",
    )
    slots: int = Field(
        64,
        ge=1,
        description="number of slots per head, at most head_dim; not given in the paper, 64 gives the model sizes that it names",
    )
    initial_slots: Literal["fixed", "learned"] = Field(
        "fixed",
        description="slots at the start of a document, orthonormal as in the paper. fixed: the first unit vectors (the projections "
        "can learn any rotation of them); learned: parameters with random orthonormal initial values",
    )
    step_max: float = Field(
        1.0,
        gt=0,
        description="maximum step size: step sizes are step_max times a sigmoid. With unit keys, a slot rotates by about "
        "step / sqrt(slots). The paper's equations for dec and enc omit a factor of 2 of the gradient (that of sim has none); "
        "step_max=2 includes it",
    )
    step_bias: float = Field(
        -3.0,
        description="initial bias of that sigmoid; not given in the paper. -3 gives initial steps of 0.05, rotations of 0.006 with "
        "64 slots. With 0 losses fall more slowly, and differences of rounding grow tenfold in a training step "
        "(docs/reproduced/lattice-initial-steps.md)",
    )
    forget: bool = Field(
        False,
        description="add a forget gate per head and token (equation 16). The paper's final model has one, and so do the models "
        "lattice-110m and lattice-340m. The default is false because, with projection, a gate mu is equivalent to a step size "
        "divided by mu, and the paper's perplexity is 10.94 with and without it (table 4)",
    )
    forget_bias: float = Field(4.0, description="initial bias of the forget gate's sigmoid; 4 gives an initial gate of 0.98")
    sparsity: float = Field(
        0.0, ge=0, description="weight of an L1 penalty on slots; soft thresholds are sparsity times the step size. 0: none"
    )
    d_conv: int = Field(4, ge=2, description="width of the causal convolutions of q and k, in tokens; 4 as in TTT's code")
    conv_bias: bool = Field(False, description="add a bias per channel to the convolutions; true in TTT's code")
    conv_activation: Literal["silu"] | None = Field(
        None, description="activation after the convolutions; null: none, as in TTT's code"
    )
    unit_queries: bool = Field(
        False, description="normalize queries to length 1 per head; otherwise the output norm removes their scale"
    )
    unit_keys: bool = Field(
        True, description="normalize keys to length 1 per head; longer keys make the slots forget within tokens, or chaotic"
    )
    value_scale: float | None = Field(
        None, gt=0, description="factor of the values; null: head_dim^-1/2, which matches their scale to slots of length 1"
    )
    output_norm: bool = Field(
        True, description="apply RMSNorm over all heads together before the gate; the paper does not mention one"
    )

    def head_count(self, d_model: int) -> int:
        """The number of heads. Raises ValueError if it is not set and does not follow from d_model."""
        if self.heads is None and d_model % self.head_dim:
            raise ValueError(f"head_dim={self.head_dim} does not divide d_model={d_model}; set heads, or another head_dim")
        return self.heads or d_model // self.head_dim

    def sizes(self, d_model: int) -> dict[str, int]:
        return {"heads": self.head_count(d_model)}

    @property
    def longest_tail(self) -> int:
        return self.d_conv - 1

    def check(self, d_model: int) -> None:
        self.head_count(d_model)
        if self.slots > self.head_dim:
            raise ValueError(f"slots={self.slots} exceeds head_dim={self.head_dim}: no more than that can begin orthonormal")

    def parameters(self, d_model: int) -> tuple[ParameterDeclaration, ...]:
        heads = self.head_count(d_model)
        keys, values = heads * self.slots, heads * self.head_dim
        forget = {"forget": heads} if self.forget else {}
        declarations = [split("step_bias", heads, init=Constant(self.step_bias))]
        if self.forget:
            declarations.append(split("forget_bias", heads, init=Constant(self.forget_bias)))
        declarations.append(column("in_proj", d_model, {"qk": keys, "v": values, "gate": values, "step": heads, **forget}))
        for name in ("conv_q", "conv_k"):
            declarations.append(split(name, keys, self.d_conv, init=linear(self.d_conv), decay=True))
            if self.conv_bias:
                declarations.append(split(f"{name}_bias", keys, init=linear(self.d_conv)))
        if self.initial_slots == "learned":
            declarations.append(split("S0", heads, self.head_dim, self.slots, init=OrthonormalColumns()))
        if self.output_norm:
            declarations.append(split_norm("norm", values))
        return (*declarations, output("out_proj", values, d_model))

    def state(self, d_model: int) -> tuple[StateDeclaration, ...]:
        heads = self.head_count(d_model)
        return (
            # both convolutions read the same inputs
            StateDeclaration("conv", (self.d_conv - 1, heads * self.slots), "compute", tp=1),
            StateDeclaration("S", (heads, self.head_dim, self.slots), "float32", tp=0),
        )

    def activation_costs(self, d_model: int) -> MixerCosts:
        heads = self.head_count(d_model)
        keys, values, slots = heads * self.slots, heads * self.head_dim, heads * self.head_dim * self.slots
        projected = keys + 2 * values + heads * (1 + self.forget)
        learned, spans = self.initial_slots == "learned", self.project and self.variant != "dec" and not self.sparsity
        conv, S = self.state(d_model)
        saved = [
            SavedTensor("in_proj input", d_model, "compute", split=False),
            SavedTensor("in_proj output", projected, "compute"),
            *_saved_convolved("q", keys, heads, unit=self.unit_queries),
            *_saved_convolved("k", keys, heads, unit=self.unit_keys),
            SavedTensor("scaled v", values, "compute"),
            # the sigmoid, and step_max times it; of the forget gate the sigmoid and, with projection, its clamped value
            SavedTensor("step sizes", (1 + (self.step_max != 1.0)) * heads, "float32"),
            SavedTensor("forget gates", (1 + self.project) * heads * self.forget, "float32"),
            SavedTensor("thresholds", heads * bool(self.sparsity), "float32"),
            *(saved_before_gate(values, split_norm=True) if self.output_norm else (SavedTensor("output", values, "float32"),)),
            *saved_by_gate("gate", values),
            SavedTensor("out_proj input", values, "compute"),
            *(saved_by_split_norm("norm", values) if self.output_norm else ()),
        ]
        if self.project or not learned:
            # with projection they are divided by their norms, and the gradient needs both
            saved.append(SavedTensor("initial slots", slots, "float32", per_token=False))
        return MixerCosts(
            saved=tuple(tensor for tensor in saved if tensor.width),
            recurrences=(
                RecurrenceCosts("short_conv", (conv,), chunk=0, messages=2),
                RecurrenceCosts(
                    "lattice",
                    (S,),
                    chunk=LATTICE_QR_CHUNK if spans else LATTICE_SEQUENTIAL_CHUNK,
                    copied=True,
                    gpu_chunk=None if self.sparsity else LATTICE_GPU_CHUNK,
                    eager=self._eager(slots) if self.sparsity else None,
                ),
            ),
            # FLOPs per element of the slots: h of dec 2, its product with the slots 2, the tangent 2, the update 2, the norm 2, the
            # division by it 1, the output 2
            vector_flops=13 * slots,
        )

    def _eager(self, slots: int) -> Eager:
        """Cost of soft thresholds on a GPU, which no kernel supports. slots: elements of all heads' slots."""
        return Eager(
            why="thresholds of slots (L1, sparsity > 0) are not in its kernels",
            instead="sparsity=0 has kernels",
            launches=(18 + 5 * self.project + self.forget, 50.0),
            moved=((30 + 13 * self.project + 2 * self.forget) * slots, (66 + 16 * self.project) * slots),
        )

    @classmethod
    def small(cls) -> "LatticeConfig":
        return cls(heads=4, head_dim=7, slots=5)


def _saved_convolved(name: str, keys: int, heads: int, *, unit: bool) -> tuple[SavedTensor, ...]:
    """Saved tensors of the convolved queries or keys. unit: they are normalized to length 1."""
    if not unit:
        return (SavedTensor(f"convolved {name}", keys, "compute"),)
    return (*saved_by_unit(f"length of {name}", keys, rows=heads), SavedTensor(f"unit {name}", keys, "compute"))
