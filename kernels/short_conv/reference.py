"""Short causal convolution as a sequential loop over time: the reference that every other implementation is tested against.

Shape suffixes: B batch, T time, W width (number of taps), C channels.

Gradients come from autograd, so there is no hand-written derivative here.
"""

import torch
from torch import Tensor


def short_conv_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    pos: Tensor | None = None,
    tail: Tensor | None = None,
    activation: str | None = None,
    unit_width: int | None = None,
    unit_eps: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """As `op.short_conv`, in the dtype of the promoted inputs; nothing is checked.

    y_t = bias + sum_j weight[:, W-1-j] x_{t-j}        over the taps j with pos_t >= j; all taps without pos
    """
    batch, length, channels = x.shape
    width = weight.shape[1]
    if tail is None:
        tail = x.new_zeros(batch, width - 1, channels)
    history_BTC = torch.cat((tail, x), dim=1)
    y_BTC = []
    for t in range(length):
        y_BC = bias.expand(batch, channels)
        for j in range(width):
            tap_BC = weight[:, width - 1 - j] * history_BTC[:, width - 1 + t - j]
            if pos is not None:
                tap_BC = tap_BC.masked_fill((pos[:, t] < j)[:, None], 0.0)
            y_BC = y_BC + tap_BC
        if activation == "silu":
            y_BC = torch.nn.functional.silu(y_BC)
        if unit_width is not None:
            heads = y_BC.unflatten(1, (-1, unit_width))
            y_BC = (heads / (heads.square().sum(2, keepdim=True) + unit_eps).sqrt()).flatten(1)
        y_BTC.append(y_BC)
    return torch.stack(y_BTC, dim=1), history_BTC[:, length:]
