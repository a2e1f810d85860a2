"""Sums over the inputs and outputs of a head, with exact gradients. Only the arguments are kept for the backward pass, because
what is computed on the way is as many times wider as a head has inputs.

Shape suffixes: B batch, T time, H heads, J outputs of a head, K its inputs, P head_dim.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from baton.kernels.common.autocast import without_autocast
from baton.kernels.mamba3_mimo.triton_launch import gated_sum_triton, use_triton


def mixed(weights: Tensor, x: Tensor, mimo_x: Tensor) -> Tensor:
    """y_j = sum_k weights_{jk} v_k of each token and head, with v_k = x * mimo_x_k.

    Args:
        weights: [B, T, H, J, K], float32 or float64: the dtype of the computation and of the result.
        x: [B, T, H, P], in any floating dtype.
        mimo_x: [H, K, P], as weights.

    Returns:
        y, [B, T, J, H, P].
    """
    y: Tensor = _Mixed.apply(weights, x, mimo_x)
    return y


def gated_sum(y: Tensor, z: Tensor, mimo_z: Tensor, mimo_o: Tensor, dtype: torch.dtype) -> Tensor:
    """sum_j mimo_o_j * y_j * silu(z * mimo_z_j) of each token and head, computed in float32 or better and rounded once, to dtype.

    Args:
        y: [B, T, J, H, P], in any floating dtype, as z.
        z: [B, T, H, P].
        mimo_z, mimo_o: [H, J, P], float32 or float64.
        dtype: of the result.

    Returns:
        [B, T, H, P].
    """
    if use_triton(y, mimo_z):
        return gated_sum_triton(y, z, mimo_z, mimo_o, dtype)
    found: Tensor = _GatedSum.apply(y, z, mimo_z, mimo_o, dtype)
    return found


class _Mixed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, x: Tensor, mimo_x: Tensor) -> Tensor:
        ctx.save_for_backward(weights, x, mimo_x)
        with without_autocast(x):
            return torch.einsum("bthjk,hkp->btjhp", weights, mimo_x) * x[:, :, None]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weights, x, mimo_x = ctx.saved_tensors
        with without_autocast(x):
            dx = (torch.einsum("bthjk,hkp->btjhp", weights, mimo_x) * dy).sum(2)
            dy = dy * x[:, :, None]
            dweights = torch.einsum("btjhp,hkp->bthjk", dy, mimo_x)
            dmimo_x = torch.einsum("bthjk,btjhp->hkp", weights, dy)
        return dweights, dx.to(x.dtype), dmimo_x


class _GatedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, z: Tensor, mimo_z: Tensor, mimo_o: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(y, z, mimo_z, mimo_o)
        precise_z, total = z.to(mimo_z.dtype), torch.zeros(z.shape, dtype=mimo_z.dtype, device=z.device)
        for j in range(mimo_z.shape[1]):
            gate = precise_z * mimo_z[:, j]
            total += mimo_o[:, j] * y[:, :, j] * (gate * torch.sigmoid(gate))
        return total.to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dtotal: Tensor) -> tuple[Tensor | None, ...]:
        y, z, mimo_z, mimo_o = ctx.saved_tensors
        precise_z, dtotal = z.to(mimo_z.dtype), dtotal.to(mimo_z.dtype)
        dy, dz = torch.empty_like(y), torch.zeros_like(precise_z)
        dmimo_z, dmimo_o = torch.empty_like(mimo_z), torch.empty_like(mimo_o)
        for j in range(mimo_z.shape[1]):
            gate = precise_z * mimo_z[:, j]
            share = torch.sigmoid(gate)
            opened = dtotal * (gate * share)
            dy[:, :, j] = opened * mimo_o[:, j]
            dmimo_o[:, j] = (opened * y[:, :, j]).sum((0, 1))
            dgate = dtotal * mimo_o[:, j] * y[:, :, j] * (share * (1 + gate * (1 - share)))
            dz += dgate * mimo_z[:, j]
            dmimo_z[:, j] = (dgate * precise_z).sum((0, 1))
        return dy, dz.to(z.dtype), dmimo_z, dmimo_o, None
