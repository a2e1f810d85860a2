"""What the tests of the law share: pieces, and what common.kernel_check compares. They run over kernels.registry."""

import itertools
from collections.abc import Sequence
from functools import partial

import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from torch import Tensor

from baton.kernels.common.example_inputs import positions
from baton.kernels.common.kernel_check import gradients, moving, results
from baton.kernels.protocol import Inputs, Recurrence, State
from baton.kernels.registry import recurrences

__all__ = ["gradients", "moving", "positions", "results"]

RECURRENCES = recurrences()

law = partial(settings, derandomize=True, database=None)
given_alone = settings(phases=[Phase.explicit])
"""The examples that a test gives, and none that are drawn."""
seeds = st.integers(0, 2**31 - 1)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def fresh(inputs: Inputs, state: State) -> tuple[Inputs, State]:
    """Leaves of their own that want a gradient, where there is one."""

    def leaf(x: Tensor) -> Tensor:
        return x.detach().clone().requires_grad_(x.is_floating_point())

    return tuple(leaf(x) for x in inputs), {name: leaf(x) for name, x in state.items()}


def no_starts(recurrence: Recurrence, batch: int, length: int) -> Tensor | None:
    """Positions in the middle of one document, as this recurrence wants to be told."""
    return 100 + torch.arange(length).repeat(batch, 1) if recurrence.needs_pos else None


def piece(recurrence: Recurrence, inputs: Inputs, begin: int, end: int) -> Inputs:
    return (*(x[:, begin:end] for x in inputs[: recurrence.num_time_inputs]), *inputs[recurrence.num_time_inputs :])


def run_in_pieces(
    recurrence: Recurrence, inputs: Inputs, pos: Tensor | None, state: State, cuts: Sequence[int]
) -> tuple[Tensor, State]:
    """Outputs and final state when the sequence is cut before the tokens `cuts` and the state is handed on."""
    edges = [0, *sorted(set(cuts)), inputs[0].shape[1]]
    outputs = []
    for begin, end in itertools.pairwise(edges):
        y, state = recurrence.run(piece(recurrence, inputs, begin, end), None if pos is None else pos[:, begin:end], state)
        outputs.append(y)
    return torch.cat(outputs, dim=1), state
