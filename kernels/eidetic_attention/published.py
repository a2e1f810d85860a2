"""All the memories that a span of tokens sees, chosen at once.

The one thing to know: publications of a lane are at least a window apart, so a block of a window's tokens has at most one, and what
a publication adds to the one before is chosen among the window between them. The largest of unions are then found by doubling, in
as many steps as the number of publications has binary digits; or, on a GPU, by one launch that reads the scores of each
publication's document (`prefix`), since small launches cost more there than reading.

Shape suffixes: B batch, T tokens, W the window, P blocks of W tokens, E eidetic rows, G key heads, K dim.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.kernels import tiles as table
from baton.kernels.eidetic_attention.memory import largest, take
from baton.kernels.protocol import State


class Published(NamedTuple):
    """Memories of a span: the one that was frozen when it began, where anything had been read, then those of its blocks of a
    window's tokens, used or not. Q in all.

    Attributes:
        k, v: [B, Q, M, G, K], eidetic rows, then fading ones; 0 where not valid.
        valid: which rows hold a token, bool [B, Q, M].
        slot: the memory that each token sees, int32 [B, T]; -1: none.
        begin: the first token that may see each, int32 [B, Q]; T: nobody does.
        last: of the last token's document the best ones at the span's end, [B, E]: rows of the entries followed by the span's
            tokens, and which are valid; None: not known.
    """

    k: Tensor
    v: Tensor
    valid: Tensor
    slot: Tensor
    begin: Tensor
    last: tuple[Tensor, Tensor] | None = None


class _Chosen(NamedTuple):
    """Tokens chosen for each publication, [B P, E] in the order of time: the row in the entries followed by the span's tokens."""

    row: Tensor
    valid: Tensor
    score: Tensor
    where: Tensor


