"""Copies of fp32 weights in the compute dtype, for matmuls.

A parameter stays fp32 (ZeRO's master copy is made from it) and is cast once per optimizer step, not once per micro-batch. An update
that has all of a parameter writes its copy too (`zero.Engine.update`); call `drop_cast_weights` after every other change.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn


class CastWeightCache:
    """Mixin that caches the low-precision copy of `self.weight` for matmuls."""

    weight: nn.Parameter
    compute_dtype: torch.dtype = torch.float32
    _cast_weight_cache: Tensor | None = None

    def cast_weight(self) -> Tensor:
        """The weight in the compute dtype, [out, in], without a graph; cast at most once between two `drop_cast_weights`."""
        if self.compute_dtype == self.weight.dtype:
            return self.weight.detach()
        if self._cast_weight_cache is None:
            self._cast_weight_cache = self.weight.detach().to(self.compute_dtype)
        return self._cast_weight_cache


def caches_of(module: nn.Module) -> list[CastWeightCache]:
    """Everything in the module that keeps a cast weight."""
    return [child for child in module.modules() if isinstance(child, CastWeightCache)]


def copies_of(caches: Iterable[CastWeightCache]) -> dict[nn.Parameter, Tensor]:
    """By parameter the cast weight that is kept, of several modules with one parameter the last one's."""
    return {cache.weight: copy for cache in caches if (copy := cache._cast_weight_cache) is not None}


def drop_cast_weights(caches: nn.Module | Iterable[CastWeightCache]) -> None:
    """Drop every cast weight, of a module or of its `caches_of`. Called after the parameters change: a load, an edit."""
    for cache in caches_of(caches) if isinstance(caches, nn.Module) else caches:
        cache._cast_weight_cache = None
