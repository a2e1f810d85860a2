"""Checks in Triton's interpreter that kernels read and write only inside their arguments.

On a GPU an out-of-bounds read usually hits another tensor and goes unnoticed. Here every address of a load or store that is not
masked must lie in the storage of an argument, or of a tensor whose address an argument holds (`reached_by_address`).
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


class OutOfBoundsError(AssertionError):
    """A kernel touched memory that is not its arguments'; the interpreter makes an InterpreterError of it."""


_reached: list[torch.Tensor] = []


@contextmanager
def reached_by_address(*tensors: torch.Tensor) -> Iterator[None]:
    """Within it kernels may touch these tensors, which they find by addresses in a table."""
    _reached.extend(tensors)
    try:
        yield
    finally:
        del _reached[len(_reached) - len(tensors) :]


@contextmanager
def bounds_checked() -> Iterator[None]:
    """Within it every interpreted launch is watched. Not for two threads."""
    from triton.runtime import interpreter

    executor, builder = interpreter.GridExecutor, interpreter.InterpreterBuilder
    prepare, load, store = executor._init_args_hst, builder.create_masked_load, builder.create_masked_store
    begins, ends, kernel = np.empty(0, np.uint64), np.empty(0, np.uint64), ""

    def preparing(self, args, kwargs):
        nonlocal begins, ends, kernel
        found = prepare(self, args, kwargs)
        tensors = [x for x in (*found[0], *found[1].values(), *_reached) if isinstance(x, torch.Tensor)]
        spans = sorted({(x.untyped_storage().data_ptr(), x.untyped_storage().nbytes()) for x in tensors})
        begins = np.array([begin for begin, _ in spans], np.uint64)
        ends = np.array([begin + size for begin, size in spans], np.uint64)
        kernel = getattr(self.fn, "__name__", "?")
        return found

    def check(what, ptrs, mask):
        at = ptrs.data[mask.data.astype(bool)].astype(np.uint64).ravel()
        if not at.size:
            return
        size = ptrs.get_element_ty().primitive_bitwidth // 8
        block = np.searchsorted(begins, at, side="right").astype(np.int64) - 1
        outside = (block < 0) | (at + np.uint64(size) > ends[np.maximum(block, 0)])
        if outside.any():
            raise OutOfBoundsError(f"{kernel}: {int(outside.sum())} of {at.size} addresses of a {what} are in no argument's memory")

    def loading(self, ptrs, mask, other, *rest):
        check("load", ptrs, mask)
        return load(self, ptrs, mask, other, *rest)

    def storing(self, ptrs, value, mask, *rest):
        check("store", ptrs, mask)
        return store(self, ptrs, value, mask, *rest)

    executor._init_args_hst, builder.create_masked_load, builder.create_masked_store = preparing, loading, storing
    try:
        yield
    finally:
        executor._init_args_hst, builder.create_masked_load, builder.create_masked_store = prepare, load, store
