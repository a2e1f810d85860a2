"""Gated linear attention on a GPU: launches the Triton kernels of `sides` and gives them a gradient.

The one thing to know: the gate decides what of q, k, v and y lies along x, where decays are, and so which of the two kernels
computes the output and which the gradients. Chunks' states are made again for the backward pass: only the arguments are kept.
"""

from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from baton.kernels import launch
from baton.kernels.gated_linear_attention.reference import Gate
from baton.kernels.tiles import power_of_two

KERNEL = "gated_linear_attention"


@dataclass(frozen=True)
class Tiles:
    """How the kernels are cut; powers of two, at least 16.

    Attributes:
        chunk: tokens that are multiplied with each other; between chunks there is a state.
        x: of the side with the decays, a program's part.
        x_gated: the same where gradients along that side are computed.
        y: of the other side, a program's part.
        warps: of a program.
        warps_gated: of one that computes scores or gradients along the side with the decays.
    """

    chunk: int = 64
    x: int = 64
    x_gated: int = 32
    y: int = 64
    warps: int = 4
    warps_gated: int = 8


def in_triton(x: Tensor) -> bool:
    """Whether these kernels compute for tensors like x: on a GPU, in float32."""
    return x.is_cuda and x.dtype != torch.float64


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
    dtype: torch.dtype | None = None,
    tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor]:
    """As `op.gated_linear_attention`, which checks the arguments. Products are of bfloat16 where q, k and v have 16 bits. dtype: of
    the output, q's if None."""
    y, leaving = _Gla.apply(q, k, v, g, initial_state, gate, scale, launch.positions(pos), dtype or q.dtype, tiles or Tiles())
    return y, leaving


def gla_effect(k: Tensor, v: Tensor, g: Tensor | None, *, gate: Gate, pos: Tensor | None, tiles: Tiles | None = None) -> Tensor:
    """What a span adds to a state of zeros, [batch, heads, d_key, d_value], without queries, outputs and gradients."""
    run = Sum(gate, 1.0, launch.positions(pos), g, Given.of(k, k, v), tiles or Tiles())
    return run.state(run.states(run.writes, None, keep=False)[1])


class Given(NamedTuple):
    """Arguments whose last dimension is contiguous, with a head of q and k for each that is read with or written."""

    q: Tensor
    k: Tensor
    v: Tensor

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor) -> "Given":
        heads = v.shape[2]
        q, k = (x.expand(-1, -1, heads, -1) if x.shape[2] == 1 else x for x in (launch.in_rows(q), launch.in_rows(k)))
        return cls(q, k, launch.in_rows(v))


class Side(NamedTuple):
    """What is read with, [B, T, Q, size], and what is written, [B, T, H, size]; None: not known or not needed."""

    r: Tensor | None
    w: Tensor | None


