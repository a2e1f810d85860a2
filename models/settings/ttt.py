"""Settings of test-time training."""

import math
from typing import Literal

from pydantic import Field

from baton.models.initializers import Constant, Normal, Reciprocals, linear
from baton.models.rope import Rates, rope_rates
from baton.models.settings import MixerConfig
from baton.models.settings.cost_model import MixerCosts, RecurrenceCosts, SavedTensor
from baton.models.settings.declarations import ParameterDeclaration, StateDeclaration, column, output, split, split_norm
from baton.models.settings.eager import Eager
from baton.models.settings.saved_tensors import saved_before_gate, saved_by_gate, saved_by_split_norm

HIDDEN = 4
"""Hidden width of the MLP in widths of a head, as in the paper."""


class TTTConfig(MixerConfig):
    """Test-time training: the State is a model that gradient steps train on the sequence (Sun et al. 2024, arXiv:2407.04620,
    "Learning to (Learn at Test Time): RNNs with Expressive Hidden States"). The block is that of the authors' code with a Mamba
    backbone."""

    kind: Literal["ttt"] = "ttt"
    model: Literal["linear", "mlp"] = Field(
        "linear", description="the State's model: linear (TTT-Linear), or an MLP with a hidden layer of four widths (TTT-MLP)"
    )
    heads: int | None = Field(None, ge=1, description="number of heads; null: d_model / head_dim")
    head_dim: int = Field(64, ge=2, multiple_of=2, description="width of a head; 64 in the paper")
    mini_batch: int = Field(
        16,
        ge=1,
        description="tokens whose gradients are taken at the same weights; 16 in the paper. A part of the model: another number is "
        "another function",
    )
    base_lr: float | None = Field(
        None, gt=0, description="largest inner learning rate; null: 1.0 for linear and 0.1 for mlp, as in the paper"
    )
    d_conv: int = Field(4, ge=2, description="width of the causal convolutions of q and k, in tokens; 4 as in the authors' code")
    rope_theta: float = Field(
        1e4,
        gt=0,
        description="base of the rotary angles of q and k, which begin anew in each mini-batch; 1e4 as in the authors' code",
    )

    @property
    def learning_rate(self) -> float:
        """The largest inner learning rate, before the division by head_dim."""
        return self.base_lr or (1.0 if self.model == "linear" else 0.1)

    @property
    def rates(self) -> Rates:
        """Radians per position of each rotated pair."""
        return rope_rates(self.rope_theta, self.head_dim)

    def head_count(self, d_model: int) -> int:
        """The number of heads. Raises ValueError if it is not set and does not follow from d_model."""
        if self.heads is None and d_model % self.head_dim:
            raise ValueError(f"head_dim={self.head_dim} does not divide d_model={d_model}; set heads, or another head_dim")
        return self.heads or d_model // self.head_dim

    def check(self, d_model: int) -> None:
        self.head_count(d_model)

    def sizes(self, d_model: int) -> dict[str, int]:
        return {"heads": self.head_count(d_model)}

    @property
    def longest_tail(self) -> int:
        return self.d_conv - 1

    def weight_shapes(self, d_model: int) -> dict[str, tuple[int, ...]]:
        """The inner model's weights by name."""
        heads, d = self.head_count(d_model), self.head_dim
        if self.model == "linear":
            return {"W1": (heads, d, d), "b1": (heads, d)}
        hidden = HIDDEN * d
        return {"W1": (heads, d, hidden), "b1": (heads, hidden), "W2": (heads, hidden, d), "b2": (heads, d)}

    def elements(self, d_model: int) -> int:
        """Elements of the inner model's matrices."""
        return sum(math.prod(shape) for shape in self._matrices(d_model))

    def _matrices(self, d_model: int) -> list[tuple[int, ...]]:
        return [shape for shape in self.weight_shapes(d_model).values() if len(shape) == 3]

    def layer_widths(self, d_model: int) -> int:
        """Inputs and outputs of the inner model's layers, in all heads."""
        return sum(heads * (before + after) for heads, before, after in self._matrices(d_model))

    def parameters(self, d_model: int) -> tuple[ParameterDeclaration, ...]:
        heads, d = self.head_count(d_model), self.head_dim
        width = heads * d
        convolutions = (
            declaration
            for name in ("conv_q", "conv_k")
            for declaration in (
                split(name, width, self.d_conv, init=linear(self.d_conv), decay=True),
                split(f"{name}_bias", width, init=linear(self.d_conv)),
            )
        )
        return (
            column("in_proj", d_model, {"qk": width, "v": width, "gate": width, "step": heads}),
            *convolutions,
            split("step_bias", heads, init=Constant(0.0)),
            # every rank's heads have the same, and each a part of its gradient
            ParameterDeclaration("token_scale", (self.mini_batch,), Reciprocals(), decay=False, partial=True),
            split("inner_norm_weight", heads, d, init=Constant(1.0)),
            split("inner_norm_bias", heads, d, init=Constant(0.0)),
            *(
                split(name, *shape, init=Normal(0.02) if name[0] == "W" else Constant(0.0))
                for name, shape in self.weight_shapes(d_model).items()
            ),
            split_norm("norm", width),
            output("out_proj", width, d_model),
        )

    def state(self, d_model: int) -> tuple[StateDeclaration, ...]:
        width, shapes = self.head_count(d_model) * self.head_dim, self.weight_shapes(d_model)
        return (
            # both convolutions read the same inputs
            StateDeclaration("conv", (self.d_conv - 1, width), "compute", tp=1),
            *(StateDeclaration(name, shape, "float32", tp=0) for name, shape in shapes.items()),
            *(StateDeclaration(f"{name}_grad", shape, "float32", tp=0) for name, shape in shapes.items()),
        )

    def activation_costs(self, d_model: int) -> MixerCosts:
        heads, d = self.head_count(d_model), self.head_dim
        width, (conv, *state) = heads * d, self.state(d_model)
        weights = self.elements(d_model)
        return MixerCosts(
            saved=(
                SavedTensor("in_proj input", d_model, "compute", split=False),
                SavedTensor("in_proj output", 3 * width + heads, "compute"),
                SavedTensor("cosines and sines", d, "float32", split=False),
                SavedTensor("rotated q and k", 2 * width, "compute"),
                SavedTensor("step sizes", 2 * heads, "float32"),
                SavedTensor("outputs of the model, normalised too", 2 * width, "float32"),
                SavedTensor("their means and scales", 2 * heads, "float32"),
                *saved_by_split_norm("norm", width),
                *saved_before_gate(width, split_norm=True),
                *saved_by_gate("gate", width),
                SavedTensor("out_proj input", width, "compute"),
            ),
            recurrences=(
                RecurrenceCosts("short_conv", (conv,), chunk=0, messages=2),
                RecurrenceCosts("ttt", tuple(state), chunk=self.mini_batch, eager=self._eager(width, weights)),
            ),
            # of three kinds of tokens k and q times the weights, of one q times earlier gradients, four sums of gradients, and in
            # an MLP three gradients of the hidden layer; within the chunk, scores and their products with gradients
            matrix_flops=22 * weights
            + (0 if self.model == "linear" else 3 * weights)
            + 6 * self.mini_batch * self.layer_widths(d_model),
        )

    def _eager(self, width: int, weights: int) -> Eager:
        """Cost of PyTorch's operators on a GPU, as a test counts them. width, weights: numbers of all heads."""
        size = self.mini_batch
        launches, passes, rows = (
            ((165, 496), (51, 136), (212, 696)) if self.model == "linear" else ((319, 924), (52, 144), (1220, 3454))
        )
        ahead, back = (
            (launched / size, per_weight * weights / size + per_row * width)
            for launched, per_weight, per_row in zip(launches, passes, rows, strict=True)
        )
        return Eager(
            why="it has a form in PyTorch alone",
            instead="delta_net has kernels",
            launches=(ahead[0], back[0]),
            moved=(ahead[1], back[1]),
        )

    @classmethod
    def small(cls) -> "TTTConfig":
        return cls(heads=4, head_dim=6, mini_batch=16)
