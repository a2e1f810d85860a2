"""Rotary position embeddings: queries and keys turned by angles that grow with the position in the document.

Source: Su et al. 2021, "RoFormer", equation 34; pairs are (i, i + dim/2), as in Llama. Scores then depend on distances alone.
"""

from functools import cache

import torch
from torch import Tensor


def rotate(q_BTHK: Tensor, k_BTGK: Tensor, pos_BT: Tensor, theta: float) -> tuple[Tensor, Tensor]:
    """q and k [B, T, heads, dim] of one dtype, dim even, turned by pos * theta^(-2i/dim); computed in float32 (float64 for float64)
    and rounded to that dtype."""
    dtype = torch.float64 if q_BTHK.dtype == torch.float64 else torch.float32
    half = q_BTHK.shape[-1] // 2
    angles_BT1K = (pos_BT.to(torch.float64)[:, :, None] * _rates(theta, half, q_BTHK.device))[:, :, None, :]
    cos, sin = angles_BT1K.cos().to(dtype), angles_BT1K.sin().to(dtype)

    def turned(x_BTHK: Tensor) -> Tensor:
        first, second = x_BTHK.to(dtype).split(half, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_BTHK.dtype)

    return turned(q_BTHK), turned(k_BTGK)


@cache
def _rates(theta: float, half: int, device: torch.device) -> Tensor:
    """Radians per position of each pair, shared by all layers. In float64: at position 1e6 a float32 angle would be off by 0.06."""
    return theta ** (-torch.arange(half, dtype=torch.float64, device=device) / half)
