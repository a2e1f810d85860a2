"""Launches of the joint attention kernels, with their gradient: B'MOJO's attention, and window attention with a window alone.

Softmax weights are recomputed in the backward pass, which keeps only the inputs, the output, and one number per token and head.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from baton.kernels.common import launch_utils
from baton.kernels.common.adjacent_views import empty_like_heads
from baton.kernels.common.attention_tails import last_queries, with_positive_scale
from baton.kernels.common.launch_utils import LazyModule
from baton.kernels.compile.aot import on_gpu
from baton.kernels.compile.fitting import Sizes, launch_blocks
from baton.kernels.eidetic_attention.launch_config import LaunchConfig
from baton.kernels.shared_gradient import Place, claim, gradients_like

_kernels = LazyModule("baton.kernels.eidetic_attention.joint_attention_kernels")
_copy_kernels = LazyModule("baton.kernels.eidetic_attention.memory_copy_kernels")

_COPIED, _CHANNELS = 16, 512  # rows and channels of a program that copies
_SUMMED = 8192  # numbers, at most, of each of the two tiles of a program that adds gradients of copies


_Pair = tuple[Tensor | None, Tensor | None]
_Places = tuple[Place | None, ...]
_NOWHERE: _Places = (None, None)


class Visibility(NamedTuple):
    """What each token of a span sees. All tensors are int32.

    There are P memories of M rows, eidetic rows first, then fading ones: the memory that was frozen when the span began, if
    anything had been read, then those of the span's blocks of `window` tokens, used or not.

    Attributes:
        limit, far_limit: largest distances, [B, T].
        slot: the memory that each token sees, [B, T]; -1: none.
        begin: the first token that may see each memory, [B, P]; T: none does.
        row: the rows that memories hold, [B, P, M]; -1: none. Frozen memory: its own rows. Eidetic rows: of the entries followed by
            the span's tokens. Fading rows: of the tail followed by the span's tokens.
        first, fading_first: the first copy of each entry and token, [B, E + T], and of each fading one, [B, tail + T], numbered s M
            + m; -1: none. Filled by `joint_attention`.
    """

    limit: Tensor
    far_limit: Tensor | None = None
    slot: Tensor | None = None
    begin: Tensor | None = None
    row: Tensor | None = None
    first: Tensor | None = None
    fading_first: Tensor | None = None


class MemorySources(NamedTuple):
    """Keys and values that memories are copied from, besides the history's.

    fading: of the span's tokens, [B, T, G, K]; best, tail, frozen: from the State, [B, rows, G, K]; None: absent.
    """

    fading_k: Tensor | None = None
    fading_v: Tensor | None = None
    best_k: Tensor | None = None
    best_v: Tensor | None = None
    tail_k: Tensor | None = None
    tail_v: Tensor | None = None
    frozen_k: Tensor | None = None
    frozen_v: Tensor | None = None


_NO_SOURCES = MemorySources()


def use_triton(x: Tensor, compute_dtype: torch.dtype) -> bool:
    """Whether tensors like x are computed by these kernels: on a GPU, in float32."""
    return on_gpu(x) and compute_dtype == torch.float32


def joint_attention(
    q: Tensor, k: Tensor, v: Tensor, seen: Visibility, *, far: _Pair = (None, None), sources: MemorySources = _NO_SOURCES,
    fading: int = 0,
    window: int | None, scale: float, soft_cap: float | None = None, config: LaunchConfig,
) -> Tensor:  # fmt: skip
    """Softmax attention of tokens q [B, T, H, K] to everything that each of them sees: y [B, T, H, K]. All tensors have q's dtype.

    Args:
        k, v: a history, [B, N + T, G, K], whose rows are visible at distances up to seen.limit; N: window - 1, or 0 if nothing has
            been read.
        far: keys and values of a second history, visible at distances from the window to seen.far_limit.
        sources: of the memories' rows, besides the history's tokens; any strides.
        fading: number of fading rows, the last ones of a memory.
        window: tokens; None: everything in the history that the limit allows, and nothing else.
        scale: of the scores.
        soft_cap: scores s of a history alone become soft_cap tanh(s / soft_cap); None: they stay what they are.
    """
    assert soft_cap is None or (seen.row is None and seen.far_limit is None)
    q, scale = with_positive_scale(q, scale)
    y: Tensor = _Joint.apply(q, k, v, *far, *sources, seen, fading, window, scale, soft_cap, config)
    return y


def history_attention(
    q: Tensor, k: Tensor, v: Tensor, limit: Tensor, *, scale: float, soft_cap: float | None = None, config: LaunchConfig
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`joint_attention` to a history alone, outside of autograd: y [B, T, H, K], and the base-2 logarithm of the sum of weights,
    float32 [B, H, T], which the backward pass reads. k, v: [B, N + T, G, K]; limit: int32 [B, T]."""
    return _history_launch(q, k, v, limit, scale, soft_cap, config).forward()


