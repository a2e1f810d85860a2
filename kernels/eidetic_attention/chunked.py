"""B'MOJO's attention in blocks of at most `window` queries through torch's fused attention, on any device.

Shape suffixes: B batch, L tokens of a block or span, G key heads, K dim, M memory rows (eidetic, then fading), E eidetic, J keys.

A document publishes its memory every `window` tokens, at multiples of the window counted from its start. A block of at most
`window` tokens therefore contains at most one publication per lane, wherever it begins, and every query sees its window and either
the memory that was frozen when the block began or the one published within it. One softmax covers all of them. The final State of a
span needs no attention, and only the last publication of the span: `final_state` selects once for all blocks.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from baton.kernels.common.attention_tails import concat_tail, masked_attention, new_tails, seen_after, visibility_mask
from baton.kernels.common.chunked_autograd import run_chunked
from baton.kernels.eidetic_attention.topk_memory import gather_rows, topk
from baton.kernels.protocol import Inputs, State

_BLOCK = 128

TAILS = ("k", "v", "fading_k", "fading_v")
"""Leaves of a State that are the last rows of inputs, by the inputs' names."""


@dataclass(frozen=True)
class Options:
    """window: tokens; n_fading, n_eidetic: rows of a memory; sliding: fading tokens slide behind the window instead; scale: of the
    scores.
    """

    window: int
    n_fading: int
    n_eidetic: int
    sliding: bool
    scale: float

    @property
    def fading_rows(self) -> int:
        """Rows of the fading tail."""
        return 2 * self.window - 1 if self.sliding else self.n_fading


def eidetic_attention_chunked(
    inputs: Inputs, options: Options, *, pos: Tensor, state: State, chunk: int | None = None, need_final_state: bool = True
) -> tuple[Tensor, State]:
    """As `op.eidetic_attention`, which checks the arguments; chunk: queries per block, at most the window."""

    def step(inputs: Inputs, pos: Tensor | None, state: State, need_final_state: bool = True) -> tuple[Tensor, State]:
        assert pos is not None
        return _step(inputs, pos.to(torch.int64), state, options, need_final_state)

    last = None if need_final_state else partial(step, need_final_state=False)
    return run_chunked(step, inputs, len(inputs), pos=pos, state=state, chunk=min(chunk or _BLOCK, options.window), last=last)


def final_state(inputs: Inputs, options: Options, *, pos: Tensor, state: State) -> State:
    """The final State of a span of any length, with the bits that `eidetic_attention_chunked` returns; plain autograd."""
    pos = pos.to(torch.int64)
    rows = {name: x for name, x in zip(TAILS, inputs[1:], strict=False) if name in state}
    ends = {name: concat_tail(state[name], x[:, max(0, x.shape[1] - state[name].shape[1]) :]) for name, x in rows.items()}
    return _final_state(ends, _build_memory(inputs, pos, state, options), pos, state)


def _step(inputs: Inputs, pos_BL: Tensor, state: State, options: Options, need_final_state: bool) -> tuple[Tensor, State]:
    q, length, w, seen = inputs[0], inputs[0].shape[1], options.window, state["seen"]
    rows = {name: concat_tail(state[name], x) for name, x in zip(TAILS, inputs[1:], strict=False) if name in state}
    parts = [(rows["k"], rows["v"], visibility_mask(w - 1, length, 0, w - 1, pos_BL, seen))]
    if options.sliding:
        parts.append((rows["fading_k"], rows["fading_v"], visibility_mask(2 * w - 1, length, w, 2 * w - 1, pos_BL, seen)))
    memory = _build_memory(inputs, pos_BL, state, options, need_entries=need_final_state)
    if memory is not None:
        parts.append((memory.old_k, memory.old_v, memory.publication.sees_old_BL[:, :, None] & memory.old_valid[:, None]))
        parts.append((memory.new_k, memory.new_v, memory.publication.sees_new_BL[:, :, None] & memory.new_valid[:, None]))
    all_keys, all_values = (torch.cat([part[x].to(q.dtype) for part in parts], dim=1) for x in (0, 1))
    y = masked_attention(q, all_keys, all_values, torch.cat([seen_BLJ for *_, seen_BLJ in parts], dim=2), options.scale)
    return y, _final_state(rows, memory, pos_BL, state) if need_final_state else {}


@dataclass(frozen=True)
class _Memory:
    """The memory at the start of a span, the one that it publishes last, and the entries after it.

    old_k, old_v, new_k, new_v: [B, M, G, K]; old_valid, new_valid: [B, M], whether a row holds a token. entries: the best tokens of
    the last document, by the State's names; empty without eidetic tokens, or if they are not needed.
    """

    publication: "_Publication"
    old_k: Tensor
    old_v: Tensor
    old_valid: Tensor
    new_k: Tensor
    new_v: Tensor
    new_valid: Tensor
    entries: State


