"""The relative error between two tensors that all tests use."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor


def worst(errors: Iterable[float]) -> float:
    """The largest; NaN if any is NaN, which `max` passes over unless it comes first."""
    found = list(errors)
    return math.nan if any(map(math.isnan, found)) else max(found)


def relative_error(a: Tensor, b: Tensor) -> float:
    """||a - b|| / ||b|| over all elements, in float64; ||a - b|| where b is zero everywhere. NaN if either holds a NaN.

    Raises:
        ValueError: the shapes differ.
    """
    if a.shape != b.shape:
        raise ValueError(f"cannot compare shape {tuple(a.shape)} with {tuple(b.shape)}")
    a64, b64 = a.detach().to("cpu", torch.float64), b.detach().to("cpu", torch.float64)
    difference, norm = float((a64 - b64).norm()), float(b64.norm())
    return difference / norm if norm != 0.0 else difference