class Sum:
    """One call's shapes and launches: sum_i rx_i^T S_i ry_i, see `sides`."""

    def __init__(self, gate: Gate, scale: float, pos: Tensor | None, g: Tensor | None, given: Given, tiles: Tiles) -> None:
        self.swapped = gate == "value"
        self.batch, self.length, self.heads, d_value = given.v.shape
        self.query_heads, d_key = given.q.shape[2], given.k.shape[3]
        self.given, self.g, self.pos, self.tiles = given, None if g is None else launch.in_rows(g), pos, tiles
        self.sizes = (d_value, d_key) if self.swapped else (d_key, d_value)
        self.scales = (1.0, scale) if self.swapped else (scale, 1.0)
        self.chunks = -(-self.length // tiles.chunk)
        self.kernels = _kernels()
        low = given.v.is_cuda and all(x.dtype in (torch.bfloat16, torch.float16) for x in given)
        self.kept = torch.bfloat16 if low else torch.float32
        kinds = {
            "none": self.kernels.NONE,
            "scalar": self.kernels.SCALAR,
            "key": self.kernels.CHANNEL,
            "value": self.kernels.CHANNEL,
        }
        self.gate = kinds[gate].value
        self.options: dict[str, Any] = {
            "HAS_POS": pos is not None,
            "LOW": _low() if low else None,
            "C": tiles.chunk,
            "num_stages": 1,
        }

    @property
    def queries(self) -> Side:
        """Along x and y, as far as q says."""
        return Side(None, self.given.q) if self.swapped else Side(self.given.q, None)

    @property
    def writes(self) -> tuple[Tensor, Tensor]:
        """Along x and along y."""
        return (self.given.v, self.given.k) if self.swapped else (self.given.k, self.given.v)

    def state(self, x: Tensor) -> Tensor:
        """[B, H, X, Y] from [B, H, d_key, d_value], or back."""
        return x.transpose(2, 3) if self.swapped else x

    def new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.given.v.device)

    def or_v(self, x: Tensor | None) -> Tensor:
        """A pointer for what is not there and is not read."""
        return self.given.v if x is None else x

    def block(self, size: int, wanted: int) -> int:
        return max(16, min(wanted, power_of_two(size)))

    def strides(self, **tensors: Tensor | None) -> dict[str, int]:
        """Of tensors [B, T, H, ...] by name, of batch, token and head."""
        found: dict[str, int] = {}
        for name, x in tensors.items():
            strides = (0, 0, 0) if x is None else x.stride()[:3]
            found |= dict(zip((f"{name}_batch", f"{name}_row", f"{name}_head"), strides, strict=True))
        return found

    def scores(self, r: Tensor, w: Tensor, scale: float, *, gated: bool) -> Tensor:
        """What is read of what is written, [B, Q, N, C, C], over what lies along x if gated, along y if not."""
        chunk, size = self.tiles.chunk, r.shape[3]
        found = self.new(self.batch, self.query_heads, self.chunks, chunk, chunk, dtype=self.kept)
        self.kernels.scores_kernel[(self.chunks, self.query_heads, self.batch)](
            r, w, self.or_v(self.g), self.or_v(self.pos), found, self.length, scale, **self.strides(r=r, w=w, g=self.g),
            X=size, G=self.query_heads // self.heads, GATE=self.gate if gated else self.kernels.NONE.value,
            LEVELS=chunk.bit_length() - 1, BX=self.block(size, self.tiles.x), num_warps=self.tiles.warps_gated, **self.options,
        )  # fmt: skip
        return found

    def states(
        self, sides: tuple[Tensor, Tensor], first: Tensor | None, *, backwards: bool = False, keep: bool = True
    ) -> tuple[Tensor, Tensor]:
        """The state that enters each chunk, [B, H, N, X, Y], and leaves the last, [B, H, X, Y]; or, backwards, the cotangents of
        those that leave each chunk, and enter the first. Each is the other's beginning."""
        along_x, along_y = sides
        (X, Y), heads = self.sizes, self.heads
        kept = self.new(self.batch, heads, self.chunks, X, Y, dtype=self.kept) if keep else None
        last, BX, BY = self.new(self.batch, heads, X, Y), self.block(X, self.tiles.x), self.block(Y, self.tiles.y)
        self.kernels.states_kernel[(-(-X // BX) * -(-Y // BY), heads, self.batch)](
            along_x, along_y, self.or_v(self.g), self.or_v(self.pos), self.or_v(first), self.or_v(kept), last, self.length,
            self.chunks, self.scales[0] * self.scales[1], **self.strides(a=along_x, c=along_y, g=self.g), X=X, Y=Y,
            G=self.query_heads // heads, GATE=self.gate, HAS_FIRST=first is not None, BACKWARDS=backwards, KEEP=keep, BX=BX, BY=BY,
            num_warps=self.tiles.warps, **self.options,
        )  # fmt: skip
        return kept if kept is not None else last, last

    def along(
        self, x: Side, y: Side, scores: Tensor, states: Tensor, cotangents: Tensor | None, *, gated: bool,
        read: torch.dtype | None, write: torch.dtype | None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
        """Derivatives, in the dtypes that are given, to what is read with and to what is written along x if gated, along y if not;
        and of the former to the log-decays, in float32."""
        (X, Y), heads, shape = self.sizes, self.heads, (self.batch, self.length)
        size = X if gated else Y
        r = None if read is None else self.new(*shape, self.query_heads, size, dtype=read)
        w = None if write is None else self.new(*shape, heads, size, dtype=write)
        BX = self.block(X, self.tiles.x_gated if gated and write is not None else self.tiles.x)
        BY = self.block(Y, self.tiles.y)
        strides = self.strides(rx=x.r, ry=y.r, wx=x.w, wy=y.w, g=self.g)
        sides = (self.or_v(x.r), self.or_v(y.r), self.or_v(x.w), self.or_v(y.w))
        given = (*sides, self.or_v(self.g), self.or_v(self.pos), scores, states, self.or_v(cotangents), self.or_v(r), self.or_v(w))
        sizes = {"X": X, "Y": Y, "H": heads, "G": self.query_heads // heads, "GATE": self.gate, "BX": BX, "BY": BY}
        flags: dict[str, int] = {"READ": read is not None, "WRITE": write is not None}
        flags["num_warps"] = self.tiles.warps_gated if gated and write is not None else self.tiles.warps
        if not gated:
            self.kernels.plain_kernel[(self.chunks, -(-Y // BY), self.batch * heads)](
                *given, self.length, self.chunks, *self.scales, **strides, **sizes, **flags, **self.options
            )
            return r, w, None
        blocks, g = -(-X // BX), None
        if write is not None and self.g is not None:
            g = self.new(*shape, heads, X) if self.gate == self.kernels.CHANNEL.value else self.new(blocks, *shape, heads)
        self.kernels.gated_kernel[(self.chunks, blocks, self.batch * heads)](
            *given, self.or_v(g), self.length, self.chunks, *self.scales, **strides, **sizes, **flags,
            LEVELS=self.tiles.chunk.bit_length() - 1, **self.options,
        )  # fmt: skip
        return r, w, g.sum(0) if g is not None and self.gate == self.kernels.SCALAR.value else g

    def forward(self, first: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The output, [B, T, Q, d_value] in dtype, and the state that leaves."""
        writes, q = self.writes, self.given.q
        states, last = self.states(writes, None if first is None else self.state(first).contiguous())
        if self.swapped:
            scores = self.scores(q, writes[1], self.scales[1], gated=False)
            x, y = Side(None, writes[0]), Side(q, writes[1])
        else:
            scores = self.scores(q, writes[0], self.scales[0], gated=True)
            x, y = Side(q, writes[0]), Side(None, writes[1])
        read, _, _ = self.along(x, y, scores, states, None, gated=self.swapped, read=dtype, write=None)
        assert read is not None
        return read, self.state(last)

    def backward(self, first: Tensor | None, dy: Tensor, dlast: Tensor) -> tuple[Any, ...]:
        """Gradients of q, k, v, g and the state that entered."""
        (wx, wy), (q, k, v) = self.writes, self.given
        rx, ry = (dy, q) if self.swapped else (q, dy)
        states, _ = self.states((wx, wy), None if first is None else self.state(first).contiguous())
        cotangents, dfirst = self.states((rx, ry), self.state(dlast).contiguous(), backwards=True)
        x, y = Side(rx, wx), Side(ry, wy)
        over_x, over_y = self.scores(rx, wx, self.scales[0], gated=True), self.scores(ry, wy, self.scales[1], gated=False)
        plain = {"read": q.dtype, "write": k.dtype} if self.swapped else {"read": None, "write": v.dtype}
        gated = {"read": None, "write": v.dtype} if self.swapped else {"read": q.dtype, "write": k.dtype}
        y_r, y_w, _ = self.along(x, y, over_x, states, cotangents, gated=False, **plain)
        x_r, x_w, dg = self.along(x, y, over_y, states, cotangents, gated=True, **gated)
        dq, dk, dv = (y_r, y_w, x_w) if self.swapped else (x_r, x_w, y_w)
        return dq, dk, dv, dg, None if first is None else self.state(dfirst)


class _Gla(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, initial_state: Tensor | None, gate: Gate, scale: float,
        pos: Tensor | None, dtype: torch.dtype, tiles: Tiles,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        ctx.save_for_backward(q, k, v, g, initial_state, pos)
        ctx.gate, ctx.scale, ctx.tiles = gate, scale, tiles
        return Sum(gate, scale, pos, g, Given.of(q, k, v), tiles).forward(initial_state, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dlast: Tensor) -> tuple[Any, ...]:
        q, k, v, g, initial_state, pos = ctx.saved_tensors
        run = Sum(ctx.gate, ctx.scale, pos, g, Given.of(q, k, v), ctx.tiles)
        dq, dk, dv, dg, dfirst = run.backward(initial_state, launch.in_rows(dy), dlast)
        # a head that all share was given to each
        dq, dk = (d.sum(2, keepdim=True) if x.shape[2] == 1 < d.shape[2] else d for x, d in ((q, dq), (k, dk)))
        grads = (dq, dk, dv, None if g is None else dg.to(g.dtype), dfirst)
        return (*(grad if want else None for want, grad in zip(ctx.needs_input_grad[:5], grads, strict=True)), *(None,) * 5)


def _kernels() -> ModuleType:
    """Imported when they are first needed: where there is no GPU there need be no Triton."""
    from baton.kernels.gated_linear_attention import sides

    return sides


def _low() -> Any:
    """bfloat16, as Triton calls it."""
    import triton.language as tl

    return tl.bfloat16
