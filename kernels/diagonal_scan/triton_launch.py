"""Launches of the diagonal scan's Triton kernels, with their gradient.

Mamba's names stand for both recurrences; Longhorn's beta is dt, its k is B and its q is C, and it has no A.

How a sequence is split, and every block size, depends on shapes and on the `LaunchConfig` alone: equal calls give equal bits on
every rank. Inputs may be views; only their last dimension has to be contiguous.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from baton.kernels.common import launch_utils
from baton.kernels.common.launch_utils import LazyModule
from baton.kernels.compile import launch_configs
from baton.kernels.compile.aot import on_gpu, target
from baton.kernels.shared_gradient import Place, claim, gradients_like

_forward_kernels = LazyModule("baton.kernels.diagonal_scan.triton_forward")
_backward_kernels = LazyModule("baton.kernels.diagonal_scan.triton_backward")

KERNEL = "diagonal_scan"


@dataclass(frozen=True)
class LaunchConfig:
    """Block sizes of the kernels.

    Attributes:
        block_d: channels of a program in the forward pass, a power of two. With 32 each lane of the warp has one.
        block_d_backward: channels of a program in the backward pass.
        warps: warps of a program.
        block_t: tokens loaded together, one block ahead of the computation; divides checkpoint_interval.
        block_t_transition: the same for the kernels that compute the transition of a split.
        prefetch_t: tokens whose B and C are loaded ahead, at most block_t.
        prefetch_t_transition: the same for the transition kernels, at most block_t_transition.
        block_t_backward: tokens whose states are in registers together in the backward pass; divides checkpoint_interval.
        checkpoint_interval: tokens between two checkpointed states; a split is a multiple of it.
        unroll: blocks of tokens in one iteration of the forward pass's loop.
        min_programs: number of programs that fill a GPU. With fewer, the sequence is split.
        target_programs: number of programs that a split sequence should make.
    """

    block_d: int = 32
    block_d_backward: int = 32
    warps: int = 1
    block_t: int = 8
    block_t_transition: int = 8
    prefetch_t: int = 6
    prefetch_t_transition: int = 4
    block_t_backward: int = 2
    checkpoint_interval: int = 16
    unroll: int = 1
    min_programs: int = 1024
    target_programs: int = 4096


class ScanInputs(NamedTuple):
    """Inputs of a scan, in the order of mamba_ssm's `selective_scan_fn`.

    x, dt, z: [batch, T, channels]. B, C: [batch, T, d_state]. A: [channels, d_state]; None: Longhorn. D, dt_bias: [channels].
    """

    x: Tensor
    dt: Tensor
    A: Tensor | None
    B: Tensor
    C: Tensor
    D: Tensor
    z: Tensor | None = None
    dt_bias: Tensor | None = None


def shape_of(kind: str, d_state: int, batch: int, channels: int) -> launch_configs.Shape:
    """The table's key. warps: warps of an unsplit sequence, rounded up to a power of two."""
    return {"kind": kind, "d_state": d_state, "warps": launch_utils.next_power_of_2(batch * -(-channels // 32))}


@cache
def default_launch_config(d_state: int, zoh: bool = False) -> LaunchConfig:
    """The largest block sizes whose states fit in registers."""
    if zoh:  # phi and its slope are blocks of states too
        euler = default_launch_config(d_state)
        smaller = replace(euler, block_d_backward=euler.block_d_backward // 2, prefetch_t=min(euler.prefetch_t, 4))
        return smaller if d_state <= 16 else replace(smaller, block_d=euler.block_d // 2, block_t=4)
    if d_state <= 16:
        return LaunchConfig()
    fewer = LaunchConfig(block_t_transition=4, prefetch_t=2, prefetch_t_transition=2)
    return replace(fewer, block_d=16, block_d_backward=8) if d_state <= 32 else replace(fewer, block_d=8, block_d_backward=4)


@cache
def _one_token(config: LaunchConfig) -> LaunchConfig:
    return replace(config, block_t=1, prefetch_t=1)


def _launch_config_for(inputs: ScanInputs, activate: bool, zoh: bool) -> LaunchConfig:
    batch, length, channels = inputs.x.shape
    d_state, kind = inputs.B.shape[2], "longhorn" if inputs.A is None else "mamba zoh" if zoh else "mamba"
    if length == 1:  # a step of generation, whose time goes into reading and writing states
        return _one_token(default_launch_config(d_state, zoh))
    sizes = {"batch": batch, "tokens": length, "channels": channels, "activate": activate, "gated": inputs.z is not None}
    shape = shape_of(kind, d_state, batch, channels)
    return launch_configs.choose(KERNEL, default_launch_config(d_state, zoh), inputs.x.device, shape, sizes)


def use_triton(x: Tensor, compute_dtype: torch.dtype) -> bool:
    """Whether tensors like x are computed by these kernels: on a GPU, in float32."""
    return on_gpu(x) and compute_dtype == torch.float32


def diagonal_scan_triton(
    inputs: ScanInputs,
    *,
    pos: Tensor | None,
    initial_state: Tensor | None,
    activate: bool = False,
    zoh: bool = False,
    overwrite_state: bool = False,
    config: LaunchConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """Run a scan whose arguments the caller has checked; T >= 1, nothing is float64.

    Args:
        inputs: see `ScanInputs`.
        pos: int [batch, T]; the state is reset where it is 0. None: nowhere.
        initial_state: float32 [batch, channels, d_state]; None: zero.
        activate: Mamba: dt is softplus(dt + dt_bias). Longhorn: beta is sigmoid(dt + dt_bias).
        zoh: Mamba's input is discretized by a zero-order hold, not by Euler's rule.
        overwrite_state: the final state is written over initial_state if that is contiguous; for one token without gradients.
        config: None: that of the table.

    Returns:
        y [batch, T, channels] in x's dtype and the final state [batch, channels, d_state] in float32, with exact gradients to all
        inputs and the initial state.
    """
    launch = _ScanLaunch(
        inputs, activate, zoh, launch_utils.int32_positions(pos), config or _launch_config_for(inputs, activate, zoh)
    )
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (*inputs, initial_state)):
        y, final = _Scan.apply(launch, initial_state, *inputs)
        return y, final
    y, final, *_ = launch.forward(initial_state, keep=False, overwrite=overwrite_state)
    return y, final


def state_transition_triton(
    inputs: ScanInputs, *, pos: Tensor | None, activate: bool = False, zoh: bool = False, config: LaunchConfig | None = None
) -> tuple[Tensor, Tensor]:
    """decay and add of h_T = decay h_0 + add, float32 [batch, channels, d_state] each, without computing outputs."""
    launch = _ScanLaunch(
        inputs, activate, zoh, launch_utils.int32_positions(pos), config or _launch_config_for(inputs, activate, zoh)
    )
    decay, add = launch.transitions()
    if launch.num_splits > 1:
        decay, add = decay.prod(1), launch.combine(decay, add, None)[1]
    return tuple(x.view(add.shape[0], *add.shape[-2:]) for x in (decay, add))  # type: ignore[return-value]


def state_transition_backward_triton(
    inputs: ScanInputs,
    dy: Tensor,
    *,
    pos: Tensor | None,
    activate: bool = False,
    zoh: bool = False,
    config: LaunchConfig | None = None,
) -> Tensor:
    """The part of the initial state's gradient that comes from dy [batch, T, channels], float32 [batch, channels, d_state]."""
    launch = _ScanLaunch(
        inputs, activate, zoh, launch_utils.int32_positions(pos), config or _launch_config_for(inputs, activate, zoh)
    )
    add = launch.transitions_backward(dy)
    return add[:, 0] if launch.num_splits == 1 else launch.combine(launch.transitions()[0], add, None, reverse=True)[1]


class _ScanLaunch:
    """Shapes, options and launches of one call."""

    def __init__(self, inputs: ScanInputs, activate: bool, zoh: bool, pos: Tensor | None, config: LaunchConfig) -> None:
        rows = (None if x is None else launch_utils.contiguous_last_dim(x) for x in inputs)
        self.inputs = ScanInputs(*rows)  # type: ignore[arg-type]
        self.pos, self.config = pos, config
        self.forward_kernels, self.backward_kernels = _forward_kernels, _backward_kernels
        self.batch, self.length, self.channels = inputs.x.shape
        self.d_state = inputs.B.shape[2]
        self.num_splits, self.split_len = _splits(self.batch * -(-self.channels // config.block_d), self.length, config)
        self.zoh, self.recurrence = zoh, _recurrence(inputs.A is not None, zoh)
        # zeros for Longhorn: see `load_A`
        self.A = (
            inputs.x.new_zeros(self.channels, self.d_state, dtype=torch.float32)
            if inputs.A is None
            else launch_utils.contiguous_aligned(inputs.A)
        )
        block_n = max(4, 1 << (self.d_state - 1).bit_length())
        self.bc = self.pack_bc(block_n)
        self.options = {
            "T": self.length,
            "split_len": self.split_len,
            "DIM": self.channels,
            "DSTATE": self.d_state,
            "RECURRENCE": self.recurrence,
            "ACTIVATE": activate,
            "HAS_POS": pos is not None,
            "BLOCK_N": block_n,
            "num_warps": config.warps,
            "num_stages": 1,
        }

    def empty(self, *shape: int, like: Tensor | None = None) -> Tensor:
        x = self.inputs.x
        return torch.empty(shape, dtype=torch.float32 if like is None else like.dtype, device=x.device)

    def launch(self, kernel: Any, block_t: int, *arguments: Any, **options: Any) -> None:
        even_t = self.length % options.get("CHECKPOINT_INTERVAL", block_t) == 0
        block_d = options.setdefault("BLOCK_D", self.config.block_d)
        even_d = self.channels % block_d == 0 and self.d_state == self.options["BLOCK_N"]
        if "UNROLL" in options and not (even_t and even_d):
            options["UNROLL"] = 1  # for the odd sizes of checks: a loop twice as long compiles six times as slowly
        grid = (-(-self.channels // block_d), self.batch, self.num_splits)
        kernel[grid](*arguments, **self.options, EVEN_T=even_t, EVEN_D=even_d, BLOCK_T=block_t, **options)

    def strides(self, **tensors: Tensor | None) -> dict[str, int]:
        """Strides of tensors [batch, T, ...] by name: of the batch, and of the tokens, for which the kernels are specialized."""
        batch = {f"{name}_batch": 0 if x is None else x.stride(0) for name, x in tensors.items()}
        return batch | {f"{name}_row": 0 if x is None else x.stride(1) for name, x in tensors.items()}

    def or_x(self, tensor: Tensor | None) -> Tensor:
        """tensor, or x as a pointer that is not read."""
        return self.inputs.x if tensor is None else tensor

    def pack_bc(self, block_n: int) -> Tensor:
        """B and C of each token side by side in float32 [batch, T, bc_row_size], so that they are converted once and loaded at
        once; see `diagonal_scan_pack_bc_kernel`."""
        from baton.kernels.diagonal_scan.triton_common import bc_row_size

        B, C = launch_utils.contiguous_last_dim(self.inputs.B), launch_utils.contiguous_last_dim(self.inputs.C)
        bc, tokens = self.empty(self.batch, self.length, bc_row_size(self.recurrence, block_n)), max(1, 1024 // block_n)
        self.forward_kernels.diagonal_scan_pack_bc_kernel[(-(-self.length // tokens), self.batch)](
            B, C, bc, self.length, self.d_state, *B.stride()[:2], *C.stride()[:2],
            RECURRENCE=self.recurrence, BLOCK_T=tokens, BLOCK_N=block_n,
        )  # fmt: skip
        return bc

    def warp_sums(self, block_t: int) -> bool:
        """Whether tensor cores sum over the lanes of a warp; see `channel_reduce`."""
        from baton.kernels.diagonal_scan.channel_reduce import LANE_OWNS_CHANNEL

        x, config = self.inputs.x, self.config
        fits = self.d_state == self.options["BLOCK_N"] == 16 and block_t % 2 == 0
        fits = fits and config.block_d_backward == 32 and config.warps == 1
        cuda = torch.version.cuda is not None or target() is not None
        return on_gpu(x) and cuda and LANE_OWNS_CHANNEL and x.dtype != torch.float32 and fits

    def transitions(self) -> tuple[Tensor, Tensor]:
        """decay and add of each split, [batch, num_splits, channels, d_state]."""
        x, dt, _, _, _, _, _, dt_bias = self.inputs
        decay, add = (self.empty(self.batch, self.num_splits, self.channels, self.d_state) for _ in range(2))
        self.launch(
            self.forward_kernels.diagonal_scan_transition_kernel, self.config.block_t_transition, x, dt, self.A, self.bc,
            self.or_x(dt_bias), self.or_x(self.pos), decay, add, **self.strides(x=x, dt=dt),
            PREFETCH_T=self.config.prefetch_t_transition,
        )  # fmt: skip
        return decay, add

    def transitions_backward(self, dy: Tensor) -> Tensor:
        """The part of the gradient of each split's initial state that comes from the split's dy, [batch, num_splits, channels,
        d_state]."""
        _, dt, _, _, _, _, z, dt_bias = self.inputs
        dy, add = launch_utils.contiguous_last_dim(dy), self.empty(self.batch, self.num_splits, self.channels, self.d_state)
        self.launch(
            self.backward_kernels.diagonal_scan_transition_backward_kernel, self.config.block_t_transition, dt, self.A, self.bc,
            self.or_x(z), self.or_x(dt_bias), dy, self.or_x(self.pos), add, **self.strides(dt=dt, z=z, dy=dy),
            HAS_Z=z is not None, PREFETCH_T=self.config.prefetch_t_transition,
        )  # fmt: skip
        return add

    def combine(self, decay: Tensor, add: Tensor, initial: Tensor | None, *, reverse: bool = False) -> tuple[Tensor, Tensor]:
        """The initial state of each split, [batch, num_splits, channels, d_state], and the final one, [batch, channels, d_state].
        reverse: from the last split to the first."""
        size, block = self.channels * self.d_state, 256
        initial_states, final = torch.empty_like(add), self.empty(self.batch, self.channels, self.d_state)
        self.forward_kernels.diagonal_scan_combine_kernel[(-(-size // block), self.batch)](
            decay, add, self.or_x(initial), initial_states, final, size, self.num_splits,
            HAS_INITIAL=initial is not None, REVERSE=reverse, BLOCK=block,
        )  # fmt: skip
        return initial_states, final

    def forward(
        self, initial_state: Tensor | None, *, keep: bool, overwrite: bool = False
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """y, the final state and, if keep, what `backward` needs: checkpointed states [batch, chunks, channels, d_state] and, where
        the sequence is split, the decays of the splits. overwrite: a sequence that is not split writes its final state over
        initial_state."""
        x, dt, _, _, _, D, z, dt_bias = self.inputs
        initial_states, decay = None if initial_state is None else launch_utils.contiguous_aligned(initial_state), None
        if self.num_splits > 1:
            decay, add = self.transitions()
            initial_states, _ = self.combine(decay, add, initial_states)
        y = self.empty(self.batch, self.length, self.channels, like=x)
        # a program reads its block of states before it writes it
        in_place = overwrite and initial_states is not None and self.num_splits == 1
        final = initial_states if in_place else self.empty(self.batch, self.channels, self.d_state)
        assert final is not None
        chunks = -(-self.length // self.config.checkpoint_interval)
        # final: a pointer of the same dtype and alignment, so that it is the same compiled kernel; it is not written as checkpoints
        checkpoints = self.empty(self.batch, chunks, self.channels, self.d_state) if keep else final
        self.launch(
            self.forward_kernels.diagonal_scan_forward_kernel, self.config.block_t, x, dt, self.A, self.bc, D, self.or_x(z),
            self.or_x(dt_bias), self.or_x(self.pos), self.or_x(initial_states), y, final, checkpoints,
            first_checkpoint=0 if keep else -1, **self.strides(x=x, dt=dt, z=z), HAS_Z=z is not None,
            HAS_INITIAL_STATES=initial_states is not None, CHECKPOINT_INTERVAL=self.config.checkpoint_interval,
            PREFETCH_T=self.config.prefetch_t, UNROLL=self.config.unroll,
        )  # fmt: skip
        return y, final, checkpoints if keep else None, decay

    def backward(
        self, checkpoints: Tensor, decay: Tensor | None, dy: Tensor, dfinal: Tensor, place: Place | None = None
    ) -> tuple[Tensor | None, ...]:
        """Gradients of the initial state and of all inputs. place: for z's, as claimed."""
        x, dt, A, B, C, D, z, dt_bias = self.inputs
        dy, dfinal_states, block_t = (
            launch_utils.contiguous_last_dim(dy),
            launch_utils.contiguous_aligned(dfinal),
            self.config.block_t_backward,
        )
        batch, length, channels, d_state = self.batch, self.length, self.channels, self.d_state
        if decay is not None:
            dfinal_states = self.combine(decay, self.transitions_backward(dy), dfinal_states, reverse=True)[0]
        dx, ddt = (self.empty(batch, length, channels, like=like) for like in (x, dt))
        dz = None if z is None else gradients_like((z,), (place,))[0]
        dA = None if A is None else self.empty(batch * self.num_splits, channels, d_state)
        dD, ddt_bias = sums = self.empty(2, batch * self.num_splits, channels)
        block_d, block_n = self.config.block_d_backward, self.options["BLOCK_N"]
        blocks = -(-channels // block_d)
        scratch = self.empty(batch * self.num_splits * blocks, self.config.checkpoint_interval // block_t, block_d, block_n)
        dbc_partial = self.empty(blocks, batch, length, 2, d_state, like=x)
        dinitial_state = self.empty(batch, channels, d_state)
        self.launch(
            self.backward_kernels.diagonal_scan_backward_kernel, block_t, x, dt, self.A, self.bc, D, self.or_x(z),
            self.or_x(dt_bias), self.or_x(self.pos), checkpoints, dfinal_states, dy, scratch,
            dx, ddt, self.or_x(dA), dbc_partial, dD, self.or_x(dz), ddt_bias, dinitial_state,
            **self.strides(x=x, dt=dt, z=z, dy=dy, dz=dz), HAS_Z=z is not None,
            CHECKPOINT_INTERVAL=self.config.checkpoint_interval, BLOCK_D=block_d, WARP_SUMS=self.warp_sums(block_t),
        )  # fmt: skip
        dB, dC = dbc_partial.sum(0, dtype=torch.float32).unbind(2)
        dD, ddt_bias = sums.sum(1)
        return (
            dinitial_state,
            dx,
            ddt,
            None if A is None or dA is None else dA.sum(0).to(A.dtype),
            dB.to(B.dtype),
            dC.to(C.dtype),
            dD.to(D.dtype),
            dz,
            None if dt_bias is None else ddt_bias.to(dt_bias.dtype),
        )


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, launch: _ScanLaunch, initial_state: Tensor | None, *inputs: Tensor | None) -> tuple[Tensor, Tensor]:
        y, final, *saved = launch.forward(initial_state, keep=True)
        ctx.activate, ctx.zoh, ctx.config = launch.options["ACTIVATE"], launch.zoh, launch.config
        (ctx.place,) = claim(inputs[ScanInputs._fields.index("z")])
        ctx.save_for_backward(launch.pos, *saved, *inputs)
        return y, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dfinal: Tensor) -> tuple[Any, ...]:
        pos, checkpoints, decay, *inputs = ctx.saved_tensors
        launch = _ScanLaunch(ScanInputs(*inputs), ctx.activate, ctx.zoh, pos, ctx.config)
        grads = launch.backward(checkpoints, decay, dy, dfinal, ctx.place)
        return (None, *(grad if needed else None for needed, grad in zip(ctx.needs_input_grad[1:], grads, strict=True)))


@cache
def _recurrence(mamba: bool, zoh: bool) -> int:
    from baton.kernels.diagonal_scan.triton_common import LONGHORN, MAMBA, MAMBA_ZOH

    return ((MAMBA_ZOH if zoh else MAMBA) if mamba else LONGHORN).value


def _splits(programs: int, length: int, config: LaunchConfig) -> tuple[int, int]:
    """The number of splits of a sequence, and tokens of each, a multiple of border."""
    chunks = -(-length // config.checkpoint_interval)
    wanted = 1 if programs >= config.min_programs else min(-(-config.target_programs // programs), max(1, chunks // 4))
    split_len = -(-chunks // wanted) * config.checkpoint_interval
    return -(-length // split_len), split_len
