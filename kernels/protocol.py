"""What is carried between pieces of a sequence: a State, and the Leaf records that describe one.

The one thing to know: a State is a plain dict of tensors whose leading dimension is the batch (a lane each). What is in it is
the layer's own business; everybody else only ships, detaches, saves or zeroes it, with the functions of this file.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.kernels.errors import KernelError

State = dict[str, Tensor]

# Every leaf starts at a multiple of this in a flat message: views need their own itemsize, and 16 serves every dtype.
_ALIGNMENT_BYTES = 16


@dataclass(frozen=True)
class Leaf:
    """One tensor of a State.

    Attributes:
        name: its key in the State.
        shape: without the leading batch dimension.
        dtype: of the tensor wherever it is: in memory, in a message and in a file.
        tp: the dimension of `shape` (batch not counted) that is split over the tensor group; None if every rank holds all of it.
        grad: whether a gradient flows through it (indices and flags have none).
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    tp: int | None
    grad: bool

    def __post_init__(self) -> None:
        if self.tp is not None and not 0 <= self.tp < len(self.shape):
            raise KernelError(f"Leaf: {self.name} has tp {self.tp}, expected None or a dimension of its shape {self.shape}")
        if self.grad and not self.dtype.is_floating_point:
            raise KernelError(f"Leaf: {self.name} has dtype {self.dtype} and grad, expected a floating dtype or grad=False")

    def nbytes(self, batch: int) -> int:
        """Bytes of this leaf for `batch` lanes."""
        return batch * math.prod(self.shape) * self.dtype.itemsize


def zeros(leaves: Sequence[Leaf], batch: int, device: torch.device | str) -> State:
    """The State of nothing read yet, for recurrences that begin from zero."""
    return {leaf.name: torch.zeros(batch, *leaf.shape, dtype=leaf.dtype, device=device) for leaf in leaves}


def detach(state: State) -> State:
    """The same values with the gradient cut: truncated backpropagation through time."""
    return {name: leaf.detach() for name, leaf in state.items()}


def check(state: State, leaves: Sequence[Leaf], batch: int) -> None:
    """Refuse a State that is not exactly what `leaves` describe, for `batch` lanes.

    Raises:
        KernelError: a leaf is missing, unknown, or has another shape or dtype than described.
    """
    names = [leaf.name for leaf in leaves]
    if set(names) != set(state):
        raise KernelError(f"state: has leaves {sorted(state)}, expected {sorted(names)}")
    for leaf in leaves:
        tensor, shape = state[leaf.name], (batch, *leaf.shape)
        if tuple(tensor.shape) != shape:
            raise KernelError(f"state: {leaf.name} has shape {tuple(tensor.shape)}, expected (batch, ...) = {shape}")
        if tensor.dtype != leaf.dtype:
            raise KernelError(f"state: {leaf.name} has dtype {tensor.dtype}, expected {leaf.dtype}")


def flat_nbytes(leaves: Sequence[Leaf], batch: int) -> int:
    """Bytes of the message that `to_flat` makes: what a receiver must have ready."""
    return sum(_padded(leaf.nbytes(batch)) for leaf in leaves)


def to_flat(state: State, leaves: Sequence[Leaf]) -> Tensor:
    """One contiguous message for a whole State: uint8 [flat_nbytes], each leaf in its own dtype, in the order of `leaves`.

    The message is a copy and carries no gradient: whoever sends it also sends the cotangents back. Padding is zero, so equal
    States make equal bytes.

    Raises:
        KernelError: the State is not what `leaves` describe.
    """
    batch = next(iter(state.values())).shape[0] if state else 0
    check(state, leaves, batch)
    device = next(iter(state.values())).device if state else torch.device("cpu")
    message = torch.zeros(flat_nbytes(leaves, batch), dtype=torch.uint8, device=device)
    for leaf, view in zip(leaves, _views(message, leaves, batch), strict=True):
        view.copy_(state[leaf.name].detach())
    return message


def from_flat(message: Tensor, leaves: Sequence[Leaf], batch: int) -> State:
    """The State in a message of `to_flat`. The leaves are views of `message`: no copy, so do not reuse its memory while they live.

    Raises:
        KernelError: the message is not uint8, contiguous and of `flat_nbytes(leaves, batch)` bytes.
    """
    expected = flat_nbytes(leaves, batch)
    if message.dtype != torch.uint8 or tuple(message.shape) != (expected,) or not message.is_contiguous():
        raise KernelError(
            f"state: message has shape {tuple(message.shape)} and dtype {message.dtype}, expected ({expected},) of contiguous "
            f"uint8 for {batch} lanes of {[leaf.name for leaf in leaves]}"
        )
    return {leaf.name: view for leaf, view in zip(leaves, _views(message, leaves, batch), strict=True)}


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _views(message: Tensor, leaves: Sequence[Leaf], batch: int) -> list[Tensor]:
    views, start = [], 0
    for leaf in leaves:
        nbytes = leaf.nbytes(batch)
        views.append(message[start : start + nbytes].view(leaf.dtype).view(batch, *leaf.shape))
        start += _padded(nbytes)
    return views
