"""Selective recomputation: cheap activations are not saved for the backward pass but recomputed there, by the same operators.

Only the operators that produce these tensors run twice, so unlike full recomputation this runs no scan again, and the recomputed
values have the bits of the first forward pass. It is a saved-tensors hook: where autograd would save a discarded tensor, it saves a
placeholder that recomputes it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

Recompute = Callable[[], Tensor]


@contextmanager
def recompute_in_backward(enabled: bool) -> Iterator[Callable[[Tensor, Recompute], None]]:
    """Yields `discard(tensor, recompute)`. Within the context, autograd saves no tensor that was passed to `discard`.

    recompute: returns the same tensor again from what is saved anyway. It is called without a graph, once for all that read the
    tensor in a backward pass; the result is freed after the last of them has read it. enabled: false makes `discard` do nothing.

    Contexts nest, and a tensor discarded in an inner one is invisible to the outer one. They cannot be combined with other
    saved-tensors hooks.
    """
    if not enabled:
        yield lambda tensor, recompute: None
        return
    placeholders: dict[tuple[Any, ...], _Placeholder] = {}

    def discard(tensor: Tensor, recompute: Recompute) -> None:
        placeholders[_storage_key(tensor)] = _Placeholder(recompute)

    def pack(x: Tensor) -> Tensor | _Placeholder:
        placeholder = placeholders.get(_storage_key(x))
        if placeholder is None:
            return x
        placeholder.readers += 1
        return placeholder

    with saved_tensors_hooks(pack, _unpack):
        yield discard


def of_one_call(make: Callable[[], tuple[Tensor, ...]], count: int) -> tuple[Recompute, ...]:
    """`count` functions, one for each tensor that `make` returns: the first that is called calls it, and keeps the others' tensors
    until they are asked for."""
    made: dict[int, Tensor] = {}

    def one(n: int) -> Tensor:
        if n not in made:
            made.update(enumerate(make()))
        return made.pop(n)

    return tuple(partial(one, n) for n in range(count))


class _Placeholder:
    """Saved in place of a discarded tensor. readers: how many backward functions have not read it yet."""

    def __init__(self, recompute: Recompute) -> None:
        self.recompute, self.readers = recompute, 0
        self.value: Tensor | None = None


def _unpack(saved: Tensor | _Placeholder) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    if saved.value is None:
        with torch.no_grad():
            saved.value = saved.recompute()
    value = saved.value
    saved.readers -= 1
    if saved.readers <= 0:
        saved.value = None
    return value


def _storage_key(x: Tensor) -> tuple[Any, ...]:
    """Equal for two tensors that are the same view of the same storage, also on the meta device, where storages have no address."""
    return x.untyped_storage()._cdata, x.storage_offset(), x.dtype, tuple(x.shape), x.stride()
