"""Selective recomputation: what costs little is not kept for the backward pass but made again there, by the same operators.

The one thing to know: nothing is run twice but what makes these tensors, so unlike a layer that is run again this costs no scan,
and the bits are those of the first time. Whoever would keep such a tensor within `remaking` keeps a note instead.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

Make = Callable[[], Tensor]


@contextmanager
def remaking(on: bool) -> Iterator[Callable[[Tensor, Make], None]]:
    """Within it autograd keeps no tensor that was named to what is given: f(tensor, make).

    make: gives the same again, from what is kept anyway. It is called without a graph, once for all who ask in a backward pass, and
    what it gave is dropped when the last has asked. What is kept within another `remaking` is not noted by an outer one; and not
    around or within other hooks for saved tensors. on: else nothing happens.
    """
    if not on:
        yield lambda tensor, make: None
        return
    notes: dict[tuple[Any, ...], _Note] = {}

    def add(tensor: Tensor, make: Make) -> None:
        notes[_place(tensor)] = _Note(make)

    def pack(x: Tensor) -> Tensor | _Note:
        note = notes.get(_place(x))
        if note is None:
            return x
        note.readers += 1
        return note

    with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
        yield add


class _Note:
    """In a tensor's place. readers: who will ask for it yet."""

    def __init__(self, make: Make) -> None:
        self.make, self.readers = make, 0
        self.made: Tensor | None = None


def _unpack(kept: Tensor | _Note) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    if kept.made is None:
        with torch.no_grad():
            kept.made = kept.make()
    made = kept.made
    kept.readers -= 1
    if kept.readers <= 0:
        kept.made = None
    return made


def _place(x: Tensor) -> tuple[Any, ...]:
    """Where a tensor lies: equal for two that are the same numbers in the same memory, which on the meta device has no address."""
    return x.untyped_storage()._cdata, x.storage_offset(), x.dtype, tuple(x.shape), x.stride()
