"""B'MOJO's attention of one token a sequence, in decoding: as `chunked`, of which it is the case of one token, but the State is
written over, and keys and values of the window and of fading tokens have rows in turn (`StateSpec.tail`), so that nothing is moved.

Shape suffixes: B batch, M memory rows (eidetic, then fading), J rows, G key heads, K dim.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.kernels.common.attention_tails import masked_attention
from baton.kernels.eidetic_attention.chunked import TAILS, Options
from baton.kernels.eidetic_attention.topk_memory import gather_rows, topk
from baton.kernels.protocol import Inputs, State


@torch.no_grad()
def eidetic_attention_one_token(inputs: Inputs, options: Options, *, pos: Tensor, state: State) -> tuple[Tensor, State]:
    """As `op.eidetic_attention` for T = 1; what it checks is not checked."""
    q, k, v, *_, score = inputs
    window, at_B = options.window, pos[:, 0].to(torch.int64)
    # tokens of the document that have been read; none of another document is seen
    before_B = torch.minimum(state["seen"], at_B)
    for name, x in zip(TAILS, inputs[1:], strict=False):
        if name in state:
            rows = state[name]
            rows.scatter_(1, (at_B % rows.shape[1])[:, None, None, None].expand_as(x), x.to(rows.dtype))
    seen = [_distances(state["k"], at_B) <= before_B.clamp(max=window - 1)[:, None]]
    parts = [(state["k"], state["v"])]
    if options.sliding:
        back_BJ = _distances(state["fading_k"], at_B)
        seen.append((back_BJ >= window) & (back_BJ <= before_B.clamp(max=2 * window - 1)[:, None]))
        parts.append((state["fading_k"], state["fading_v"]))
    if options.n_eidetic + options.n_fading:
        _publish(options, at_B, before_B, state)
        seen.append(state["frozen"])
        parts.append((state["frozen_k"], state["frozen_v"]))
    if options.n_eidetic:
        _remember(k, v, score, at_B, state)
    keys, values = (torch.cat(rows, dim=1).to(q.dtype) for rows in zip(*parts, strict=True))
    seen_BJ = torch.cat(seen, dim=1)
    batch, _, heads, dim = q.shape
    shared = heads // k.shape[2]
    # heads that share keys are queries of one head
    q = q.reshape(batch, -1, shared, dim).transpose(1, 2)
    y = masked_attention(q, keys, values, seen_BJ[:, None].expand(-1, shared, -1), options.scale)
    state["seen"].copy_(before_B + 1)
    return y.transpose(1, 2).reshape(batch, 1, heads, dim), state


def _distances(rows: Tensor, at_B: Tensor) -> Tensor:
    """How far back each row's token is, [B, J]; where a row has none yet, more tokens than have been read."""
    count = rows.shape[1]
    return (at_B[:, None] - torch.arange(count, device=at_B.device)) % count


def _publish(options: Options, at_B: Tensor, before_B: Tensor, state: State) -> None:
    """At a positive multiple of the window the memory in use is replaced; before the first one there is none."""
    n, at_M = options.n_fading, []
    publishes_B = (at_B % options.window == 0) & (at_B > 0)
    found: dict[str, list[Tensor]] = {"k": [], "v": []}
    if options.n_eidetic:
        at_M.append((state["where"] >= 0) & (at_B > 0)[:, None])
        for name, new in found.items():
            new.append(state[f"best_{name}"])
    if n:
        back_n = torch.arange(n, 0, -1, device=at_B.device)
        at_M.append(back_n <= before_B[:, None])
        rows = state["fading_k"].shape[1]
        index_Bn = (at_B[:, None] - back_n) % rows
        lanes_B1 = torch.arange(len(at_B), device=at_B.device)[:, None]
        for name, new in found.items():
            new.append(state[f"fading_{name}"][lanes_B1, index_Bn])
    valid_BM = torch.cat(at_M, dim=1)
    state["frozen"].copy_(torch.where(publishes_B[:, None], valid_BM, state["frozen"] & (at_B >= options.window)[:, None]))
    for name, new in found.items():
        frozen = state[f"frozen_{name}"]
        new_BMGK = torch.cat(new, dim=1).masked_fill(~valid_BM[:, :, None, None], 0.0)
        frozen.copy_(torch.where(publishes_B[:, None, None, None], new_BMGK, frozen))


def _remember(k: Tensor, v: Tensor, score_B1: Tensor, at_B: Tensor, state: State) -> None:
    """Puts the token among the entries if there is room, or if an entry has a smaller score."""
    entries = state["score"].shape[1]
    counted_BJ = F.pad((at_B > 0)[:, None].expand(-1, entries), (0, 1), value=True)  # none of another document
    best = topk(entries, state["score"], state["where"], score_B1.to(state["score"].dtype), at_B[:, None], counted_BJ)
    best_k, best_v = gather_rows([(state["best_k"], k), (state["best_v"], v)], best.rows, best.valid)
    for name, x in (("best_k", best_k), ("best_v", best_v), ("score", best.score), ("where", best.where)):
        state[name].copy_(x)
