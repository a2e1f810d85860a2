"""The delta rule on a GPU: launches the Triton kernels of `solve`, and gated linear attention's with what tokens write for values.

The one thing to know: only the arguments are kept for the backward pass; what tokens wrote and the chunks' states are made again.
"""

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from baton.kernels import launch
from baton.kernels.gated_linear_attention.triton import Given, Side, Sum
from baton.kernels.gated_linear_attention.triton import Tiles as SumTiles
from baton.kernels.tiles import power_of_two

KERNEL = "delta_rule"


@dataclass(frozen=True)
class Tiles(SumTiles):
    """How the kernels are cut, gated linear attention's among them.

    Attributes:
        values: of d_value, the part of a program that walks over chunks; a power of two, at least 16.
        warps_walk: of such a program.
    """

    values: int = 32
    warps_walk: int = 4


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
    tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor]:
    """As `op.delta_rule`, which checks the arguments. Products are of bfloat16 where q, k and v have 16 bits, the inverse's not."""
    y, leaving = _DeltaRule.apply(q, k, v, beta, g, initial_state, scale, launch.positions(pos), tiles or Tiles())
    return y, leaving


class _Run:
    """One call's launches."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, scale: float, pos: Tensor | None, tiles: Tiles
    ) -> None:
        self.sum = Sum("none" if g is None else "scalar", scale, pos, g, Given.of(q, k, v), tiles)
        self.beta, self.scale, self.tiles, self.kernels = launch.in_rows(beta), scale, tiles, _kernels()
        self.levels = tiles.chunk.bit_length() - 1

    def options(self, *, walk: bool) -> dict[str, Any]:
        run, tiles = self.sum, self.tiles
        X, Y = run.sizes
        BX = max(16, power_of_two(X)) if walk else run.block(X, tiles.x)
        BY = run.block(Y, tiles.values if walk else tiles.y)
        sizes = {"X": X, "Y": Y, "H": run.heads, "GATE": run.gate, "BX": BX, "BY": BY}
        return {**sizes, "num_warps": tiles.warps_walk if walk else tiles.warps_gated, **run.options}

    def writes(self, first: Tensor | None, *, keep: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The chunks' inverses [B, H, N, C, C], what tokens write [B, T, H, d_value], the states before each chunk, the last."""
        run = self.sum
        (_, k, v), chunk, heads, rows = run.given, self.tiles.chunk, run.heads, run.batch * run.heads
        inverse = run.new(run.batch, heads, run.chunks, chunk, chunk, dtype=run.kept)
        options = self.options(walk=False)
        del options["Y"], options["BY"]
        strides = run.strides(k=k, beta=self.beta, g=run.g)
        self.kernels.inverse_kernel[(run.chunks, rows)](
            k,
            self.beta,
            run.or_v(run.g),
            run.or_v(run.pos),
            inverse,
            run.length,
            run.chunks,
            **strides,
            LEVELS=self.levels,
            **options,
        )
        X, Y = run.sizes
        u = run.new(*v.shape, dtype=run.kept)
        states = run.new(run.batch, heads, run.chunks, X, Y, dtype=run.kept) if keep else None
        last, options = run.new(run.batch, heads, X, Y), self.options(walk=True)
        self.kernels.writes_kernel[(-(-Y // options["BY"]), rows)](
            k, v, self.beta, run.or_v(run.g), run.or_v(run.pos), inverse, run.or_v(first), u, run.or_v(states), last, run.length,
            run.chunks, **run.strides(k=k, v=v, beta=self.beta, g=run.g), HAS_FIRST=first is not None, KEEP=keep, **options,
        )  # fmt: skip
        return inverse, u, last if states is None else states, last

    def forward(self, first: Tensor | None) -> tuple[Tensor, Tensor]:
        run = self.sum
        q, k, _ = run.given
        _, u, states, last = self.writes(first, keep=True)
        scores = run.scores(q, k, self.scale, gated=True)
        y, _, _ = run.along(Side(q, k), Side(None, u), scores, states, None, gated=False, read=q.dtype, write=None)
        assert y is not None
        return y, last

    def backward(self, first: Tensor | None, dy: Tensor, dlast: Tensor) -> tuple[Any, ...]:
        """Gradients of q, k, v, beta, g and the state that entered."""
        run = self.sum
        (q, k, v), rows, shape = run.given, run.batch * run.heads, run.given.v.shape
        inverse, u, states, _ = self.writes(first, keep=True)
        scores = run.scores(q, k, self.scale, gated=True)
        dr, cotangents, dfirst = run.new(*shape, dtype=run.kept), torch.empty_like(states), torch.empty_like(dlast)
        options = self.options(walk=True)
        self.kernels.writes_backward_kernel[(-(-shape[3] // options["BY"]), rows)](
            q, k, self.beta, run.or_v(run.g), dy, run.or_v(run.pos), scores, inverse, dlast, dr, cotangents, dfirst, run.length,
            run.chunks, self.scale, **run.strides(q=q, k=k, beta=self.beta, dy=dy, g=run.g), **options,
        )  # fmt: skip
        over_y = run.scores(dy, u, 1.0, gated=False)
        dq, dk, dg = run.along(Side(q, k), Side(dy, u), over_y, states, cotangents, gated=True, read=q.dtype, write=torch.float32)
        more_dk, dv = run.new(*k.shape), run.new(*shape, dtype=v.dtype)
        dbeta, more_dg = run.new(*shape[:3]), None if dg is None else run.new(*shape[:3])
        self.kernels.solved_kernel[(run.chunks, rows)](
            k, v, self.beta, run.or_v(run.g), run.or_v(run.pos), u, dr, states, more_dk, dv, dbeta, run.or_v(more_dg), run.length,
            run.chunks, **run.strides(k=k, v=v, beta=self.beta, g=run.g), LEVELS=self.levels, **self.options(walk=False),
        )  # fmt: skip
        assert dk is not None
        return dq, dk + more_dk, dv, dbeta, None if dg is None or more_dg is None else dg + more_dg, dfirst


class _DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, initial_state: Tensor | None, scale: float,
        pos: Tensor | None, tiles: Tiles,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        ctx.save_for_backward(q, k, v, beta, g, initial_state, pos)
        ctx.scale, ctx.tiles = scale, tiles
        return _Run(q, k, v, beta, g, scale, pos, tiles).forward(_contiguous(initial_state))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dlast: Tensor) -> tuple[Any, ...]:
        q, k, v, beta, g, initial_state, pos = ctx.saved_tensors
        run = _Run(q, k, v, beta, g, ctx.scale, pos, ctx.tiles)
        dq, dk, dv, dbeta, dg, dfirst = run.backward(_contiguous(initial_state), launch.in_rows(dy), dlast.contiguous())
        grads = (dq, dk.to(k.dtype), dv, dbeta.to(beta.dtype), None if g is None else dg.to(g.dtype), dfirst)
        return (*(grad if want else None for want, grad in zip(ctx.needs_input_grad[:6], grads, strict=True)), *(None,) * 3)


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _kernels() -> ModuleType:
    """Imported when they are first needed: where there is no GPU there need be no Triton."""
    from baton.kernels.delta_rule import solve

    return solve
