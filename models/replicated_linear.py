"""A linear layer that every tensor rank computes completely, for outputs that are too narrow to split or that all heads share.

Where each rank uses the result for its own heads, it computes only a part of the result's gradient. The consumer must pass the
result through `for_own_heads`, whose backward sums the parts; before it, all tensors and their gradients are the same on every
rank, and a result that all ranks use alike (layer "whole" of a declaration) needs no sum. With sequence parallelism `for_own_heads`
sums nothing: gradients stay partial down to the input, where the backward of the all-gather sums them, and down to the parameters,
whose layouts declare it.
"""

from torch import Tensor, nn

from baton.models.mixer_context import MixerContext
from baton.models.settings.declarations import ParameterDeclaration
from baton.parallel.cast_weights import CastWeightCache
from baton.parallel.linear import linear
from baton.parallel.tensor_group import copy_to_tensor_group


class ReplicatedLinear(CastWeightCache, nn.Module):
    """y = x W^T: x [B, T, d_model] and y [B, T, out_features], the same on every rank of the tensor group."""

    def __init__(self, declaration: ParameterDeclaration, context: MixerContext) -> None:
        super().__init__()
        self.compute_dtype, self._sum = context.compute_dtype, not context.sequence_parallel
        self.weight = context.parameter(declaration)

    def forward(self, x: Tensor) -> Tensor:
        (y,) = linear(x.to(self.compute_dtype), self.weight, self.cast_weight())
        return y

    def for_own_heads(self, y: Tensor) -> Tensor:
        """y, or a tensor that every rank computed from y alike, for use by this rank's heads."""
        return copy_to_tensor_group(y) if self._sum else y
