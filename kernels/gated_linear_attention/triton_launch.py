"""Gated linear attention on a GPU: launches the kernels of `triton_kernels` and defines their gradient.

The gate decides which of q, k, v and y lie along x, the dimension with decays, and therefore which of the two kernels computes the
output and which the gradients. Only the arguments are saved for the backward pass, and the scores within chunks if they are small.
The states between chunks are recomputed, and sums of gates and what decays by key multiply, unless they are to be kept.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from baton.kernels.common import launch_utils
from baton.kernels.common.adjacent_views import empty_like_heads
from baton.kernels.compile import launch_configs
from baton.kernels.compile.aot import on_gpu
from baton.kernels.gated_linear_attention.launch_args import (
    NOTHING,
    QKV,
    Gradients,
    Kept,
    Launch,
    LaunchConfig,
    PreparedGates,
    Side,
    gate_kind,
)
from baton.kernels.gated_linear_attention.reference import Gate
from baton.kernels.gated_linear_attention.shared_launch import launch_shared_dqk
from baton.kernels.shared_gradient import claim, gradients_like

KERNEL = "gated_linear_attention"
_DEFAULT = LaunchConfig()
SCORES_SHARE = 6
"""Scores are saved for the backward pass if their elements are at most 1 / SCORES_SHARE of those of q, k and v."""


def use_triton(x: Tensor, compute_dtype: torch.dtype) -> bool:
    """Whether these kernels apply to tensors like x: on a GPU, computing in float32."""
    return on_gpu(x) and compute_dtype == torch.float32


def shape_of(gate: Gate, d_key: int, d_value: int) -> launch_configs.Shape:
    """The shape for the table of launch configurations."""
    return {"gate": gate, "d_key": launch_utils.next_power_of_2(d_key), "d_value": launch_utils.next_power_of_2(d_value)}


def launch_config_for(gate: Gate, given: QKV) -> LaunchConfig:
    batch, length, heads, d_value = given.v.shape
    (key_heads, d_key), query_heads = given.k.shape[2:], given.q.shape[2]
    sizes = {"batch": batch, "tokens": length, "heads": heads, "query_heads": query_heads, "key_heads": key_heads}
    sizes |= {"d_key": d_key, "d_value": d_value}
    return launch_configs.choose(KERNEL, _DEFAULT, given.v.device, shape_of(gate, d_key, d_value), sizes)


def gla_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    *,
    gate: Gate,
    scale: float,
    pos: Tensor | None,
    initial_state: Tensor | None,
    keep_states: bool = False,
    config: LaunchConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """As `op.gated_linear_attention`, which checks the arguments. Matmuls are computed in bfloat16 if q, k and v are 16-bit."""
    config = config or launch_config_for(gate, QKV(q, k, v))
    y, leaving = _Gla.apply(q, k, v, g, initial_state, gate, scale, launch_utils.int32_positions(pos), keep_states, config)
    return y, leaving


def gla_final_state_triton(
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    *,
    gate: Gate,
    pos: Tensor | None,
    config: LaunchConfig | None = None,
    low: bool | None = None,
) -> Tensor:
    """The state that a span reaches from zero, [batch, heads, d_key, d_value], without queries, outputs and gradients.

    low: whether matrix products are computed in bfloat16 (default: if k and v are 16-bit).
    """
    given = QKV.of(k, k, v)
    low = given.low if low is None else low
    run = LinearAttentionLaunch(
        gate, 1.0, launch_utils.int32_positions(pos), g, given, config or launch_config_for(gate, QKV(k, k, v)), low=low
    )
    wx, wy = run.writes
    prepared = run.launch_prepare(None, wx)
    assert prepared.written is not None
    return run.state(run.launch_chunk_h(prepared.written, wy, prepared, None, keep=False)[1])


class LinearAttentionLaunch(Launch):
    """The launches of one call."""

    @property
    def keeps_scores(self) -> bool:
        """Whether the output's scores are saved for the backward pass."""
        widths = (x.shape[3] * (1 if x.stride(2) == 0 else x.shape[2]) for x in self.given)
        return SCORES_SHARE * self.query_heads * self.config.chunk <= sum(widths)

    def launch_prepare(self, r: Tensor | None, w: Tensor | None) -> PreparedGates:
        """Of what is read with and what is written along x."""
        if self.g is None:
            return PreparedGates(None, r, w, None)
        shape, X = (self.batch, self.length, self.heads), self.sizes[0]
        # see `triton_common`
        precise = torch.float32 if self.kept == torch.bfloat16 else torch.float64
        if not self.per_channel:
            sums, read, written, whole, BX = self.new(*shape, dtype=precise), r, w, None, 16
        else:
            sums = self.new(*shape, X, dtype=precise)
            read = None if r is None else self.new(*shape[:2], self.query_heads, X, dtype=self.kept)
            written = None if w is None else self.new(*shape, X, dtype=self.kept)
            whole, BX = self.new(self.batch, self.heads, self.chunks, X), self.block(X, self.config.x_prepared)
        self.kernels.gla_prepare_kernel[(self.chunks, -(-X // BX) if self.per_channel else 1, self.batch * self.heads)](
            self.or_v(r), self.or_v(w), self.g, self.or_v(self.pos), sums, self.or_v(read), self.or_v(written),
            self.or_v(whole), self.length, self.scale, *launch_utils.strides(r, w, self.g), X=X, READ=r is not None,
            WRITE=w is not None, BX=BX, num_warps=4 if self.per_channel else 1, **self.common,
        )  # fmt: skip
        return PreparedGates(sums, read, written, whole)

    @property
    def shares_scores(self) -> bool:
        """Whether scores along x are computed once for all heads, each of which has decays of its own."""
        return self.shared and not self.keeps_scores

    def launch_scores(
        self, r: Tensor, w: Tensor, sums: Tensor | None, *, gated: bool, shared: bool = False, dtype: torch.dtype | None = None
    ) -> Tensor:
        """What is read of what is written, but for the scale, [B, Q, N, C, C]; over what lies along x if gated, along y if not.
        dtype: of the result; None: that of products. shared: once for all heads and without decays, [B, 1, N, C, C] in float32."""
        heads = self.query_heads
        if shared:
            heads, gated, dtype = 1, False, torch.float32
        chunk, size = self.config.chunk, r.shape[3]
        found = self.new(self.batch, heads, self.chunks, chunk, chunk, dtype=dtype or self.kept)
        options: dict[str, Any] = {**self.common, **self.low}
        if gated and self.per_channel:
            # more programs per SM hide more latency than pipelined loads would
            options |= {"BX": self.block(size, self.config.x_scores), "num_warps": self.config.warps_scores, "num_stages": 1}
        else:
            options |= {"BX": self.block(size, self.config.x_products), "num_warps": self.config.warps}
        if not gated:
            options["GATE"] = gate_kind("none")
        self.kernels.gla_scores_kernel[(self.chunks, heads, self.batch)](
            r, w, self.or_v(sums), self.or_v(self.pos), found, self.length, *launch_utils.strides(r, w), X=size,
            **self.levels, **options,
        )  # fmt: skip
        return found

    def launch_chunk_h(
        self,
        x_operand: Tensor,
        y_operand: Tensor,
        prepared: PreparedGates,
        first: Tensor | None,
        *,
        backwards: bool = False,
        keep: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """The entering state of each chunk, [B, H, N, X, Y], and the final state, [B, H, X, Y]. Backward: the gradients of each
        chunk's final state, and of the sequence's entering state."""
        (X, Y), heads, chunks = self.sizes, self.heads, self.chunks
        kept = self.new(self.batch, heads, chunks, X, Y, dtype=self.kept) if keep else None
        BX, BY = self.block(X, self.config.x), self.block(Y, self.config.y)
        blocks = -(-X // BX) * -(-Y // BY)
        options = {**self.common, "X": X, "Y": Y, "BX": BX, "BY": BY}
        del options["H"]

        def walk(piece: int, first: Tensor | None, kept: Tensor | None, decay: Tensor | None = None) -> Tensor:
            """Through pieces of so many chunks; what leaves each, [B, P, H, X, Y]."""
            last = self.new(self.batch, -(-chunks // piece), heads, X, Y)
            self.kernels.chunk_h_kernel[(blocks, heads, self.batch * last.shape[1])](
                x_operand, y_operand, self.or_v(prepared.sums), self.or_v(prepared.whole), self.or_v(self.pos), self.or_v(first),
                self.or_v(kept), last, self.or_v(decay), self.length, chunks, piece, self.scale,
                *launch_utils.strides(x_operand, y_operand), HAS_FIRST=first is not None, BACKWARDS=backwards,
                KEEP=kept is not None, DECAY=decay is not None, num_warps=self.config.warps, **options, **self.low,
            )  # fmt: skip
            return last

        # a sequence is split if heads and states give too few programs; then everything but the decays is computed twice
        wanted = min(-(-self.config.target_programs // (blocks * heads * self.batch)), max(1, chunks // 4))
        piece = -(-chunks // wanted)
        if piece == chunks:
            last = walk(chunks, first, kept)[:, 0]
            return last if kept is None else kept, last
        decay = self.new(self.batch, -(-chunks // piece), heads, X if self.per_channel else 1)
        add = walk(piece, None, None, decay)
        arriving, last = torch.empty_like(add), self.new(self.batch, heads, X, Y)
        self.kernels.chunk_h_fold_kernel[(-(-X * Y // 256), heads, self.batch)](
            decay, add, self.or_v(first), arriving, last, add.shape[1], X=X, Y=Y, WIDTH=decay.shape[3],
            HAS_FIRST=first is not None, BACKWARDS=backwards, BLOCK=256, num_warps=4,
        )  # fmt: skip
        if kept is not None:
            walk(piece, arriving, kept)
        return last if kept is None else kept, last

    def launch_chunk_o(
        self, x: PreparedGates, y: Side, scores: Tensor, states: Tensor, cotangents: Tensor | None, *,
        read: torch.dtype | None, write: torch.dtype | None, into: Side = NOTHING, projected: Side | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
        """Derivatives to what is read with and to what is written along y, or to what these are silu of (projected), in memory that
        is given or new, of the given dtypes. scores: as `launch_scores`, which may be of all heads."""
        X, Y = self.sizes
        r, w = self.gradient(into.r, self.query_heads, Y, read), self.gradient(into.w, self.heads, Y, write)
        raw = Side(*(None if of is None else launch_utils.contiguous_last_dim(of) for of in projected or NOTHING))
        BX, BY = self.block(X, self.config.x), self.block(Y, self.config.y)
        self.kernels.gla_chunk_o_kernel[(-(-Y // BY), self.chunks, self.batch * self.heads)](
            self.or_v(x.read), self.or_v(y.r), self.or_v(x.written), self.or_v(y.w), self.or_v(x.sums), self.or_v(self.pos), scores,
            states, self.or_v(cotangents), self.or_v(r), self.or_v(w), self.or_v(raw.r), self.or_v(raw.w), self.length, self.chunks,
            self.scale, *launch_utils.strides(x.read, y.r, x.written, y.w, r, w, *raw), X=X, Y=Y, READ=read is not None,
            WRITE=write is not None, SILU=projected is not None, SHARED=scores.shape[1] < self.query_heads, BX=BX, BY=BY,
            num_warps=self.config.warps, **self.common, **self.low,
        )  # fmt: skip
        return r, w

    def launch_chunk_dqk(
        self, x: Side, y: Side, sums: Tensor | None, scores: Tensor, states: Tensor, cotangents: Tensor | None, *,
        read: torch.dtype | None, write: torch.dtype | None, into: Side = NOTHING, decays: bool = True,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
        """Derivatives to what is read with and what is written along x, as `launch_chunk_o`; and with the latter, if `decays`, to
        the log-decays, in float32. What is not rounded when it is read is computed as precisely."""
        (X, Y), heads, shape = self.sizes, self.heads, (self.batch, self.length)
        r, w = self.gradient(into.r, self.query_heads, X, read), self.gradient(into.w, heads, X, write)
        size, warps = (
            (self.config.x_read, self.config.warps_read) if write is None else (self.config.x_gated, self.config.warps_gated)
        )
        BX = self.block(X, size)
        # of tiles of 32 by 64 or 16 by 64 ptxas 12.8 makes a kernel whose gates' gradients are wrong (`assembler`)
        BY, g = self.block(Y, self.config.y_gated if BX > 32 else 32), None
        blocks = -(-X // BX)
        if decays and write is not None and self.g is not None:
            g = self.new(*shape, heads, X) if self.per_channel else self.new(blocks, *shape, heads)
        self.kernels.gla_chunk_dqk_kernel[(blocks, self.chunks, self.batch * heads)](
            self.or_v(x.r), self.or_v(y.r), self.or_v(x.w), self.or_v(y.w), self.or_v(sums), self.or_v(self.pos), scores, states,
            self.or_v(cotangents), self.or_v(r), self.or_v(w), self.or_v(g), self.length, self.chunks, self.scale,
            *launch_utils.strides(x.r, y.r, x.w, y.w, r, w), X=X, Y=Y, READ=read is not None, WRITE=write is not None,
            DECAYS=g is not None, PRECISE=self.low["DOT_DTYPE"] is not None and self.per_channel and read == torch.float32,
            BX=BX, BY=BY, num_warps=warps, maxnreg=self.config.registers_gated, **self.levels, **self.common, **self.low,
        )  # fmt: skip
        return r, w, g if g is None or self.per_channel else g.sum(0)

    def forward(self, first: Tensor | None, dtype: torch.dtype, *, keep_states: bool = False) -> tuple[Tensor, Tensor, Kept]:
        """The output, [B, T, Q, d_value] in dtype, the final state, and what `backward` does not compute again."""
        (wx, wy), q = self.writes, self.given.q
        prepared = self.launch_prepare(None if self.swapped else q, wx)
        assert prepared.written is not None
        states, last = self.launch_chunk_h(
            prepared.written, wy, prepared, None if first is None else self.state(first).contiguous()
        )
        if self.swapped:
            scores = self.launch_scores(q, wy, None, gated=False)
            read, _, _ = self.launch_chunk_dqk(
                Side(None, wx), Side(q, wy), prepared.sums, scores, states, None, read=dtype, write=None
            )
        else:
            scores = self.launch_scores(q, wx, prepared.sums, gated=True, shared=self.shares_scores)
            read, _ = self.launch_chunk_o(prepared, Side(None, wy), scores, states, None, read=dtype, write=None)
        assert read is not None
        # of a decay along the values the gradient of y is what reads
        prepared = prepared if keep_states and self.per_channel and not self.swapped else PreparedGates()
        return read, self.state(last), Kept(scores if self.keeps_scores else None, states if keep_states else None, prepared)

    def backward(
        self, first: Tensor | None, kept: Kept, dy: Tensor, dlast: Tensor | None, *, wide: str = "",
        into: Gradients | None = None, projected: Side | None = None, decays: bool = True,
    ) -> tuple[Any, ...]:  # fmt: skip
        """Gradients of q, k, v, g and the entering state.

        kept: by `forward`. dlast: gradient of the final state; None: zeros. wide: which of the gradients of q, k and v are not
        rounded to the inputs' dtypes. into: memory for them, except of what all heads share. projected: the projections of which
        the tensors along y are silu; the gradients returned for them are then those of the projections. decays: whether g has a
        gradient; heads that share q and k compute it always.
        """
        (wx, wy), (q, k, v) = self.writes, self.given
        rx, ry = (dy, q) if self.swapped else (q, dy)
        scores, states, prepared = kept
        if prepared.sums is None:
            prepared = self.launch_prepare(rx, wx)
        assert prepared.written is not None
        assert prepared.read is not None
        if states is None:
            arriving = None if first is None else self.state(first).contiguous()
            states, _ = self.launch_chunk_h(prepared.written, wy, prepared, arriving)
        last = None if dlast is None else self.state(dlast).contiguous()
        cotangents, dfirst = self.launch_chunk_h(prepared.read, ry, prepared, last, backwards=True)
        x, y = Side(rx, wx), Side(ry, wy)
        over_x, over_y = (None, scores) if self.swapped else (scores, None)
        if over_x is None:
            over_x = self.launch_scores(rx, wx, prepared.sums, gated=True, shared=self.shares_scores)
        of_q, of_k, of_v = (torch.float32 if name in wide else x.dtype for name, x in zip("qkv", (q, k, v), strict=True))
        into = into or Gradients()
        into_y, into_x = Side(into.q, into.k), Side(None, into.v)
        into_y, into_x = (into_y, into_x) if self.swapped else (into_x, into_y)
        plain = {"read": of_q, "write": of_k} if self.swapped else {"read": None, "write": of_v}
        y_r, y_w = self.launch_chunk_o(prepared, y, over_x, states, cotangents, into=into_y, projected=projected, **plain)
        if self.shared:
            x_r, x_w, dg = launch_shared_dqk(self, x, y, prepared.sums, states, cotangents, read=of_q, write=of_k)
        else:
            over_y = self.launch_scores(ry, wy, None, gated=False) if over_y is None else over_y
            gated = {"read": None, "write": of_v} if self.swapped else {"read": of_q, "write": of_k}
            x_r, x_w, dg = self.launch_chunk_dqk(
                x, y, prepared.sums, over_y, states, cotangents, into=into_x, decays=decays, **gated
            )
        dq, dk, dv = (y_r, y_w, x_w) if self.swapped else (x_r, x_w, y_w)
        return dq, dk, dv, dg, None if first is None else self.state(dfirst)


class _Gla(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, initial_state: Tensor | None, gate: Gate, scale: float,
        pos: Tensor | None, keep_states: bool, config: LaunchConfig,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        given = QKV.of(q, k, v)
        run = LinearAttentionLaunch(gate, scale, pos, g, given, config, low=given.low)
        y, last, kept = run.forward(initial_state, q.dtype, keep_states=keep_states)
        ctx.save_for_backward(q, k, v, g, initial_state, pos, *kept.tensors)
        ctx.gate, ctx.scale, ctx.config, ctx.places = gate, scale, config, claim(q, k, v)
        ctx.set_materialize_grads(False)
        return y, last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dlast: Tensor | None) -> tuple[Any, ...]:
        q, k, v, g, initial_state, pos, *kept = ctx.saved_tensors
        if dy is None:
            dy = q.new_zeros(*q.shape[:2], max(q.shape[2], v.shape[2]), v.shape[3])
        given = QKV.of(q, k, v)
        run = LinearAttentionLaunch(ctx.gate, ctx.scale, pos, g, given, ctx.config, low=given.low)
        # a head that all share has a gradient of each
        of_heads = (q.shape[2], k.shape[2]) == (run.query_heads, run.heads)
        into = Gradients(*gradients_like((q, k, v), ctx.places, empty_like_heads)) if of_heads else None
        dq, dk, dv, dg, dfirst = run.backward(
            initial_state, Kept.of(kept), launch_utils.contiguous_last_dim(dy), dlast, into=into, decays=ctx.needs_input_grad[3]
        )
        # a head that all share was given to each, or to several at a time
        dq, dk = (d.sum(2, keepdim=True) if x.shape[2] == 1 < d.shape[2] else d for x, d in ((q, dq), (k, dk)))
        grads = (dq, dk, dv, None if g is None or dg is None else dg.to(g.dtype), dfirst)
        return (*(grad if want else None for want, grad in zip(ctx.needs_input_grad[:5], grads, strict=True)), *(None,) * 5)
