"""y = x W^T over a tensor group, with a backward pass that reads and writes as little memory as possible.

Within `fused_grad_accumulation` the matmul that computes a weight's gradient adds it to `.grad`, in fp32. Autograd never sees the
gradient, so it is neither rounded to the compute dtype nor read and written again. megatron-core does the same with an extension
that has to be compiled; PyTorch's matmuls can accumulate into another dtype by now.
"""

from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from baton.kernels.shared_gradient import SharedGradient
from baton.parallel.comm_timing import describe_collective, reported_wait, timed_wait

_NARROW = 512
"""Gradients of output parts with fewer columns are concatenated: a matmul for each would cost more than the copy."""

_FEW_ROWS = 16
"""Products with fewer rows are computed apart from what they are added to."""

_PIECE = 2048
"""Fewest rows of a piece. A product that is summed over ranks is made in two pieces where both have as many: the first one's sum is
under way while the second one is computed. With fewer, launches would cost more than what is hidden."""

_adding = False
_outdated: set[Tensor] = set()  # parameters whose `.grad` holds nothing yet that counts


@contextmanager
def fused_grad_accumulation() -> Iterator[None]:
    """Within it, backward passes add gradients of `linear`'s weights, and of `embedding`'s on a GPU, to `.grad` directly: for plain
    backward passes, not for autograd.grad nor for hooks on parameters. It holds for the whole process, because autograd has threads
    of its own."""
    global _adding
    before, _adding = _adding, True
    try:
        yield
    finally:
        _adding = before


def accumulates_fused() -> bool:
    """Whether this is within `fused_grad_accumulation`."""
    return _adding


@contextmanager
def overwriting(parameters: Iterable[nn.Parameter]) -> Iterator[Set[Tensor]]:
    """Within it and within `fused_grad_accumulation`, what the `.grad` of these parameters holds does not count: the first matmul
    that would add to it replaces it, which spares a pass that sets it to 0 and the reading of zeros. Yields those that nothing has
    replaced yet: set theirs to 0 before the pass. It holds for the whole process, as does `fused_grad_accumulation`."""
    _outdated.update(parameters)
    try:
        yield _outdated
    finally:
        _outdated.clear()


def take_outdated(parameter: Tensor) -> bool:
    """Whether what the parameter's `.grad` holds does not count; from now on it does."""
    found = parameter in _outdated
    _outdated.discard(parameter)
    return found


def linear(
    x: Tensor,
    parameter: nn.Parameter,
    weight: Tensor,
    *,
    split_sizes: Sequence[int] | None = None,
    group: dist.ProcessGroup | None = None,
    sum_group: dist.ProcessGroup | None = None,
    return_input: bool = False,
) -> tuple[Tensor, ...]:
    """y = x W^T, in parts.

    Args:
        x: [.., in], in the weight's dtype.
        parameter: [out, in]; receives the gradient, in its own dtype.
        weight: the parameter in the compute dtype, without a graph.
        split_sizes: columns of the parts of y, one after the other; None: y is one part.
        group: ranks whose gradients of x are summed in the backward pass, overlapped with the products; None: no sum.
        sum_group: ranks whose y are summed, overlapped with the product; the gradient is y's on every rank. y has one part then.
            None: no sum.
        return_input: also return x first, for other readers of it: their gradient is the starting value of the input gradient's
            matmul, where autograd would add two tensors. Within `fused_grad_accumulation` the sum is written over it, so readers
            must be operators that make a new tensor for their input's gradient and hand it to nothing else, as a matmul does, and
            an addition does not.

    Returns:
        y [.., size] of each part, in x's dtype; the parts are views of one tensor.
    """
    if return_input and not x.requires_grad:  # a returned view would, and its readers would compute a gradient that nothing takes
        return x, *linear(x, parameter, weight, split_sizes=split_sizes, group=group, sum_group=sum_group)
    sizes = tuple(split_sizes or (len(weight),))
    found: tuple[Tensor, ...] = _Linear.apply(x, parameter, weight, sizes, group, sum_group, return_input)
    if sum_group is None:
        return found
    *before, y = found
    return *before, _Sum.apply(y, x.detach(), weight, sum_group)


