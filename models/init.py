"""Initial values. Each function returns an `Init`: it fills a whole (unsplit) fp32 tensor in place from a generator."""

import math

import torch
from torch import Tensor

from baton.parallel.param_layout import Init


def uniform(bound: float) -> Init:
    """U(-bound, bound)."""

    def fill(w: Tensor, g: torch.Generator) -> None:
        w.uniform_(-bound, bound, generator=g)

    return fill


def linear(fan_in: int, scale: float = 1.0) -> Init:
    """The framework's default of a linear layer, U(+-1/sqrt(fan_in)), times `scale`."""
    return uniform(scale / math.sqrt(fan_in))


def normal(std: float) -> Init:
    """N(0, std^2)."""

    def fill(w: Tensor, g: torch.Generator) -> None:
        w.normal_(0.0, std, generator=g)

    return fill


def constant(value: float) -> Init:
    """Every element `value`."""

    def fill(w: Tensor, g: torch.Generator) -> None:
        w.fill_(value)

    return fill


def log_arange(w: Tensor, g: torch.Generator) -> None:
    """log(n + 1) along the last dimension: A = -(1 .. N), S4D-real."""
    w.copy_(torch.arange(1, w.shape[-1] + 1, dtype=torch.float32).log().expand_as(w))


def log_uniform(low: float, high: float) -> Init:
    """log of a number that is uniform on [low, high]: Mamba-2's rates."""

    def fill(w: Tensor, g: torch.Generator) -> None:
        w.uniform_(low, high, generator=g).log_()

    return fill


def inverse_softplus_log_uniform(low: float, high: float, floor: float) -> Init:
    """softplus^-1 of a step size that is log-uniform on [low, high], at least `floor`."""

    def fill(w: Tensor, g: torch.Generator) -> None:
        dt = torch.empty_like(w).uniform_(math.log(low), math.log(high), generator=g).exp_().clamp_(min=floor)
        w.copy_(_inverse_softplus(dt))

    return fill


def inverse_softplus_uniform(low: float, high: float, floor: float) -> Init:
    """softplus^-1 of a step size that is uniform on [low, high], at least `floor`."""

    def fill(w: Tensor, g: torch.Generator) -> None:
        w.copy_(_inverse_softplus(torch.empty_like(w).uniform_(low, high, generator=g).clamp_(min=floor)))

    return fill


def _inverse_softplus(y: Tensor) -> Tensor:
    return y + torch.log(-torch.expm1(-y))
