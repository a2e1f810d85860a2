"""Settings of Mamba-3."""

from dataclasses import replace
from typing import Literal

from pydantic import Field, model_validator

from baton.models.initializers import Constant, InverseSoftplusLogUniform
from baton.models.settings import MixerConfig
from baton.models.settings.cost_model import (
    LINEAR_ATTENTION_CHUNK,
    MAMBA3_MOST_INPUTS,
    MixerCosts,
    RecurrenceCosts,
    SavedTensor,
    linear_attention_flops,
)
from baton.models.settings.declarations import (
    ParameterDeclaration,
    StateDeclaration,
    column,
    head_norm,
    output,
    replicated,
    split,
    split_norm,
)
from baton.models.settings.linear_attention import whole
from baton.models.settings.saved_tensors import saved_by_gate, saved_by_norm, saved_by_split_norm, saved_scores


class Mamba3Config(MixerConfig):
    """Mamba-3 with one or several inputs and outputs per head: a trapezoidal rule in time and a state that turns, without a
    convolution (Lahoti et al. 2026, "Mamba-3: Improved Sequence Modeling using State Space Principles")."""

    kind: Literal["mamba3"] = "mamba3"
    expand: int = Field(2, ge=1, description="d_inner / d_model; 2 as released")
    head_dim: int = Field(64, ge=1, description="channels of a head; 64 as released")
    d_state: int = Field(128, ge=2, description="state size per channel; 128 as released")
    n_groups: int = Field(
        1,
        ge=1,
        description="number of groups of consecutive heads, whose heads share B and C up to a bias; 1 as released. Several are "
        "split over the tensor group, as heads are",
    )
    rope_fraction: float = Field(
        0.5, gt=0, le=1, description="share of the states that turn, in pairs, by angles that depend on the token; 0.5 as released"
    )
    mimo_rank: int = Field(
        1,
        ge=1,
        description="inputs and outputs of a head. 1: the paper's SISO form; several, 4 as released: its MIMO form (is_mimo in "
        "mamba_ssm), whose state is as large, and is read and written so many times a token",
    )
    output_norm: bool = Field(
        False, description="RMSNorm over each head in front of the gate (is_outproj_norm in mamba_ssm); off as released"
    )
    A_floor: float = Field(1e-4, gt=0, description="smallest rate of decay per unit of step size")
    dt_min: float = Field(
        1e-3, gt=0, description="lower bound of the initial step sizes, which are log-uniform between dt_min and dt_max"
    )
    dt_max: float = Field(1e-1, gt=0, description="upper bound of the initial step sizes")
    dt_floor: float = Field(1e-4, gt=0, description="smaller initial step sizes are raised to this")

    @model_validator(mode="after")
    def _bounds_and_pairs(self) -> "Mamba3Config":
        if self.dt_min > self.dt_max:
            raise ValueError(f"dt_min={self.dt_min} exceeds dt_max={self.dt_max}; initial values lie between them")
        if not self.pairs:
            raise ValueError(f"rope_fraction={self.rope_fraction} of d_state={self.d_state} is less than a pair; raise either")
        return self

    @property
    def pairs(self) -> int:
        """Pairs of states that turn."""
        return int(self.rope_fraction * self.d_state) // 2

    @property
    def ranks(self) -> tuple[int, ...]:
        """The dimension of a head's inputs in shapes, which one input does not have."""
        return (self.mimo_rank,) if self.mimo_rank > 1 else ()

    def head_count(self, d_model: int) -> int:
        """The number of heads. Raises ValueError if head_dim does not divide d_inner."""
        return whole("head_dim", "expand * d_model / head_dim", self.expand * d_model, self.head_dim)

    def sizes(self, d_model: int) -> dict[str, int]:
        found = {"expand * model.d_model / head_dim": self.head_count(d_model)}
        return found | ({"n_groups": self.n_groups} if self.n_groups > 1 else {})

    def check(self, d_model: int) -> None:
        heads = self.head_count(d_model)
        if heads % self.n_groups:
            raise ValueError(f"n_groups={self.n_groups} does not divide expand * d_model / head_dim = {heads}; set n_groups")

    def parameters(self, d_model: int) -> tuple[ParameterDeclaration, ...]:
        inner, heads, several = self.expand * d_model, self.head_count(d_model), self.n_groups > 1
        # a vector each per token, group and input, as in Mamba-2; the angles are those of all heads
        per_group, initial = 2 * self.mimo_rank * self.d_state, Constant(1 / self.mimo_rank)
        shared = {"bc": self.n_groups * per_group} if several else {}
        return (
            column("in_proj", d_model, {"z": inner, "x": inner, "dt": heads, "A": heads, "lam": heads} | shared),
            *(() if several else (replicated("bc_proj", d_model, per_group),)),
            replicated("angle_proj", d_model, self.pairs),
            split("dt_bias", heads, init=InverseSoftplusLogUniform(self.dt_min, self.dt_max, self.dt_floor)),
            head_norm("B_norm", self.d_state),
            head_norm("C_norm", self.d_state),
            split("B_bias", heads, *self.ranks, self.d_state, init=Constant(1.0), decay=True),
            split("C_bias", heads, *self.ranks, self.d_state, init=Constant(1.0), decay=True),
            *(split("mimo_x", heads, rank, self.head_dim, init=initial, decay=True) for rank in self.ranks),
            *(split("mimo_z", heads, rank, self.head_dim, init=Constant(1.0), decay=True) for rank in self.ranks),
            *(split("mimo_o", heads, rank, self.head_dim, init=initial, decay=True) for rank in self.ranks),
            split("D", heads, init=Constant(1.0)),
            *((split_norm("norm", inner, groups=heads),) if self.output_norm else ()),
            output("out_proj", inner, d_model),
        )

    def state(self, d_model: int) -> tuple[StateDeclaration, ...]:
        heads = self.head_count(d_model)
        return (
            StateDeclaration("h", (heads, self.d_state, self.head_dim), "float32", tp=0),
            StateDeclaration("k", (heads, *self.ranks, self.d_state), "float32", tp=0),
            StateDeclaration("x", (heads, *self.ranks, self.head_dim), "float32", tp=0),
        )

    def activation_costs(self, d_model: int) -> MixerCosts:
        inner, heads, several, rank = self.expand * d_model, self.head_count(d_model), self.n_groups > 1, self.mimo_rank
        h, k, x = self.state(d_model)
        vectors, shared, states = self.n_groups * rank, self.n_groups * rank * self.d_state, rank * heads * self.d_state
        transition = (heads, 2), (heads, self.pairs), (heads, self.pairs)
        fused = 2 * inner + 3 * heads + (2 * shared if several else 0)
        normed = tuple(x for name in "BC" for x in saved_by_norm(f"{name}_norm", shared, rows=vectors))
        if several:  # what is normalised is a view of in_proj's outputs: a GPU copies it, a CPU if it is not float32
            normed = tuple(replace(x, cast=x.device == "cpu" and "input" in x.name) for x in normed)
        outputs, by_kernels = rank * inner, rank <= MAMBA3_MOST_INPUTS
        # what PyTorch's operators keep, and what kernels keep in its place on a GPU
        by_operators: Literal["cpu"] | None = "cpu" if by_kernels else None
        if self.output_norm:
            gated_by = (
                *saved_by_split_norm("norm", outputs, groups=rank * heads),
                SavedTensor("normalised output", outputs, "float32"),
            )
            if rank == 1:  # on a GPU one kernel normalises and gates
                gated_by = (
                    *(replace(x, device="cpu") for x in gated_by if x.device != "gpu"),
                    SavedTensor("output", inner, "compute", device="gpu"),
                    SavedTensor("norm scale", heads, "float32", device="gpu"),
                )
        elif rank > 1:
            gated_by = (SavedTensor("output", outputs, "compute"),)
        else:
            gated_by = (
                SavedTensor("output", inner, "float32", device="cpu"),
                SavedTensor("output", inner, "compute", device="gpu"),
            )
        own = (
            (
                SavedTensor("inputs of heads", rank * inner, "compute", device=by_operators),
                *((SavedTensor("inputs of heads", rank * inner, "compute", device="gpu", recomputed=True),) * by_kernels),
                SavedTensor("decays of inputs", rank * heads, "float32"),
                # of a token with itself, with and without its step size, and of the next token; kernels: rank^2 and those of i < j
                SavedTensor("products of q and k", 3 * rank**2 * heads, "float32", device=by_operators),
                *((SavedTensor("products of q and k", rank * (3 * rank - 1) // 2 * heads, "float32", device="gpu"),) * by_kernels),
            )
            if rank > 1
            else saved_by_gate("z", inner)
        )
        return MixerCosts(
            saved=(
                SavedTensor("in_proj input", d_model, "compute", split=False),
                SavedTensor("z, x, dt, A and lam", fused, "compute"),
                *(replace(x, split=several) for x in normed),
                SavedTensor("B and C", 2 * shared, "compute", split=several),
                SavedTensor("angles, before and after tanh", 2 * self.pairs, "float32", split=False),
                # inputs and results of activations, and their products
                SavedTensor("step sizes, decays and shares", (13 if rank == 1 else 10) * heads, "float32"),
                SavedTensor("rates", heads, "float32", cast=True),
                SavedTensor("turned B and C", 2 * states, "compute", device="gpu", recomputed=by_kernels),
                # one of 64 tokens has its angles in float64
                *((SavedTensor("angles of chunks", heads * self.pairs // 32, "float32", device="gpu"),) * by_kernels),
                SavedTensor("turned B and C", 2 * states, "float32", device="cpu"),
                SavedTensor("x times step sizes", inner, "compute", device=by_operators if rank > 1 else "cpu"),
                *((SavedTensor("x times step sizes", inner, "compute", device="gpu", recomputed=True),) * (rank == 1)),
                *saved_scores(rank * heads, states, states, outputs),
                SavedTensor("what tokens read of the state", outputs, "float32", device=by_operators),
                *((SavedTensor("what tokens read of the state", outputs, "compute", device="gpu"),) * by_kernels),
                *gated_by,
                *own,
                SavedTensor("out_proj input", inner, "compute"),
            ),
            recurrences=(
                RecurrenceCosts(
                    "mamba3" if rank == 1 else "mamba3_mimo",
                    (h, k, x),
                    chunk=max(1, LINEAR_ATTENTION_CHUNK // rank),  # each input is a token of linear attention
                    recomputed_on_gpu=True,
                    between_chunks=(h,),
                    transition=transition,
                    gradients_read=(k, x),
                ),
            ),
            matrix_flops=rank * linear_attention_flops(*h.shape),
        )

    @classmethod
    def small(cls) -> "Mamba3Config":
        return cls(expand=1, head_dim=3, d_state=6, n_groups=1)