def accumulate_product(into: Tensor, a: Tensor, b: Tensor, *, first: bool) -> None:
    """into [M, N] (contiguous, at least as precise as a) += a [M, K] b [K, N]; first: into = a b, whatever it holds. Zeros to which
    a product is added become what the first product is, to the bit."""
    if len(into) < _FEW_ROWS and not first:
        # a library may sum a few rows in another order where it adds the sum to something
        product = torch.empty_like(into)
        accumulate_product(product, a, b, first=True)
        into.add_(product)
    elif into.dtype == a.dtype:
        torch.mm(a, b, out=into) if first else into.addmm_(a, b)
    elif a.is_cuda and into.dtype == torch.float32:
        if first:
            torch.mm(a, b, out_dtype=torch.float32, out=into)
        else:
            torch.addmm(into, a, b, out_dtype=torch.float32, out=into)
    elif first:
        into.copy_(a @ b)
    else:
        into.add_(a @ b)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, parameter: Tensor, weight: Tensor, split_sizes: tuple[int, ...], group: Any, sum_group: Any,
        return_input: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight)
        ctx.parameter, ctx.split_sizes, ctx.group, ctx.return_input = parameter, split_sizes, group, return_input
        y = F.linear(x, weight) if sum_group is None else _first_piece(x, weight, sum_group)
        parts = (y,) if len(split_sizes) == 1 else y.split(split_sizes, dim=-1)
        # as wide as x: to copy a gradient then costs less than to add a product of its own to x's gradient
        ctx.shared_gradient = SharedGradient(split_sizes, copied=x.shape[-1], first=int(return_input))
        return (x.view_as(x), *parts) if return_input else parts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dx, grads = (grads[0], grads[1:]) if ctx.return_input else (None, grads)
        runs = _runs(ctx.split_sizes, ctx.shared_gradient.complete(grads))
        for_x, for_weight = ctx.needs_input_grad[:2]
        sums: list[Any] = []
        if for_x:
            dx, sums = _input_gradient(dx, runs, weight, x, ctx.group, overwrite=_adding)
        dweight = _weight_gradient(ctx.parameter, runs, x) if for_weight else None
        if sums:
            with reported_wait(describe_collective("all_reduce", ctx.group)):
                for work in sums:
                    work.wait()
        return (dx if for_x else None), dweight, None, None, None, None, None


def _runs(split_sizes: Sequence[int], grads: Sequence[Tensor | None]) -> list[tuple[int, Tensor]]:
    """Gradients of y [tokens, columns], and where their columns begin: neighbours as one where they lie side by side in memory, or
    are narrow; none of what has none."""
    runs: list[tuple[int, Tensor]] = []
    for begin, width, grad in zip(accumulate(split_sizes, initial=0), split_sizes, grads, strict=False):
        if grad is None:
            continue
        flat = grad.reshape(-1, width)
        before, last = runs[-1] if runs else (0, flat)
        if runs and before + last.shape[1] == begin and _side_by_side(last, flat):
            runs[-1] = before, last.as_strided((len(flat), begin - before + width), last.stride())
        else:
            runs.append((begin, flat))
    joined: list[tuple[int, list[Tensor]]] = []
    for begin, flat in runs:
        before, parts = joined[-1] if joined else (0, [])
        narrow = max((part.shape[1] for part in (*parts, flat)), default=0) < _NARROW
        if parts and narrow and before + sum(part.shape[1] for part in parts) == begin:
            parts.append(flat)
        else:
            joined.append((begin, [flat]))
    return [(begin, parts[0] if len(parts) == 1 else torch.cat(parts, 1)) for begin, parts in joined]


