"""Root-mean-square norms: over the whole width, over each head, and over a width that is split over the tensor group."""

import torch
from torch import Tensor, nn

from baton.kernels.gate import gated
from baton.kernels.gate.op import Activation
from baton.kernels.gated_norm import gated_norm
from baton.kernels.rms_norm import fused_add_rms_norm, rms_norm, split_rms_norm
from baton.models import cached_constants
from baton.models.mixer_context import MixerContext
from baton.models.settings.declarations import ParameterDeclaration
from baton.parallel.tensor_group import copy_to_tensor_group, sum_over_tensor_group

Stream = tuple[Tensor, Tensor | None]
"""A residual stream as (x, branch): branch is the last sub-block's output, which the next norm adds to x, or None."""


def summed(stream: Stream) -> Tensor:
    """The stream as one tensor."""
    x, branch = stream
    return x if branch is None else x + branch


def unit(x: Tensor, eps: float, *, precise: torch.dtype, dtype: torch.dtype) -> Tensor:
    """x / sqrt(|x|^2 + eps) over the last dimension, computed in `precise` (fp32) and rounded once, to dtype."""
    width = x.shape[-1]
    return rms_norm(x, cached_constants.full(width, width**-0.5, precise, x.device), eps / width, dtype=dtype)


def unweighted(x: Tensor, eps: float, *, precise: torch.dtype, dtype: torch.dtype) -> Tensor:
    """x / sqrt(mean(x^2) + eps) over the last dimension, computed in `precise` (fp32) and rounded once, to dtype."""
    return rms_norm(x, cached_constants.full(x.shape[-1], 1.0, precise, x.device), eps, dtype=dtype)


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in the weight's type (fp32)."""

    def __init__(self, declaration: ParameterDeclaration, context: MixerContext) -> None:
        super().__init__()
        self.eps = context.norm_eps
        self.weight = context.parameter(declaration)

    def forward(self, stream: Stream, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """x + branch, which continues the stream, and its norm y in dtype."""
        x, branch = stream
        return fused_add_rms_norm(x, self.weight, self.eps, added=branch, dtype=dtype)


class HeadRMSNorm(nn.Module):
    """RMSNorm over the last dimension of this rank's heads [.., heads, dim], in fp32, with one weight [dim] for all heads."""

    def __init__(self, declaration: ParameterDeclaration, context: MixerContext) -> None:
        super().__init__()
        self.eps = context.norm_eps
        self.weight = context.parameter(declaration)

    def forward(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """dtype: of the result; None: the weight's."""
        return rms_norm(x, self.weight, self.eps, dtype=dtype)

    def gated(self, x: Tensor, z: Tensor, *, activation: Activation = "silu") -> Tensor:
        """norm(x) act(z), [.., heads * dim], in z's dtype. z: [.., heads * dim]."""
        return gated_norm(x, z, self.weight, self.eps, activation=activation)


class SplitRMSNorm(nn.Module):
    """RMSNorm over a width that is split over the tensor group: x [.., width / tensor ranks], in fp32, a weight per feature. Of
    several groups: over each of them, and a rank has whole ones."""

    def __init__(self, declaration: ParameterDeclaration, context: MixerContext) -> None:
        super().__init__()
        (self.width,), self._groups = declaration.shape, declaration.groups
        self.eps, self._split = context.norm_eps, context.tensor_size > 1
        self.weight = context.parameter(declaration)

    def forward(self, x: Tensor, dtype: torch.dtype, *, silu: bool = False) -> Tensor:
        """y in dtype. silu: normalise silu(x)."""
        if self._groups > 1:
            unit_weight = cached_constants.full(self._size, 1.0, self.weight.dtype, x.device)
            normed = rms_norm(x.unflatten(-1, (-1, self._size)), unit_weight, self.eps, silu=silu)
            return (normed.flatten(-2) * self.weight).to(dtype)
        if not self._split:
            return rms_norm(x, self.weight, self.eps, silu=silu, dtype=dtype)
        return split_rms_norm(x, self.weight, self.eps, width=self.width, sum_over_ranks=_sum_over_ranks, silu=silu, dtype=dtype)

    def gated(self, x: Tensor, z: Tensor, *, activation: Activation = "silu") -> Tensor:
        """norm(x) act(z), in z's dtype."""
        if self._whole:
            return gated_norm(self._by_row(x), z, self._row_weight, self.eps, activation=activation)
        return gated(self(x, self.weight.dtype), z, activation=activation, dtype=z.dtype)

    def of_gated(self, x: Tensor, z: Tensor, *, skip: tuple[Tensor, Tensor]) -> Tensor:
        """norm((x + D u) silu(z)), in z's dtype. skip: u, as x, and D [heads], of which each is for as many channels as others."""
        u, factors = skip
        if self._whole:
            return gated_norm(self._by_row(x), z, self._row_weight, self.eps, gate_first=True, skip=(self._by_row(u), factors))
        heads = len(factors), -1
        x = (x.unflatten(-1, heads) + factors[:, None] * u.unflatten(-1, heads)).flatten(-2)
        return self(gated(x, z), z.dtype)

    @property
    def _size(self) -> int:
        """Channels that are normalised together."""
        return self.width // self._groups

    @property
    def _whole(self) -> bool:
        """Whether this rank has all channels of what it normalises."""
        return self._groups > 1 or not self._split

    @property
    def _row_weight(self) -> Tensor:
        return self.weight.view(-1, self._size) if self._groups > 1 else self.weight

    def _by_row(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self._size))


def _sum_over_ranks(x: Tensor) -> Tensor:
    """The sum over the tensor group of what every rank's outputs depend on, so its gradient is summed too."""
    return copy_to_tensor_group(sum_over_tensor_group(x))
