"""The diagonal scans on a GPU: launches the Triton kernels of `triton_forward` and `triton_backward` and gives them a gradient.

The one thing to know: how a sequence is cut into pieces, and every tile, is a function of shapes and of the `LaunchConfig` alone,
so equal calls give equal bits on every rank. Inputs may be views: only their last dimension has to be contiguous.
"""

from dataclasses import dataclass, replace
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from baton.kernels.common import launch_utils
from baton.kernels.compile import launch_configs
from baton.kernels.compile.aot import on_gpu, target

KERNEL = "diagonal_scan"


@dataclass(frozen=True)
class LaunchConfig:
    """How the kernels are cut.

    Attributes:
        channels: of a program; a power of two. A lane has one of each 32 forwards.
        channels_back: of a program of the backward pass.
        warps: of a program.
        steps: tokens that are loaded together, one such block ahead of what is computed; divides border.
        steps_summary: the same for the passes that find what a piece does to a state and to a cotangent.
        ahead: tokens whose rows of states (in, query) are loaded ahead; at most steps.
        ahead_summary: the same for those passes; at most steps_summary.
        steps_back: tokens whose states are in registers together in the backward pass; divides border.
        border: tokens between two states that are kept for the backward pass; a piece is a multiple of it.
        unroll: such blocks in a round of the forward pass's loop.
        full: programs that keep a GPU busy; where there are fewer, the sequence is cut into pieces.
        programs: that there are then.
    """

    channels: int = 32
    channels_back: int = 32
    warps: int = 1
    dts: int = 8
    steps_summary: int = 8
    ahead: int = 6
    ahead_summary: int = 4
    steps_back: int = 2
    border: int = 16
    unroll: int = 1
    full: int = 1024
    programs: int = 4096


class ScanInputs(NamedTuple):
    """What a scan reads, whatever its kind; what a kind or a caller has not is None.

    x, step, z: [B, T, D]. into, query: [B, T, N]. skip, bias: [D]. A: [D, N].
    """

    x: Tensor
    dt: Tensor
    B: Tensor
    C: Tensor
    D: Tensor
    A: Tensor | None = None
    dt_bias: Tensor | None = None
    z: Tensor | None = None


