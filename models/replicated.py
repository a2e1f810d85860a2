"""A projection that every tensor rank computes whole, for what is too narrow to split: codes and vectors that all heads share.

The one thing to know: ranks use the result for their own heads, so each finds only a part of its gradient. Whatever they use must
go through `copy_to_tensor_group` first, which sums the parts; behind it everything is the same on every rank, gradients included.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from baton.models.mixer import Site
from baton.parallel.layout import Init, ParameterLayout, declare
from baton.parallel.tensor import ComputeCopy


class ReplicatedLinear(ComputeCopy, nn.Module):
    """y = x W^T: x [B, T, d_model] and y [B, T, out_features], the same on every rank of the tensor group."""

    def __init__(self, out_features: int, site: Site) -> None:
        super().__init__()
        self.compute_dtype = site.compute_dtype
        self.weight = replicated((out_features, site.d_model), site.fill(site.d_model), decay=True)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.to(self.compute_dtype), self.compute_weight())


def replicated(shape: tuple[int, ...], fill: Init, *, decay: bool) -> nn.Parameter:
    """A parameter that every tensor rank holds and uses alike; it stays fp32 in the computation."""
    return declare(nn.Parameter(torch.empty(shape)), ParameterLayout(shape, fill, decay=decay))
