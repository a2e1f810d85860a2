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
    """Memories of a span: the one that was frozen when it began, then those of its blocks of a window's tokens, used or not.

    Attributes:
        k, v: [B, P + 1, M, G, K], eidetic rows, then fading ones; 0 where not valid.
        valid: which rows hold a token, bool [B, P + 1, M].
        slot: the memory that each token sees, int32 [B, T]; -1: none.
        begin: the first token that may see each, int32 [B, P + 1]; T: nobody does.
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
    pos: Tensor, state: State, at_once: bool = False,
) -> Published:  # fmt: skip
    """Of a span of any length; the State as `op.leaves` describes it. pos: int64 [B, T]. at_once: by one launch, for float32
    scores on a GPU."""
    batch, length = pos.shape
    blocks = -(-length // window)
    pos_BPW = F.pad(pos, (0, blocks * window - length)).view(batch, blocks, window)
    publishes_BPW = (pos_BPW % window == 0) & (pos_BPW > 0)
    has_BP = publishes_BPW.any(2)
    place_BP = publishes_BPW.to(torch.int8).argmax(2) + torch.arange(0, blocks * window, window, device=pos.device)
    place_BP = torch.where(has_BP, place_BP, length)
    begun_BP = place_BP - pos.gather(1, place_BP.clamp(max=length - 1))  # where the document begins, before the span if negative
    parts: list[tuple[Tensor, ...]] = []
    last = None
    if n_eidetic:
        if at_once:
            ends = torch.cat((place_BP.where(has_BP, -1), torch.full_like(place_BP[:, :1], length)), dim=1)
            begun = torch.cat((begun_BP, (length - 1) - pos[:, -1:]), dim=1)
            row, chosen_valid = _largest(n_eidetic, score, ends, begun, state)
            last = (row[:, -1], chosen_valid[:, -1])
            rows, valid = (x[:, :-1].reshape(batch, -1) for x in (row, chosen_valid))
        else:
            chosen = _eidetic(n_eidetic, window, score, place_BP, begun_BP, has_BP, state)
            rows, valid = (x.view(batch, -1) for x in (chosen.row, chosen.valid))
        parts.append((*take([(state["best_k"], k), (state["best_v"], v)], rows, valid), valid))
    if n_fading:
        back = torch.arange(n_fading, 0, -1, device=pos.device)
        valid = has_BP[:, :, None] & (back <= (place_BP + state["seen"][:, None])[:, :, None])
        rows, valid = (n_fading + place_BP[:, :, None] - back).view(batch, -1), valid.view(batch, -1)
        parts.append((*take([(state["fading_k"], fading_k), (state["fading_v"], fading_v)], rows, valid), valid))
    new_k, new_v, new_valid = (
        torch.cat([part[x].unflatten(1, (blocks, -1)) for part in parts], dim=2) for x in range(3)
    )  # fmt: skip
    published_BP = torch.where(has_BP, torch.arange(1, blocks + 1, device=pos.device), 0)
    before_BP = F.pad(published_BP.cummax(1).values[:, :-1], (1, 0))
    behind_BPW = torch.arange(blocks * window, device=pos.device).view(blocks, window) >= place_BP[:, :, None]
    latest_BT = torch.where(behind_BPW, published_BP[:, :, None], before_BP[:, :, None]).view(batch, -1)[:, :length]
    slot = torch.where(pos >= window, latest_BT, -1)
    return Published(
        torch.cat((state["frozen_k"].to(k.dtype)[:, None], new_k), dim=1),
        torch.cat((state["frozen_v"].to(v.dtype)[:, None], new_v), dim=1),
        torch.cat((state["frozen"][:, None], new_valid), dim=1),
        slot.to(torch.int32),
        F.pad(place_BP, (1, 0)).to(torch.int32),
        last,
    )


@torch.no_grad()
def _largest(m: int, score: Tensor, stop: Tensor, begun: Tensor, state: State) -> tuple[Tensor, Tensor]:
    """Rows, int64, and which are valid, [B, queries, m]; see `prefix.largest_kernel`."""
    from baton.kernels.eidetic_attention import prefix

    (batch, length), queries, entries = score.shape, stop.shape[1], state["score"].shape[1]
    rows = torch.empty(batch, queries, m, dtype=torch.int64, device=score.device)
    valid = torch.empty(batch, queries, m, dtype=torch.bool, device=score.device)
    prefix.largest_kernel[(queries, batch)](
        score.contiguous(), state["score"].contiguous(), state["where"].contiguous(), stop.to(torch.int32), begun.to(torch.int32),
        rows, valid, length, queries, E=entries, M=m, BM=table.power_of_two(max(m, entries, 16)), num_warps=1,
    )  # fmt: skip
    return rows, valid


@torch.no_grad()
def _eidetic(m: int, window: int, score: Tensor, place_BP: Tensor, begun_BP: Tensor, has_BP: Tensor, state: State) -> _Chosen:
    """The m largest scores of each publication's document before it."""
    (batch, blocks), entries = place_BP.shape, state["score"].shape[1]
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