def shape_of(kind: str, d_state: int, batch: int, channels: int) -> launch_configs.Shape:
    """What the launch configuration depends on. warps: that a GPU would have without pieces, in classes."""
    return {"kind": kind, "d_state": d_state, "warps": launch_utils.next_power_of_2(batch * -(-channels // 32))}


@cache
def default_launch_config(d_state: int, zoh: bool = False) -> LaunchConfig:
    """What a program has room for in its registers."""
    if zoh:  # phi and its slope are blocks of states too
        euler = default_launch_config(d_state)
        smaller = replace(euler, channels_back=euler.channels_back // 2, ahead=min(euler.ahead, 4))
        return smaller if d_state <= 16 else replace(smaller, channels=euler.channels // 2, dts=4)
    if d_state <= 16:
        return LaunchConfig()
    fewer = LaunchConfig(steps_summary=4, ahead=2, ahead_summary=2)
    return replace(fewer, channels=16, channels_back=8) if d_state <= 32 else replace(fewer, channels=8, channels_back=4)


def _launch_config_for(inputs: ScanInputs, activate: bool, zoh: bool) -> LaunchConfig:
    batch, length, channels = inputs.x.shape
    d_state, kind = inputs.B.shape[2], "longhorn" if inputs.A is None else "mamba zoh" if zoh else "mamba"
    sizes = {"batch": batch, "tokens": length, "channels": channels, "activate": activate, "gated": inputs.z is not None}
    shape = shape_of(kind, d_state, batch, channels)
    return launch_configs.choose(KERNEL, default_launch_config(d_state, zoh), inputs.x.device, shape, sizes)


def in_triton(x: Tensor, compute_dtype: torch.dtype) -> bool:
    """Whether these kernels compute for tensors like x: on a GPU, in float32."""
    return on_gpu(x) and compute_dtype == torch.float32


def scan(
    inputs: ScanInputs,
    *,
    pos: Tensor | None,
    initial_state: Tensor | None,
    activate: bool = False,
    zoh: bool = False,
    config: LaunchConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """y [B, T, D] in x's dtype and the final state [B, D, N] in float32, with exact gradients to all inputs and the state.

    With A it is Mamba's (step sizes, `activate`: softplus of step + bias), without it is Longhorn's (beta, sigmoid). zoh: Mamba's
    input is discretized by a zero-order hold, not by Euler's rule. Arguments are checked by the caller; T >= 1, nothing is float64.
    """
    run = _Run(inputs, activate, zoh, launch_utils.positions(pos), config or _launch_config_for(inputs, activate, zoh))
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (*inputs, initial_state)):
        y, final = _Scan.apply(run, initial_state, *inputs)
        return y, final
    output, final, *_ = run.forward(initial_state, keep=False)
    return output, final


def state_transition_triton(
    inputs: ScanInputs, *, pos: Tensor | None, activate: bool = False, zoh: bool = False, config: LaunchConfig | None = None
) -> tuple[Tensor, Tensor]:
    """What the tokens do to a state, without outputs: decay and add, [B, D, N] in float32 each."""
    run = _Run(inputs, activate, zoh, launch_utils.positions(pos), config or _launch_config_for(inputs, activate, zoh))
    decay, add = run.summarize()
    if run.num_splits > 1:
        decay, add = decay.prod(1), run.fold(decay, add, None)[1]
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
    """What dy [B, T, D] alone adds to the cotangent of the state that entered, [B, D, N] in float32."""
    run = _Run(inputs, activate, zoh, launch_utils.positions(pos), config or _launch_config_for(inputs, activate, zoh))
    add = run.summarize_backward(dy)
    return add[:, 0] if run.num_splits == 1 else run.fold(run.summarize()[0], add, None, backwards=True)[1]


class _Run:
    """One call's shapes, options and launches."""

    def __init__(self, inputs: ScanInputs, activate: bool, zoh: bool, pos: Tensor | None, config: LaunchConfig) -> None:
        self.inputs = ScanInputs(*(None if x is None else launch_utils.in_rows(x) for x in inputs))  # type: ignore[arg-type]
        self.pos, self.config = pos, config
        self.forwards, self.backwards = _kernels()
        self.batch, self.length, self.channels = inputs.x.shape
        self.d_state = inputs.B.shape[2]
        self.num_splits, self.split_len = _pieces(self.batch * -(-self.channels // config.channels), self.length, config)
        self.zoh, self.kind = zoh, _kind(inputs.A is not None, zoh)
        # Longhorn's are zeros: see `rates_at`
        self.A = (
            inputs.x.new_zeros(self.channels, self.d_state, dtype=torch.float32)
            if inputs.A is None
            else launch_utils.aligned(inputs.A)
        )
        width = max(4, 1 << (self.d_state - 1).bit_length())
        self.bc = self.pack(width)
        self.options = {
            "T": self.length,
            "split_len": self.split_len,
            "DIM": self.channels,
            "DSTATE": self.d_state,
            "RECURRENCE": self.kind,
            "ACTIVATE": activate,
            "HAS_POS": pos is not None,
            "BLOCK_N": width,
            "num_warps": config.warps,
            "num_stages": 1,
        }

    def empty(self, *shape: int, like: Tensor | None = None) -> Tensor:
        x = self.inputs.x
        return torch.empty(shape, dtype=torch.float32 if like is None else like.dtype, device=x.device)

    def launch(self, kernel: Any, dts: int, *arguments: Any, **options: Any) -> None:
        even = self.length % options.get("CHECKPOINT_INTERVAL", dts) == 0
        channels = options.setdefault("BLOCK_D", self.config.channels)
        full = self.channels % channels == 0 and self.d_state == self.options["BLOCK_N"]
        if "UNROLL" in options and not (even and full):
            options["UNROLL"] = 1  # of odd sizes, as checks have: a loop twice as long takes the compiler six times as long
        grid = (-(-self.channels // channels), self.batch, self.num_splits)
        kernel[grid](*arguments, **self.options, EVEN_T=even, EVEN_D=full, BLOCK_T=dts, **options)

    def strides(self, **tensors: Tensor | None) -> dict[str, int]:
        """Of tensors [B, T, ...] by name: of batch, and of a token, which the kernels are compiled for."""
        found = {f"{name}_batch": 0 if x is None else x.stride(0) for name, x in tensors.items()}
        return found | {f"{name}_row": 0 if x is None else x.stride(1) for name, x in tensors.items()}

    def or_x(self, x: Tensor | None) -> Tensor:
        """A pointer for what is not there and is not read."""
        return self.inputs.x if x is None else x

    def pack(self, width: int) -> Tensor:
        """in, query and what else all channels read of a token, side by side [B, T, rows]: read at once, and converted once."""
        from baton.kernels.diagonal_scan.triton_common import bc_row_size

        B, C = launch_utils.in_rows(self.inputs.B), launch_utils.in_rows(self.inputs.C)
        bc, tokens = self.empty(self.batch, self.length, bc_row_size(self.kind, width)), max(1, 1024 // width)
        self.forwards.diagonal_scan_pack_bc_kernel[(-(-self.length // tokens), self.batch)](
            B, C, bc, self.length, self.d_state, *B.stride()[:2], *C.stride()[:2],
            RECURRENCE=self.kind, BLOCK_T=tokens, BLOCK_N=width,
        )  # fmt: skip
        return bc

    def warp_sums(self, dts: int) -> bool:
        """Whether tensor cores add over the lanes of a warp; see `over_channels`."""
        from baton.kernels.diagonal_scan.channel_reduce import LANE_OWNS_CHANNEL

        x = self.inputs.x
        fits = (
            self.d_state == self.options["BLOCK_N"] == 16
            and self.config.channels_back == 32
            and self.config.warps == 1
            and dts % 2 == 0
        )
        cuda = torch.version.cuda is not None or target() is not None
        return on_gpu(x) and cuda and LANE_OWNS_CHANNEL and x.dtype != torch.float32 and fits

    def summarize(self) -> tuple[Tensor, Tensor]:
        """decay and add of each piece, [B, P, D, N]."""
        x, dt, _, _, _, _, dt_bias, _ = self.inputs
        decay, add = (self.empty(self.batch, self.num_splits, self.channels, self.d_state) for _ in range(2))
        self.launch(
            self.forwards.diagonal_scan_transition_kernel, self.config.steps_summary, x, dt, self.or_x(dt_bias), self.A, self.bc,
            self.or_x(self.pos), decay, add, **self.strides(x=x, dt=dt), PREFETCH_T=self.config.ahead_summary,
        )  # fmt: skip
        return decay, add

    def summarize_backward(self, dy: Tensor) -> Tensor:
        """What dy alone adds to the cotangent of the state that entered each piece, [B, P, D, N]."""
        _, dt, _, _, _, _, dt_bias, z = self.inputs
        dy, add = launch_utils.in_rows(dy), self.empty(self.batch, self.num_splits, self.channels, self.d_state)
        self.launch(
            self.backwards.diagonal_scan_transition_backward_kernel, self.config.steps_summary, dt, self.or_x(dt_bias), self.A,
            self.bc,
            self.or_x(z), dy, self.or_x(self.pos), add, **self.strides(dt=dt, z=z, dy=dy), HAS_Z=z is not None,
            PREFETCH_T=self.config.ahead_summary,
        )  # fmt: skip
        return add

    def fold(self, decay: Tensor, add: Tensor, first: Tensor | None, *, backwards: bool = False) -> tuple[Tensor, Tensor]:
        """What arrives at each piece, [B, P, D, N], and leaves the last, [B, D, N]."""
        size, block = self.channels * self.d_state, 256
        arriving, last = torch.empty_like(add), self.empty(self.batch, self.channels, self.d_state)
        self.forwards.diagonal_scan_combine_kernel[(-(-size // block), self.batch)](
            decay, add, self.or_x(first), arriving, last, size, self.num_splits,
            HAS_INITIAL=first is not None, REVERSE=backwards, BLOCK=block,
        )  # fmt: skip
        return arriving, last

    def forward(self, initial_state: Tensor | None, *, keep: bool) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """The output, the final state [B, D, N] and, if kept, what `triton_backward` needs: states at borders [B, C, D, N] and the
        pieces' decays, of which one piece has none."""
        x, dt, _, _, D, _, dt_bias, z = self.inputs
        initial_states, decay = None if initial_state is None else launch_utils.aligned(initial_state), None
        if self.num_splits > 1:
            decay, add = self.summarize()
            initial_states, _ = self.fold(decay, add, initial_states)
        output = self.empty(self.batch, self.length, self.channels, like=x)
        final = self.empty(self.batch, self.channels, self.d_state)
        chunks, checkpoints = -(-self.length // self.config.border), None
        if keep:
            checkpoints = self.empty(self.batch, chunks, self.channels, self.d_state)
        self.launch(
            self.forwards.diagonal_scan_forward_kernel, self.config.dts, x, dt, self.or_x(dt_bias), self.A, self.bc, D,
            self.or_x(z),
            self.or_x(self.pos), self.or_x(initial_states), output, final, self.or_x(checkpoints),
            **self.strides(x=x, dt=dt, z=z),
            HAS_Z=z is not None, HAS_INITIAL_STATES=initial_states is not None, STORE_CHECKPOINTS=keep,
            CHECKPOINT_INTERVAL=self.config.border,
            PREFETCH_T=self.config.ahead, UNROLL=self.config.unroll,
        )  # fmt: skip
        return output, final, checkpoints, decay

    def backward(self, checkpoints: Tensor, decay: Tensor | None, dy: Tensor, dfinal: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the entering state and of all inputs."""
        x, dt, B, C, D, A, dt_bias, z = self.inputs
        dy, arriving, dts = launch_utils.in_rows(dy), launch_utils.aligned(dfinal), self.config.steps_back
        batch, length, channels, d_state = self.batch, self.length, self.channels, self.d_state
        if decay is not None:
            arriving = self.fold(decay, self.summarize_backward(dy), arriving, backwards=True)[0]
        dx, ddt, dz = (None if like is None else self.empty(batch, length, channels, like=like) for like in (x, dt, z))
        dA = None if A is None else self.empty(batch * self.num_splits, channels, d_state)
        dD, ddt_bias = (self.empty(batch * self.num_splits, channels) for _ in range(2))
        blocks = -(-channels // self.config.channels_back)
        states = self.empty(
            batch * self.num_splits * blocks, self.config.border // dts, self.config.channels_back, self.options["BLOCK_N"]
        )
        dbc_partial = self.empty(blocks, batch, length, 2, d_state, like=x)
        dinitial_state = self.empty(batch, channels, d_state)
        self.launch(
            self.backwards.diagonal_scan_backward_kernel, dts, x, dt, self.or_x(dt_bias), self.A, self.bc, D, self.or_x(z),
            self.or_x(self.pos), checkpoints, arriving, dy, states,
            dx, ddt, self.or_x(dz), self.or_x(dA), dD, ddt_bias, dbc_partial, dinitial_state,
            **self.strides(x=x, dt=dt, z=z, dy=dy), HAS_Z=z is not None, CHECKPOINT_INTERVAL=self.config.border,
            BLOCK_D=self.config.channels_back, WARP_SUMS=self.warp_sums(dts),
        )  # fmt: skip
        dB, dC = dbc_partial.sum(0, dtype=torch.float32).unbind(2)
        return (
            dinitial_state,
            dx,
            ddt,
            dB.to(B.dtype),
            dC.to(C.dtype),
            dD.sum(0).to(D.dtype),
            None if A is None or dA is None else dA.sum(0).to(A.dtype),
            None if dt_bias is None else ddt_bias.sum(0).to(dt_bias.dtype),
            dz,
        )


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: _Run, initial_state: Tensor | None, *inputs: Tensor | None) -> tuple[Tensor, Tensor]:
        output, final, *kept = run.forward(initial_state, keep=True)
        ctx.activate, ctx.zoh, ctx.config = run.options["ACTIVATE"], run.zoh, run.config
        ctx.save_for_backward(run.pos, *kept, *inputs)
        return output, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dfinal: Tensor) -> tuple[Any, ...]:
        pos, checkpoints, decay, *inputs = ctx.saved_tensors
        run = _Run(ScanInputs(*inputs), ctx.activate, ctx.zoh, pos, ctx.config)
        grads = run.backward(checkpoints, decay, dy, dfinal)
        return (None, *(grad if want else None for want, grad in zip(ctx.needs_input_grad[1:], grads, strict=True)))


@cache
def _kernels() -> tuple[ModuleType, ModuleType]:
    """Those forwards and those backwards, imported when they are first needed: where there is no GPU there need be no Triton."""
    from baton.kernels.diagonal_scan import triton_backward, triton_forward

    return triton_forward, triton_backward


@cache
def _kind(mamba: bool, zoh: bool) -> int:
    from baton.kernels.diagonal_scan.triton_common import LONGHORN, MAMBA, MAMBA_ZOH

    return ((MAMBA_ZOH if zoh else MAMBA) if mamba else LONGHORN).value


def _pieces(programs: int, length: int, config: LaunchConfig) -> tuple[int, int]:
    """How many pieces a sequence is cut into, and tokens of each, a multiple of border."""
    chunks = -(-length // config.border)
    wanted = 1 if programs >= config.full else min(-(-config.programs // programs), max(1, chunks // 4))
    split_len = -(-chunks // wanted) * config.border
    return -(-length // split_len), split_len
