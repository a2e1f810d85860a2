"""Settings of Mamba-2."""

from dataclasses import replace
from typing import Literal

from pydantic import Field, model_validator

from baton.models.initializers import Constant, InverseSoftplusLogUniform, LogUniform, linear
from baton.models.settings import MixerConfig
from baton.models.settings.cost_model import (
    MixerCosts,
    RecurrenceCosts,
    SavedTensor,
    linear_attention_costs,
    linear_attention_flops,
)
from baton.models.settings.declarations import (
    ParameterDeclaration,
    StateDeclaration,
    column,
    output,
    replicated,
    split,
    split_norm,
)
from baton.models.settings.linear_attention import whole
from baton.models.settings.saved_tensors import saved_by_gate, saved_by_split_norm, saved_scores


class Mamba2Config(MixerConfig):
    """The state space model of Mamba-2, with one decay per head and token (Dao & Gu 2024, "Transformers are SSMs")."""

    kind: Literal["mamba2"] = "mamba2"
    expand: int = Field(2, ge=1, description="d_inner / d_model; 2 in every model of the paper")
    head_dim: int = Field(64, ge=1, description="channels of a head; 64 as released")
    d_state: int = Field(128, ge=1, description="state size per channel; 128 as released")
    n_groups: int = Field(
        1,
        ge=1,
        description="number of groups of consecutive heads, whose heads share B and C; 1 in the paper's models. Several are split "
        "over the tensor group, as heads are",
    )
    norm_group_size: int | None = Field(
        None,
        ge=1,
        description="number of channels over which the norm takes its mean (group_size in mamba_ssm); null: d_inner / n_groups, as "
        "released. d_inner is one norm over all channels, which tensor ranks have to sum",
    )
    d_conv: int = Field(4, ge=2, description="width of the causal convolution, in tokens; 4 as released")
    A_init_min: float = Field(
        1.0, gt=0, description="lower bound of the initial exp(A_log), which is uniform between A_init_min and A_init_max"
    )
    A_init_max: float = Field(16.0, gt=0, description="upper bound of the initial exp(A_log)")
    dt_min: float = Field(
        1e-3, gt=0, description="lower bound of the initial step sizes, which are log-uniform between dt_min and dt_max"
    )
    dt_max: float = Field(1e-1, gt=0, description="upper bound of the initial step sizes")
    dt_floor: float = Field(1e-4, gt=0, description="smaller initial step sizes are raised to this")

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> "Mamba2Config":
        for name in ("A_init", "dt"):
            low, high = getattr(self, f"{name}_min"), getattr(self, f"{name}_max")
            if low > high:
                raise ValueError(f"{name}_min={low} exceeds {name}_max={high}; initial values lie between them")
        return self

    def head_count(self, d_model: int) -> int:
        """The number of heads. Raises ValueError if head_dim does not divide d_inner."""
        return whole("head_dim", "expand * d_model / head_dim", self.expand * d_model, self.head_dim)

    def norm_group_count(self, d_model: int) -> int:
        """The number of groups of channels that are normalised. Raises ValueError if norm_group_size does not divide d_inner."""
        if self.norm_group_size is None:
            return self.n_groups
        return whole("norm_group_size", "expand * d_model / norm_group_size", self.expand * d_model, self.norm_group_size)

    def sizes(self, d_model: int) -> dict[str, int]:
        found, norms = {"expand * model.d_model / head_dim": self.head_count(d_model)}, self.norm_group_count(d_model)
        if self.n_groups > 1:
            found["n_groups"] = self.n_groups
        if self.norm_group_size is not None and norms > 1:
            found["expand * model.d_model / norm_group_size"] = norms
        return found

    @property
    def longest_tail(self) -> int:
        return self.d_conv - 1

    def check(self, d_model: int) -> None:
        heads = self.head_count(d_model)
        if heads % self.n_groups:
            raise ValueError(f"n_groups={self.n_groups} does not divide expand * d_model / head_dim = {heads}; set n_groups")
        self.norm_group_count(d_model)

    @property
    def _shared_width(self) -> int:
        """Channels of B and C."""
        return 2 * self.n_groups * self.d_state

    def parameters(self, d_model: int) -> tuple[ParameterDeclaration, ...]:
        inner, heads, shared = self.expand * d_model, self.head_count(d_model), self._shared_width
        conv, several = linear(self.d_conv), self.n_groups > 1
        # B and C, one vector each per token and group: those of all heads are computed on every rank, those of groups where their
        # heads are. They lie by group, so that groups can be split: B and C of the first, B and C of the second
        place = 0 if several else None
        return (
            column("in_proj", d_model, {"z": inner, "x": inner, "dt": heads} | ({"bc": shared} if several else {})),
            *(() if several else (replicated("bc_proj", d_model, shared),)),
            split("conv_weight", inner, self.d_conv, init=conv, decay=True),
            split("conv_bias", inner, init=conv),
            ParameterDeclaration("bc_conv_weight", (shared, self.d_conv), conv, split=place),
            ParameterDeclaration("bc_conv_bias", (shared,), conv, split=place, decay=False),
            split("A_log", heads, init=LogUniform(self.A_init_min, self.A_init_max)),
            split("dt_bias", heads, init=InverseSoftplusLogUniform(self.dt_min, self.dt_max, self.dt_floor)),
            split("D", heads, init=Constant(1.0)),
            split_norm("norm", inner, groups=self.norm_group_count(d_model)),
            output("out_proj", inner, d_model),
        )

    def state(self, d_model: int) -> tuple[StateDeclaration, ...]:
        tail = self.d_conv - 1
        return (
            StateDeclaration("conv_x", (tail, self.expand * d_model), "compute", tp=1),
            StateDeclaration("conv_bc", (tail, self._shared_width), "compute", tp=1 if self.n_groups > 1 else None),
            StateDeclaration("S", (self.head_count(d_model), self.d_state, self.head_dim), "float32", tp=0),
        )

    def activation_costs(self, d_model: int) -> MixerCosts:
        inner, heads, shared = self.expand * d_model, self.head_count(d_model), self._shared_width
        conv_x, conv_bc, S = self.state(d_model)
        return MixerCosts(
            saved=(
                SavedTensor("in_proj input", d_model, "compute", split=False),
                SavedTensor("z, x and dt", 2 * inner + heads, "compute"),
                # before and after the convolution
                SavedTensor("B and C", 2 * shared, "compute", split=self.n_groups > 1),
                SavedTensor("convolved x", inner, "compute"),
                # softplus's input and output, and the decay
                SavedTensor("step sizes", 3 * heads, "float32"),
                SavedTensor("x times step size", inner, "compute"),
                # with one group and several ranks also of narrower heads: each rank has all of what they share
                *saved_scores(heads, shared, inner),
                *self._saved_behind_scan(inner, self.norm_group_count(d_model)),
                SavedTensor("out_proj input", inner, "compute"),
            ),
            recurrences=(
                RecurrenceCosts("short_conv", (conv_x,), chunk=0),
                RecurrenceCosts("short_conv", (conv_bc,), chunk=0),
                linear_attention_costs(S, per_key=False, kept="compute"),
            ),
            matrix_flops=linear_attention_flops(*S.shape),
        )

    @staticmethod
    def _saved_behind_scan(inner: int, groups: int) -> tuple[SavedTensor, ...]:
        """On a GPU one kernel adds the skip, gates and normalises, unless what is normalised is split over ranks."""
        apart = (
            SavedTensor("output with skip", inner, "float32"),
            *saved_by_gate("z", inner),
            *saved_by_split_norm("norm", inner, groups=groups),
        )
        fused = (SavedTensor("output", inner, "compute", device="gpu"), SavedTensor("norm scale", groups, "float32", device="gpu"))
        on_cpu = tuple(replace(x, device="cpu") for x in apart if x.device != "gpu")
        if groups > 1:
            return (*on_cpu, *fused)
        on_gpu = (replace(x, device="gpu", ranks="several") for x in apart if x.device != "cpu" and x.ranks != "one")
        return (*on_cpu, *(replace(x, ranks="one") for x in fused), *on_gpu)

    @classmethod
    def small(cls) -> "Mamba2Config":
        return cls(expand=1, head_dim=3, d_state=5, d_conv=4)
