"""Which of Lattice's updates a recurrence makes, and the two limits that keep every one of them defined.

The one thing to know: a slot enters an update only through its direction, and a slot of zeros has none. With projection slots
have norm 1 after every step, and only a forget gate of 0 could take that away; without it norms only grow, and only forgetting,
by gate or by threshold, could end them. The limits are where those cases stop being what the equations say.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

Variant = Literal["dec", "enc", "sim"]
VARIANTS: tuple[Variant, ...] = get_args(Variant)

SMALLEST_GATE = 1e-3
"""With projection a forget gate below this counts as this: only gamma / mu matters then, and gamma / 0 is no step size."""

SMALLEST_NORM = 1e-3
"""Without projection a slot shorter than this counts as this long where it is divided by: initial slots have norm 1."""


@dataclass(frozen=True)
class Rule:
    """The options of the recurrence that are no tensors.

    Attributes:
        variant: the loss that a token's step descends: decoding, encoding or similarity (equations 6, 9 and 11).
        project: whether slots are put back on the unit sphere after each step (equation 14).
    """

    variant: Variant
    project: bool


def norms(S: Tensor, out: Tensor | None = None) -> Tensor:
    """Of the slots [..., d, m], as [..., 1, m]. torch's vector_norm takes fifteen times as long along a dimension but the last."""
    return torch.sum(S.square(), -2, keepdim=True, out=out).sqrt_()
