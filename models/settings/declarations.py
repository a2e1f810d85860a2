"""Declarations of parameters and States: shapes, tensor-parallel splits, initial values, weight decay.

A settings class declares each parameter and each tensor of the State once, as plain data. `models.build_parameters` creates the
modules and their layouts from the declarations (checkpoints, the optimizer and gathering read the layouts), `Mixer.state_specs` the
specification of the State, and the cost model the figures of `baton plan`, which does not need torch.

All shapes are global shapes, over all tensor ranks.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from baton.models.initializers import Constant, Initializer, Projection, Ramp

Dtype = Literal["compute", "float32", "int64", "bool"]
"""compute: training.compute_dtype, the dtype of matmuls and activations."""

Layer = Literal[
    "column", "low_rank_column", "row", "output", "replicated", "whole", "rms_norm", "head_norm", "split_norm", "embedding", "head"
]
"""The module that a parameter is the weight of.

- column: a projection of the mixer's input whose output features are split over the tensor group.
- low_rank_column: a column projection of an input whose gradient is all-reduced elsewhere.
- row: a projection of split features whose result is all-reduced over the group.
- output: a row projection whose result is added to the residual stream.
- replicated: a projection of the mixer's input that every rank computes completely, and reads for its own heads.
- whole: a projection that every rank computes completely, and whose output no rank reads a part of.
- rms_norm: RMSNorm over d_model.
- head_norm: RMSNorm over each head, with one weight for all heads.
- split_norm: RMSNorm over features that are split over the tensor group, or over each of several groups of them.
- embedding, head: the model's, with rows split over the tensor group.
"""


@dataclass(frozen=True)
class ParameterDeclaration:
    """One parameter of a mixer or of the model.

    name: relative to the mixer.
    shape: global shape.
    init: initial values.
    split: dimension that is split over the tensor group; None: replicated.
    fused_splits: names and rows of the projections that are fused along dimension 0; each of them is split over the group.
    decay: whether weight decay applies.
    uses: matmuls with it per token; 0: none, so it has no copy in the compute dtype.
    partial: each tensor rank computes a part of the gradient, and the parts are summed once per step. With sequence parallelism
        this holds for every parameter that is not split.
    groups: of a split_norm, the groups of features that are each normalised alone.
    layer: the module whose weight it is; None: a parameter of the mixer itself, which is used in float32.
    """

    name: str
    shape: tuple[int, ...]
    init: Initializer
    split: int | None = None
    fused_splits: tuple[tuple[str, int], ...] = ()
    decay: bool = True
    uses: int = 0
    partial: bool = False
    groups: int = 1
    layer: Layer | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def local_numel(self, tensor_size: int) -> int:
        """Elements on one tensor rank."""
        return self.numel if self.split is None else self.numel // tensor_size

    def nested(self) -> "ParameterDeclaration":
        """The declaration in a nested mixer, whose output goes to the outer mixer and not to the residual stream."""
        if self.layer != "output":
            return self
        return replace(self, layer="row", init=Projection(self.shape[1]))


@dataclass(frozen=True)
class StateDeclaration:
    """One tensor of a State, per sequence.

    name: relative to the mixer.
    shape: global shape without the batch dimension.
    dtype: float32 means the dtype of the parameters, which is float64 in some tests.
    tp: dimension that is split over the tensor group; None: replicated.
    grad: whether it has a gradient.
    grows: dimension 0 grows with the document. tail: see kernels.protocol.StateSpec.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Dtype
    tp: int | None
    grad: bool = True
    grows: bool = False
    tail: bool = False


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
    """A projection of a low-rank input that every rank has. The layer that computes the input all-reduces its gradient."""
    return replace(column(name, rank, features, init=init), layer="low_rank_column")


def row(name: str, features: int, d_out: int, init: Initializer) -> ParameterDeclaration:
    """A projection of split features whose result is all-reduced over the tensor group."""
    return ParameterDeclaration(f"{name}.weight", (d_out, features), init, split=1, uses=1, layer="row")


def output(name: str, features: int, d_model: int) -> ParameterDeclaration:
    """The projection of split features to the residual stream."""
    return replace(row(name, features, d_model, Projection(features, residual=True)), layer="output")


def replicated(name: str, d_model: int, features: int) -> ParameterDeclaration:
    """A projection of the mixer's input that every rank computes, because it is too narrow to split or shared by all heads."""
    return ParameterDeclaration(f"{name}.weight", (features, d_model), Projection(d_model), uses=1, layer="replicated")


def whole(name: str, d_in: int, features: int, *, init: Initializer | None = None) -> ParameterDeclaration:
    """A projection that every rank computes, and whose output all of them read alike, before tokens are mixed or heads split."""
    return ParameterDeclaration(f"{name}.weight", (features, d_in), init or Projection(d_in), uses=1, layer="whole")


def split(name: str, *shape: int, init: Initializer, decay: bool = False) -> ParameterDeclaration:
    """A parameter with a row per channel or head, split over the tensor group."""
    return ParameterDeclaration(name, shape, init, split=0, decay=decay)


def shift_mix(name: str, d_model: int, exponent: float) -> ParameterDeclaration:
    """The share of the token before, per channel of the mixer's input, in RWKV's token shift: initially 1 - (n / d_model)^exponent
    or nearly so."""
    return ParameterDeclaration(name, (d_model,), Ramp(1.0, 0.0, exponent=exponent), decay=False)


def rms_norm(name: str, d_model: int) -> ParameterDeclaration:
    """RMSNorm over d_model."""
    return ParameterDeclaration(f"{name}.weight", (d_model,), Constant(1.0), decay=False, layer="rms_norm")


def sub_block_norm(d_model: int) -> ParameterDeclaration:
    """The RMSNorm before each mixer."""
    return rms_norm("norm", d_model)


def head_norm(name: str, head_dim: int) -> ParameterDeclaration:
    """RMSNorm over each head with one weight for all heads. Each rank applies it to its heads and has a part of its gradient."""
    return ParameterDeclaration(f"{name}.weight", (head_dim,), Constant(1.0), decay=False, partial=True, layer="head_norm")


def split_norm(name: str, width: int, *, groups: int = 1) -> ParameterDeclaration:
    """RMSNorm over features that are split over the tensor group; of several groups, over each of them, which a rank has whole."""
    return ParameterDeclaration(f"{name}.weight", (width,), Constant(1.0), split=0, decay=False, groups=groups, layer="split_norm")


def prefixed(prefix: str, declarations: Iterable[_Declaration]) -> tuple[_Declaration, ...]:
    """The declarations with `prefix.` before their names."""
    return tuple(replace(d, name=f"{prefix}.{d.name}") for d in declarations)
