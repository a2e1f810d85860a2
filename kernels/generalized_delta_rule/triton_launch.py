"""Launches of the generalized delta rule's Triton kernels, with their gradient. Kept for the backward pass are the arguments and a
state before every `checkpoint_interval`-th token."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from baton.kernels.common import launch_utils
from baton.kernels.common.launch_utils import LazyModule
from baton.kernels.compile.aot import on_gpu

_kernels = LazyModule("baton.kernels.generalized_delta_rule.triton_kernels")

_FEW = 128
"""Heads of all sequences together below which a head's values are divided among programs."""
_PARTS_BYTES = 2**30
"""Most that the parts of keys' gradients may take for that."""


@dataclass(frozen=True)
class LaunchConfig:
    """Sizes of the kernels; powers of two.

    Attributes:
        state_block: numbers of a head's state that a program holds: all channels of a key, for a part of the values.
        state_block_few: the same where batch times heads is small.
        values_per_warp: those in the registers of one warp.
        checkpoint_interval: tokens between two states that are kept.
        group_t: tokens whose states are in registers together in the backward pass; divides checkpoint_interval.
    """

    state_block: int = 4096
    state_block_few: int = 2048
    values_per_warp: int = 512
    checkpoint_interval: int = 64
    group_t: int = 2


STEP = LaunchConfig(state_block=1024, state_block_few=1024)
"""Of one token: small blocks, whatever the batch is, so that a sequence's bits do not depend on it."""


def use_triton(k: Tensor, compute_dtype: torch.dtype) -> bool:
    """Whether tensors like k are computed by these kernels: on a GPU, in float32."""
    return on_gpu(k) and compute_dtype == torch.float32


