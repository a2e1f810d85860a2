"""One fused attention on a GPU over a window of rows, rows farther back and published memories, which B'MOJO's attention has all of
and window attention the first.

The one thing to know: it makes its weights again for the backward pass, so it keeps no more than its inputs, its output and one
number per token and head.
"""

from dataclasses import dataclass, replace
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from baton.kernels import tiles as table
from baton.kernels.ahead import on_gpu

KERNEL = "eidetic_attention"


@dataclass(frozen=True)
class Tiles:
    """How the kernels are cut; powers of two, at least 16.

    Attributes:
        queries, keys: tokens and rows of a step of what computes outputs and the queries' gradients.
        queries_back, keys_back: the same of what computes the gradients of keys and values.
        memory: rows of a memory in a step.
        warps, warps_back: of a program.
        stages: of what loops load, ahead of what they compute.
        registers: of a thread of what computes outputs, at most: with 128 a processor has room for two programs of 8 warps.
    """

    queries: int = 128
    keys: int = 64
    queries_back: int = 64
    keys_back: int = 64
    memory: int = 64
    warps: int = 8
    warps_back: int = 8
    stages: int = 2
    registers: int = 255

    def for_float32(self) -> "Tiles":
        """None larger than these: products of float32 use no tensor cores, and larger ones have no room in registers."""
        return replace(self, queries=32, keys=32, queries_back=32, keys_back=32, memory=32, stages=1, registers=255)


_Pair = tuple[Tensor | None, Tensor | None]


class Seen(NamedTuple):
    """What a span's tokens see. limit, far_limit: largest distances, int32 [B, T]; the others: see `Published`, valid in int8."""

    limit: Tensor
    far_limit: Tensor | None = None
    slot: Tensor | None = None
    begin: Tensor | None = None
    valid: Tensor | None = None


def in_triton(x: Tensor, compute_dtype: torch.dtype) -> bool:
    """Whether these kernels compute for tensors like x: on a GPU, in float32."""
    return on_gpu(x) and compute_dtype == torch.float32


def shape_of(dim: int) -> table.Shape:
    """What tiles depend on, in classes."""
    return {"dim": table.power_of_two(dim)}


def joint_attention(
    q: Tensor, k: Tensor, v: Tensor, seen: Seen, *, far: _Pair = (None, None), memory: _Pair = (None, None), window: int | None,
    scale: float, tiles: Tiles,
) -> Tensor:  # fmt: skip
    """Softmax attention of tokens q [B, T, H, K] to all that each of them sees: y [B, T, H, K].

    Args:
        k, v: a history, [B, N + T, G, K], of rows at distances up to seen.limit; N: window - 1, or 0 where nothing has been read.
        far: keys and values of another, of rows at distances from the window to seen.far_limit.
        memory: keys and values of memories, [B, P, M, G, K].
        window: tokens; None: of the history all that the limit allows, and nothing else.
        scale: of the scores.
    """
    if scale <= 0:  # the kernels know the largest score before it is scaled
        q, scale = q * (-1 if scale < 0 else 0), abs(scale) or 1.0
    y: Tensor = _Joint.apply(q, k, v, *far, *memory, seen, window, scale, tiles)
    return y


class _Joint(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, far_k: Tensor | None, far_v: Tensor | None, memory_k: Tensor | None,
        memory_v: Tensor | None, seen: Seen, window: int | None, scale: float, tiles: Tiles,
    ) -> Tensor:  # fmt: skip
        k, v = _alike(k, v)
        tensors = [q.contiguous(), k, v, *(None if x is None else x.contiguous() for x in (far_k, far_v, memory_k, memory_v))]
        run = _Run(tensors, seen, window, scale, tiles)
        y, lse = run.forward()
        ctx.save_for_backward(*tensors, y, lse, *seen)
        ctx.window, ctx.scale, ctx.tiles = window, scale, tiles
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        saved = ctx.saved_tensors  # once: a layer that is run again gives them once
        *tensors, y, lse = saved[:9]
        run = _Run(tensors, Seen(*saved[9:]), ctx.window, ctx.scale, ctx.tiles)
        return (*run.backward(y, lse, dy.contiguous()), *(None,) * 4)


