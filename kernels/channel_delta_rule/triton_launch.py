"""The delta rule with a decay per key channel on a GPU: launches the kernels of `triton_kernels`, of the delta rule and of gated
linear attention. As for other gates, the arguments and the chunks' inverses are kept for the backward pass.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from baton.kernels.common import launch_utils
from baton.kernels.common.launch_utils import LazyModule
from baton.kernels.compile.fitting import Sizes, launch_blocks
from baton.kernels.delta_rule.triton_launch import SMALL, DeltaRuleLaunch, LaunchConfig
from baton.kernels.gated_linear_attention.launch_args import NEAR, QKV, PreparedGates, Side
from baton.kernels.gated_linear_attention.triton_launch import LinearAttentionLaunch

_kernels = LazyModule("baton.kernels.channel_delta_rule.triton_kernels")


class ChannelDeltaRuleLaunch(DeltaRuleLaunch):
    """Launches of one call whose g is [batch, T, heads, d_key].

    alternate: tokens take turns. Those at even places read with q, instead of k, for the values that they replace, and have no
    output; those at odd places read with q for the output alone. beta then has to be 1 everywhere and v and the output's gradient 0
    at even places; the gradient of beta is not computed. near: as of `LinearAttentionLaunch`; its kernels take it.
    """

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
        *,
        alternate: bool = False,
        near: int = NEAR,
    ) -> None:
        assert g is not None
        given = QKV.of(q, k, v)
        # what alternates may be more precise
        self.in_bfloat16, self.alternate = (given._replace(q=given.k) if alternate else given).low, alternate
        low = self.in_bfloat16
        self.gla = launch = LinearAttentionLaunch("key", scale, pos, g, given, config, low=low, near=near)
        self.config = config if low else config.for_float32
        self.beta, self.scale = launch_utils.contiguous_last_dim(beta), scale
        (X, _), along = launch.sizes, (launch.batch, launch.length, launch.heads)
        # see `gated_linear_attention.triton_common`
        sums = launch.new(*along, X, dtype=torch.float32 if low else torch.float64)
        read_q, self.read_a, written = (launch.new(*along, X, dtype=launch.kept) for _ in range(3))
        self.whole = launch.new(launch.batch, launch.heads, launch.chunks, X)
        assert launch.g is not None
        BX = launch.block(X, self.config.x_prepared)
        _kernels.channel_prepare_kernel[(launch.chunks, -(-X // BX), launch.batch * launch.heads)](
            launch.given.q, launch.given.k, launch.g, launch.or_v(pos), sums, read_q, self.read_a, written, self.whole,
            launch.length, scale, *launch_utils.strides(launch.given.q, launch.given.k, launch.g), X=X, H=launch.heads,
            HAS_POS=pos is not None, ALTERNATE=alternate, C=self.config.chunk, BX=BX, num_warps=4,
        )  # fmt: skip
        self.prepared = PreparedGates(sums, read_q, written, self.whole)

    def chunk_loop_options(self, values: int, **own: int) -> dict[str, Any]:
        options = super().chunk_loop_options(values, **own)
        # the kernels' operands have been prepared
        return {name: value for name, value in options.items() if name not in ("GATE", "HAS_POS")}

    def compute_inverses(self) -> Tensor:
        """The chunks' inverses, see `triton_kernels.channel_inverse_kernel`."""
        reads = self.gla.given.q if self.alternate else self.gla.given.k
        return self.inverted(self.gla.launch_scores(reads, self.gla.given.k, self.prepared.sums, gated=True, dtype=torch.float32))

    def inverted(self, read: Tensor) -> Tensor:
        """The same in the memory of what is read of keys, float32 [B, H, N, C, C]."""
        launch, chunk = self.gla, self.config.chunk
        _kernels.channel_inverse_kernel[(launch.chunks, launch.batch * launch.heads)](
            self.beta, read, launch.length, launch.chunks, *launch_utils.strides(self.beta), H=launch.heads,
            ALTERNATE=self.alternate, C=chunk, num_warps=self.config.warps_inverse, **launch.low,
        )  # fmt: skip
        return read.view(launch.kept).view(launch.batch, launch.heads, launch.chunks, -1, chunk, chunk)

    def launch_u(
        self, inverse: Tensor, piece: int, first: Tensor | None, u: Tensor | None, states: Tensor | None, last: Tensor
    ) -> None:
        launch, v = self.gla, self.gla.given.v
        X, Y = launch.sizes
        warps = self.warps_for(self.config.warps_walk, self.read_a, v)
        options = self.chunk_loop_options(self.config.values, num_warps=warps)
        columns = Y if u is not None else Y + X

        def walk(blocks: Sizes) -> None:
            grid = (-(-columns // blocks["BY"]), launch.batch * launch.heads, -(-launch.chunks // piece))
            _kernels.channel_u_kernel[grid](
                self.read_a, self.prepared.written, self.whole, v, self.beta, inverse, launch.or_v(first), launch.or_v(u),
                launch.or_v(states), last, launch.length, launch.chunks, piece, *launch_utils.strides(v, self.beta),
                HAS_FIRST=first is not None, KEEP=u is not None, **{**options, **blocks},
            )  # fmt: skip

        launch_blocks(walk, "channel_u_kernel", BY=options["BY"])

    def forward(self, first: Tensor | None, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """The output in dtype (None: q's), the final state and the chunks' inverses."""
        launch, (q, k, _) = self.gla, self.gla.given
        if self.alternate:
            read = launch.launch_scores(q, k, self.prepared.sums, gated=True, dtype=torch.float32)
            scores, inverse = read.to(launch.kept, copy=True), self.inverted(read)
        else:
            inverse = self.compute_inverses()
        u, states, last, _ = self.compute_u(inverse, first)
        if not self.alternate:
            scores = launch.launch_scores(q, k, self.prepared.sums, gated=True)
        y, _ = launch.launch_chunk_o(self.prepared, Side(None, u), scores, states, None, read=dtype or q.dtype, write=None)
        assert y is not None
        return y, last, inverse

    def backward(self, first: Tensor | None, inverse: Tensor, dy: Tensor, dlast: Tensor) -> tuple[Any, ...]:
        q, k, _ = self.gla.given
        of_readers, dk, *others = self.gradients(first, inverse, dy, dlast)
        dq, da = of_readers.unflatten(2, (-1, 2)).unbind(3)
        return dq.to(q.dtype), (dk + da).to(k.dtype), *others

    def gradients(self, first: Tensor | None, inverse: Tensor, dy: Tensor, dlast: Tensor) -> tuple[Tensor, ...]:
        """Gradients of what reads (if alternate, q; else q and k, [B, T, 2 H, d_key]), of k as it is written, v, beta, g and the
        entering state; the first two are not rounded to their dtypes."""
        launch = self.gla
        (q, k, v), rows, shape = launch.given, launch.batch * launch.heads, launch.given.v.shape
        (X, Y), sums, chunk = launch.sizes, self.prepared.sums, self.config.chunk
        u, states, _, transitions = self.compute_u(inverse, first)
        scores = launch.launch_scores(q, k, sums, gated=True)
        dr, cotangents = launch.new(*shape, dtype=launch.kept), torch.empty_like(states)

        def back(arriving: Tensor | None, dfirst: Tensor, pieces: int) -> Tensor:
            warps = self.warps_for(self.config.warps_backward, self.read_a, dy)
            options = self.chunk_loop_options(self.config.values_backward, num_warps=warps, num_stages=self.config.stages_backward)

            def walk(blocks: Sizes) -> None:
                _kernels.channel_u_backward_kernel[(-(-Y // blocks["BY"]), rows, pieces)](
                    self.prepared.read, self.read_a, self.prepared.written, self.whole, self.beta, dy, scores, inverse,
                    launch.or_v(arriving), dr, cotangents, dfirst, launch.length, launch.chunks, -(-launch.chunks // pieces),
                    self.scale, *launch_utils.strides(self.beta, dy), KEEP=arriving is not None, **{**options, **blocks},
                )  # fmt: skip

            launch_blocks(walk, "channel_u_backward_kernel", BY=options["BY"])
            return dfirst

        pieces = 1 if transitions is None else transitions.shape[2]
        arriving = dlast
        if transitions is not None:
            adds = back(None, launch.new(*transitions.shape[:4], Y), pieces)
            arriving = self.fold_pieces(transitions, adds, dlast, backwards=True)
        dfirst = back(arriving, torch.empty_like(dlast), pieces)
        readers = q if self.alternate else torch.stack((q, k), dim=3).flatten(2, 3)
        pairs = launch.new(launch.batch, readers.shape[2], launch.chunks, chunk, chunk, dtype=launch.kept)
        ry = launch.new(*readers.shape[:3], Y, dtype=launch.kept)
        dv, dbeta = launch.new(*shape, dtype=v.dtype), launch.new(*shape[:3])
        _kernels.channel_pairs_kernel[(launch.chunks, rows)](
            dy, u, dr, self.beta, launch.or_v(launch.pos), pairs, ry, dv, dbeta, launch.length, launch.chunks, self.scale,
            *launch_utils.strides(dy, self.beta), Y=Y, H=launch.heads, HAS_POS=launch.pos is not None,
            ALTERNATE=self.alternate, C=chunk, BY=launch.block(Y, self.config.y_chunk), num_warps=self.config.warps,
            num_stages=self.config.stages, **launch.low,
        )  # fmt: skip
        if not self.alternate:
            _kernels.channel_dbeta_zero_kernel[(launch.chunks, rows)](
                k, self.read_a, sums, v, self.beta, launch.or_v(launch.pos), u, dr, states, dbeta, launch.length, launch.chunks,
                *launch_utils.strides(k, v, self.beta), X=X, Y=Y, H=launch.heads, HAS_POS=launch.pos is not None,
                LEVELS=chunk.bit_length() - 1, C=chunk, BX=16, BY=launch.block(Y, SMALL), num_warps=4, **launch.low,
            )  # fmt: skip
        # of two that read per head the products leave no registers for loads ahead; scales are in ry
        config = self.config if self.alternate else replace(self.config, stages=1)
        both = LinearAttentionLaunch(
            "key", 1.0, launch.pos, launch.g, QKV(readers, k, v), config, low=self.in_bfloat16, near=launch.near
        )
        of_readers, of_k, dg = both.launch_chunk_dqk(
            Side(readers, k), Side(ry, u), sums, pairs, states, cotangents, read=launch.kept, write=torch.float32
        )
        assert of_readers is not None
        assert of_k is not None
        assert dg is not None
        return of_readers, of_k, dv, dbeta, dg, dfirst
