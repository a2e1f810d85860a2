"""Messages that carry a State from rank to rank: all its tensors in one buffer of bytes, each at an aligned offset."""

from collections.abc import Sequence

import torch
from torch import Tensor

from baton.kernels.errors import KernelError
from baton.kernels.protocol import State, StateSpec, check

# Every leaf starts at a multiple of this in a flat message: views need their own itemsize, and 16 serves every dtype.
_ALIGNMENT_BYTES = 16


def flat_nbytes(leaves: Sequence[StateSpec], batch: int) -> int:
    """Bytes of the message that `to_flat` makes: what a receiver must have ready."""
    return sum(_padded(leaf.nbytes(batch)) for leaf in leaves)


def to_flat(state: State, leaves: Sequence[StateSpec]) -> Tensor:
    """One contiguous message for a whole State: uint8 [flat_nbytes], each leaf in its own dtype, in the order of `leaves`.

    The message is a copy and carries no gradient; the caller must send the State's gradient back. Padding is zero, so equal States
    give equal bytes.

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


def from_flat(message: Tensor, leaves: Sequence[StateSpec], batch: int) -> State:
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


def _views(message: Tensor, leaves: Sequence[StateSpec], batch: int) -> list[Tensor]:
    views, start = [], 0
    for leaf in leaves:
        nbytes = leaf.nbytes(batch)
        views.append(message[start : start + nbytes].view(leaf.dtype).view(batch, *leaf.shape))
        start += _padded(nbytes)
    return views
