"""B'MOJO's attention as a loop over tokens: the reference that every other implementation is tested against.

Shape suffixes: B batch, T time, H query heads, G key heads, K dim.

The memory is published when pos is a multiple of the window and frozen until the next such token. The streaming top-k by score is
kept; ties go to the older token. Gradients come from autograd, through the selected rows.
"""

from typing import Any

import torch
from torch import Tensor

from baton.kernels.protocol import State

Row = tuple[Tensor, Tensor]
"""A key and a value, [G, K] each."""


def eidetic_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    fading_k: Tensor,
    fading_v: Tensor,
    score: Tensor,
    *,
    window: int,
    n_fading: int,
    n_eidetic: int,
    sliding: bool,
    pos: Tensor,
    state: State,
    scale: float,
) -> tuple[Tensor, State]:
    """As `op.eidetic_attention`; nothing is checked. Zancato et al. 2024, Algorithm 1 in chunks of `window` tokens."""
    group = q.shape[2] // k.shape[2]
    lanes, outputs = [], []
    for b in range(q.shape[0]):
        lane = _Lane(state, b)
        lane_outputs = []
        for t in range(q.shape[1]):
            at = int(pos[b, t])
            lane.seen = min(lane.seen, at)
            if at == 0:
                lane.best = []
            if at < window:
                lane.frozen = []
            elif at % window == 0:
                best = [row for _, _, row in lane.best]
                newest = lane.fading[: min(n_fading, lane.seen)][::-1]
                lane.frozen = [*best, *[None] * (n_eidetic - len(best)), *[None] * (n_fading - len(newest)), *newest]
            lane.seen += 1
            lane.window.insert(0, (k[b, t], v[b, t]))
            lane.fading.insert(0, (fading_k[b, t], fading_v[b, t]))
            rows = lane.window[: min(window, lane.seen)] + [row for row in lane.frozen if row is not None]
            if sliding:
                rows = rows + lane.fading[window : min(2 * window, lane.seen)]
            K, V = (torch.stack(x, dim=1).repeat_interleave(group, dim=0) for x in zip(*rows, strict=True))
            weights = torch.softmax(scale * torch.einsum("hk,hjk->hj", q[b, t], K), dim=-1)
            lane_outputs.append(torch.einsum("hj,hjk->hk", weights, V))
            lane.best.append((float(score[b, t].detach()), at, (k[b, t], v[b, t])))
            if len(lane.best) > n_eidetic:
                # in time order, so the last of the smallest is the youngest: of equal scores the older one stays
                lane.best.pop(min(range(len(lane.best)), key=lambda n: (lane.best[n][0], -n)))
        outputs.append(torch.stack(lane_outputs))
        lanes.append(lane)
    return torch.stack(outputs), _pack(lanes, state)


class _Lane:
    """The State of one lane as lists: window and fading newest first, best (score, position, row) oldest first."""

    def __init__(self, state: State, b: int) -> None:
        self.seen = int(state["seen"][b])
        self.window = self._rows(state, "k", "v", b)[::-1]
        self.fading = self._rows(state, "fading_k", "fading_v", b)[::-1] if "fading_k" in state else []
        self.best: list[tuple[float, int, Row]] = []
        self.frozen: list[Row | None] = []
        if "score" in state:
            entries = zip(state["score"][b], state["where"][b], self._rows(state, "best_k", "best_v", b), strict=True)
            self.best = [(float(score.detach()), int(where), row) for score, where, row in entries if where >= 0]
        if "frozen" in state:
            rows = zip(state["frozen"][b], self._rows(state, "frozen_k", "frozen_v", b), strict=True)
            self.frozen = [row if valid else None for valid, row in rows]

    @staticmethod
    def _rows(state: State, keys: str, values: str, b: int) -> list[Row]:
        return list(zip(state[keys][b], state[values][b], strict=True))


def _pack(lanes: list[_Lane], like: State) -> State:
    """The lists as tensors shaped like those of `like`: newest rows last, empty rows 0."""

    def rows(lists: list[list[Row | None]], names: tuple[str, str], last: bool) -> State:
        packed: dict[str, Any] = {}
        for place, name in enumerate(names):
            n, nothing = like[name].shape[1], like[name].new_zeros(like[name].shape[2:])
            filled = [[nothing if row is None else row[place] for row in entries] for entries in lists]
            padded = [[nothing] * (n - len(own)) + own if last else own + [nothing] * (n - len(own)) for own in filled]
            packed[name] = torch.stack([torch.stack(own) if n else like[name][0] for own in padded])
        return packed

    def newest(entries: list[Row], n: int, seen: int) -> list[Row | None]:
        return [*entries[: min(n, seen)][::-1]]

    state = rows([newest(lane.window, like["k"].shape[1], lane.seen) for lane in lanes], ("k", "v"), last=True)
    state["seen"] = torch.tensor([lane.seen for lane in lanes])
    if "fading_k" in like:
        n = like["fading_k"].shape[1]
        state |= rows([newest(lane.fading, n, lane.seen) for lane in lanes], ("fading_k", "fading_v"), last=True)
    if "score" in like:
        n = like["score"].shape[1]
        bests = [lane.best for lane in lanes]
        state |= rows([[entry[2] for entry in best] for best in bests], ("best_k", "best_v"), last=False)
        state["score"] = torch.tensor(
            [[score for score, *_ in best] + [0.0] * (n - len(best)) for best in bests], dtype=like["score"].dtype
        )
        state["where"] = torch.tensor([[where for _, where, _ in best] + [-1] * (n - len(best)) for best in bests])
    if "frozen" in like:
        n = like["frozen"].shape[1]
        state |= rows([lane.frozen for lane in lanes], ("frozen_k", "frozen_v"), last=False)
        state["frozen"] = torch.tensor([[row is not None for row in lane.frozen or [None] * n] for lane in lanes])
    return state
