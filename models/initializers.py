"""Initial values of parameters, as plain data. Torch-free: a settings class declares them, a module applies them.

An initializer is called with a whole (unsplit) float32 tensor and a generator and fills the tensor in place, so the values do not
depend on the layout. `Projection` is the exception: its distribution depends on the model, and `MixerContext.initializer` resolves
it.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Initializer:
    """Base class: fills a whole float32 tensor in place from a generator."""

    def __call__(self, w: "Tensor", g: "torch.Generator") -> None:
        raise TypeError(f"{self} depends on the model; resolve it with MixerContext.initializer")


@dataclass(frozen=True)
class Projection(Initializer):
    """A projection's weight: U(+-1/sqrt(fan_in)), or N(0, model.init_std^2) where the model sets it.

    residual: the output is added to the residual stream, so the scale is multiplied by residual_adds^(-1/2).
    """

    fan_in: int
    residual: bool = False


@dataclass(frozen=True)
class Uniform(Initializer):
    """U(-bound, bound)."""

    bound: float

    def __call__(self, w: "Tensor", g: "torch.Generator") -> None:
        w.uniform_(-self.bound, self.bound, generator=g)


def linear(fan_in: int, scale: float = 1.0) -> Uniform:
    """PyTorch's default for a linear layer, U(+-1/sqrt(fan_in)), times `scale`."""
    return Uniform(scale / math.sqrt(fan_in))


@dataclass(frozen=True)
class Normal(Initializer):
    """N(0, std^2)."""

    std: float

    def __call__(self, w: "Tensor", g: "torch.Generator") -> None:
        w.normal_(0.0, self.std, generator=g)


@dataclass(frozen=True)
class Constant(Initializer):
    """Every element is `value`."""

    value: float

    def __call__(self, w: "Tensor", g: "torch.Generator") -> None:
        w.fill_(self.value)


@dataclass(frozen=True)
class Ramp(Initializer):
    """From `low` to `high` over a vector's N elements, low + (high - low) (n / (N - 1))^exponent: RWKV-7's decays and mixes.

    zigzag: of each `period` elements (a head), added as z |z| for z from -1 to 1.
    """

    low: float
    high: float
    exponent: float = 1.0
    zigzag: float = 0.0
    period: int = 2

    def __call__(self, w: "Tensor", g: "torch.Generator") -> None:
        import torch

        n = torch.arange(w.numel(), dtype=torch.float32)
        z = 2 * (n % self.period) / (self.period - 1) - 1
        w.copy_(self.low + (self.high - self.low) * (n / max(1, w.numel() - 1)) ** self.exponent + self.zigzag * z * z.abs())


@dataclass(frozen=True)
class LogArange(Initializer):
    """log(n + 1) along the last dimension: A = -(1 .. N), S4D-real."""

    def __call__(self, w: "Tensor", g: "torch.Generator") -> None:
        import torch

        w.copy_(torch.arange(1, w.shape[-1] + 1, dtype=torch.float32).log().expand_as(w))


@dataclass(frozen=True)
class Reciprocals(Initializer):
    """1 / (n + 1) along the last dimension."""

    def __call__(self, w: "Tensor", g: "torch.Generator") -> None:
        import torch

        w.copy_((1 / torch.arange(1, w.shape[-1] + 1, dtype=torch.float32)).expand_as(w))


@dataclass(frozen=True)
class LogUniform(Initializer):
    """log of a number that is uniform on [low, high]: Mamba-2's A_log."""

    low: float
    high: float

    def __call__(self, w: "Tensor", g: "torch.Generator") -> None:
        w.uniform_(self.low, self.high, generator=g).log_()


@dataclass(frozen=True)
class Between(Initializer):
    """U(low, high)."""

    low: float
    high: float

    def __call__(self, w: "Tensor", g: "torch.Generator") -> None:
        w.uniform_(self.low, self.high, generator=g)


@dataclass(frozen=True)
class S4DFrequencies(Initializer):
    """Imaginary parts of S4D's A along the last dimension, n = 0 .. N/2 - 1, of N states (Gu et al. 2022, equations 8 and 9)."""

    law: Literal["lin", "inv"]

    def __call__(self, w: "Tensor", g: "torch.Generator") -> None:
        import torch

        n, states = torch.arange(w.shape[-1], dtype=torch.float32), 2 * w.shape[-1]
        w.copy_((math.pi * n if self.law == "lin" else states / math.pi * (states / (2 * n + 1) - 1)).expand_as(w))


@dataclass(frozen=True)
class LogitOfRoot(Initializer):
    """sigmoid^-1 of the root of order `power` of a number that is uniform on [low, high]: RG-LRU's Lambda."""

    low: float
    high: float
    power: float

    def __call__(self, w: "Tensor", g: "torch.Generator") -> None:
        import torch

        log_root = torch.empty_like(w).uniform_(self.low, self.high, generator=g).log_() / self.power
        w.copy_(log_root - torch.log(-torch.expm1(log_root)))


@dataclass(frozen=True)
class InverseSoftplusLogUniform(Initializer):
    """softplus^-1 of a step size that is log-uniform on [low, high] and at least `floor`."""

    low: float
    high: float
    floor: float

    def __call__(self, w: "Tensor", g: "torch.Generator") -> None:
        import torch

        dt = torch.empty_like(w).uniform_(math.log(self.low), math.log(self.high), generator=g).exp_().clamp_(min=self.floor)
        w.copy_(_inverse_softplus(dt))


@dataclass(frozen=True)
class InverseSoftplusUniform(Initializer):
    """softplus^-1 of a step size that is uniform on [low, high] and at least `floor`."""

    low: float
    high: float
    floor: float

    def __call__(self, w: "Tensor", g: "torch.Generator") -> None:
        import torch

        w.copy_(_inverse_softplus(torch.empty_like(w).uniform_(self.low, self.high, generator=g).clamp_(min=self.floor)))


@dataclass(frozen=True)
class OrthonormalColumns(Initializer):
    """Q of a Gaussian matrix per head, signed so that it is uniform among matrices with orthonormal columns (Mezzadri 2007)."""

    def __call__(self, w: "Tensor", g: "torch.Generator") -> None:
        import torch

        q, r = torch.linalg.qr(torch.empty_like(w).normal_(generator=g))
        w.copy_(q * torch.diagonal(r, dim1=-2, dim2=-1).sign().unsqueeze(-2))


def _inverse_softplus(y: "Tensor") -> "Tensor":
    import torch

    return y + torch.log(-torch.expm1(-y))
