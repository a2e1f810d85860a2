"""Declarations of parameters and States: the one place where their shapes, splits, initial values and decay are written.

A settings class declares them as plain data. From the declarations models.build_parameters makes the modules with their layouts
(which checkpoints, the optimizer and gathering read), `Mixer.state_specs` the States that are carried, and the cost model what
`baton plan` counts, on machines without torch.

All shapes are whole: of all tensor ranks together.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from baton.models.initializers import Constant, Initializer, Projection

Dtype = Literal["compute", "float32", "int64", "bool"]
"""compute: the type of matmuls and of the activations between them."""

Layer = Literal[
    "column", "low_rank_column", "row", "output", "replicated", "rms_norm", "head_norm", "split_norm", "embedding", "head"
]
"""The module that a parameter is the weight of.

column: a projection of the mixer's input whose outputs are split over the tensor group. low_rank_column: the same of an input whose
gradient is summed over the group elsewhere. row: a projection from split features whose result is summed over the group. output:
the same, added to the residual stream. replicated: a projection of the mixer's input that every rank computes whole. rms_norm: over
d_model. head_norm: over each head, one weight for all heads. split_norm: over features that are split over the tensor group.
embedding, head: the model's own, with their rows split over the tensor group.
"""


@dataclass(frozen=True)
class ParameterDeclaration:
    """One parameter, by the name that the mixer gives it.

    split: the dimension that is split over the tensor group; None: every rank has all of it.
    fused_splits: names and rows of the projections that are fused along dimension 0; each is split over the group on its own.
    decay: whether weight decay applies.
    uses: how often a token is multiplied with it; 0: no matmul reads it, so it has no copy in the compute type.
    partial: every tensor rank has a part of its gradient, and the parts are summed once per step. Where ranks share the residual
        stream, this holds for every parameter that is not split.
    layer: the module whose weight it is; None: a parameter of the mixer itself, which stays float32 in the computation.
    """

    name: str
    shape: tuple[int, ...]
    init: Initializer
    split: int | None = None
    fused_splits: tuple[tuple[str, int], ...] = ()
    decay: bool = True
    uses: int = 0
    partial: bool = False
    layer: Layer | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def local_numel(self, tensor_size: int) -> int:
        """Elements on one tensor rank."""
        return self.numel if self.split is None else self.numel // tensor_size

    def nested(self) -> "ParameterDeclaration":
        """The declaration in a mixer that is a part of another, which reads its output whole on every rank."""
        if self.layer != "output":
            return self
        return replace(self, layer="row", init=Projection(self.shape[1]))


@dataclass(frozen=True)
class StateDeclaration:
    """One tensor of a State, per sequence.

    tp: the dimension split over the tensor group; None: replicated. grad: whether a gradient comes back for it. grows: dimension 0
    is as long as the document. float32 means the parameters' type, which tests make float64.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Dtype
    tp: int | None
    grad: bool = True
    grows: bool = False


_Declaration = TypeVar("_Declaration", ParameterDeclaration, StateDeclaration)


def column(
    name: str, d_model: int, splits: Mapping[str, int] | int, *, uses: int = 1, init: Initializer | None = None
) -> ParameterDeclaration:
    """A projection of the mixer's input. splits: output features, or those of each fused projection by name."""
    fused = tuple(splits.items()) if isinstance(splits, Mapping) else ()
    features = splits if isinstance(splits, int) else sum(splits.values())
    return ParameterDeclaration(
        f"{name}.weight",
        (features, d_model),
        init or Projection(d_model),
        split=0,
        fused_splits=fused,
        uses=uses,
        layer="column",
    )


def low_rank_column(name: str, rank: int, features: int, init: Initializer) -> ParameterDeclaration:
    """A projection from a low-rank code that every rank has, whose gradient the code's own consumer sums."""
    return replace(column(name, rank, features, init=init), layer="low_rank_column")


def row(name: str, features: int, d_out: int, init: Initializer) -> ParameterDeclaration:
    """A projection from split features, summed over the tensor group on every rank."""
    return ParameterDeclaration(f"{name}.weight", (d_out, features), init, split=1, uses=1, layer="row")


def output(name: str, features: int, d_model: int) -> ParameterDeclaration:
    """The projection from split features to the residual stream."""
    return replace(row(name, features, d_model, Projection(features, residual=True)), layer="output")


def replicated(name: str, d_model: int, features: int) -> ParameterDeclaration:
    """A projection of the mixer's input that every rank computes whole: too narrow to split, or shared by all heads."""
    return ParameterDeclaration(f"{name}.weight", (features, d_model), Projection(d_model), uses=1, layer="replicated")


def split(name: str, *shape: int, init: Initializer, decay: bool = False) -> ParameterDeclaration:
    """A parameter with a row per channel or head, split over the tensor group."""
    return ParameterDeclaration(name, shape, init, split=0, decay=decay)


def rms_norm(name: str, d_model: int) -> ParameterDeclaration:
    """RMSNorm over d_model."""
    return ParameterDeclaration(f"{name}.weight", (d_model,), Constant(1.0), decay=False, layer="rms_norm")


def sub_block_norm(d_model: int) -> ParameterDeclaration:
    """The norm in front of each mixer."""
    return rms_norm("norm", d_model)


def head_norm(name: str, head_dim: int) -> ParameterDeclaration:
    """RMSNorm of each head with one weight for all heads. Each rank applies it to its own heads and has a part of its gradient."""
    return ParameterDeclaration(f"{name}.weight", (head_dim,), Constant(1.0), decay=False, partial=True, layer="head_norm")


def split_norm(name: str, width: int) -> ParameterDeclaration:
    """RMSNorm over features that are split over the tensor group."""
    return ParameterDeclaration(f"{name}.weight", (width,), Constant(1.0), split=0, decay=False, layer="split_norm")


def prefixed(prefix: str, declarations: Iterable[_Declaration]) -> tuple[_Declaration, ...]:
    """The declarations with `prefix.` before their names."""
    return tuple(replace(d, name=f"{prefix}.{d.name}") for d in declarations)
