"""The delta rule on a GPU: launches the kernels of `wy_forward_kernels` and `wy_backward_kernels` and defines their gradient.

The output is computed from the writes u by gated linear attention's kernels. The arguments and the inverses of the chunks' matrices
are kept for the backward pass; the writes, the states between chunks and the scores within them are recomputed, unless they are to
be kept.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from baton.kernels.common import launch_utils
from baton.kernels.common.launch_utils import LazyModule
from baton.kernels.compile import launch_configs
from baton.kernels.compile.fitting import Sizes, launch_blocks
from baton.kernels.gated_linear_attention.launch_args import QKV, PreparedGates, Side
from baton.kernels.gated_linear_attention.launch_args import LaunchConfig as GLALaunchConfig
from baton.kernels.gated_linear_attention.reference import Gate
from baton.kernels.gated_linear_attention.triton_launch import LinearAttentionLaunch

_forward_kernels = LazyModule("baton.kernels.delta_rule.wy_forward_kernels")
_backward_kernels = LazyModule("baton.kernels.delta_rule.wy_backward_kernels")
_channel_launch = LazyModule("baton.kernels.channel_delta_rule.triton_launch")  # which imports this module

KERNEL = "delta_rule"
SMALL = 32
"""Columns of d_key and d_value that the inversion, and the computation for beta = 0, process per iteration."""
ODD_WARPS = 2
"""Maximum number of warps of a state loop if rows are not 16-byte aligned, so that its matmuls are not compiled to wgmma: of the
backward loop, and of both if there is a decay per channel. For wgmma with unaligned loads, ptxas 12.8 (Triton's) generates a kernel
that loses a matrix descriptor and crashes with an illegal address (d_key 33, d_value 5, bfloat16, with decays). ptxas 13.0 does
not."""


@dataclass(frozen=True)
class LaunchConfig(GLALaunchConfig):
    """Block sizes of the kernels, including gated linear attention's.

    Attributes:
        values: columns of d_value per program in the loop over chunks; a power of two, at least 16.
        warps_walk: warps of such a program.
        values_backward, warps_backward, stages_backward: columns, warps and pipeline stages in the backward loop over chunks.
        target_programs: programs in the loop over chunks that fill a GPU; with less than a third, the sequence is split.
        warps_inverse: warps of a program that inverts a chunk's matrix.
        x_chunk, y_chunk, warps_chunk: columns of d_key and d_value per iteration, and warps, of the program that computes a
            chunk's gradients.
    """

    stages: int = 2
    values: int = 64
    warps_walk: int = 4
    values_backward: int = 64
    warps_backward: int = 4
    stages_backward: int = 1
    target_programs: int = 256
    warps_inverse: int = 2
    x_chunk: int = 64
    y_chunk: int = 64
    warps_chunk: int = 8

    @cached_property
    def for_float32(self) -> Self:
        largest = {"values": 16, "values_backward": 16, "x_chunk": 32, "y_chunk": 32, "warps_chunk": 4}
        return replace(super().for_float32, **{name: min(size, getattr(self, name)) for name, size in largest.items()})


_DEFAULT = LaunchConfig()


def delta_rule_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    *,
    scale: float,
    pos: Tensor | None,
    initial_state: Tensor | None,
    keep_states: bool = False,
    config: LaunchConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """As `op.delta_rule`, which checks the arguments. Matmuls are computed in bfloat16 if q, k and v are 16-bit, except the
    inverse's."""
    config = config or launch_config_for(k, v, g)
    y, leaving = _DeltaRule.apply(q, k, v, beta, g, initial_state, scale, launch_utils.int32_positions(pos), keep_states, config)
    return y, leaving


def delta_rule_transition_triton(
    k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, *, pos: Tensor | None, config: LaunchConfig | None = None
) -> tuple[Tensor, Tensor]:
    """As `chunked.delta_rule_transition`, for arguments that `delta_rule_triton` accepts."""
    config = config or launch_config_for(k, v, g)
    return _launch_class(g)(k, k, v, beta, g, 1.0, launch_utils.int32_positions(pos), config).whole_transition()


def gate_of(g: Tensor | None) -> Gate:
    """What decays with g."""
    return "none" if g is None else "key" if g.ndim == 4 else "scalar"


def shape_of(gate: Gate, d_key: int, d_value: int) -> launch_configs.Shape:
    """The shape for the table of launch configurations."""
    return {
        "gate": gate,
        "d_key": launch_utils.next_power_of_2(d_key),
        "d_value": launch_utils.next_power_of_2(d_value),
    }


def launch_config_for(k: Tensor, v: Tensor, g: Tensor | None) -> LaunchConfig:
    batch, length, heads, d_value = v.shape
    sizes = {"batch": batch, "tokens": length, "heads": heads, "d_key": k.shape[3], "d_value": d_value}
    return launch_configs.choose(KERNEL, _DEFAULT, v.device, shape_of(gate_of(g), k.shape[3], d_value), sizes)


def _launch_class(g: Tensor | None) -> type["DeltaRuleLaunch"]:
    if gate_of(g) != "key":
        return DeltaRuleLaunch
    launch: type[DeltaRuleLaunch] = _channel_launch.ChannelDeltaRuleLaunch
    return launch


class Kept(NamedTuple):
    """What a forward pass computes and a backward pass needs: what tokens write, u [B, T, H, d_value], the state before each chunk,
    [B, H, N, d_key, d_value], the transitions of the sequence's pieces, if any, and the scores of each chunk's tokens,
    [B, H, N, C, C]."""

    u: Tensor
    states: Tensor
    transitions: Tensor | None
    scores: Tensor


class DeltaRuleLaunch:
    """Launches of one call, for decays of heads or none; for those of channels see `channel_delta_rule.triton_launch`."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        beta: Tensor,
        g: Tensor | None,
        scale: float,
        pos: Tensor | None,
        config: LaunchConfig,
    ) -> None:
        given = QKV.of(q, k, v)
        self.gla = LinearAttentionLaunch("none" if g is None else "scalar", scale, pos, g, given, config, low=given.low)
        self.config = config if given.low else config.for_float32
        self.beta, self.scale = launch_utils.contiguous_last_dim(beta), scale
        self.sums = self.gla.launch_prepare(None, None).sums

    def options(self, **own: int) -> dict[str, Any]:
        """Options of the kernels that compute a chunk's gradients, without those of a single kernel."""
        launch, config = self.gla, self.config
        X, Y = launch.sizes
        sizes = {"X": X, "Y": Y, "BX": launch.block(X, config.x_chunk), "BY": launch.block(Y, config.y_chunk)}
        options = {**launch.low, **launch.common, **sizes, "num_warps": config.warps_chunk, **own}
        del options["G"]
        return options

    def chunk_loop_options(self, values: int, **own: int) -> dict[str, Any]:
        """Options of the kernels that loop over chunks, with `values` columns of d_value per program."""
        X, Y = self.gla.sizes
        return self.options(BX=max(16, launch_utils.next_power_of_2(X)), BY=self.gla.block(Y, values), **own)

    @staticmethod
    def warps_for(warps: int, *rows: Tensor) -> int:
        """Warps of a state loop that reads rows of these tensors [B, T, ..]; see ODD_WARPS."""
        aligned = all(x.stride(1) * x.element_size() % 16 == 0 for x in rows)
        return warps if aligned else min(warps, ODD_WARPS)

    def chunks_per_piece(self, blocks: int) -> int:
        """Number of chunks in each piece of the sequence, for this number of programs per head."""
        launch = self.gla
        # pieces are processed twice, the first time with more columns, so two pieces would not be faster
        wanted = min(self.config.target_programs // (blocks * launch.batch * launch.heads), launch.chunks // 4)
        return launch.chunks if wanted < 3 else -(-launch.chunks // wanted)

    def compute_inverses(self) -> Tensor:
        """The chunks' inverses, see `wy_forward_kernels.wy_inverse_kernel`."""
        launch = self.gla
        k, chunk, heads, rows = launch.given.k, self.config.chunk, launch.heads, launch.batch * launch.heads
        planes = 1 if launch.kept == torch.float32 else 2
        inverse = launch.new(launch.batch, heads, launch.chunks, planes, chunk, chunk, dtype=launch.kept)
        options = self.options(BX=launch.block(launch.sizes[0], self.config.x_products), num_warps=self.config.warps_inverse)
        del options["Y"], options["BY"]
        _forward_kernels.wy_inverse_kernel[(launch.chunks, rows)](
            k, self.beta, launch.or_v(self.sums), launch.or_v(launch.pos), inverse, launch.length, launch.chunks,
            *launch_utils.strides(k, self.beta), **options,
        )  # fmt: skip
        return inverse

    def launch_u(
        self, inverse: Tensor, piece: int, first: Tensor | None, u: Tensor | None, states: Tensor | None, last: Tensor
    ) -> None:
        """Launches `wy_forward_kernels.wy_u_kernel`; without u and states, to compute each piece's effect on the state."""
        launch, (_, k, v) = self.gla, self.gla.given
        X, Y = launch.sizes
        options = self.chunk_loop_options(self.config.values, num_warps=self.config.warps_walk)
        columns = Y if u is not None else Y + X

        def walk(blocks: Sizes) -> None:
            grid = (-(-columns // blocks["BY"]), launch.batch * launch.heads, -(-launch.chunks // piece))
            _forward_kernels.wy_u_kernel[grid](
                k, v, self.beta, launch.or_v(self.sums), launch.or_v(launch.pos), inverse, launch.or_v(first), launch.or_v(u),
                launch.or_v(states), last, launch.length, launch.chunks, piece, *launch_utils.strides(k, v, self.beta),
                HAS_FIRST=first is not None, KEEP=u is not None, **{**options, **blocks},
            )  # fmt: skip

        launch_blocks(walk, "wy_u_kernel", BY=options["BY"])

    def transitions(self, inverse: Tensor, piece: int) -> Tensor:
        """The state that each piece adds, and its transition matrix, [B, H, P, d_key, d_value + d_key]."""
        launch, (X, Y) = self.gla, self.gla.sizes
        transitions = launch.new(launch.batch, launch.heads, -(-launch.chunks // piece), X, Y + X)
        self.launch_u(inverse, piece, None, None, None, transitions)
        return transitions

    def whole_transition(self) -> tuple[Tensor, Tensor]:
        """The transition of all tokens, S -> M S + add: M [B, H, d_key, d_key] and add."""
        X, Y = self.gla.sizes
        blocks = -(-(Y + X) // self.chunk_loop_options(self.config.values)["BY"])
        total, *others = self.transitions(self.compute_inverses(), self.chunks_per_piece(blocks)).unbind(2)
        for transition in others:
            total = transition[..., Y:] @ total
            total[..., :Y] += transition[..., :Y]
        add, M = total.split((Y, X), dim=3)
        return M.contiguous(), add.contiguous()

    def fold_pieces(self, transitions: Tensor, adds: Tensor, first: Tensor | None, *, backwards: bool) -> Tensor:
        """The entering state of each piece, [B, H, P, d_key, d_value]; backward: the gradient of each piece's final state."""
        launch, (X, Y), pieces = self.gla, self.gla.sizes, transitions.shape[2]
        arriving, BY = launch.new(*transitions.shape[:3], X, Y), 16
        _forward_kernels.wy_fold_kernel[(-(-Y // BY), launch.batch * launch.heads)](
            transitions, adds, launch.or_v(first), arriving, pieces, X=X, Y=Y, WIDTH=adds.shape[4], HAS_FIRST=first is not None,
            BACKWARDS=backwards, BX=launch.block(X, 64), BY=BY, num_warps=4,
        )  # fmt: skip
        return arriving

    def compute_u(self, inverse: Tensor, first: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """What `Kept` has first, and the final state."""
        launch, (X, Y), transitions = self.gla, self.gla.sizes, None
        piece = self.chunks_per_piece(-(-Y // self.chunk_loop_options(self.config.values)["BY"]))
        if piece < launch.chunks:
            transitions = self.transitions(inverse, piece)
            first = self.fold_pieces(transitions, transitions, first, backwards=False)
        u = launch.new(*launch.given.v.shape, dtype=launch.kept)
        states = launch.new(launch.batch, launch.heads, launch.chunks, X, Y, dtype=launch.kept)
        last = launch.new(launch.batch, launch.heads, X, Y)
        self.launch_u(inverse, piece, first, u, states, last)
        return u, states, transitions, last

    def compute_again(self, inverse: Tensor, first: Tensor | None) -> Kept:
        """What a forward pass has not kept."""
        u, states, transitions, _ = self.compute_u(inverse, first)
        q, k, _ = self.gla.given
        return Kept(u, states, transitions, self.gla.launch_scores(q, k, self.sums, gated=True))

    def forward(self, first: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Kept]:
        """The output, the final state, the chunks' inverses and what a backward pass needs."""
        launch, inverse = self.gla, self.compute_inverses()
        q, k, _ = launch.given
        u, states, transitions, last = self.compute_u(inverse, first)
        scores = launch.launch_scores(q, k, self.sums, gated=True)
        y, _ = launch.launch_chunk_o(
            PreparedGates(self.sums, q, k, None), Side(None, u), scores, states, None, read=q.dtype, write=None
        )
        assert y is not None
        return y, last, inverse, Kept(u, states, transitions, scores)

    def backward(self, first: Tensor | None, inverse: Tensor, kept: Kept | None, dy: Tensor, dlast: Tensor) -> tuple[Any, ...]:
        """Gradients of q, k, v, beta, g and the entering state. kept: by `forward`; None: it is computed again."""
        launch = self.gla
        (q, k, v), rows, shape = launch.given, launch.batch * launch.heads, launch.given.v.shape
        u, states, transitions, scores = kept or self.compute_again(inverse, first)
        dr, cotangents = launch.new(*shape, dtype=launch.kept), torch.empty_like(states)

        def back(arriving: Tensor | None, dfirst: Tensor, pieces: int) -> Tensor:
            warps = self.warps_for(self.config.warps_backward, q, k, dy)
            options = self.chunk_loop_options(self.config.values_backward, num_warps=warps, num_stages=self.config.stages_backward)

            def walk(blocks: Sizes) -> None:
                _backward_kernels.wy_u_backward_kernel[(-(-shape[3] // blocks["BY"]), rows, pieces)](
                    q, k, self.beta, launch.or_v(self.sums), dy, launch.or_v(launch.pos), scores, inverse, launch.or_v(arriving),
                    dr, cotangents, dfirst, launch.length, launch.chunks, -(-launch.chunks // pieces), self.scale,
                    *launch_utils.strides(q, k, self.beta, dy), KEEP=arriving is not None, **{**options, **blocks},
                )  # fmt: skip

            launch_blocks(walk, "wy_u_backward_kernel", BY=options["BY"])
            return dfirst

        pieces = 1 if transitions is None else transitions.shape[2]
        arriving = dlast
        if transitions is not None:
            adds = back(None, launch.new(*transitions.shape[:4], shape[3]), pieces)
            arriving = self.fold_pieces(transitions, adds, dlast, backwards=True)
        dfirst = back(arriving, torch.empty_like(dlast), pieces)
        dq, dk, dv = (launch.new(*x.shape, dtype=x.dtype) for x in (q, k, v))
        dbeta, dg = launch.new(*shape[:3]), None if self.sums is None else launch.new(*shape[:3])
        _backward_kernels.wy_gradients_kernel[(launch.chunks, rows)](
            q, k, self.beta, launch.or_v(self.sums), dy, launch.or_v(launch.pos), u, dr, states, cotangents, dq, dk, dv, dbeta,
            launch.or_v(dg), launch.length, launch.chunks, self.scale, *launch_utils.strides(q, k, self.beta, dy), **self.options(),
        )  # fmt: skip
        X, Y = launch.sizes
        options = self.options(BX=launch.block(X, SMALL), BY=launch.block(Y, SMALL), num_warps=4)
        _backward_kernels.wy_dbeta_zero_kernel[(launch.chunks, rows)](
            k, v, self.beta, launch.or_v(self.sums), launch.or_v(launch.pos), u, dr, states, dbeta, launch.length, launch.chunks,
            *launch_utils.strides(k, v, self.beta), **options,
        )  # fmt: skip
        return dq, dk, dv, dbeta, dg, dfirst


class _DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, initial_state: Tensor | None, scale: float,
        pos: Tensor | None, keep_states: bool, config: LaunchConfig,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        y, last, inverse, kept = _launch_class(g)(q, k, v, beta, g, scale, pos, config).forward(_contiguous(initial_state))
        # a sequence is cut into pieces where there are few heads: their transitions, in float32, are not in any plan
        kept_states = kept if keep_states and kept.transitions is None else ()
        ctx.save_for_backward(q, k, v, beta, g, initial_state, inverse, pos, *kept_states)
        ctx.scale, ctx.config = scale, config
        return y, last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dlast: Tensor) -> tuple[Any, ...]:
        q, k, v, beta, g, initial_state, inverse, pos, *kept = ctx.saved_tensors
        launch = _launch_class(g)(q, k, v, beta, g, ctx.scale, pos, ctx.config)
        dq, dk, dv, dbeta, dg, dfirst = launch.backward(
            _contiguous(initial_state), inverse, Kept(*kept) if kept else None, launch_utils.contiguous_last_dim(dy),
            dlast.contiguous(),
        )  # fmt: skip
        # a head that all share has a gradient of each
        dq, dk = (d.sum(2, keepdim=True) if x.shape[2] == 1 < d.shape[2] else d for x, d in ((q, dq), (k, dk)))
        grads = (dq, dk, dv, dbeta.to(beta.dtype), None if g is None else dg.to(g.dtype), dfirst)
        return (*(grad if want else None for want, grad in zip(ctx.needs_input_grad[:6], grads, strict=True)), *(None,) * 4)


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()