def history_attention_backward(
    q: Tensor, k: Tensor, v: Tensor, limit: Tensor, y: Tensor, lse: Tensor, dy: Tensor, *, scale: float,
    soft_cap: float | None = None, config: LaunchConfig,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v for `history_attention`."""
    found = _history_launch(q, k, v, limit, scale, soft_cap, config).backward(y, lse, dy.contiguous())
    return tuple(found[:3])  # type: ignore[return-value]


def _history_launch(
    q: Tensor, k: Tensor, v: Tensor, limit: Tensor, scale: float, soft_cap: float | None, config: LaunchConfig
) -> "_JointAttentionLaunch":
    tensors = [q.contiguous(), *_with_equal_strides(k, v), None, None]
    return _JointAttentionLaunch(tensors, Visibility(limit), None, scale, soft_cap, config)


class _Joint(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, far_k: Tensor | None, far_v: Tensor | None, *saved: Any) -> Tensor:
        *backward_memories, seen, fading, window, scale, soft_cap, config = saved
        sources = MemorySources(*backward_memories)
        ctx.places = claim(k, v), claim(sources.fading_k, sources.fading_v)
        k, v = _with_equal_strides(k, v)
        tensors = [q.contiguous(), k, v, *(None if x is None else x.contiguous() for x in (far_k, far_v))]
        ctx.options = window, scale, soft_cap, config
        run = _JointAttentionLaunch(tensors, seen, *ctx.options)
        copies = run.copy_memories(sources, fading)
        y, lse = run.forward()
        ctx.save_for_backward(*tensors, *copies, y, lse, *seen)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        saved = ctx.saved_tensors  # accessed once: under activation checkpointing they can be unpacked only once
        tensors, copies, (y, lse), seen = saved[:5], saved[5:8], saved[8:10], Visibility(*saved[10:])
        window, scale, soft_cap, config = ctx.options
        run = _JointAttentionLaunch(tensors, seen, window, scale, soft_cap, config, copies)
        return (*run.backward(y, lse, dy.contiguous(), *ctx.places), *(None,) * 6)


def _with_equal_strides(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Histories [B, J, G, K] as they are if their rows are whole and equally far apart, as halves of one tensor's rows are; else
    copies.
    """
    row, (batch, rows, groups, dim) = k.stride(1), k.shape
    # of one sequence the distance to the next one is not read: the first rows of a longer history are as good
    own = int(batch == 1)
    as_they_are = all(x.stride()[own:] == (rows * row, row, dim, 1)[own:] for x in (k, v)) and row >= groups * dim
    return (k, v) if as_they_are else (launch_utils.contiguous_by_words(k), launch_utils.contiguous_by_words(v))


class _JointAttentionLaunch:
    """Shapes and launches of one call. tensors: q, then keys and values of the window and of the far history. window: tokens; None:
    the whole history, and no far rows or memories. copies: returned by `copy_memories`.
    """

    def __init__(
        self, tensors: Sequence[Tensor | None], seen: Visibility, window: int | None, scale: float, soft_cap: float | None,
        config: LaunchConfig, copies: Sequence[Tensor | None] = (None, None, None),
    ) -> None:  # fmt: skip
        q, k, v, *self.far = tensors
        assert q is not None
        assert k is not None
        assert v is not None
        self.q, self.k, self.v, self.seen, self.window, self.scale, self.copies = q, k, v, seen, window, scale, copies
        self.batch, self.length, self.heads, self.dim = q.shape
        self.groups, self.before = k.shape[2], k.shape[1] - self.length
        low = on_gpu(q) and q.dtype in (torch.bfloat16, torch.float16)
        self.config = config if low else config.for_float32()
        _, self.memories, self.rows = (self.batch, 0, 0) if seen.row is None else seen.row.shape
        # rows of the State; 0 if nothing has been read
        self.entries, self.tail = (0 if x is None else x.shape[1] - self.length for x in (seen.first, seen.fading_first))
        self.kernels, self.copy_kernels = _kernels, _copy_kernels
        self.block_dim = max(16, launch_utils.next_power_of_2(self.dim))
        self.common = {
            "H": self.heads, "G": self.groups, "K": self.dim, "M": self.rows, "DOT_DTYPE": _tl_bfloat16() if low else None,
            "BLOCK_D": self.block_dim, "num_stages": self.config.stages_backward,
        }  # fmt: skip
        self.rows_first = {"ROWS_FIRST": self.config.rows_first}
        self.cap = {"CAP": soft_cap or 0.0}
        self.query_options = {
            **self.common, "num_stages": self.config.stages, "N": self.before, "FAR": 0 if self.far[0] is None else window,
            "num_warps": self.config.warps, "ROW": k.stride(1), **self.cap,
        }  # fmt: skip
        self.query_blocks = {"BLOCK_Q": self.config.queries, "BLOCK_K": self.config.keys, "BLOCK_M": self.memory_block}

    @property
    def memory_block(self) -> int:
        return max(16, min(self.config.memory, launch_utils.next_power_of_2(max(1, self.rows))))

    def or_q(self, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        """The tensors, with q as a pointer that is not read in place of None."""
        return tuple(self.q if x is None else x for x in tensors)

    @property
    def query_arguments(self) -> tuple[Tensor, ...]:
        """Input arguments of the kernels that loop over queries."""
        seen = (self.seen.row, self.seen.slot, self.seen.limit, self.seen.far_limit)
        return self.or_q(self.q, self.k, self.v, *self.far, *self.copies[:2], *seen)

    def grid(self, tokens: int, size: int, heads: int) -> tuple[int, int, int]:
        return (-(-tokens // size), heads, self.batch)

    def empty_per_token(self) -> Tensor:
        return torch.empty(self.batch, self.heads, self.length, dtype=torch.float32, device=self.q.device)

    def copy_memories(self, sources: MemorySources, fading: int) -> Sequence[Tensor | None]:
        """Keys and values of memories, [B, P, M, G, K], and for each copy the next copy of its row, int32 [B, P, M]."""
        if self.seen.row is None:
            return self.copies
        fading_k, fading_v, *leaves = sources
        if fading_k is not None and fading_v is not None:
            fading_k, fading_v = _with_equal_strides(fading_k, fading_v)
        of_state = [None if x is None else x.contiguous() for x in leaves]
        memory_k, memory_v = (self.q.new_empty(*self.seen.row.shape, self.groups, self.dim) for _ in range(2))
        self.copies = memory_k, memory_v, torch.empty_like(self.seen.row)
        channels, eidetic = self.groups * self.dim, self.rows - fading
        size, programs = min(_CHANNELS, launch_utils.next_power_of_2(channels)), self.memories * -(-self.rows // _COPIED)
        self.copy_kernels.memory_copy_kernel[(programs, -(-channels // size), self.batch)](
            *self.or_q(self.k, self.v, fading_k, fading_v, *of_state, self.seen.row, self.seen.begin, memory_k, memory_v),
            *self.or_q(self.seen.first, self.seen.fading_first, self.copies[2]), self.length, self.memories, C=channels,
            ROW=self.k.stride(1), FADING_ROW=0 if fading_k is None else fading_k.stride(1), N=self.before, WINDOW=self.window,
            EIDETIC=eidetic, FADING=fading, HAS_STATE=int(of_state[-1] is not None), BLOCK_M=_COPIED,
            BLOCK_E=max(16, launch_utils.next_power_of_2(eidetic)), BLOCK_C=size, num_warps=4,
        )  # fmt: skip
        return self.copies

    def forward(self) -> tuple[Tensor, Tensor]:
        """y [B, T, H, K] and the logarithm of the sum of weights, [B, H, T]."""
        y, lse = torch.empty_like(self.q), self.empty_per_token()

        def launch(blocks: Sizes) -> None:
            self.kernels.joint_attention_forward_kernel[self.grid(self.length, blocks["BLOCK_Q"], self.heads)](
                *self.query_arguments, y, lse, self.length, self.memories, self.scale,
                maxnreg=self.config.registers, **self.query_options, **blocks,
            )  # fmt: skip

        launch_blocks(launch, "joint_attention_forward_kernel", **self.query_blocks)
        return y, lse

    def backward(
        self, y: Tensor, lse: Tensor, dy: Tensor, places: _Places = _NOWHERE, of_fading: _Places = _NOWHERE
    ) -> list[Tensor | None]:  # fmt: skip
        """Gradients of q, keys and values, and the sources of memories. places, of_fading: claimed for those of k and v, and of the
        fading ones."""
        dq, delta = torch.empty_like(self.q), self.empty_per_token()
        keys = self.config.keys_dq or self.config.keys

        def launch(blocks: Sizes) -> None:
            self.kernels.joint_attention_backward_dq_kernel[self.grid(self.length, blocks["BLOCK_Q"], self.heads)](
                *self.query_arguments, y, lse, dy, dq, delta, self.length, self.memories, self.scale,
                **self.query_options, **blocks,
            )  # fmt: skip

        launch_blocks(launch, "joint_attention_backward_dq_kernel", **{**self.query_blocks, "BLOCK_K": keys})
        saved = (lse, dy, delta)
        dmemory = self.backward_memories(*saved)
        reach = -1 if self.window is None else self.window - 1 - self.before
        found: list[Tensor | None] = [dq, *self.backward_rows(self.k, self.v, self.seen.limit, 0, reach, *saved, dmemory, places)]
        far_k, far_v = self.far
        if far_k is None or far_v is None or self.seen.far_limit is None:
            found += [None, None]
        else:
            assert self.window is not None
            found += self.backward_rows(far_k, far_v, self.seen.far_limit, self.window, 0, *saved, (None, None))
        return found + self.backward_sources(dmemory, of_fading)

    def backward_rows(
        self, k: Tensor, v: Tensor, limit: Tensor, nearest: int, reach: int, lse: Tensor, dy: Tensor, delta: Tensor, dmemory: _Pair,
        places: _Places = _NOWHERE,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Gradients of a history whose rows are visible from the distance `nearest` on, to at most `reach` tokens behind the span's
        start (-1: any), including those of their copies in memories, if dmemory is given.
        """
        (dk, dv), before = gradients_like((k, v), places, empty_like_heads), k.shape[1] - self.length
        copied = self.seen.first is not None and dmemory[0] is not None
        copies = self.or_q(self.seen.first, self.copies[2], *dmemory)
        options = {**self.common, "M": self.rows if copied else 0}

        def launch(blocks: Sizes) -> None:
            size = blocks["BLOCK_K"]
            ends = last_queries(limit, before, k.shape[1], size) if reach < 0 else limit
            self.kernels.joint_attention_backward_dkv_kernel[self.grid(k.shape[1] + max(0, reach), size, self.groups)](
                self.q, k, v, limit, ends, lse, dy, delta, *copies, dk, dv, self.length, self.memories, self.scale, N=before,
                MIN_DISTANCE=nearest, REACH=reach, ROW=k.stride(1), DK_ROW=dk.stride(1), DV_ROW=dv.stride(1),
                E=self.entries, num_warps=self.config.warps_backward, **options, **self.rows_first, **self.cap, **blocks,
            )  # fmt: skip

        sizes = {"BLOCK_K": self.config.keys_backward, "BLOCK_Q": self.config.queries_backward}
        launch_blocks(launch, "joint_attention_backward_dkv_kernel", **sizes)
        return dk, dv

    def backward_memories(self, lse: Tensor, dy: Tensor, delta: Tensor) -> _Pair:
        """Gradients of the memories' rows, float32 [B, P, M, G, K]: they are rounded together with the gradients that they are
        added to.
        """
        k, v, _ = self.copies
        if k is None or v is None:
            return None, None
        dk, dv = (torch.empty_like(x, dtype=torch.float32) for x in (k, v))

        def launch(blocks: Sizes) -> None:
            grid = (self.memories * -(-self.rows // blocks["BLOCK_M"]), self.groups, self.batch)
            self.kernels.joint_attention_backward_dmemory_kernel[grid](
                self.q, k, v, *self.or_q(self.seen.row, self.seen.slot, self.seen.begin), lse, dy, delta, dk, dv,
                self.length, self.memories, self.scale, WINDOW=self.window,
                num_warps=self.config.warps_backward, **self.common, **self.rows_first, **blocks,
            )  # fmt: skip

        sizes = {"BLOCK_M": self.memory_block, "BLOCK_Q": self.config.queries_backward}
        launch_blocks(launch, "joint_attention_backward_dmemory_kernel", **sizes)
        return dk, dv

    def backward_sources(self, dmemory: _Pair, of_fading: _Places = _NOWHERE) -> list[Tensor | None]:
        """Gradients of `MemorySources`, each from its copies. of_fading: places of those of fading_k and fading_v."""
        dk, dv = dmemory
        if dk is None or dv is None:
            return [None] * len(MemorySources._fields)
        first, fading_first = self.seen.first, self.seen.fading_first
        found = [
            *self.backward_copies(fading_first, self.tail, self.length, dk, dv, of_fading),
            *self.backward_copies(first, 0, self.entries, dk, dv),
            *self.backward_copies(fading_first, 0, self.tail, dk, dv),
        ]
        entered = self.entries + self.tail > 0
        return [*found, *(x[:, 0].to(self.q.dtype) if entered else None for x in (dk, dv))]

    def backward_copies(
        self, first: Tensor | None, skipped: int, rows: int, dmemory_k: Tensor, dmemory_v: Tensor, places: _Places = _NOWHERE
    ) -> _Pair:  # fmt: skip
        """Gradients of rows that are read in memories only; `first` locates their copies, after the first `skipped` rows."""
        if first is None or rows == 0:
            return None, None
        like = self.q[:, :1, :1].expand(self.batch, rows, self.groups, self.dim)
        dk, dv = gradients_like((like, like), places)
        size = max(16, min(self.config.keys_backward, _SUMMED // self.block_dim))
        self.copy_kernels.memory_copy_backward_kernel[self.grid(rows, size, self.groups)](
            first, self.copies[2], dmemory_k, dmemory_v, dk, dv, rows, first.shape[1], skipped, self.memories * self.rows,
            G=self.groups, K=self.dim, BLOCK_K=size, BLOCK_D=self.block_dim, DK_ROW=dk.stride(1), DV_ROW=dv.stride(1),
            num_warps=4,
        )  # fmt: skip
        return dk, dv


@cache
def _tl_bfloat16() -> Any:
    """Triton's bfloat16."""
    import triton.language as tl

    return tl.bfloat16
