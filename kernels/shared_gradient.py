"""One tensor for the gradients of a projection's parts, written where they are computed.

A fused projection y = x W^T hands its columns out in parts. Where the gradients of all parts are columns of one tensor, its
backward pass is one product for x and one for W, instead of one for every part. The parts are read by different operators, and no
operator can place its gradient beside those of others by itself: in its forward pass an operator claims the place of what it reads
(`claim`), in its backward pass it writes there (`gradients_like`), and the projection copies the gradients that nobody claimed
(`SharedGradient.complete`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

import torch
from torch import Tensor

_VIEWS = ("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0")
"""Nodes of autograd behind which a tensor has other sizes and the same elements."""

_ALIGNMENT = 16
"""Bytes: kernels are compiled for tensors and rows that begin at multiples of it."""


class SharedGradient:
    """Memory for the gradient of y [.., columns], which has parts of `widths`.

    A backward pass allocates it for the first reader that writes there. It has the columns of all claimed parts and of those that
    are at most `copied` wide, in their order. The node of autograd that made the parts has it as its attribute `shared_gradient`;
    output `first` of the node is the first part.
    """

    def __init__(self, widths: Sequence[int], *, copied: int, first: int = 0) -> None:
        self.first, self._widths, self._copied = first, tuple(widths), copied
        self._claimed: set[int] = set()
        self._places: dict[int, Tensor] = {}
        self._taken: set[int] = set()

    def claim(self, part: int) -> None:
        """The part's gradient will be written in place, by one reader at least."""
        self._claimed.add(part)

    def take(self, part: int, like: Tensor) -> Tensor | None:
        """Memory for the gradient of a part, which has the shape and dtype of `like`. None: another reader has written there in
        this pass, its columns are not aligned, or dimensions of `like` mix them with tokens."""
        if not self._places:
            self._allocate(like, part)
        place = self._places.get(part)
        if place is None or part in self._taken or place.dtype != like.dtype:
            return None
        width = self._widths[part]
        if place.stride(0) != width and width not in accumulate(reversed(like.shape), mul):
            return None
        if place.storage_offset() * place.element_size() % _ALIGNMENT:
            return None
        self._taken.add(part)
        found = place.view(like.shape)
        if like.dim() > 2 and like.shape[1] == 1:
            # kernels take the distance between two sequences to be their length, which is 1, times that of tokens
            found = found.as_strided(found.shape, (found.stride(0), place.stride(0), *found.stride()[2:]))
        return found

    def complete(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Gradients of the parts [.., width], as views of one tensor where it has room for them. Ends the pass: the memory is then
        the caller's alone. A part whose place a reader took, and whose gradient lies elsewhere, as with several readers, stays
        there: what the reader wrote may have been handed out, as a gradient of the view that it read, or in an earlier pass that
        did not come as far as the projection."""
        places, taken, self._places, self._taken = self._places, self._taken, {}, set()
        found: list[Tensor | None] = []
        for part, grad in enumerate(grads):
            place = None if part in taken else places.get(part)
            found.append(grad if grad is None or place is None else place.view(grad.shape).copy_(grad))
        return found

    def _allocate(self, like: Tensor, part: int) -> None:
        tokens = like.numel() // self._widths[part]
        parts = [n for n, width in enumerate(self._widths) if n in self._claimed or width <= self._copied]
        widths = [self._widths[n] for n in parts]
        aligned = _ALIGNMENT // like.element_size()
        whole = torch.empty(tokens, -(-sum(widths) // aligned) * aligned, dtype=like.dtype, device=like.device)
        begins = accumulate(widths, initial=0)
        self._places = {n: whole[:, at : at + width] for n, at, width in zip(parts, begins, widths, strict=False)}


@dataclass(frozen=True)
class Place:
    """Of the gradient of a part."""

    owner: SharedGradient
    part: int

    def take(self, like: Tensor) -> Tensor | None:
        return self.owner.take(self.part, like)


def claim(*xs: Tensor | None) -> tuple[Place | None, ...]:
    """The places for the gradients of xs where these are parts of projections, or views of parts with other sizes; else None. For
    the forward pass of an operator whose backward pass makes its gradients of xs with `gradients_like`."""
    return tuple(None if x is None else _place(x) for x in xs)


def gradients_like(
    xs: Sequence[Tensor], places: Sequence[Place | None], allocate: Callable[[Sequence[Tensor]], Sequence[Tensor]] | None = None
) -> list[Tensor]:
    """Uninitialised tensors of the shapes and dtypes of xs, whose last dimension is contiguous: in the places that were claimed; of
    the others, which are at least one, as `allocate` makes them. None: each contiguous."""
    given = [None if place is None else place.take(x) for x, place in zip(xs, places, strict=True)]
    others = [x for x, place in zip(xs, given, strict=True) if place is None]
    own = iter(allocate(others) if allocate is not None and others else map(_empty_like, others))
    return [next(own) if place is None else place for place in given]


def _empty_like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _place(x: Tensor) -> Place | None:
    node, number = x.grad_fn, x.output_nr
    while node is not None and node.name() in _VIEWS:
        node, number = node.next_functions[0]
    owner = getattr(node, "shared_gradient", None)
    if owner is None or number < owner.first:
        return None
    owner.claim(number - owner.first)
    return Place(owner, number - owner.first)
