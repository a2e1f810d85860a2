"""Test-time training as one loop over tokens: the definition.

Shape suffixes: B batch, H heads, D width of a head, E outputs of a layer.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

_SQRT_2_PI, _CUBIC = math.sqrt(2 / math.pi), 0.044715
NORM_EPS = 1e-6
"""Of the inner loss's LayerNorm; that of the authors' code."""


def ttt_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lr: Tensor,
    step_scale: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    *weights: Tensor,
    pos: Tensor,
    initial_state: dict[str, Tensor] | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Sun et al. 2024 (arXiv:2407.04620), sections 2.3 to 2.7; as `op.ttt`. Nothing is checked."""
    layers, size = len(weights) // 2, step_scale.shape[0]
    if initial_state is None:
        batch = q.shape[0]
        initial_state = {
            name: w.new_zeros(batch, *w.shape) for name, w in zip(state_names(layers), (*weights, *weights), strict=True)
        }
    names = state_names(layers)
    # differences of the mini-batch's weights from the initial ones, and sums of weighted gradients in the mini-batch
    moved, sums = ([initial_state[name] for name in part] for part in (names[: 2 * layers], names[2 * layers :]))
    y_BTHD = []
    for t in range(q.shape[1]):
        place = pos[:, t] % size
        begins, starts = place == 0, pos[:, t] == 0
        moved = [_where(begins, m - step_scale[-1] * s, m) for m, s in zip(moved, sums, strict=True)]
        sums = [_where(begins, torch.zeros_like(s), s) for s in sums]
        moved = [_where(starts, torch.zeros_like(m), m) for m in moved]
        frozen = [w + m for w, m in zip(weights, moved, strict=True)]
        read, grads = inner_gradients(k[:, t, :, None], v[:, t, :, None], frozen, norm_weight[:, None], norm_bias[:, None])
        for n, (x_BH1E, grad_BH1E) in enumerate(zip(read, grads, strict=True)):
            weighted_BH1E = lr[:, t, :, None, None] * grad_BH1E
            sums[2 * n] = sums[2 * n] + x_BH1E.mT @ weighted_BH1E
            sums[2 * n + 1] = sums[2 * n + 1] + weighted_BH1E.squeeze(2)
        trained = [w - _per_row(step_scale[place], s) * s for w, s in zip(frozen, sums, strict=True)]
        z_BH1E = q[:, t, :, None]
        for n in range(layers):
            z_BH1E = z_BH1E if n == 0 else F.gelu(z_BH1E, approximate="tanh")
            z_BH1E = z_BH1E @ trained[2 * n] + trained[2 * n + 1][:, :, None]
        y_BTHD.append(z_BH1E.squeeze(2))
    return torch.stack(y_BTHD, dim=1), dict(zip(names, (*moved, *sums), strict=True))


def state_names(layers: int) -> tuple[str, ...]:
    """The State's tensors: first how far the weights have moved, then sums of gradients, each layer's W and b."""
    weights = [f"{part}{n}" for n in range(1, layers + 1) for part in ("W", "b")]
    return (*weights, *(f"{name}_grad" for name in weights))


def inner_gradients(
    k: Tensor, v: Tensor, weights: Sequence[Tensor], norm_weight: Tensor, norm_bias: Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    """What each layer reads, and the gradient of the inner loss to what it gives before any activation, of every token alone:

        |LayerNorm(f(k)) - (v - k)|^2 / 2

    Of k and v [B, H, tokens, D]; weights W [B, H, D, E] and b [B, H, E] of each layer in turn.
    """
    z = k @ weights[0] + weights[1][:, :, None]
    hidden, slope = z, z
    if len(weights) > 2:
        hidden, slope = F.gelu(z, approximate="tanh"), _gelu_slope(z)
        z = hidden @ weights[2] + weights[3][:, :, None]
    centred = z - z.mean(-1, keepdim=True)
    scale = torch.rsqrt(centred.square().mean(-1, keepdim=True) + NORM_EPS)
    unit = centred * scale
    d_unit = (unit * norm_weight + norm_bias - (v - k)) * norm_weight
    dz = scale * (d_unit - d_unit.mean(-1, keepdim=True) - unit * (d_unit * unit).mean(-1, keepdim=True))
    if len(weights) == 2:
        return [k], [dz]
    return [k, hidden], [slope * (dz @ weights[2].mT), dz]


def _gelu_slope(x: Tensor) -> Tensor:
    """The derivative of GELU's tanh approximation."""
    t = torch.tanh(_SQRT_2_PI * (x + _CUBIC * x**3))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * _SQRT_2_PI * (1 + 3 * _CUBIC * x * x)


def _per_row(x_B: Tensor, like: Tensor) -> Tensor:
    return x_B.reshape(-1, *(1 for _ in like.shape[1:]))


def _where(rows_B: Tensor, there: Tensor, elsewhere: Tensor) -> Tensor:
    return torch.where(_per_row(rows_B, there), there, elsewhere)
