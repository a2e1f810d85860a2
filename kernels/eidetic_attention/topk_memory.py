"""Prefix top-k memory: the tokens of a document with the largest scores so far.

Shape suffixes: B batch, E memory entries, L tokens.

The largest m of a union are among the largest m of its parts, so a memory can be passed over any split of the sequence. Entries are
kept in time order and compared by score, then age: of equal scores the older token is kept, wherever the split is. Indices are
constants to autograd; gradients flow through the selected rows.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Selection(NamedTuple):
    """The selected entries, [B, m] each, in time order, valid ones first.

    rows: index into the entries followed by the tokens; score and where: 0 and -1 where not valid.
    """

    rows: Tensor
    valid: Tensor
    score: Tensor
    where: Tensor


@torch.no_grad()
def topk(m: int, score_BE: Tensor, where_BE: Tensor, score_BL: Tensor, where_BL: Tensor, counted_BJ: Tensor) -> Selection:
    """The m largest scores among memory entries and tokens.

    Args:
        m: number of entries to keep.
        score_BE, where_BE: the entries in time order; where is the position in the document, -1 for an empty entry.
        score_BL, where_BL: the tokens, all later than the entries.
        counted_BJ: bool [B, E + L], which of the entries and tokens are candidates.
    """
    score_BJ = torch.cat((score_BE, score_BL), dim=1)
    where_BJ = torch.cat((where_BE, where_BL), dim=1)
    counted_BJ = counted_BJ & (where_BJ >= 0)
    candidates = score_BJ.masked_fill(~counted_BJ, -torch.inf)
    chosen = candidates.argsort(dim=1, descending=True, stable=True)[:, :m]
    if chosen.shape[1] < m:
        chosen = torch.nn.functional.pad(chosen, (0, m - chosen.shape[1]))
        enough = torch.arange(m, device=chosen.device) < score_BJ.shape[1]
    else:
        enough = chosen.new_ones(m, dtype=torch.bool)
    valid = counted_BJ.gather(1, chosen) & enough
    # valid entries first, in time order
    order = chosen.masked_fill(~valid, score_BJ.shape[1]).argsort(dim=1, stable=True)
    index, valid = chosen.gather(1, order), valid.gather(1, order)
    return Selection(
        index.masked_fill(~valid, 0),
        valid,
        score_BJ.gather(1, index).masked_fill(~valid, 0.0),
        where_BJ.gather(1, index).masked_fill(~valid, -1),
    )


def gather_rows(sources: Sequence[tuple[Tensor | None, Tensor]], index: Tensor, valid: Tensor) -> list[Tensor]:
    """Rows `index` [B, m] of each pair: before [B, E, ...] (None in all pairs: no rows before) followed by rows [B, L, ...]. 0
    where not valid: [B, m, ...] in the dtype of rows.

    The two tensors are not concatenated: gathering from a span copies the gathered rows, not the span. Whole rows are indexed by
    one number, because the deterministic backward pass of a gather, which has an index per element, sorts them all on a GPU.
    Advanced indexing is used and not index_select: rows are selected more than once, and its gradients are added in a fixed order
    even when deterministic algorithms were not requested.
    """
    first, nothing = sources[0][0], ~valid
    entries = 0 if first is None else first.shape[1]
    at_rows = _flat(index - entries if entries else index, sources[0][1].shape[1])
    at_before, inside = (_flat(index, entries), index < entries) if entries else (at_rows, nothing)
    found = []
    for before, rows in sources:
        wide = (*index.shape, *[1] * (rows.dim() - 2))
        taken = rows.flatten(0, 1)[at_rows].unflatten(0, index.shape)
        if before is not None:
            old = before.flatten(0, 1)[at_before].unflatten(0, index.shape).to(rows.dtype)
            taken = torch.where(inside.view(wide), old, taken)
        found.append(taken.masked_fill(nothing.view(wide), 0.0))
    return found


def _flat(index: Tensor, rows: int) -> Tensor:
    """Rows [B, m] of each lane, clamped to existing ones, as indices into the rows of all lanes: [B m]."""
    lanes = torch.arange(0, len(index) * rows, rows, device=index.device)
    return (index.clamp(0, rows - 1) + lanes[:, None]).flatten()
