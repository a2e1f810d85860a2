"""Tensors that stay in one place, where recorded passes find and leave what changes from pass to pass."""

from collections.abc import Sequence

import torch
from torch import Tensor

from baton.parallel.local_states import HandedOn

_ALIGNMENT_BYTES = 256
"""Of each tensor, as in memory that was allocated for it: kernels are compiled for aligned addresses."""


class FixedTensors:
    """Tensors in one block of memory, with the shapes, dtypes and strides of those given.

    Attributes:
        block: all of them, uint8 [bytes].
        tensors: views of it.
    """

    def __init__(self, like: Sequence[Tensor], device: torch.device) -> None:
        made = [torch.empty_like(x, device="meta") for x in like]  # of what is not dense, the strides of a dense one
        starts, end = [], 0
        for x in made:
            starts.append(end)
            end += -(-x.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        self.block = torch.zeros(end, dtype=torch.uint8, device=device)
        self.tensors = [
            self.block[start : start + x.nbytes].view(x.dtype).as_strided(x.shape, x.stride(), start // x.dtype.itemsize)
            for start, x in zip(starts, made, strict=True)
        ]

    def copy_(self, values: Sequence[Tensor]) -> None:
        """Overwrite all of them."""
        for own, x in zip(self.tensors, values, strict=True):
            own.copy_(x)

    def rows(self, count: int) -> Tensor:
        """Memory for copies of the block, uint8 [count, bytes]."""
        return self.block.new_zeros(max(0, count), len(self.block))


class FixedStates:
    """What one segment hands to another in one direction, in fixed memory."""

    def __init__(self, like: HandedOn, device: torch.device) -> None:
        self.memory = FixedTensors([x for states in like.values() for state in states for x in state.values()], device)
        own = iter(self.memory.tensors)
        self.states: HandedOn = {key: [{name: next(own) for name in state} for state in states] for key, states in like.items()}

    def copy_(self, values: HandedOn) -> None:
        """Overwrite what of it is given."""
        for key, states in values.items():
            for own, given in zip(self.states[key], states, strict=True):
                for name, x in own.items():
                    x.copy_(given[name])
