"""The generalized delta rule on a GPU in chunks of tokens, where no decay is too strong for it: by the kernels of the delta rule
with a decay per key channel (`channel_delta_rule`), for which every token is two.

    S' = Diag(exp(g_t)) S_{t-1}     u = (exp(-g_t) a_t)^T S'     S'' = S' + b_t u^T     the first: reads a_t, writes b_t
    S_t = S'' + k_t v_t^T                                                               the second: reads nothing, writes k_t

exp(-g_t) a_t reads of the decayed state what a_t reads of the one before. It is as precise as a_t, but grows with the decay: by
less than two for RWKV-7, whose decays have a bound. r_t reads behind the second.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from baton.kernels.channel_delta_rule.triton_launch import ChannelDeltaRuleLaunch
from baton.kernels.common import launch_utils
from baton.kernels.delta_rule.triton_launch import LaunchConfig, launch_config_for
from baton.kernels.errors import REDUCED_DTYPES

STRONGEST = -4.0
"""Least log-decay: what exp(-g) of a reads may be 55 times as large as what a reads."""


def decays_allow_chunks(lower_bound: float | None) -> bool:
    """Whether these kernels are for log-decays with this lower bound."""
    return lower_bound is not None and lower_bound >= STRONGEST


def generalized_delta_rule_chunks_triton(
    r: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, g: Tensor, *, scale: float, pos: Tensor | None,
    initial_state: Tensor | None, config: LaunchConfig | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As `op.generalized_delta_rule`, which checks the arguments. No g is less than STRONGEST. Matmuls are computed in bfloat16 if
    r, k and v are 16-bit."""
    if initial_state is not None:
        initial_state = initial_state.contiguous()
    o, final = _GeneralizedDeltaRuleChunks.apply(r, k, v, a, b, g, initial_state, scale, launch_utils.int32_positions(pos), config)
    return o, final


def generalized_delta_rule_transition_triton(
    k: Tensor, v: Tensor, a: Tensor, b: Tensor, g: Tensor, *, pos: Tensor | None, config: LaunchConfig | None = None
) -> tuple[Tensor, Tensor]:
    """As `chunked.generalized_delta_rule_transition`, for arguments that `generalized_delta_rule_chunks_triton` accepts."""
    return _launch(k, k, v, a, b, g, 1.0, launch_utils.int32_positions(pos), config).whole_transition()


def _launch(
    r: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, g: Tensor, scale: float, pos: Tensor | None, config: LaunchConfig | None
) -> ChannelDeltaRuleLaunch:
    """Of two tokens for each, see above."""
    if all(x.dtype in REDUCED_DTYPES for x in (r, k, v)):
        b = b.to(k.dtype)  # else they would not be multiplied in bfloat16
    # read - u is written where u is what replaces it, and here nothing is subtracted
    a = -torch.exp(-g.float()) * a
    r, v, a, g = (_alone(x, at) for x, at in ((r, 1), (v, 1), (a, 0), (g, 0)))
    k = torch.stack((b, k), dim=2).flatten(1, 2)
    beta = torch.ones(v.shape[:3], dtype=torch.float32, device=v.device)
    if pos is not None:
        pos = torch.stack((2 * pos, 2 * pos + 1), dim=2).flatten(1, 2)
    return ChannelDeltaRuleLaunch(r, k, v, beta, g, scale, pos, config or launch_config_for(k, v, g), a)


def _alone(x: Tensor, at: int) -> Tensor:
    """x [B, T, ..] for the first (at = 0) or the second of two tokens, and 0 for the other, [B, 2 T, ..]."""
    doubled = x.new_zeros(x.shape[0], 2 * x.shape[1], *x.shape[2:])
    doubled[:, at::2] = x
    return doubled


class _GeneralizedDeltaRuleChunks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, r: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, g: Tensor, initial: Tensor | None, scale: float,
        pos: Tensor | None, config: LaunchConfig | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        o, final, inverse = _launch(r, k, v, a, b, g, scale, pos, config).forward(initial)
        ctx.save_for_backward(r, k, v, a, b, g, initial, inverse, pos)
        ctx.scale, ctx.config = scale, config
        return o[:, 1::2].contiguous(), final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor, dfinal: Tensor) -> tuple[Any, ...]:
        r, k, v, a, b, g, initial, inverse, pos = ctx.saved_tensors
        launch = _launch(r, k, v, a, b, g, ctx.scale, pos, ctx.config)
        dr, da, dk, dv, _, dg, dinitial = launch.gradients(initial, inverse, _alone(do, 1), dfinal.contiguous())
        # of what reads the decayed state, exp(-g) a, which is computed with g too
        da, read = da[:, 0::2].float(), launch.a[:, 0::2]
        dg = dg[:, 0::2] - da * read
        da = -da * torch.exp(-g.float())
        grads = (dr[:, 1::2], dk[:, 1::2], dv[:, 1::2], da, dk[:, 0::2], dg)
        found = [grad.to(x.dtype) for grad, x in zip(grads, (r, k, v, a, b, g), strict=True)]
        return (*(x if need else None for x, need in zip((*found, dinitial), ctx.needs_input_grad[:7], strict=True)), *(None,) * 3)
