"""What the tests of the law share: positions, pieces, gradients of everything. What they run over is baton.kernels.registry."""

import itertools
from collections.abc import Sequence
from functools import partial

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from baton.kernels.protocol import Inputs, Recurrence, State
from baton.kernels.registry import recurrences

RECURRENCES = recurrences()

law = partial(settings, derandomize=True, deadline=None, database=None)
seeds = st.integers(0, 2**31 - 1)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def positions(generator: torch.Generator, batch: int, length: int, start_probability: float) -> Tensor:
    """Positions that begin inside a document (sometimes at its start) and start new ones at random, often right after another."""
    pos = torch.empty(batch, length, dtype=torch.int64)
    current = torch.randint(0, 6, (batch,), generator=generator)
    starts = torch.rand(batch, length, generator=generator) < start_probability
    for t in range(length):
        current = torch.where(starts[:, t], 0, current)
        pos[:, t] = current
        current = current + 1
    return pos


def fresh(inputs: Inputs, state: State) -> tuple[Inputs, State]:
    """Leaves of their own that want a gradient, where there is one."""

    def leaf(x: Tensor) -> Tensor:
        return x.detach().clone().requires_grad_(x.is_floating_point())

    return tuple(leaf(x) for x in inputs), {name: leaf(x) for name, x in state.items()}


def moving(state: State) -> State:
    """The leaves that can have a gradient."""
    return {name: x for name, x in state.items() if x.is_floating_point()}


def no_starts(recurrence: Recurrence, batch: int, length: int) -> Tensor | None:
    """Positions in the middle of one document, as this recurrence wants to be told."""
    return 100 + torch.arange(length).repeat(batch, 1) if recurrence.needs_pos else None


def piece(recurrence: Recurrence, inputs: Inputs, begin: int, end: int) -> Inputs:
    return (*(x[:, begin:end] for x in inputs[: recurrence.along]), *inputs[recurrence.along :])


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


def gradients(outputs: Sequence[Tensor], leaves: Sequence[Tensor], generator: torch.Generator) -> tuple[Tensor, ...]:
    """Gradients of all leaves for random cotangents of all outputs that have one, the final state's included."""
    # numbers that bfloat16 can hold, so that outputs of every precision get the same ones
    cotangents = [torch.randn(x.shape, generator=generator).to(torch.bfloat16).to(x.device, x.dtype) for x in outputs]
    reached = [(x, dx) for x, dx in zip(outputs, cotangents, strict=True) if x.requires_grad]
    return torch.autograd.grad(
        [x for x, _ in reached], leaves, [dx for _, dx in reached], allow_unused=True, materialize_grads=True
    )


def results(y: Tensor, state: State, inputs: Inputs, entering: State, seed: int) -> dict[str, Tensor]:
    """Outputs, leaving state and the gradients of everything, by name."""
    grads = gradients([y, *moving(state).values()], [*inputs, *moving(entering).values()], seeded(seed))
    names = [*(f"d input {n}" for n in range(len(inputs))), *(f"d entering {name}" for name in moving(entering))]
    return {"y": y, **{f"leaving {name}": x for name, x in state.items()}, **dict(zip(names, grads, strict=True))}
