"""Window attention as a `Recurrence` whose State is a tail of keys and values, and full attention, whose State is all of them."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from baton.kernels.common.attention_tails import masked_attention, new_tails, seen_after
from baton.kernels.common.example_inputs import randn
from baton.kernels.protocol import GatheredRecurrence, Inputs, Recurrence, State, StateSpec
from baton.kernels.window_attention.op import full_attention_backward, full_attention_forward, window_attention
from baton.kernels.window_attention.reference import window_attention_reference


@dataclass(frozen=True)
class WindowAttention(Recurrence):
    """Inputs q, with sinks also those, k, v along time; State {k, v [batch, window - 1, key heads, dim], seen [batch]}. See
    `op.window_attention`. soft_cap: of the scores; grouped: whether examples have fewer key heads."""

    window: int | None
    grouped: bool = False
    sinks: bool = False
    soft_cap: float | None = None
    bfloat16_limit = 2e-2  # on a GPU the fused attention also rounds its weights

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"window_attention-{self.window}{self._variant}"

    @property
    def _variant(self) -> str:
        cap = "" if self.soft_cap is None else f"-cap-{self.soft_cap}"
        return f"{'-grouped' if self.grouped else ''}{'-sinks' if self.sinks else ''}{cap}"

    @property
    def input_names(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("q", "sinks", "k", "v") if self.sinks else ("q", "k", "v")

    @property
    def num_time_inputs(self) -> int:  # type: ignore[override]
        return len(self.input_names)

    def state_specs(self, inputs: Inputs) -> tuple[StateSpec, ...]:
        k, v = inputs[-2:]
        return tail_state_specs(k, v, self.window, in_turn=True)

    def run(self, inputs: Inputs, pos: Tensor | None, state: State | None) -> tuple[Tensor, State]:
        return self._run(inputs, pos, state, need_final_state=True)

    def forward_no_state(self, inputs: Inputs, pos: Tensor | None, state: State | None) -> Tensor:
        return self._run(inputs, pos, state, need_final_state=False)[0]

    def _run(self, inputs: Inputs, pos: Tensor | None, state: State | None, *, need_final_state: bool) -> tuple[Tensor, State]:
        (q, k, v), sinks = _parted(inputs)
        options: dict[str, Any] = {"window": self.window, "sinks": sinks, "soft_cap": self.soft_cap}
        return window_attention(q, k, v, pos=pos, state=state, need_final_state=need_final_state, **options)

    def step(self, inputs: Inputs, pos: Tensor | None, state: State) -> tuple[Tensor, State]:
        (q, k, v), sinks = _parted(inputs)
        assert pos is not None, "the row of each token is that of its position"
        read, rows = pos[:, 0].to(torch.int64), state["k"].shape[1]
        for name, x in (("k", k), ("v", v)):
            state[name].scatter_(1, (read % rows)[:, None, None, None].expand_as(x), x.to(state[name].dtype))
        batch, _, heads, dim = q.shape
        groups = k.shape[2]

        def by_key_head(x: Tensor) -> Tensor:
            """Heads that share keys as queries of one head: [batch, heads / key heads, key heads, ...]."""
            return x.reshape(batch, groups, heads // groups, *x.shape[3:]).transpose(1, 2)

        # a window that is full has a row for each of its tokens, in whatever order
        mask = (torch.arange(rows, device=q.device) <= read[:, None])[:, None].expand(-1, heads // groups, -1)
        keys, values = (state[name].to(q.dtype) for name in ("k", "v"))
        given = () if sinks is None else (by_key_head(sinks),)
        y = masked_attention(by_key_head(q), keys, values, mask, dim**-0.5, *given, soft_cap=self.soft_cap)
        state["seen"].copy_(read + 1 if self.window is None else (read + 1).clamp(max=self.window - 1))
        return y.transpose(1, 2).reshape(batch, 1, heads, dim), state

    def reference(self, inputs: Inputs, pos: Tensor | None, state: State | None) -> tuple[Tensor, State]:
        (q, k, v), sinks = _parted(inputs)
        options: dict[str, Any] = {"scale": q.shape[-1] ** -0.5, "sinks": sinks, "soft_cap": self.soft_cap}
        return window_attention_reference(q, k, v, window=self.window, pos=pos, state=state, **options)

    def tail_state(self, inputs: Inputs, pos: Tensor | None) -> State | None:
        k, v = inputs[-2:]
        if self.window is None or k.shape[1] < self.window - 1:
            return None
        rows = self.window - 1
        seen = seen_after(k.shape[1], pos, torch.zeros(k.shape[0], dtype=torch.int64, device=k.device)).clamp(max=rows)
        return {**new_tails({"k": k, "v": v}, {"k": rows, "v": rows}, seen), "seen": seen}

    def example(self, generator: torch.Generator, batch: int, length: int, dtype: torch.dtype, wide: bool) -> tuple[Inputs, State]:
        heads, groups, dim = (6, 2, 17) if wide else (4, 2, 3)
        groups = groups if self.grouped else heads
        normal = partial(randn, generator, dtype=dtype)
        shape = (batch, length, groups, dim)
        rows = 3 if self.window is None else self.window - 1
        # lanes that have read less than their tail holds, as much, and more; rows that were not read are not 0 here
        seen = torch.tensor([rows + 40, max(0, rows - 2), rows])[:batch]
        state = {"k": normal(batch, rows, groups, dim), "v": normal(batch, rows, groups, dim), "seen": seen}
        sinks = (2 * normal(batch, length, heads),) if self.sinks else ()
        return (3 * normal(batch, length, heads, dim), *sinks, normal(*shape), normal(*shape)), state


@dataclass(frozen=True)
class FullAttention(WindowAttention, GatheredRecurrence):
    """Attention to the whole document: `WindowAttention` without a window. Inputs are the same; State {k, v [batch, tokens read,
    key heads, dim], seen [batch]}, which grows with every token."""

    window: None = None

    @property
    def num_queries(self) -> int:  # type: ignore[override]
        return 2 if self.sinks else 1

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"full_attention{self._variant}"

    def attend(self, queries: Inputs, gathered: Inputs, pos: Tensor | None) -> tuple[Tensor, Inputs]:
        (q, *sinks), (k, v) = queries, gathered
        return full_attention_forward(q, k, v, pos, *sinks, soft_cap=self.soft_cap)

    def attend_backward(
        self, queries: Inputs, gathered: Inputs, pos: Tensor | None, y: Tensor, saved: Inputs, dy: Tensor
    ) -> tuple[Inputs, Inputs]:
        (q, *sinks), (k, v) = queries, gathered
        dq, dk, dv, *dsinks = full_attention_backward(q, k, v, pos, y, saved, dy, *sinks, soft_cap=self.soft_cap)
        return (dq, *dsinks), (dk, dv)

    def span_state(self, inputs: Inputs, pos: Tensor | None) -> State:
        k, v = inputs[-2:]
        seen = seen_after(k.shape[1], pos, torch.zeros(k.shape[0], dtype=torch.int64, device=k.device))
        return {"k": k, "v": v, "seen": seen}


def _parted(inputs: Inputs) -> tuple[Inputs, Tensor | None]:
    """q, k and v, and the sinks or None."""
    q, *sinks, k, v = inputs
    return (q, k, v), sinks[0] if sinks else None


def tail_state_specs(k: Tensor, v: Tensor, window: int | None, *, in_turn: bool = False) -> tuple[StateSpec, ...]:
    """StateSpecs of a tail of keys and values, split over the tensor group by heads. in_turn: StateSpec.tail, of a window."""
    rows, grows = (0, True) if window is None else (window - 1, False)
    tail = in_turn and not grows
    return (
        StateSpec("k", (rows, *k.shape[2:]), k.dtype, tp=1, grad=True, grows=grows, tail=tail),
        StateSpec("v", (rows, *v.shape[2:]), v.dtype, tp=1, grad=True, grows=grows, tail=tail),
        StateSpec("seen", (), torch.int64, tp=None, grad=False),
    )


RECURRENCES = (WindowAttention(5), WindowAttention(8, grouped=True, sinks=True, soft_cap=1.5), FullAttention())
