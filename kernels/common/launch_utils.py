"""Preparation of arguments for Triton launches, and lazy imports of Triton modules.

Kernels take the batch, token and head strides of a tensor; its last dimension must be contiguous.
"""

from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from baton.kernels.compile.assembler import use_sound_assembler
from baton.kernels.compile.fitting import FittingKernel


def contiguous_last_dim(x: Tensor) -> Tensor:
    """x, or a contiguous copy if its last dimension is not contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def as_rows(x: Tensor, width: int) -> Tensor:
    """[rows, width] whose columns are contiguous: x itself where it has such a view, as columns of wider rows have; else a copy."""
    return contiguous_last_dim(x.reshape(-1, width))


def strides(*tensors: Tensor | None) -> tuple[int, ...]:
    """Batch, token and head strides of tensors [B, T, H, ...], concatenated; (0, 0, 0) for None."""
    found: tuple[int, ...] = ()
    for x in tensors:
        found += (0, 0, 0) if x is None else x.stride()[:3]
    return found


def int32_positions(pos: Tensor | None) -> Tensor | None:
    """Positions as contiguous int32 [B, T]; None stays None."""
    return None if pos is None else pos.to(torch.int32).contiguous()


def contiguous_aligned(x: Tensor) -> Tensor:
    """x, or a copy of it, contiguous and 16-byte aligned, so that kernels may use 16-byte loads."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def contiguous_by_words(x: Tensor) -> Tensor:
    """x contiguous. Columns of wider rows are copied 8 bytes at a time where they lie so: PyTorch copies what is not contiguous
    element by element."""
    of_word = 8 // x.element_size()
    if x.is_contiguous() or of_word < 2 or not x.ndim or x.stride(-1) != 1:
        return x.contiguous()
    if any(n % of_word for n in (x.shape[-1], x.storage_offset(), *x.stride()[:-1])):
        return x.contiguous()
    return x.view(torch.int64).contiguous().view(x.dtype)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n (1 for n <= 1)."""
    return 1 << max(0, n - 1).bit_length()


@cache
def whole_keys() -> None:
    """Makes a kernel's key in Triton's cache independent of the order in which kernels are launched.

    Triton 3.6 hashes a kernel's source, the functions that it calls, and the constants that they use. It hashes a function's
    constants before it has found them, so they are only included if another kernel called the function earlier. Without this, a
    process that launches in another order than the one that compiled ahead would compile again.
    """
    from triton.runtime.jit import DependenciesFinder

    update = DependenciesFinder._update_hash

    def whole(self: Any, function: Any) -> None:
        _ = function.cache_key  # finds the function's constants
        update(self, function)

    DependenciesFinder._update_hash = whole


class LazyModule:
    """A module of kernels that is imported when one of its attributes is first read: without a GPU Triton need not be installed.

    Triton also decides at import time whether kernels are interpreted, so they must not be imported with their op.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        whole_keys()  # before any kernel is launched
        use_sound_assembler()
        value = getattr(import_module(self._name), attribute)
        if _is_kernel(value):
            value = FittingKernel(value)
        setattr(self, attribute, value)  # a launch then costs no lookup
        return value


def _is_kernel(value: object) -> bool:
    from triton.runtime.jit import KernelInterface

    return isinstance(value, KernelInterface)


@cache
def triton_bfloat16() -> Any:
    """`tl.bfloat16`."""
    import triton.language as tl

    return tl.bfloat16
