"""The options of Lattice's update, and the two limits that keep every option defined.

A slot enters an update only through its direction, and a slot of zeros has none. With projection, slots have norm 1 after every
step, and only a forget gate of 0 could change that. Without projection norms only grow, and only forgetting, by gate or by
threshold, can shrink them. The limits say where these cases deviate from the equations.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

Variant = Literal["dec", "enc", "sim"]
VARIANTS: tuple[Variant, ...] = get_args(Variant)

MIN_GATE = 1e-3
"""With projection, forget gates are clamped to this minimum: only gamma / mu matters then, and gamma / 0 is no step size."""

MIN_NORM = 1e-3
"""Without projection, norms that are divided by are clamped to this minimum; initial slots have norm 1."""


@dataclass(frozen=True)
class UpdateRule:
    """The options of the recurrence that are not tensors.

    Attributes:
        variant: the loss that a token's step descends: decoding, encoding or similarity (equations 6, 9 and 11).
        project: whether slots are normalized to the unit sphere after each step (equation 14).
    """

    variant: Variant
    project: bool


def slot_norms(S: Tensor, out: Tensor | None = None) -> Tensor:
    """Norms of the slots [..., d, m], as [..., 1, m]. torch's vector_norm takes fifteen times as long along a dimension other than
    the last.
    """
    return torch.sum(S.square(), -2, keepdim=True, out=out).sqrt_()