def generalized_delta_rule_triton(
    r: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, g: Tensor, *, scale: float, pos: Tensor | None,
    initial_state: Tensor | None, config: LaunchConfig | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As `op.generalized_delta_rule`, which checks the arguments. config: None: the default."""
    if initial_state is None:
        initial_state = k.new_zeros(*k.shape[::2], k.shape[3], v.shape[3], dtype=torch.float32)
    config, pos = config or LaunchConfig(), launch_utils.int32_positions(pos)
    tensors = (r, k, v, a, b, g)
    if torch.is_grad_enabled() and any(x.requires_grad for x in (*tensors, initial_state)):
        o, final = _GeneralizedDeltaRule.apply(scale, pos, config, initial_state, *tensors)
        return o, final
    o, final, _ = _Launch(tensors, scale, pos, config).forward(initial_state, keep=False)
    return o, final


def generalized_delta_rule_step_triton(
    r: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, g: Tensor, *, scale: float, pos: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`op.generalized_delta_rule` of one token a sequence, without gradients. The new state is written over the given one if that
    is contiguous."""
    launch = _Launch((r, k, v, a, b, g), scale, launch_utils.int32_positions(pos), STEP)
    o, final, _ = launch.forward(state.contiguous(), keep=False, overwrite=True)
    return o, final


class _Launch:
    """Shapes and launches of one call."""

    def __init__(self, tensors: tuple[Tensor, ...], scale: float, pos: Tensor | None, config: LaunchConfig) -> None:
        self.tensors = tuple(launch_utils.contiguous_last_dim(x) for x in tensors)
        self.scale, self.pos, self.config = scale, pos, config
        k, v = tensors[1:3]
        self.batch, self.length, self.heads, self.d_key = k.shape
        self.d_value = v.shape[3]
        self.block_k = max(4, launch_utils.next_power_of_2(self.d_key))

    def new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.tensors[0].device)

    def options(self, block_v: int) -> dict[str, Any]:
        warps = min(16, max(1, self.block_k * block_v // self.config.values_per_warp))
        return {
            "K": self.d_key, "V": self.d_value, "H": self.heads, "HAS_POS": self.pos is not None,
            "INTERVAL": self.config.checkpoint_interval, "BLOCK_K": self.block_k, "BLOCK_V": block_v, "num_warps": warps,
        }  # fmt: skip

    def block_v(self, part_bytes: int = 0) -> int:
        """Values of a program. part_bytes: what each part of a head's values takes."""
        whole = max(4, launch_utils.next_power_of_2(self.d_value))
        block, few = (min(whole, max(4, size // self.block_k)) for size in (self.config.state_block, self.config.state_block_few))
        divides = self.batch * self.heads < _FEW and part_bytes * -(-self.d_value // few) <= _PARTS_BYTES
        return few if divides else block

    def or_r(self, x: Tensor | None) -> Tensor:
        """x, or r as a pointer that is not read."""
        return self.tensors[0] if x is None else x

    def forward(self, initial: Tensor, *, keep: bool, overwrite: bool = False) -> tuple[Tensor, Tensor, Tensor | None]:
        """o, the final state and, if keep, the checkpoints. overwrite: the final state is written over the initial one."""
        v, chunks, block_v = self.tensors[2], -(-self.length // self.config.checkpoint_interval), self.block_v()
        o = self.new(*v.shape, dtype=self.tensors[0].dtype)
        state = (self.batch, self.heads, self.d_key, self.d_value)
        initial = initial if overwrite else launch_utils.contiguous_aligned(initial)
        final = initial if overwrite else self.new(*state)
        # final: a pointer of the same dtype and alignment, so that it is the same compiled kernel
        checkpoints = self.new(*state[:2], chunks, *state[2:]) if keep else final
        _kernels.generalized_delta_rule_forward_kernel[(-(-self.d_value // block_v) * self.batch * self.heads,)](
            *self.tensors, self.or_r(self.pos), initial, o, final, checkpoints, self.length,
            self.scale, 0 if keep else -1, *launch_utils.strides(*self.tensors), **self.options(block_v),
        )  # fmt: skip
        return o, final, checkpoints if keep else None

    def backward(self, checkpoints: Tensor, do: Tensor, dfinal: Tensor) -> tuple[Tensor, ...]:
        """Gradients of the initial state, r, k, v, a, b and g."""
        of_key = self.batch * self.length * self.heads * self.d_key
        block_v, interval, group = self.block_v(5 * 4 * of_key), self.config.checkpoint_interval, self.config.group_t
        parts, heads = -(-self.d_value // block_v), self.batch * self.heads
        do = launch_utils.contiguous_last_dim(do)
        keys = (self.batch, self.length, self.heads, self.d_key)
        r, k, v, a, b, g = self.tensors
        # parts are added in float32
        of_keys = [self.new(parts, *keys, dtype=x.dtype if parts == 1 else torch.float32) for x in (r, k, a, b, g)]
        dr, dk, da, db, dg = of_keys
        dv, dinitial = self.new(*v.shape, dtype=v.dtype), self.new(self.batch, self.heads, self.d_key, self.d_value)
        scratch = self.new(parts * heads * (interval // group) * self.block_k * block_v)
        _kernels.generalized_delta_rule_backward_kernel[(parts * heads,)](
            *self.tensors, self.or_r(self.pos), checkpoints, do, launch_utils.contiguous_aligned(dfinal), scratch, dr, dk, dv, da,
            db, dg, dinitial, self.length, self.scale, *launch_utils.strides(*self.tensors, do), GROUP=group,
            **self.options(block_v),
        )  # fmt: skip
        dr, dk, da, db, dg = (
            x[0] if parts == 1 else x.sum(0).to(like.dtype) for x, like in zip(of_keys, (r, k, a, b, g), strict=True)
        )
        return dinitial, dr, dk, dv, da, db, dg


class _GeneralizedDeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, scale: float, pos: Tensor | None, config: LaunchConfig, initial: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        o, final, checkpoints = _Launch(tensors, scale, pos, config).forward(initial, keep=True)
        ctx.scale, ctx.config = scale, config
        ctx.save_for_backward(pos, checkpoints, *tensors)
        return o, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor, dfinal: Tensor) -> tuple[Any, ...]:
        pos, checkpoints, *tensors = ctx.saved_tensors
        grads = _Launch(tuple(tensors), ctx.scale, pos, ctx.config).backward(checkpoints, do, dfinal)
        return (None, None, None, *(x if need else None for x, need in zip(grads, ctx.needs_input_grad[3:], strict=True)))
