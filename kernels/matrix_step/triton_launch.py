"""Launches the Triton kernel of one token a sequence for recurrences with a matrix State."""

from typing import Any

import torch
from torch import Tensor

from baton.kernels.common import launch_utils
from baton.kernels.common.launch_utils import LazyModule

_kernels = LazyModule("baton.kernels.matrix_step.triton_kernels")

_GATES = {"none": 0, "scalar": 1, "key": 2, "value": 3}
"""As the kernel has them."""
COLUMNS = 16
"""Of a head's State in a program: a row of them is 64 bytes, and with them one sequence of a 1.3B model makes 128 programs. They do
not depend on the batch, which would make a sequence's bits depend on it."""
_NUMBERS_PER_WARP = 512


def launch_sizes(d_key: int, d_value: int) -> dict[str, int]:
    """Sizes of a program's block, and its warps."""
    block_k, block_v = launch_utils.next_power_of_2(d_key), min(COLUMNS, launch_utils.next_power_of_2(d_value))
    return {"BLOCK_K": block_k, "BLOCK_V": block_v, "num_warps": min(8, max(1, block_k * block_v // _NUMBERS_PER_WARP))}


def matrix_step_triton(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, *, gate: str, scale: float, pos: Tensor | None, state: Tensor,
    beta: Tensor | None = None, bonus: Tensor | None = None, y_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One token a sequence, without gradients; nothing is checked. All is computed in float32, and y rounded once.

        S = decay state            0 where pos == 0
        S = S + k v^T              with beta: S + k (beta (v - S^T k))^T
        y = scale S^T q            with bonus: scale (state^T q + (q bonus k) v), of the state before its decay

    Args:
        q: [batch, 1, query_heads, d_key]. query_heads is a multiple of heads, or divides it.
        k: [batch, 1, key_heads, d_key]. heads is a multiple of key_heads.
        v: [batch, 1, heads, d_value].
        g: log-decays, [batch, 1, heads], of gate "key" and "value" with d_key and d_value behind; None with gate "none".
        gate: what a log-decay belongs to, as in `gated_linear_attention`.
        state: float32 [batch, heads, d_key, d_value]. The new one is written over it if it is contiguous.
        beta: of the delta rule, [batch, 1, heads].
        bonus: of RWKV-6, [heads, d_key]; there is a query for each head then.
        y_dtype: of y; None: q's.

    Returns:
        y, [batch, 1, max(query_heads, heads), d_value], and the new state.
    """
    q, k, v = (launch_utils.contiguous_last_dim(x) for x in (q, k, v))
    if g is not None and g.ndim == 4:
        g = launch_utils.contiguous_last_dim(g)
    state, pos = state.contiguous(), launch_utils.int32_positions(pos)
    bonus = None if bonus is None else launch_utils.contiguous_aligned(bonus)
    (batch, _, heads, d_value), d_key, query_heads = v.shape, k.shape[3], q.shape[2]
    y = torch.empty((batch, 1, max(query_heads, heads), d_value), dtype=y_dtype or q.dtype, device=v.device)
    sizes: dict[str, Any] = launch_sizes(d_key, d_value)

    def or_state(x: Tensor | None) -> Tensor:
        """A pointer in place of an absent tensor, which is not read."""
        return state if x is None else x

    _kernels.matrix_step_kernel[(-(-d_value // sizes["BLOCK_V"]) * batch * heads,)](
        q, k, v, or_state(g), or_state(beta), or_state(bonus), or_state(pos), state, y, scale, *_strides(q, k, v, g, beta),
        K=d_key, V=d_value, H=heads, G=max(1, query_heads // heads), Q_SHARE=max(1, heads // query_heads),
        K_SHARE=heads // k.shape[2], GATE=_GATES[gate], DELTA=beta is not None, BONUS=bonus is not None, HAS_POS=pos is not None,
        **sizes,
    )  # fmt: skip
    return y, state


def _strides(*tensors: Tensor | None) -> tuple[int, ...]:
    """Of the batch and of heads, one tensor's behind the other's."""
    return tuple(stride for x in tensors for stride in ((0, 0) if x is None else (x.stride(0), x.stride(2))))
