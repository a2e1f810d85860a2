"""The RG-LRU as a selective scan, on any device.

The selective scan of one state per channel, h = exp(dt A) h + dt B x, is the RG-LRU for A = -1, B = C = 1 and dt = -log a, if its
input is x sqrt(1 - a^2) / dt. So the RG-LRU has that scan's implementations: PyTorch's on a CPU and Triton's on a GPU.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from baton.kernels.common.chunked_autograd import state_dtype
from baton.kernels.rg_lru.reference import LARGEST_LOG
from baton.kernels.selective_scan.op import selective_scan


def rg_lru_torch(x: Tensor, log_a: Tensor, *, pos: Tensor | None, initial_state: Tensor | None) -> tuple[Tensor, Tensor]:
    """As `op.rg_lru`, which checks the arguments."""
    batch, length, channels = x.shape
    scaled, dt = _AsScanInputs.apply(x, log_a, pos)
    one = torch.ones((), dtype=dt.dtype, device=x.device)
    ones, no_skip = one.expand(batch, length, 1), torch.zeros_like(one).expand(channels)
    initial = None if initial_state is None else initial_state[..., None]
    y, h = selective_scan(scaled, dt, -one.expand(channels, 1), ones, ones, no_skip, pos=pos, initial_state=initial)
    return y.to(x.dtype), h.squeeze(-1)


class _AsScanInputs(torch.autograd.Function):
    """x sqrt(1 - a^2) / dt and dt = -log a, in the state's dtype; the backward pass keeps x and log a alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, log_a: Tensor, pos: Tensor | None) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, log_a)
        ctx.pos = pos
        dt, share = _shares(log_a.to(state_dtype(x, log_a)), pos)
        return x * (share / dt), dt

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dscaled: Tensor, ddt: Tensor) -> tuple[Tensor | None, ...]:
        x, log_a = ctx.saved_tensors
        precise = log_a.to(dscaled.dtype)
        dt, share = _shares(precise, ctx.pos)
        # d sqrt(1 - exp(-2 dt)) / d dt; where a document starts there is no square root
        slope = torch.exp(-2 * dt) / share
        if ctx.pos is not None:
            slope = slope.masked_fill((ctx.pos == 0)[..., None], 0.0)
        ddt = ddt + dscaled * x * (slope - share / dt) / dt
        return (
            (dscaled * (share / dt)).to(x.dtype),
            (-ddt).masked_fill(precise > LARGEST_LOG, 0.0).to(log_a.dtype),
            None,
        )


def _shares(log_a: Tensor, pos: Tensor | None) -> tuple[Tensor, Tensor]:
    """dt and sqrt(1 - a^2), which is 1 where a document starts."""
    dt = -log_a.clamp(max=LARGEST_LOG)
    share = torch.sqrt(-torch.expm1(-2 * dt))
    return dt, share if pos is None else share.masked_fill((pos == 0)[..., None], 1.0)
