"""A projection that every tensor rank computes whole, for what is too narrow to split: codes and vectors that all heads share.

The one thing to know: ranks use the result for their own heads, so each finds only a part of its gradient. Whatever they use must
go through `for_own_heads` first, which sums the parts; behind it everything is the same on every rank, gradients included. Where
the residual stream is shared, nothing is summed there: gradients stay parts, down to the input, whose gathering sums them, and to
the parameters, whose layouts say so.
"""

import torch
from torch import Tensor, nn

from baton.models.mixer import MixerContext
from baton.parallel.linear import linear
from baton.parallel.param_layout import Init, ParameterLayout, declare
from baton.parallel.tensor import CastWeightCache, copy_to_tensor_group


class ReplicatedLinear(CastWeightCache, nn.Module):
    """y = x W^T: x [B, T, d_model] and y [B, T, out_features], the same on every rank of the tensor group."""

    def __init__(self, out_features: int, context: MixerContext) -> None:
        super().__init__()
        self.compute_dtype, self._sum = context.compute_dtype, not context.sequence_parallel
        self.weight = replicated_parameter(
            (out_features, context.d_model), context.initializer(context.d_model), context, decay=True
        )

    def forward(self, x: Tensor) -> Tensor:
        (y,) = linear(x.to(self.compute_dtype), self.weight, self.cast_weight())
        return y

    def for_own_heads(self, y: Tensor) -> Tensor:
        """The result, or what every rank has made of it alike, as this rank's heads use it."""
        return copy_to_tensor_group(y) if self._sum else y


def replicated_parameter(shape: tuple[int, ...], initializer: Init, context: MixerContext, *, decay: bool) -> nn.Parameter:
    """A parameter that every tensor rank holds and uses alike, in front of `for_own_heads`; it stays fp32 in the computation."""
    partial = frozenset({"tensor"} if context.sequence_parallel else ())
    return declare(nn.Parameter(torch.empty(shape)), ParameterLayout(shape, initializer, partial_over=partial, decay=decay))
