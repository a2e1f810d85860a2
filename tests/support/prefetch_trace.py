"""Checks prefetches of kernels in Triton's interpreter: that prefetched addresses exist, and which loads were not prefetched.

A prefetch does not affect results, so comparisons cannot find prefetches that are unnecessary, too late or missing. The interpreter
omits `triton_prefetch.prefetch`; here it reads one byte of each cache line instead, which `bounds_checked` watches.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

LINE = 128  # bytes

Lines = dict[tuple[str, str], set[int]]


@contextmanager
def asking_watched() -> Iterator[Lines]:
    """Within it, by kernel and argument: lines, counted from where the argument's memory begins, that any program of an interpreted
    launch loaded and had not asked for before. What one program asks for is nothing to another. Not for two threads."""
    import triton.language as tl
    from triton.runtime import interpreter

    from baton.kernels.common.triton_prefetch import prefetch

    executor, builder, rewrite = interpreter.GridExecutor, interpreter.InterpreterBuilder, prefetch.rewrite
    prepare, load, begin_program = executor._init_args_hst, builder.create_masked_load, builder.set_grid_idx
    spans, kernel, asking = [], "", False
    asked: set[tuple[str, int]] = set()
    unasked: Lines = defaultdict(set)

    def preparing(self, args, kwargs):
        nonlocal spans, kernel
        found = prepare(self, args, kwargs)
        given = {**dict(zip(self.arg_names, found[0])), **found[1]}
        memory = {name: x.untyped_storage() for name, x in given.items() if isinstance(x, torch.Tensor)}
        spans = [(name, x.data_ptr(), x.data_ptr() + x.nbytes()) for name, x in memory.items()]
        kernel = getattr(self.fn, "__name__", "?")
        return found

    def beginning(self, *program):
        asked.clear()
        begin_program(self, *program)

    def lines_at(addresses):
        """By the first argument that lies there: others may be given for what is not read."""
        left = addresses.astype(np.int64).ravel()
        for name, begin, end in spans:
            if not left.size:
                return
            own = (left >= begin) & (left < end)
            yield from ((name, line) for line in set(((left[own] - begin) // LINE).tolist()))
            left = left[~own]

    def loading(self, ptrs, mask, other, *rest):
        for name, line in lines_at(ptrs.data[mask.data.astype(bool)]):
            if asking:
                asked.add((name, line))
            elif (name, line) not in asked:
                unasked[kernel, name].add(line)
        return load(self, ptrs, mask, other, *rest)

    def reading(at):
        nonlocal asking
        asking = True
        tl.load(at.to(tl.pointer_type(tl.int8), bitcast=True))
        asking = False

    executor._init_args_hst, builder.create_masked_load, builder.set_grid_idx = preparing, loading, beginning
    prefetch.rewrite = lambda: reading
    try:
        yield unasked
    finally:
        executor._init_args_hst, builder.create_masked_load, builder.set_grid_idx = prepare, load, begin_program
        prefetch.rewrite = rewrite
