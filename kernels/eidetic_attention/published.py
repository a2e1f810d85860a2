"""All the memories that a span of tokens sees, chosen at once.

The one thing to know: publications of a lane are at least a window apart, so a block of a window's tokens has at most one, and what
a publication adds to the one before is chosen among the window between them. The largest of unions are then found by doubling, in
as many steps as the number of publications has binary digits.

Shape suffixes: B batch, T tokens, W the window, P blocks of W tokens, E eidetic rows, G key heads, K dim.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.kernels.eidetic_attention.memory import largest, take
from baton.kernels.protocol import State


class Published(NamedTuple):
    """Memories of a span: the one that was frozen when it began, then those of its blocks of a window's tokens, used or not.

    Attributes:
        k, v: [B, P + 1, M, G, K], eidetic rows, then fading ones; 0 where not valid.
        valid: which rows hold a token, bool [B, P + 1, M].
        slot: the memory that each token sees, int32 [B, T]; -1: none.
        begin: the first token that may see each, int32 [B, P + 1]; T: nobody does.
    """

    k: Tensor
    v: Tensor
    valid: Tensor
    slot: Tensor
    begin: Tensor


class _Chosen(NamedTuple):
    """Tokens chosen for each publication, [B P, E] in the order of time: the row in the entries followed by the span's tokens."""

    row: Tensor
    valid: Tensor
    score: Tensor
    where: Tensor


def publish(
    k: Tensor, v: Tensor, fading_k: Tensor, fading_v: Tensor, score: Tensor, *, window: int, n_fading: int, n_eidetic: int,
    pos: Tensor, state: State,
) -> Published:  # fmt: skip
    """Of a span of any length; the State as `op.leaves` describes it. pos: int64 [B, T]."""
    batch, length = pos.shape
    blocks = -(-length // window)
    pos_BPW = F.pad(pos, (0, blocks * window - length)).view(batch, blocks, window)
    publishes_BPW = (pos_BPW % window == 0) & (pos_BPW > 0)
    has_BP = publishes_BPW.any(2)
    place_BP = publishes_BPW.to(torch.int8).argmax(2) + torch.arange(0, blocks * window, window, device=pos.device)
    place_BP = torch.where(has_BP, place_BP, length)
    begun_BP = place_BP - pos.gather(1, place_BP.clamp(max=length - 1))  # where the document begins, before the span if negative
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    if n_eidetic:
        chosen = _eidetic(n_eidetic, window, score, place_BP, begun_BP, has_BP, state)
        rows, valid = (x.view(batch, -1) for x in (chosen.row, chosen.valid))
        parts.append((take(state["best_k"], k, rows, valid), take(state["best_v"], v, rows, valid), valid))
    if n_fading:
        back = torch.arange(n_fading, 0, -1, device=pos.device)
        valid = has_BP[:, :, None] & (back <= (place_BP + state["seen"][:, None])[:, :, None])
        rows, valid = (n_fading + place_BP[:, :, None] - back).view(batch, -1), valid.view(batch, -1)
        parts.append((take(state["fading_k"], fading_k, rows, valid), take(state["fading_v"], fading_v, rows, valid), valid))
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
    )


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
