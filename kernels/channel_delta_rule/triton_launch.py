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
from baton.kernels.delta_rule.triton_launch import SMALL, DeltaRuleLaunch, Kept, LaunchConfig
from baton.kernels.gated_linear_attention.launch_args import NEAR, QKV, PreparedGates, Side
from baton.kernels.gated_linear_attention.triton_launch import LinearAttentionLaunch

_kernels = LazyModule("baton.kernels.channel_delta_rule.triton_kernels")


class ChannelDeltaRuleLaunch(DeltaRuleLaunch):
    """Launches of one call whose g is [batch, T, heads, d_key]."""

    alternate = False
    """Whether tokens take turns. Those at even places read with q, instead of k, for the values that they replace, and have no
    output; those at odd places read with q for the output alone. beta is then 1 everywhere. v and the output's gradient have the
    tokens at odd places alone, the others are zeros. A class whose tokens do makes its own preparation, with one tensor for what
    all tokens read of the state that enters, and its own gradients behind `walk_back`."""

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
        assert g is not None
        given = QKV.of(q, k, v)
        self._begin(given, v, beta, g, scale, pos, config, low=given.low)
        launch = self.gla
        (X, _), along = launch.sizes, (launch.batch, launch.length, launch.heads)
        sums = launch.new(*along, X, dtype=self.of_sums)
        read_q, self.read_a, written = (launch.new(*along, X, dtype=launch.kept) for _ in range(3))
        self.whole = launch.new(launch.batch, launch.heads, launch.chunks, X)
        assert launch.g is not None
        BX = launch.block(X, self.config.x_prepared)
        _kernels.channel_prepare_kernel[(launch.chunks, -(-X // BX), launch.batch * launch.heads)](
            launch.given.q, launch.given.k, launch.g, launch.or_v(pos), sums, read_q, self.read_a, written, self.whole,
            launch.length, scale, *launch_utils.strides(launch.given.q, launch.given.k, launch.g), X=X, H=launch.heads,
            HAS_POS=pos is not None, C=self.config.chunk, BX=BX, num_warps=4,
        )  # fmt: skip
        self.sums, self.prepared = sums, PreparedGates(sums, read_q, written, self.whole)

    def _begin(
        self, given: QKV, v: Tensor, beta: Tensor, g: Tensor, scale: float, pos: Tensor | None, config: LaunchConfig,
        *, low: bool, near: int = NEAR,
    ) -> None:  # fmt: skip
        """Everything but what is prepared. v: the values, whose shape given has. low, near: as of `LinearAttentionLaunch`."""
        self.in_bfloat16 = low
        self.gla = LinearAttentionLaunch("key", scale, pos, g, given, config, low=low, near=near)
        self.config = config if low else config.for_float32
        self.values, self.beta = (launch_utils.contiguous_last_dim(x) for x in (v, beta))
        self.scale = scale
        # see `gated_linear_attention.triton_common`
        self.of_sums = torch.float32 if low else torch.float64

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
        launch, v = self.gla, self.values
        X, Y = launch.sizes
        warps = self.warps_for(self.config.warps_walk, self.read_a, v)
        options = self.chunk_loop_options(self.config.values, num_warps=warps)
        columns = Y if u is not None else Y + X

        def walk(blocks: Sizes) -> None:
            grid = (-(-columns // blocks["BY"]), launch.batch * launch.heads, -(-launch.chunks // piece))
            _kernels.channel_u_kernel[grid](
                self.read_a, self.prepared.written, self.whole, v, self.beta, inverse, launch.or_v(first), launch.or_v(u),
                launch.or_v(states), last, launch.length, launch.chunks, piece, *launch_utils.strides(v, self.beta),
                HAS_FIRST=first is not None, KEEP=u is not None, ALTERNATE=self.alternate, **{**options, **blocks},
            )  # fmt: skip

        launch_blocks(walk, "channel_u_kernel", BY=options["BY"])

    def forward(self, first: Tensor | None, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor, Tensor, Kept]:
        """The output in dtype (None: q's), the final state, the chunks' inverses and what a backward pass needs."""
        launch, (q, k, _) = self.gla, self.gla.given
        if self.alternate:
            read = launch.launch_scores(q, k, self.prepared.sums, gated=True, dtype=torch.float32)
            scores, inverse = read.to(launch.kept, copy=True), self.inverted(read)
        else:
            inverse = self.compute_inverses()
        u, states, transitions, last = self.compute_u(inverse, first)
        if not self.alternate:
            scores = launch.launch_scores(q, k, self.prepared.sums, gated=True)
        y, _ = launch.launch_chunk_o(self.prepared, Side(None, u), scores, states, None, read=dtype or q.dtype, write=None)
        assert y is not None
        return y, last, inverse, Kept(u, states, transitions, scores)

    def walk_back(
        self, first: Tensor | None, inverse: Tensor, kept: Kept | None, dy: Tensor, dlast: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """u, the states before chunks, the gradient of u / beta, the cotangents of the states behind chunks, and the gradient of
        the entering state."""
        launch, rows, shape = self.gla, self.gla.batch * self.gla.heads, self.gla.given.v.shape
        u, states, transitions, scores = kept or self.compute_again(inverse, first)
        dr, cotangents = launch.new(*shape, dtype=launch.kept), torch.empty_like(states)

        def back(arriving: Tensor | None, dfirst: Tensor, pieces: int) -> Tensor:
            warps = self.warps_for(self.config.warps_backward, self.read_a, dy)
            options = self.chunk_loop_options(self.config.values_backward, num_warps=warps, num_stages=self.config.stages_backward)

            def walk(blocks: Sizes) -> None:
                _kernels.channel_u_backward_kernel[(-(-shape[3] // blocks["BY"]), rows, pieces)](
                    self.prepared.read, self.read_a, self.prepared.written, self.whole, self.beta, dy, scores, inverse,
                    launch.or_v(arriving), dr, cotangents, dfirst, launch.length, launch.chunks, -(-launch.chunks // pieces),
                    self.scale, *launch_utils.strides(self.beta, dy), KEEP=arriving is not None, ALTERNATE=self.alternate,
                    **{**options, **blocks},
                )  # fmt: skip

            launch_blocks(walk, "channel_u_backward_kernel", BY=options["BY"])
            return dfirst

        pieces = 1 if transitions is None else transitions.shape[2]
        arriving = dlast
        if transitions is not None:
            adds = back(None, launch.new(*transitions.shape[:4], shape[3]), pieces)
            arriving = self.fold_pieces(transitions, adds, dlast, backwards=True)
        dfirst = back(arriving, torch.empty_like(dlast), pieces)
        return u, states, dr, cotangents, dfirst

    def backward(self, first: Tensor | None, inverse: Tensor, kept: Kept | None, dy: Tensor, dlast: Tensor) -> tuple[Any, ...]:
        u, states, dr, cotangents, dfirst = self.walk_back(first, inverse, kept, dy, dlast)
        launch, sums, chunk = self.gla, self.prepared.sums, self.config.chunk
        (q, k, v), rows, (X, Y) = launch.given, launch.batch * launch.heads, launch.sizes
        readers = torch.stack((q, k), dim=3).flatten(2, 3)
        pairs = launch.new(launch.batch, readers.shape[2], launch.chunks, chunk, chunk, dtype=launch.kept)
        ry = launch.new(*readers.shape[:3], Y, dtype=launch.kept)
        dv, dbeta = launch.new(*v.shape, dtype=v.dtype), launch.new(*v.shape[:3])
        _kernels.channel_pairs_kernel[(launch.chunks, rows)](
            dy, u, dr, self.beta, launch.or_v(launch.pos), pairs, ry, dv, dbeta, launch.length, launch.chunks, self.scale,
            *launch_utils.strides(dy, self.beta), Y=Y, H=launch.heads, HAS_POS=launch.pos is not None, C=chunk,
            BY=launch.block(Y, self.config.y_chunk), num_warps=self.config.warps, num_stages=self.config.stages, **launch.low,
        )  # fmt: skip
        _kernels.channel_dbeta_zero_kernel[(launch.chunks, rows)](
            k, self.read_a, sums, v, self.beta, launch.or_v(launch.pos), u, dr, states, dbeta, launch.length, launch.chunks,
            *launch_utils.strides(k, v, self.beta), X=X, Y=Y, H=launch.heads, HAS_POS=launch.pos is not None,
            LEVELS=chunk.bit_length() - 1, C=chunk, BX=16, BY=launch.block(Y, SMALL), num_warps=4, **launch.low,
        )  # fmt: skip
        # the products of two query heads leave no registers for loads ahead; scales are in ry
        both = LinearAttentionLaunch(
            "key", 1.0, launch.pos, launch.g, QKV(readers, k, v), replace(self.config, stages=1), low=self.in_bfloat16
        )
        of_readers, of_k, dg = both.launch_chunk_dqk(
            Side(readers, k), Side(ry, u), sums, pairs, states, cotangents, read=launch.kept, write=torch.float32
        )
        assert of_readers is not None
        assert of_k is not None
        assert dg is not None
        dq, da = of_readers.unflatten(2, (-1, 2)).unbind(3)
        return dq.to(q.dtype), (of_k + da).to(k.dtype), dv, dbeta, dg, dfirst
