"""The generalized delta rule on a GPU in chunks of tokens, where no decay is too strong for it: by the kernels of the delta rule
with a decay per key channel (`channel_delta_rule`), for which every token is two.

    S' = Diag(exp(g_t)) S_{t-1}     u = (exp(-g_t) a_t)^T S'     S'' = S' + b_t u^T     the first: reads a_t, writes b_t
    S_t = S'' + k_t v_t^T                                                               the second: reads nothing, writes k_t

exp(-g_t) a_t reads of the decayed state what a_t reads of the one before. It is as precise as a_t, but grows with the decay: by
less than two for RWKV-7, whose decays have a bound. r_t reads behind the second. So each of the two reads once, and one tensor has
what both read with.
"""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from baton.kernels.channel_delta_rule.triton_launch import ChannelDeltaRuleLaunch
from baton.kernels.common import launch_utils
from baton.kernels.common.launch_utils import LazyModule
from baton.kernels.delta_rule.triton_launch import LaunchConfig, launch_config_for
from baton.kernels.errors import REDUCED_DTYPES
from baton.kernels.gated_linear_attention.launch_args import QKV, PreparedGates

_kernels = LazyModule("baton.kernels.generalized_delta_rule.pair_kernels")

STRONGEST = -4.0
"""Least log-decay: what exp(-g) of a reads may be 55 times as large as what a reads."""
_NEAR = 2 + int(math.log2(96 * math.log(2) / -STRONGEST))
"""log2 of the most tokens in a chunk. Every second decays, and over half of them all decays together are at least 2^-96, so that
those between two tokens are those to the middle of the chunk times those from it."""


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
    return PairedDeltaRuleLaunch(k, k, v, a, b, g, 1.0, launch_utils.int32_positions(pos), config).whole_transition()


class PairedDeltaRuleLaunch(ChannelDeltaRuleLaunch):
    """Launches of one call with two tokens for each, see above. config: None: the one for the two."""

    alternate = True

    def __init__(
        self, r: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, g: Tensor, scale: float, pos: Tensor | None,
        config: LaunchConfig | None,
    ) -> None:  # fmt: skip
        low = all(x.dtype in REDUCED_DTYPES for x in (r, k, v))
        batch, length, heads, X = k.shape
        two = (batch, 2 * length, heads, X)
        # in float32 exp(-g) a is as precise as a; with float32 keys nothing is multiplied in bfloat16
        readers = torch.empty(two, dtype=torch.float32, device=k.device)
        keys = torch.empty(two, dtype=k.dtype if low else torch.float32, device=k.device)
        # values stay as they are: of these the shape is read
        values = v[:, :1].expand(-1, 2 * length, -1, -1)
        beta = torch.ones(two[:3], dtype=torch.float32, device=k.device)
        twice = None if pos is None else torch.stack((2 * pos, 2 * pos + 1), dim=2).flatten(1, 2)
        config = config or launch_config_for(keys, values, g)
        config = replace(config, chunk=min(config.chunk, 2**_NEAR))
        self._begin(QKV(readers, keys, values), v, beta, g, scale, twice, config, low=low, near=_NEAR)
        launch = self.gla
        sums = torch.empty(two, dtype=self.of_sums, device=k.device)
        read, written = (torch.empty(two, dtype=launch.kept, device=k.device) for _ in range(2))
        self.whole, self.read_a = launch.new(batch, heads, launch.chunks, X), read
        self.given, self.pos = tuple(launch_utils.contiguous_last_dim(x) for x in (r, k, v, a, b, g)), pos
        given = (*self.given[:2], *self.given[3:])
        BX = launch.block(X, self.config.x_prepared)
        _kernels.pair_prepare_kernel[(launch.chunks, -(-X // BX), batch * heads)](
            *given, launch.or_v(pos), readers, keys, sums, read, written, self.whole, length, scale, *launch_utils.strides(*given),
            X=X, H=heads, HAS_POS=pos is not None, C=self.config.chunk // 2, BX=BX, num_warps=4,
        )  # fmt: skip
        self.sums, self.prepared = sums, PreparedGates(sums, read, written, self.whole)

    def gradients(
        self, first: Tensor | None, inverse: Tensor, do: Tensor, dlast: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Of r, k, v, a, b, g and the entering state."""
        do, launch = launch_utils.contiguous_last_dim(do), self.gla
        u, states, dmissed, cotangents, dfirst = self.walk_back(first, inverse, None, do, dlast)
        dr, dk, dv, da, db, dg = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in self.given)
        (X, Y), g, pos = launch.sizes, self.given[5], self.pos
        # of 64 channels what a program holds does not fit in registers, and more warps would do the same products twice; of 32 by
        # 64 ptxas 12.8 makes a wrong kernel, see `assembler`
        BX, BY = (launch.block(size, 32) for size in (X, Y))
        _kernels.pair_gradients_kernel[(launch.chunks, launch.batch * launch.heads, -(-X // BX))](
            *launch.given[:2], self.prepared.sums, u, dmissed, do, g, launch.or_v(pos), states, cotangents, dr, dk, da, db, dg, dv,
            launch.length // 2, launch.chunks, self.scale, *launch_utils.strides(do, g), X=X, Y=Y, H=launch.heads,
            HAS_POS=pos is not None, C=self.config.chunk, BX=BX, BY=BY, num_warps=4, num_stages=1, **launch.low,
        )  # fmt: skip
        return dr, dk, dv, da, db, dg, dfirst


class _GeneralizedDeltaRuleChunks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, r: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, g: Tensor, initial: Tensor | None, scale: float,
        pos: Tensor | None, config: LaunchConfig | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        o, final, inverse, _ = PairedDeltaRuleLaunch(r, k, v, a, b, g, scale, pos, config).forward(initial, r.dtype)
        ctx.save_for_backward(r, k, v, a, b, g, initial, inverse, pos)
        ctx.scale, ctx.config = scale, config
        return o[:, 1::2].contiguous(), final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor, dfinal: Tensor) -> tuple[Any, ...]:
        r, k, v, a, b, g, initial, inverse, pos = ctx.saved_tensors
        launch = PairedDeltaRuleLaunch(r, k, v, a, b, g, ctx.scale, pos, ctx.config)
        found = launch.gradients(initial, inverse, do, dfinal.contiguous())
        return (*(x if need else None for x, need in zip(found, ctx.needs_input_grad[:7], strict=True)), *(None,) * 3)