def publish(
    k: Tensor, v: Tensor, fading_k: Tensor, fading_v: Tensor, score: Tensor, *, window: int, n_fading: int, n_eidetic: int,
    pos: Tensor, state: State | None, at_once: bool = False, last_wanted: bool = True,
) -> Published:  # fmt: skip
    """Of a span of any length; the State as `op.leaves` describes it, None: nothing has been read. pos: int32 or int64 [B, T].
    at_once: by one launch, for float32 scores on a GPU, which finds `last` too, where that is wanted."""
    pos, (batch, length) = pos.to(torch.int32), pos.shape
    blocks = -(-length // window)
    pos_BPW = (pos if length == blocks * window else F.pad(pos, (0, blocks * window - length))).view(batch, blocks, window)
    publishes_BPW = (pos_BPW % window == 0) & (pos_BPW > 0)
    has_BP = publishes_BPW.any(2)
    place_BP = publishes_BPW.view(torch.int8).argmax(2) + torch.arange(0, blocks * window, window, device=pos.device)
    place_BP = torch.where(has_BP, place_BP, length)
    # where the document begins, before the span if negative
    begun_BP = place_BP.to(torch.int32) - pos.gather(1, place_BP.clamp(max=length - 1))
    place_BP = place_BP.to(torch.int32)
    parts: list[tuple[Tensor, ...]] = []
    last = None
    if n_eidetic:
        if at_once:
            ends, begun = place_BP.where(has_BP, -1), begun_BP
            if last_wanted:
                ends = torch.cat((ends, torch.full_like(ends[:, :1], length)), dim=1)
                begun = torch.cat((begun, (length - 1) - pos[:, -1:]), dim=1)
            row, chosen_valid = _largest(n_eidetic, score, ends, begun, state)
            if last_wanted:
                last = (row[:, -1], chosen_valid[:, -1])
            rows, valid = (x[:, :blocks].reshape(batch, -1) for x in (row, chosen_valid))
        else:
            chosen = _eidetic(n_eidetic, window, score, place_BP, begun_BP, has_BP, state)
            rows, valid = (x.view(batch, -1) for x in (chosen.row, chosen.valid))
        best_k, best_v = (None, None) if state is None else (state["best_k"], state["best_v"])
        parts.append((*take([(best_k, k), (best_v, v)], rows, valid), valid))
    if n_fading:
        # rows of the tail followed by the span's
        back = torch.arange(n_fading, 0, -1, device=pos.device)
        rows, read = place_BP[:, :, None] - back, place_BP
        tail_k = tail_v = None
        if state is not None:
            rows, read = rows + n_fading, read + state["seen"][:, None]
            tail_k, tail_v = state["fading_k"], state["fading_v"]
        rows, valid = rows.view(batch, -1), (has_BP[:, :, None] & (back <= read[:, :, None])).view(batch, -1)
        parts.append((*take([(tail_k, fading_k), (tail_v, fading_v)], rows, valid), valid))
    new_k, new_v, new_valid = (
        torch.cat([part[x].unflatten(1, (blocks, -1)) for part in parts], dim=2) for x in range(3)
    )  # fmt: skip
    none = -1 if state is None else 0  # the memory before the first publication
    published_BP = torch.where(has_BP, torch.arange(none + 1, none + 1 + blocks, dtype=torch.int32, device=pos.device), none)
    before_BP = F.pad(published_BP.cummax(1).values[:, :-1], (1, 0), value=none)
    behind_BPW = torch.arange(blocks * window, device=pos.device).view(blocks, window) >= place_BP[:, :, None]
    latest_BT = torch.where(behind_BPW, published_BP[:, :, None], before_BP[:, :, None]).view(batch, -1)[:, :length]
    slot = torch.where(pos >= window, latest_BT, -1)
    if state is None:
        return Published(new_k, new_v, new_valid, slot, place_BP, last)
    return Published(
        torch.cat((state["frozen_k"].to(k.dtype)[:, None], new_k), dim=1),
        torch.cat((state["frozen_v"].to(v.dtype)[:, None], new_v), dim=1),
        torch.cat((state["frozen"][:, None], new_valid), dim=1),
        slot,
        F.pad(place_BP, (1, 0)),
        last,
    )


@torch.no_grad()
def _largest(m: int, score: Tensor, stop: Tensor, begun: Tensor, state: State | None) -> tuple[Tensor, Tensor]:
    """Rows, int64, and which are valid, [B, queries, m]; see `prefix.largest_kernel`."""
    from baton.kernels.eidetic_attention import prefix

    (batch, length), queries = score.shape, stop.shape[1]
    rows = torch.empty(batch, queries, m, dtype=torch.int64, device=score.device)
    valid = torch.empty(batch, queries, m, dtype=torch.bool, device=score.device)
    # what is not there is not read
    entry_score, entry_where = (score, rows) if state is None else (state["score"].contiguous(), state["where"].contiguous())
    entries = 0 if state is None else entry_score.shape[1]
    prefix.largest_kernel[(queries, batch)](
        score.contiguous(), entry_score, entry_where, stop, begun, rows, valid, length, queries, E=entries, M=m,
        BM=table.power_of_two(max(m, entries, 16)), num_warps=1,
    )  # fmt: skip
    return rows, valid


@torch.no_grad()
def _eidetic(
    m: int, window: int, score: Tensor, place_BP: Tensor, begun_BP: Tensor, has_BP: Tensor, state: State | None
) -> _Chosen:
    """The m largest scores of each publication's document before it."""
    (batch, blocks), entries = place_BP.shape, 0 if state is None else state["score"].shape[1]
    # the window before a publication, which is of its document: what is before the span the entries know
    token_BPW = place_BP[:, :, None] - torch.arange(window, 0, -1, device=score.device)
    counted = has_BP[:, :, None] & (token_BPW >= 0)
    token_BPW = token_BPW.clamp(0, score.shape[1] - 1)
    of_token = score.gather(1, token_BPW.view(batch, -1)).view(token_BPW.shape)
    segment = _Chosen(token_BPW + entries, counted, of_token, token_BPW - begun_BP[:, :, None])
    nothing = _Chosen(*(x[..., :0] for x in segment))
    chosen = _merged(m, nothing, segment)
    reach = 1
    while reach < blocks:
        before = _Chosen(*(F.pad(x, (0, 0, reach, 0))[:, :blocks] for x in chosen))
        same = (F.pad(begun_BP, (reach, 0))[:, :blocks] == begun_BP) & F.pad(has_BP, (reach, 0))[:, :blocks]
        chosen = _merged(m, before._replace(valid=before.valid & same[:, :, None]), chosen)
        reach *= 2
    if state is None:
        return chosen
    row = torch.arange(entries, device=score.device)
    began_before = (begun_BP < 0) & has_BP
    entered = _Chosen(
        row.expand(batch, blocks, -1),
        (state["where"] >= 0)[:, None] & began_before[:, :, None],
        state["score"][:, None].expand(-1, blocks, -1),
        state["where"][:, None].expand(-1, blocks, -1),
    )
    return _merged(m, entered, chosen)


def _merged(m: int, earlier: _Chosen, later: _Chosen) -> _Chosen:
    """The m largest of both, [B, P, m]."""
    flat = _Chosen(*(torch.cat((a, b), dim=2).flatten(0, 1) for a, b in zip(earlier, later, strict=True)))
    n = earlier.row.shape[2]
    where = flat.where.clamp(min=0)
    found = largest(m, flat.score[:, :n], where[:, :n], flat.score[:, n:], where[:, n:], flat.valid)
    row = flat.row.gather(1, found.rows).masked_fill(~found.valid, 0)
    shape = (*earlier.row.shape[:2], m)
    return _Chosen(row.view(shape), found.valid.view(shape), found.score.view(shape), found.where.view(shape))