def _alike(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Histories, [B, J, G, K], or copies of them, whose rows lie equally far apart, whole; as do halves of one tensor's."""
    row, (_, rows, groups, dim) = k.stride(1), k.shape
    as_they_are = all(x.stride() == (rows * row, row, dim, 1) for x in (k, v)) and row >= groups * dim
    return (k, v) if as_they_are else (k.contiguous(), v.contiguous())


class _Run:
    """One call's shapes and launches. tensors: q, then keys and values of the window, farther back and of memories. window: tokens;
    None: all there are, and nothing but the first keys and values."""

    def __init__(self, tensors: list[Tensor | None], seen: Seen, window: int | None, scale: float, tiles: Tiles) -> None:
        q, k, v, *self.others = tensors
        assert q is not None
        assert k is not None
        assert v is not None
        self.q, self.k, self.v, self.seen, self.window, self.scale = q, k, v, seen, window, scale
        self.batch, self.length, self.heads, dim = q.shape
        self.groups = k.shape[2]
        low = on_gpu(q) and q.dtype in (torch.bfloat16, torch.float16)
        self.tiles = tiles if low else tiles.for_float32()
        self.memories = 0 if self.others[2] is None else self.others[2].shape[1]
        self.kernels = _kernels()
        self.common = {
            "H": self.heads, "G": self.groups, "K": dim, "LOW": _low() if low else None, "BD": max(16, table.power_of_two(dim)),
            "num_stages": self.tiles.stages,
        }  # fmt: skip
        rows = 0 if self.others[2] is None else self.others[2].shape[2]
        self.of_queries = {
            **self.common, "N": k.shape[1] - self.length, "FAR": 0 if self.others[0] is None else window, "M": rows,
            "BQ": self.tiles.queries, "BK": self.tiles.keys, "BM": self.memory_block(rows), "num_warps": self.tiles.warps,
            "ROW": k.stride(1),
        }  # fmt: skip

    def memory_block(self, rows: int) -> int:
        return max(16, min(self.tiles.memory, table.power_of_two(max(1, rows))))

    def or_q(self, x: Tensor | None) -> Tensor:
        """A pointer for what is not there and is not read."""
        return self.q if x is None else x

    @property
    def read(self) -> tuple[Tensor, ...]:
        """What the kernels of queries read."""
        seen = (self.seen.valid, self.seen.slot, self.seen.limit, self.seen.far_limit)
        return self.q, self.k, self.v, *(self.or_q(x) for x in (*self.others, *seen))

    def grid(self, tokens: int, size: int, heads: int) -> tuple[int, int, int]:
        return (-(-tokens // size), heads, self.batch)

    def of_tokens(self) -> Tensor:
        return torch.empty(self.batch, self.heads, self.length, dtype=torch.float32, device=self.q.device)

    def forward(self) -> tuple[Tensor, Tensor]:
        """The output, [B, T, H, K], and the logarithms of sums of weights, [B, H, T]."""
        y, lse = torch.empty_like(self.q), self.of_tokens()
        self.kernels.forward_kernel[self.grid(self.length, self.tiles.queries, self.heads)](
            *self.read, y, lse, self.length, self.memories, self.scale, maxnreg=self.tiles.registers, **self.of_queries
        )
        return y, lse

    def backward(self, y: Tensor, lse: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of q and the keys and values."""
        dq, delta = torch.empty_like(self.q), self.of_tokens()
        self.kernels.queries_backward_kernel[self.grid(self.length, self.tiles.queries, self.heads)](
            *self.read, y, lse, dy, dq, delta, self.length, self.memories, self.scale, **self.of_queries
        )
        far_k, far_v, memory_k, memory_v = self.others
        reach = -1 if self.window is None else self.window - 1 - (self.k.shape[1] - self.length)
        found: list[Tensor | None] = [dq, *self.of_rows(self.k, self.v, self.seen.limit, 0, reach, lse, dy, delta)]
        if far_k is None or far_v is None or self.seen.far_limit is None:
            found += [None, None]
        else:
            assert self.window is not None
            found += self.of_rows(far_k, far_v, self.seen.far_limit, self.window, 0, lse, dy, delta)
        if memory_k is None or memory_v is None:
            found += [None, None]
        else:
            found += self.of_memories(memory_k, memory_v, lse, dy, delta)
        return tuple(found)

    def of_rows(
        self, k: Tensor, v: Tensor, limit: Tensor, nearest: int, reach: int, lse: Tensor, dy: Tensor, delta: Tensor
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Gradients of a history, whose rows are seen from the nearest distance on, by so many tokens behind them (-1: by any)."""
        (dk, dv), size, before = (x.new_empty(x.shape) for x in (k, v)), self.tiles.keys_back, k.shape[1] - self.length
        self.kernels.rows_backward_kernel[self.grid(k.shape[1] + max(0, reach), size, self.groups)](
            self.q, k, v, limit, lse, dy, delta, dk, dv, self.length, self.scale, N=before, NEAR=nearest, REACH=reach,
            ROW=k.stride(1),
            BQ=self.tiles.queries_back, BK=size, num_warps=self.tiles.warps_back, **self.common,
        )  # fmt: skip
        return dk, dv

    def of_memories(self, k: Tensor, v: Tensor, lse: Tensor, dy: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        dk, dv, size = torch.empty_like(k), torch.empty_like(v), self.memory_block(k.shape[2])
        self.kernels.memories_backward_kernel[self.grid(self.memories * -(-k.shape[2] // size) * size, size, self.groups)](
            self.q, k, v, self.or_q(self.seen.valid), self.or_q(self.seen.slot), self.or_q(self.seen.begin), lse, dy, delta, dk, dv,
            self.length, self.memories, self.scale, M=k.shape[2], WINDOW=self.window, BQ=self.tiles.queries_back, BM=size,
            num_warps=self.tiles.warps_back, **self.common,
        )  # fmt: skip
        return dk, dv


@cache
def _kernels() -> ModuleType:
    """Imported when they are first needed: where there is no GPU there need be no Triton."""
    from baton.kernels.window_attention import joint

    return joint


@cache
def _low() -> Any:
    """bfloat16, as Triton calls it."""
    import triton.language as tl

    return tl.bfloat16
