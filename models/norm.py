"""Root-mean-square norms: of the whole width, of each head, and of a width that is split over the tensor group."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from baton.kernels.rms_norm import fused_add_rms_norm, rms_norm
from baton.models import cached_constants, init
from baton.models.mixer import MixerContext
from baton.parallel.param_layout import ParameterLayout, declare
from baton.parallel.tensor import copy_to_tensor_group, sum_over_tensor_group

Stream = tuple[Tensor, Tensor | None]
"""A residual stream in two parts: the second, if any, is still to be added to the first, which the next norm does in passing."""


def summed(stream: Stream) -> Tensor:
    """The stream as one."""
    x, added = stream
    return x if added is None else x + added


def unit(x: Tensor, eps: float, *, precise: torch.dtype, dtype: torch.dtype) -> Tensor:
    """x / sqrt(|x|^2 + eps) over the last dimension, computed in `precise` (fp32) and rounded once, to dtype."""
    width = x.shape[-1]
    return rms_norm(x, cached_constants.full(width, width**-0.5, precise, x.device), eps / width, dtype=dtype)


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in the weight's type (fp32).

    of_part: x is this tensor rank's part of the tokens, so the weight's gradient is too.
    """

    def __init__(self, d_model: int, eps: float, *, of_part: bool = False) -> None:
        super().__init__()
        self.eps = eps
        partial = frozenset({"tensor"} if of_part else ())
        layout = ParameterLayout((d_model,), init.constant(1.0), partial_over=partial, decay=False)
        self.weight = declare(nn.Parameter(torch.empty(d_model)), layout)

    def forward(self, stream: Stream, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """x, the sum of the stream's parts, for what else reads it, and y in dtype."""
        x, added = stream
        return fused_add_rms_norm(x, self.weight, self.eps, added=added, dtype=dtype)


class HeadRMSNorm(nn.Module):
    """RMSNorm over the last dimension of this rank's heads [.., heads, dim], in fp32, with one weight [dim] for all heads."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        # every rank applies the weight to its own heads, so each has a part of the gradient
        layout = ParameterLayout((dim,), init.constant(1.0), partial_over=frozenset({"tensor"}), decay=False)
        self.weight = declare(nn.Parameter(torch.empty(dim)), layout)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class SplitRMSNorm(nn.Module):
    """RMSNorm over a width that is split over the tensor group: x [.., width / tensor ranks], in fp32, a weight per feature."""

    def __init__(self, width: int, context: MixerContext) -> None:
        super().__init__()
        self.width, self.eps, self._split = width, context.norm_eps, context.tensor_size > 1
        self.weight = context.split((width,), init.constant(1.0), decay=False)

    def forward(self, x: Tensor, dtype: torch.dtype, *, silu: bool = False) -> Tensor:
        """y in dtype. silu: of silu(x)."""
        if not self._split:
            return rms_norm(x, self.weight, self.eps, silu=silu, dtype=dtype)
        x = (F.silu(x) if silu else x).to(self.weight.dtype)
        squares = x.square().sum(-1, keepdim=True)
        # summed forwards; and since every rank's outputs depend on the sum, its gradient is summed backwards
        squares = copy_to_tensor_group(sum_over_tensor_group(squares))
        return (x * torch.rsqrt(squares / self.width + self.eps) * self.weight).to(dtype)
