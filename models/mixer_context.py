"""The context that a mixer is built in, and the parameters that are made there from declarations."""

import dataclasses
from dataclasses import dataclass

import torch
from torch import nn

from baton.models import initializers
from baton.models.initializers import Initializer, Projection
from baton.models.settings.declarations import ParameterDeclaration
from baton.parallel.megatron import ModelParallelConfig
from baton.parallel.param_layout import ParameterLayout, declare


@dataclass(frozen=True)
class MixerContext:
    """The model around a mixer.

    residual_adds: how often the whole model adds to its residual stream; output projections' initial values are scaled by its
    -1/2 power. compute_dtype: of matmuls and of the activations between them. init_std: of normal initial values of projections;
    None: uniform ones. sequence_parallel: tensor ranks share the residual stream, each a part of the tokens; the mixer's input is
    gathered. is_nested: the mixer is a part of another one, which reads its output whole on every rank. selective_recompute: cheap
    activations are recomputed in the backward pass (kernels.common.selective_recompute). keep_states: a GPU keeps the states
    between chunks of tokens, and what decays by key have multiplied, for the backward pass instead of computing them again.
    """

    d_model: int
    residual_adds: int
    norm_eps: float
    megatron: ModelParallelConfig
    compute_dtype: torch.dtype
    init_std: float | None = None
    sequence_parallel: bool = False
    is_nested: bool = False
    selective_recompute: bool = False
    keep_states: bool = False

    def nested(self) -> "MixerContext":
        """The context of a mixer inside this one, whose output is not added to the residual stream."""
        return dataclasses.replace(self, is_nested=True)

    @property
    def tensor_size(self) -> int:
        """Ranks of the tensor group."""
        return int(self.megatron.tensor_model_parallel_size)

    def initializer(self, declared: Initializer) -> Initializer:
        """The initializer with what depends on the model filled in."""
        if not isinstance(declared, Projection):
            return declared
        scale = self.residual_adds**-0.5 if declared.residual else 1.0
        if self.init_std is None:
            return initializers.linear(declared.fan_in, scale)
        return initializers.Normal(scale * self.init_std)

    def parameter(self, declaration: ParameterDeclaration) -> nn.Parameter:
        """An uninitialised parameter with its layout."""
        # tensor ranks that read a part of the tokens, or compute alike on unsummed gradients, have a part of the gradient
        partial = declaration.partial or (self.sequence_parallel and declaration.split is None)
        layout = ParameterLayout(
            declaration.shape,
            self.initializer(declaration.init),
            split=declaration.split,
            fused_splits=declaration.fused_splits,
            partial_over=frozenset({"tensor"} if partial else ()),
            decay=declaration.decay,
        )
        return declare(nn.Parameter(torch.empty(layout.local_shape(self.tensor_size))), layout)
