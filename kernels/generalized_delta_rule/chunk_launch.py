"""The generalized delta rule on a GPU in chunks of tokens, where no decay is too strong for it: by the kernels of the delta rule
with a decay per key channel (`channel_delta_rule`), for which every token is two.

    S' = Diag(exp(g_t)) S_{t-1}     u = (exp(-g_t) a_t)^T S'     S'' = S' + b_t u^T     the first: reads a_t, writes b_t
    S_t = S'' + k_t v_t^T                                                               the second: reads nothing, writes k_t

exp(-g_t) a_t reads of the decayed state what a_t reads of the one before. It is as precise as a_t, but grows with the decay: by
less than two for RWKV-7, whose decays have a bound. r_t reads behind the second. So each of the two reads once, and one tensor has
what both read with.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from baton.kernels.channel_delta_rule.triton_launch import ChannelDeltaRuleLaunch
from baton.kernels.common import launch_utils
from baton.kernels.common.launch_utils import LazyModule
from baton.kernels.delta_rule.triton_launch import LaunchConfig, launch_config_for
from baton.kernels.errors import REDUCED_DTYPES

_kernels = LazyModule("baton.kernels.generalized_delta_rule.pair_kernels")

_ENTRIES = 2048  # of a program of those
STRONGEST = -4.0
"""Least log-decay: what exp(-g) of a reads may be 55 times as large as what a reads."""
_NEAR = 2 + int(math.log2(96 * math.log(2) / -STRONGEST))
"""log2 of the tokens, of which every second decays, over half of which all decays together are at least 2^-96."""


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
    low = all(x.dtype in REDUCED_DTYPES for x in (r, k, v))
    batch, length, heads, d_key = k.shape
    two = (batch, 2 * length, heads, d_key)
    # in float32 exp(-g) a is as precise as a; with float32 keys nothing is multiplied in bfloat16
    readers = torch.empty(two, dtype=torch.float32, device=k.device)
    keys = torch.empty(two, dtype=k.dtype if low else torch.float32, device=k.device)
    gates = torch.empty(two, dtype=g.dtype, device=k.device)
    r, k, a, b, g = (launch_utils.contiguous_last_dim(x) for x in (r, k, a, b, g))
    grid, sizes = _grid_of(k, "X")
    _kernels.pair_inputs_kernel[grid](
        r, k, a, b, g, readers, keys, gates, length, *launch_utils.strides(r, k, a, b, g), **sizes
    )  # fmt: skip
    values = _second(v)
    beta = torch.ones(values.shape[:3], dtype=torch.float32, device=v.device)
    if pos is not None:
        pos = torch.stack((2 * pos, 2 * pos + 1), dim=2).flatten(1, 2)
    config = config or launch_config_for(keys, values, gates)
    return ChannelDeltaRuleLaunch(readers, keys, values, beta, gates, scale, pos, config, alternate=True, near=_NEAR)


def _second(v: Tensor) -> Tensor:
    """v [B, T, H, Y] for the second of two tokens, and 0 for the first, [B, 2 T, H, Y]."""
    values = v.new_empty(v.shape[0], 2 * v.shape[1], *v.shape[2:])
    v = launch_utils.contiguous_last_dim(v)
    grid, sizes = _grid_of(v, "Y")
    _kernels.pair_values_kernel[grid](v, values, v.shape[1], *launch_utils.strides(v), **sizes)
    return values


def _grid_of(x: Tensor, axis: str) -> tuple[tuple[int, int], dict[str, int]]:
    """Of programs over the rows of x [B, T, H, axis], and their constants."""
    batch, length, heads, width = x.shape
    block = launch_utils.next_power_of_2(width)
    rows = max(1, _ENTRIES // block)
    return (-(-length * heads // rows), batch), {axis: width, "H": heads, "BR": rows, f"B{axis}": block, "num_warps": 4}


class _GeneralizedDeltaRuleChunks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, r: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, g: Tensor, initial: Tensor | None, scale: float,
        pos: Tensor | None, config: LaunchConfig | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        o, final, inverse = _launch(r, k, v, a, b, g, scale, pos, config).forward(initial, r.dtype)
        ctx.save_for_backward(r, k, v, a, b, g, initial, inverse, pos)
        ctx.scale, ctx.config = scale, config
        return o[:, 1::2].contiguous(), final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor, dfinal: Tensor) -> tuple[Any, ...]:
        r, k, v, a, b, g, initial, inverse, pos = ctx.saved_tensors
        launch = _launch(r, k, v, a, b, g, ctx.scale, pos, ctx.config)
        dreaders, dkeys, dvalues, _, dgates, dinitial = launch.gradients(initial, inverse, _second(do), dfinal.contiguous())
        dr, dk, da, db, dg = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (r, k, a, b, g))
        a, g = (launch_utils.contiguous_last_dim(x) for x in (a, g))
        grid, sizes = _grid_of(k, "X")
        _kernels.pair_gradients_kernel[grid](
            dreaders, dkeys, dgates, a, g, dr, dk, da, db, dg, k.shape[1], *launch_utils.strides(a, g), **sizes
        )  # fmt: skip
        found = (dr, dk, dvalues[:, 1::2], da, db, dg, dinitial)
        return (*(x if need else None for x, need in zip(found, ctx.needs_input_grad[:7], strict=True)), *(None,) * 3)
