"""B'MOJO's attention in blocks of at most a window of queries, through torch's fused attention, on any device.

The one thing to know: a document publishes its memory every `window` tokens, at multiples of the window counted from its start, so
a block of at most `window` tokens, wherever it is cut, meets at most one publication per lane. So every query sees its window, and
either the memory that was frozen when the block began or the one published within it; one softmax covers all of them.

Shape suffixes: B batch, L tokens of a block, G key heads, K dim, M memory rows (eidetic, then fading), E eidetic, J keys.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from baton.kernels.eidetic_attention.memory import largest, take
from baton.kernels.in_chunks import in_chunks
from baton.kernels.protocol import Inputs, State
from baton.kernels.window_attention.chunked import attend, history, new_tail, read_so_far, visible

_BLOCK = 128


@dataclass(frozen=True)
class Options:
    """window: tokens; n_fading, n_eidetic: rows of a memory; sliding: fading tokens slide behind the window instead; scale."""

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
    inputs: Inputs, options: Options, *, pos: Tensor, state: State, chunk: int | None = None
) -> tuple[Tensor, State]:
    """As `op.eidetic_attention`, which checks the arguments; chunk: queries per block, at most the window."""

    def step(inputs: Inputs, pos: Tensor | None, state: State) -> tuple[Tensor, State]:
        assert pos is not None
        return _step(inputs, pos.to(torch.int64), state, options)

    return in_chunks(step, inputs, len(inputs), pos=pos, state=state, chunk=min(chunk or _BLOCK, options.window))


def _step(inputs: Inputs, pos_BL: Tensor, state: State, options: Options) -> tuple[Tensor, State]:
    q, k, v, fading_k, fading_v, score_BL = inputs
    length, w, seen = q.shape[1], options.window, state["seen"]
    keys, values = history(state["k"], k), history(state["v"], v)
    parts = [(keys, values, visible(w - 1, length, 0, w - 1, pos_BL, seen))]
    read = read_so_far(length, pos_BL, seen)
    leaving = {"k": new_tail(keys, w - 1, read), "v": new_tail(values, w - 1, read), "seen": read}
    if options.fading_rows:
        n = options.fading_rows
        fading_keys, fading_values = history(state["fading_k"], fading_k), history(state["fading_v"], fading_v)
        leaving |= {"fading_k": new_tail(fading_keys, n, read), "fading_v": new_tail(fading_values, n, read)}
        if options.sliding:
            parts.append((fading_keys, fading_values, visible(n, length, w, 2 * w - 1, pos_BL, seen)))
    if options.n_eidetic + options.n_fading:
        publication = _Publication(pos_BL, w)
        published: list[tuple[Tensor, Tensor, Tensor]] = []
        if options.n_eidetic:
            pool_k, pool_v = torch.cat((state["best_k"].to(k.dtype), k), dim=1), torch.cat((state["best_v"].to(v.dtype), v), dim=1)
            entries = state["score"], state["where"], score_BL, pos_BL
            best = largest(options.n_eidetic, *entries, publication.before(options.n_eidetic))
            published.append((take(pool_k, best.rows, best.valid), take(pool_v, best.rows, best.valid), best.valid))
            best = largest(options.n_eidetic, *entries, publication.of_last_document(options.n_eidetic))
            leaving |= {"best_k": take(pool_k, best.rows, best.valid), "best_v": take(pool_v, best.rows, best.valid)}
            leaving |= {"score": best.score, "where": best.where}
        if options.n_fading:
            index, valid = publication.just_before(options.n_fading, seen)
            published.append((take(fading_keys, index, valid), take(fading_values, index, valid), valid))
        new_k, new_v, new_valid = (torch.cat(x, dim=1) for x in zip(*published, strict=True))
        old_k, old_v, old_valid = state["frozen_k"].to(k.dtype), state["frozen_v"].to(v.dtype), state["frozen"]
        parts.append((old_k, old_v, publication.sees_old_BL[:, :, None] & old_valid[:, None]))
        parts.append((new_k, new_v, publication.sees_new_BL[:, :, None] & new_valid[:, None]))
        # what the last token sees is what the next block begins with; a document's first window sees nothing
        keeps_old, keeps_new = publication.sees_old_BL[:, -1], publication.sees_new_BL[:, -1]
        leaving["frozen"] = (old_valid & keeps_old[:, None]) | (new_valid & keeps_new[:, None])
        for name, old, new in (("frozen_k", old_k, new_k), ("frozen_v", old_v, new_v)):
            kept = torch.where(keeps_new[:, None, None, None], new, old)
            leaving[name] = kept.masked_fill(~leaving["frozen"][:, :, None, None], 0.0)
    all_keys, all_values = (torch.cat([part[x].to(q.dtype) for part in parts], dim=1) for x in (0, 1))
    y = attend(q, all_keys, all_values, torch.cat([rows for *_, rows in parts], dim=2), options.scale)
    return y, {name: leaving[name] for name in state}


class _Publication:
    """Where in a block each lane publishes its memory: at the first token whose pos is a positive multiple of the window, if any.

    sees_old_BL, sees_new_BL: whether a token sees the memory that was frozen when the block began, or the one published in it. A
    token whose document began less than a window ago sees neither, so no start lies between a publication and who sees it.
    """

    def __init__(self, pos_BL: Tensor, window: int) -> None:
        self.pos_BL = pos_BL
        self.at_L = torch.arange(pos_BL.shape[1], device=pos_BL.device)
        publishes = (pos_BL % window == 0) & (pos_BL > 0)
        # the length of the block where there is none
        self.place_B = torch.where(publishes, self.at_L, pos_BL.shape[1]).amin(dim=1)
        behind = self.at_L >= self.place_B[:, None]
        old_enough = pos_BL >= window
        self.sees_new_BL, self.sees_old_BL = old_enough & behind, old_enough & ~behind

    def before(self, entries: int) -> Tensor:
        """[B, entries + L]: candidates of the published memory, the entries and the tokens before it."""
        counted = self.at_L < self.place_B[:, None]
        return torch.nn.functional.pad(counted, (entries, 0), value=True)

    def of_last_document(self, entries: int) -> Tensor:
        """[B, entries + L]: candidates at the end of the block, the tokens of the last token's document, and the entries if it
        began before the block."""
        begun_B = self.pos_BL.shape[1] - 1 - self.pos_BL[:, -1]
        counted = self.at_L >= begun_B[:, None]
        return torch.cat(((begun_B < 0)[:, None].expand(-1, entries), counted), dim=1)

    def just_before(self, n: int, seen_B: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of a history with a tail of n rows, the n before the published memory, [B, n], and whether they were ever read."""
        back_n = torch.arange(n, 0, -1, device=self.at_L.device)
        valid = back_n <= (self.place_B + seen_B)[:, None]
        return (n + self.place_B[:, None] - back_n), valid
