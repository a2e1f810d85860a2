"""Rotary position embeddings: queries and keys turned by angles that grow with the position in the document.

Source: Su et al. 2021, "RoFormer", equation 34; pairs are (i, i + dim/2), as in Llama. Scores then depend on distances alone.
"""

import torch
from torch import Tensor


def rotate(x_BTHK: Tensor, pos_BT: Tensor, theta: float) -> Tensor:
    """x [B, T, heads, dim], dim even, turned by pos * theta^(-2i/dim); computed in float32 (float64 for float64), in x's dtype."""
    dtype = torch.float64 if x_BTHK.dtype == torch.float64 else torch.float32
    half = x_BTHK.shape[-1] // 2
    # float64: at position 1e6 a float32 angle would be off by 0.06 radians
    rates = theta ** (-torch.arange(half, dtype=torch.float64, device=x_BTHK.device) / half)
    angles_BT1K = (pos_BT.to(torch.float64)[:, :, None] * rates)[:, :, None, :]
    cos, sin = angles_BT1K.cos().to(dtype), angles_BT1K.sin().to(dtype)
    first, second = x_BTHK.to(dtype).split(half, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_BTHK.dtype)