def _build_memory(inputs: Inputs, pos_BL: Tensor, state: State, options: Options, need_entries: bool = True) -> _Memory | None:
    """The memory of a span of any length; None if the options have no memory."""
    if not options.n_eidetic + options.n_fading:
        return None
    _, k, v, fading_k, fading_v, score_BL = inputs
    publication = _Publication(pos_BL, options.window)
    published: list[tuple[Tensor, Tensor, Tensor]] = []
    entries: State = {}
    if options.n_eidetic:
        m, candidates = options.n_eidetic, (state["score"], state["where"], score_BL, pos_BL)
        chosen = [topk(m, *candidates, publication.before(m))]
        if need_entries:
            chosen.append(topk(m, *candidates, publication.of_last_document(m)))
        rows, valid = (torch.cat(x, dim=1) for x in ([c.rows for c in chosen], [c.valid for c in chosen]))
        taken = gather_rows([(state["best_k"], k), (state["best_v"], v)], rows, valid)
        (new_k, *best_k), (new_v, *best_v) = (x.split(m, dim=1) for x in taken)
        published.append((new_k, new_v, chosen[0].valid))
        for k_BE, v_BE, best in zip(best_k, best_v, chosen[1:], strict=True):
            # copies: a view would also keep the published rows alive
            entries = {"best_k": k_BE.clone(), "best_v": v_BE.clone(), "score": best.score, "where": best.where}
    if options.n_fading:
        rows, valid = publication.just_before(options.n_fading, state["seen"])
        new_k, new_v = gather_rows([(state["fading_k"], fading_k), (state["fading_v"], fading_v)], rows, valid)
        published.append((new_k, new_v, valid))
    new_k, new_v, new_valid = (torch.cat(x, dim=1) for x in zip(*published, strict=True))
    old_k, old_v = state["frozen_k"].to(k.dtype), state["frozen_v"].to(v.dtype)
    return _Memory(publication, old_k, old_v, state["frozen"], new_k, new_v, new_valid, entries)


def _final_state(rows: State, memory: _Memory | None, pos_BL: Tensor, state: State) -> State:
    """The State after a span. rows: the last rows read, by the name of their tail, at least as many as the tail has."""
    read = seen_after(pos_BL.shape[1], pos_BL, state["seen"])
    final = {"seen": read, **new_tails(rows, {name: state[name].shape[1] for name in rows}, read)}
    if memory is not None:
        # the next span begins with the memory that the last token sees; a document's first window sees none
        keeps_old, keeps_new = memory.publication.sees_old_BL[:, -1], memory.publication.sees_new_BL[:, -1]
        frozen = (memory.old_valid & keeps_old[:, None]) | (memory.new_valid & keeps_new[:, None])
        final |= {**memory.entries, "frozen": frozen}
        for name, old, new in (("frozen_k", memory.old_k, memory.new_k), ("frozen_v", memory.old_v, memory.new_v)):
            kept = torch.where(keeps_new[:, None, None, None], new, old)
            final[name] = kept.masked_fill(~frozen[:, :, None, None], 0.0)
    return {name: final[name] for name in state}


class _Publication:
    """Where in a span each lane publishes its memory last: at the last token whose pos is a positive multiple of the window.

    sees_old_BL, sees_new_BL: whether a token sees the memory that was frozen when the span began, or the one published last in it.
    They hold for the last token of any span, and for all tokens of a block of at most `window` tokens, which publishes at most
    once. A token whose document began less than a window ago sees neither, so no document starts between a publication and the
    tokens that see it.
    """

    def __init__(self, pos_BL: Tensor, window: int) -> None:
        self.pos_BL, length = pos_BL, pos_BL.shape[1]
        self.at_L = torch.arange(length, device=pos_BL.device)
        publishes = (pos_BL % window == 0) & (pos_BL > 0)
        last_B = torch.where(publishes, self.at_L, -1).amax(dim=1)
        # without a publication: the length of the span
        self.place_B = torch.where(last_B < 0, length, last_B)
        behind = self.at_L >= self.place_B[:, None]
        old_enough = pos_BL >= window
        self.sees_new_BL, self.sees_old_BL = old_enough & behind, old_enough & ~behind

    def before(self, entries: int) -> Tensor:
        """[B, entries + L]: candidates of the published memory, which are the entries and the document's tokens before the
        publication.
        """
        last_B = (self.place_B - 1).clamp(min=0)
        begun_B = torch.where(self.place_B > 0, last_B - self.pos_BL.gather(1, last_B[:, None])[:, 0], -1)
        return self._candidates(entries, begun_B) & torch.nn.functional.pad(
            self.at_L < self.place_B[:, None], (entries, 0), value=True
        )

    def of_last_document(self, entries: int) -> Tensor:
        """[B, entries + L]: candidates at the end of the span, those of the last token's document."""
        return self._candidates(entries, self.pos_BL.shape[1] - 1 - self.pos_BL[:, -1])

    def _candidates(self, entries: int, begun_B: Tensor) -> Tensor:
        """Tokens since the document began, and the entries if it began before the span."""
        counted = self.at_L >= begun_B[:, None]
        return torch.cat(((begun_B < 0)[:, None].expand(-1, entries), counted), dim=1)

    def just_before(self, n: int, seen_B: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of a tail of n rows followed by the span, the n before the published memory, [B, n], and whether they were ever
        read.
        """
        back_n = torch.arange(n, 0, -1, device=self.at_L.device)
        valid = back_n <= (self.place_B + seen_B)[:, None]
        return (n + self.place_B[:, None] - back_n), valid
