"""The recurrences of baton.kernels behind one face, and random cases for them: what the tests of the law run on.

A new recurrence is added to RECURRENCES and is tested by tests/kernels/test_law.py without a test being written.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from baton.kernels.longhorn import longhorn
from baton.kernels.longhorn.reference import longhorn_reference
from baton.kernels.selective_scan import selective_scan
from baton.kernels.selective_scan.reference import selective_scan_reference
from baton.kernels.short_conv import short_conv
from baton.kernels.short_conv.reference import short_conv_reference

Run = Callable[[Sequence[Tensor], Sequence[Tensor], Tensor | None, Tensor | None], tuple[Tensor, Tensor]]

law = partial(settings, derandomize=True, deadline=None, database=None)


@dataclass(frozen=True)
class Recurrence:
    """run and reference take (inputs along time [batch, T, ...], parameters, pos, state) and return (y, state).

    `smooth` moves a case's inputs, in place, to where finite differences reach to both sides and are accurate.
    """

    name: str
    run: Run
    reference: Run
    make: Callable[[torch.Generator, int, int, torch.dtype], "Case"]
    smooth: Callable[["Case"], object] = lambda case: None

    def __str__(self) -> str:
        return self.name


@dataclass
class Case:
    inputs: list[Tensor]
    parameters: list[Tensor]
    state: Tensor

    def leaves(self) -> list[Tensor]:
        """Fresh leaves that want a gradient: inputs, parameters, then the initial state."""
        return [x.detach().clone().requires_grad_() for x in (*self.inputs, *self.parameters, self.state)]


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


def extreme_steps(generator: torch.Generator, *shape: int, dtype: torch.dtype) -> Tensor:
    """Step sizes between 0 and 1, among them many of exactly 0, 1e-6 and 50."""
    scales = torch.tensor([0.0, 1e-6, 0.1, 1.0, 1.0, 1.0], dtype=dtype)
    steps = torch.rand(*shape, generator=generator, dtype=dtype) * scales[torch.randint(0, 6, shape, generator=generator)]
    steps[torch.rand(*shape, generator=generator) < 0.05] = 50.0
    return steps


def extreme_keys(generator: torch.Generator, *shape: int, dtype: torch.dtype) -> Tensor:
    """Keys of either sign, whole tokens of them exactly 0, tiny or 30 times larger, and single ones exactly 0."""
    scales = torch.tensor([0.0, 1e-4, 0.3, 1.0, 1.0, 30.0], dtype=dtype)
    keys = torch.randn(*shape, generator=generator, dtype=dtype)
    keys *= scales[torch.randint(0, 6, shape[:-1], generator=generator)].unsqueeze(-1)
    keys[torch.rand(*shape, generator=generator) < 0.1] = 0.0
    return keys


def extreme_gates(generator: torch.Generator, *shape: int, dtype: torch.dtype) -> Tensor:
    """Sigmoids of very wide logits: from 0 to 1, among them many of nearly, and of exactly, 0 and 1."""
    return torch.sigmoid(8 * torch.randn(*shape, generator=generator, dtype=dtype)).to(torch.bfloat16).to(dtype)


def _randn(generator: torch.Generator, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=dtype)


def _make_scan(
    generator: torch.Generator, batch: int, length: int, dtype: torch.dtype, channels: int = 5, d_state: int = 3
) -> Case:
    randn = partial(_randn, generator, dtype=dtype)
    u, delta = randn(batch, length, channels), extreme_steps(generator, batch, length, channels, dtype=dtype)
    A = -torch.exp(randn(channels, d_state))
    B, C = randn(batch, length, d_state), randn(batch, length, d_state)
    return Case([u, delta, B, C], [A, randn(channels)], randn(batch, channels, d_state))


def _make_longhorn(
    generator: torch.Generator, batch: int, length: int, dtype: torch.dtype, channels: int = 5, d_state: int = 3
) -> Case:
    randn = partial(_randn, generator, dtype=dtype)
    k = extreme_keys(generator, batch, length, d_state, dtype=dtype)
    beta = extreme_gates(generator, batch, length, channels, dtype=dtype)
    inputs = [randn(batch, length, channels), k, randn(batch, length, d_state), beta]
    return Case(inputs, [randn(channels)], randn(batch, channels, d_state))


def _make_conv(generator: torch.Generator, batch: int, length: int, dtype: torch.dtype, channels: int = 5, width: int = 4) -> Case:
    randn = partial(_randn, generator, dtype=dtype)
    return Case([randn(batch, length, channels)], [randn(channels, width), randn(channels)], randn(batch, width - 1, channels))


def _scan(function: Callable[..., tuple[Tensor, Tensor]], discretization: str) -> Run:
    def run(
        inputs: Sequence[Tensor], parameters: Sequence[Tensor], pos: Tensor | None, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        u, delta, B, C = inputs
        A, D = parameters
        return function(u, delta, A, B, C, D, pos=pos, initial_state=state, discretization=discretization)

    return run


def _longhorn(function: Callable[..., tuple[Tensor, Tensor]]) -> Run:
    def run(
        inputs: Sequence[Tensor], parameters: Sequence[Tensor], pos: Tensor | None, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return function(*inputs, *parameters, pos=pos, initial_state=state)

    return run


def _conv(function: Callable[..., tuple[Tensor, Tensor]], activation: str | None) -> Run:
    def run(
        inputs: Sequence[Tensor], parameters: Sequence[Tensor], pos: Tensor | None, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return function(inputs[0], *parameters, pos=pos, tail=state, activation=activation)

    return run


def _of_scan(discretization: str, **sizes: int) -> Recurrence:
    return Recurrence(
        "selective_scan-" + "-".join([discretization, *(f"{key}={value}" for key, value in sizes.items())]),
        _scan(selective_scan, discretization),
        _scan(selective_scan_reference, discretization),
        partial(_make_scan, **sizes),
        smooth=lambda case: case.inputs[1].add_(0.3).clamp_(max=2.0),
    )


def _of_longhorn(**sizes: int) -> Recurrence:
    return Recurrence(
        "-".join(["longhorn", *(f"{key}={value}" for key, value in sizes.items())]),
        _longhorn(longhorn),
        _longhorn(longhorn_reference),
        partial(_make_longhorn, **sizes),
        smooth=lambda case: case.inputs[1].clamp_(-2.0, 2.0),
    )


def _of_conv(activation: str | None, **sizes: int) -> Recurrence:
    return Recurrence(
        "short_conv-" + "-".join([str(activation), *(f"{key}={value}" for key, value in sizes.items())]),
        _conv(short_conv, activation),
        _conv(short_conv_reference, activation),
        partial(_make_conv, **sizes),
    )


RECURRENCES = [_of_scan("euler"), _of_scan("zoh"), _of_longhorn(), _of_conv(None), _of_conv("silu")]
# odd sizes, large enough for several vectors and, in the scan's expanded buffers, for several threads
WIDE_RECURRENCES = [
    _of_scan("euler", channels=67, d_state=17),
    _of_scan("zoh", channels=67, d_state=17),
    _of_longhorn(channels=67, d_state=17),
    _of_conv(None, channels=67),
    _of_conv("silu", channels=67),
]


def run_in_pieces(
    recurrence: Recurrence, leaves: Sequence[Tensor], n_inputs: int, pos: Tensor | None, cuts: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Outputs and final state when the sequence is cut before the tokens `cuts` and the state is handed on."""
    inputs, parameters, state = leaves[:n_inputs], leaves[n_inputs:-1], leaves[-1]
    edges = [0, *sorted(set(cuts)), inputs[0].shape[1]]
    outputs = []
    for begin, end in itertools.pairwise(edges):
        piece = [x[:, begin:end] for x in inputs]
        y, state = recurrence.run(piece, parameters, None if pos is None else pos[:, begin:end], state)
        outputs.append(y)
    return torch.cat(outputs, dim=1), state


def gradients(outputs: Sequence[Tensor], leaves: Sequence[Tensor], generator: torch.Generator) -> tuple[Tensor, ...]:
    """Gradients of all leaves for random cotangents of all outputs, the final state's included."""
    cotangents = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in outputs]
    return torch.autograd.grad(outputs, leaves, cotangents)


seeds = st.integers(0, 2**31 - 1)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
