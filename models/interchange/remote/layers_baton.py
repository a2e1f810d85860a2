"""What the mixers share: matrix products, norms, positions, short convolutions. As in mixers_baton, matrix products are in the
inputs' dtype and everything else is in float32 (float64 for float64).

Shapes: B batch, T tokens, H heads, K width of a head, C channels.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.models.rope import scaled_rope

Parameters = Mapping[str, Tensor]
Settings = Mapping[str, Any]
State = dict[str, Tensor]
Result = tuple[Tensor, State]

FEATURE_MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "silu": F.silu,
    "relu": F.relu,
    "elu": lambda x: F.elu(x) + 1,
}


def linear(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight.to(x.dtype))


def precise(x: Tensor) -> Tensor:
    """In float32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Over the last dimension, in float32."""
    x = precise(x)
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return y if weight is None else y * weight


def unit(x: Tensor, eps: float) -> Tensor:
    """x / sqrt(|x|^2 + eps), in float32."""
    x = precise(x)
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def heads(x: Tensor, width: int) -> Tensor:
    return x.unflatten(-1, (-1, width))


def rotary(x: Tensor, pos: Tensor, theta: float, channels: int, scaling: Settings | None = None) -> Tensor:
    """Turns the pairs (i, i + channels / 2) of x [B, T, H, K] by angles that grow with the position, float64 until their sine."""
    rates, magnitude = scaled_rope(theta, channels, scaling)
    angles = (pos.to(torch.float64)[..., None] * torch.tensor(rates, dtype=torch.float64, device=x.device))[:, :, None]
    first, second, rest = precise(x).split((len(rates), len(rates), x.shape[-1] - channels), dim=-1)
    cos, sin = ((magnitude * a).to(first.dtype) for a in (angles.cos(), angles.sin()))
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1).to(x.dtype)


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, pos: Tensor, tail: Tensor | None) -> tuple[Tensor, Tensor]:
    """Short causal convolution of x [B, T, C] in documents, weight [C, taps], in float32, and the inputs the next token needs."""
    taps, length = weight.shape[1], x.shape[1]
    before = x.new_zeros(x.shape[0], taps - 1, x.shape[2]) if tail is None else tail
    inputs = torch.cat((before, x), dim=1)
    y = precise(x.new_zeros(())) if bias is None else bias
    for back in range(taps):
        first = taps - 1 - back
        reached = (pos >= back)[..., None]
        y = y + weight[:, first] * torch.where(reached, precise(inputs[:, first : first + length]), 0.0)
    return y, inputs[:, length:]


def part_of(state: State | None, name: str) -> Tensor | None:
    return None if state is None else state[name]
