"""Random inputs that cover the corner cases of recurrences, for tests and `baton doctor`."""

import torch
from torch import Tensor


def randn(generator: torch.Generator, *shape: int, dtype: torch.dtype) -> Tensor:
    """N(0, 1)."""
    return torch.randn(*shape, generator=generator, dtype=dtype)


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


def extreme_log_gates(generator: torch.Generator, *shape: int, dtype: torch.dtype) -> Tensor:
    """Logarithms of gates, finite and at most 0: from exactly 0 (keep all) over -1e-6 to -50 (keep nothing)."""
    scales = torch.tensor([0.0, 1e-6, 0.05, 0.3, 1.0, 50.0], dtype=dtype)
    return -torch.rand(*shape, generator=generator, dtype=dtype) * scales[torch.randint(0, 6, shape, generator=generator)]


def positions(generator: torch.Generator, batch: int, length: int, start_probability: float) -> Tensor:
    """Positions [batch, length] that begin inside a document (sometimes at its start) and start new ones at random, often right
    after another."""
    pos = torch.empty(batch, length, dtype=torch.int64)
    current = torch.randint(0, 6, (batch,), generator=generator)
    starts = torch.rand(batch, length, generator=generator) < start_probability
    for t in range(length):
        current = torch.where(starts[:, t], 0, current)
        pos[:, t] = current
        current = current + 1
    return pos