def _side_by_side(left: Tensor, right: Tensor) -> bool:
    """Whether two gradients are adjacent columns of one tensor [tokens, columns]."""
    width, row = left.shape[1], left.stride(0)
    return (
        left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()
        and right.storage_offset() - left.storage_offset() == width
        and left.stride() == right.stride() == (row, 1)
        and row >= width + right.shape[1]
    )


def _pieces(rows: int, group: Any) -> list[slice]:
    """Of rows whose products are summed over the group, each piece by itself."""
    middle = rows // 2
    return [slice(0, middle), slice(middle, rows)] if group is not None and middle >= _PIECE else [slice(0, rows)]


def _first_piece(x: Tensor, weight: Tensor, group: Any) -> Tensor:
    """x W^T, of which only the first piece has been computed."""
    rows, y = x.reshape(-1, x.shape[-1]), x.new_empty(*x.shape[:-1], len(weight))
    first = _pieces(len(rows), group)[0]
    torch.mm(rows[first], weight.mT, out=y.view(-1, len(weight))[first])
    return y  # no view, for `_Sum` works in place


class _Sum(torch.autograd.Function):
    """y, whose first piece has been computed, whole and summed over the group. It keeps nothing, so that a recomputation, which
    ends with the last tensor that is kept, does not repeat it behind a layer's last product."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, weight: Tensor, group: Any) -> Tensor:
        ctx.mark_dirty(y)
        rows, flat, sums = x.reshape(-1, x.shape[-1]), y.view(-1, y.shape[-1]), []
        for number, piece in enumerate(_pieces(len(rows), group)):
            if number:
                torch.mm(rows[piece], weight.mT, out=flat[piece])
            sums.append(dist.all_reduce(flat[piece], group=group, async_op=True))
        with timed_wait(describe_collective("all_reduce", group)):
            for work in sums:
                work.wait()
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        return dy, None, None, None


def _input_gradient(
    before: Tensor | None, runs: Sequence[tuple[int, Tensor]], weight: Tensor, x: Tensor, group: Any, *, overwrite: bool
) -> tuple[Tensor, list[Any]]:
    """The input's gradient of all runs, added to what was there before; and the sums over the group that are under way. overwrite:
    it may be written over `before`, which is copied otherwise: matmuls of PyTorch do not add to one tensor and write to another."""
    if before is not None and overwrite and before.is_contiguous():
        total = before.reshape(-1, weight.shape[1])
    else:
        total = torch.empty_like(x, memory_format=torch.contiguous_format).view(-1, weight.shape[1])
        if before is not None:
            total.copy_(before.reshape(total.shape))
    # the narrowest first, which costs little more than to write the sum; later it would cost to read and write it
    runs, sums = sorted(runs, key=lambda run: run[1].shape[1]), []
    for piece in _pieces(len(total), group):
        into = total[piece]
        for number, (begin, dy) in enumerate(runs):
            matrix = weight[begin : begin + dy.shape[1]]
            if number or before is not None:
                into.addmm_(dy[piece], matrix)
            else:
                torch.mm(dy[piece], matrix, out=into)
        if not runs and before is None:
            into.zero_()
        if group is not None:
            sums.append(dist.all_reduce(into, group=group, async_op=True))
    return total.view(x.shape), sums


def _weight_gradient(parameter: nn.Parameter, runs: Sequence[tuple[int, Tensor]], x: Tensor) -> Tensor | None:
    """The gradient; None: it was added to `.grad`."""
    before = parameter.grad if _adding else None
    new = take_outdated(parameter) or before is None  # in this order: what is made here counts
    whole = sum(dy.shape[1] for _, dy in runs) == len(parameter)
    grad = torch.empty_like(parameter) if before is None else before
    if new and not whole:
        grad.zero_()
    rows = x.reshape(-1, x.shape[-1])
    for begin, dy in runs:
        accumulate_product(grad[begin : begin + dy.shape[1]], dy.mT, rows, first=new and whole)
    if not _adding:
        return grad
    parameter.grad = grad
    return None
