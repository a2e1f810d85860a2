"""B'MOJO's attention as a `StateFirstRecurrence`, and its innovation score as a `Recurrence`."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from baton.kernels.common.attention_tails import new_tails
from baton.kernels.common.chunked_autograd import state_dtype
from baton.kernels.common.example_inputs import randn
from baton.kernels.eidetic_attention.chunked import Options
from baton.kernels.eidetic_attention.one_token import eidetic_attention_one_token
from baton.kernels.eidetic_attention.op import (
    Norm,
    eidetic_attention,
    eidetic_attention_final_state,
    empty,
    innovation,
    state_specs,
)
from baton.kernels.eidetic_attention.reference import eidetic_attention_reference
from baton.kernels.protocol import Inputs, Recurrence, State, StateFirstRecurrence, StateSpec


@dataclass(frozen=True)
class EideticAttention(StateFirstRecurrence):
    """Inputs q, k, v, fading_k, fading_v, score along time. See `op.eidetic_attention`."""

    window: int
    n_fading: int
    n_eidetic: int
    sliding: bool = False
    input_names = ("q", "k", "v", "fading_k", "fading_v", "score")
    num_time_inputs = 6
    needs_pos = True
    bfloat16_limit = 2e-2  # on a GPU the fused attention also rounds its weights

    @property
    def name(self) -> str:  # type: ignore[override]
        sliding = "-sliding" if self.sliding else ""
        return f"eidetic_attention-w{self.window}-f{self.n_fading}-e{self.n_eidetic}{sliding}"

    def _options(self, inputs: Inputs) -> Options:
        return Options(self.window, self.n_fading, self.n_eidetic, self.sliding, inputs[0].shape[-1] ** -0.5)

    def state_specs(self, inputs: Inputs) -> tuple[StateSpec, ...]:
        return state_specs(self._options(inputs), inputs[1], state_dtype(*inputs))

    @property
    def _sizes(self) -> dict[str, Any]:
        return {"window": self.window, "n_fading": self.n_fading, "n_eidetic": self.n_eidetic, "sliding": self.sliding}

    def initial(self, inputs: Inputs) -> State:
        return empty(self.state_specs(inputs), inputs[0].shape[0], inputs[0].device)

    def run(self, inputs: Inputs, pos: Tensor | None, state: State | None) -> tuple[Tensor, State]:
        return eidetic_attention(*inputs, **self._sizes, pos=pos, state=state)  # type: ignore[arg-type]

    def step(self, inputs: Inputs, pos: Tensor | None, state: State) -> tuple[Tensor, State]:
        assert pos is not None, "the row of each token is that of its position"
        return eidetic_attention_one_token(inputs, self._options(inputs), pos=pos, state=state)

    def final_state(self, inputs: Inputs, pos: Tensor | None, state: State) -> State:
        return eidetic_attention_final_state(*inputs, **self._sizes, pos=pos, state=state)  # type: ignore[arg-type]

    def forward_no_state(self, inputs: Inputs, pos: Tensor | None, state: State | None) -> Tensor:
        return eidetic_attention(*inputs, **self._sizes, pos=pos, state=state, need_final_state=False)[0]  # type: ignore[arg-type]

    def reference(self, inputs: Inputs, pos: Tensor | None, state: State | None) -> tuple[Tensor, State]:
        assert pos is not None
        state = self.initial(inputs) if state is None else state
        return eidetic_attention_reference(*inputs, **self._sizes, pos=pos, state=state, scale=inputs[0].shape[-1] ** -0.5)

    def example(self, generator: torch.Generator, batch: int, length: int, dtype: torch.dtype, wide: bool) -> tuple[Inputs, State]:
        """The State is the one that some tokens of a previous document left; scores have ties."""
        heads, groups, dim = (6, 3, 17) if wide else (2, 1, 3)

        def inputs(tokens: int) -> Inputs:
            normal = partial(randn, generator, dtype=dtype)
            keyed = [normal(batch, tokens, groups, dim) for _ in range(4)]
            score = (3 * torch.rand(batch, tokens, generator=generator, dtype=dtype)).round(decimals=1)
            return (2 * normal(batch, tokens, heads, dim), *keyed, score)

        pos = torch.arange(2 * self.window + 3).repeat(batch, 1) - torch.arange(batch)[:, None]
        with torch.no_grad():
            _, state = self.run(inputs(pos.shape[1]), pos.clamp(min=0), None)
        return inputs(length), state


@dataclass(frozen=True)
class Innovation(Recurrence):
    """Input y along time, then the predictor's weights; State {tail [batch, k, channels]}. No gradient. norm: of the error; see
    `op.innovation`.

    Not among the RECURRENCES that test_law.py differentiates; tests/kernels/test_eidetic_attention.py tests its split invariance.
    """

    norm: Norm = "l2"
    name = "innovation"
    input_names = ("y", "weights")
    num_time_inputs = 1
    needs_pos = True
    differentiable = False

    def state_specs(self, inputs: Inputs) -> tuple[StateSpec, ...]:
        y, weights = inputs
        return (StateSpec("y", (weights.shape[0], y.shape[2]), y.dtype, tp=None, grad=False),)

    def run(self, inputs: Inputs, pos: Tensor | None, state: State | None) -> tuple[Tensor, State]:
        y, weights = inputs
        assert pos is not None
        score, tail = innovation(y, weights, pos, self._tail(inputs, state), norm=self.norm)
        return score, {"y": tail}

    def forward_no_state(self, inputs: Inputs, pos: Tensor | None, state: State | None) -> Tensor:
        y, weights = inputs
        assert pos is not None
        return innovation(y, weights, pos, self._tail(inputs, state), norm=self.norm, need_tail=False)[0]

    @staticmethod
    def _tail(inputs: Inputs, state: State | None) -> Tensor:
        y, weights = inputs
        return y.new_zeros(y.shape[0], weights.shape[0], y.shape[2]) if state is None else state["y"]

    def tail_state(self, inputs: Inputs, pos: Tensor | None) -> State | None:
        y, weights = inputs
        assert pos is not None
        n = weights.shape[0]
        if y.shape[1] < n:
            return None
        return {"y": new_tails({"y": y}, {"y": n}, pos[:, -1].to(torch.int64) + 1)["y"].contiguous()}

    def reference(self, inputs: Inputs, pos: Tensor | None, state: State | None) -> tuple[Tensor, State]:
        """One token at a time."""
        parts = []
        for t in range(inputs[0].shape[1]):
            score, state = self.run((inputs[0][:, t : t + 1], inputs[1]), None if pos is None else pos[:, t : t + 1], state)
            parts.append(score)
        assert state is not None
        return torch.cat(parts, dim=1), state

    def example(self, generator: torch.Generator, batch: int, length: int, dtype: torch.dtype, wide: bool) -> tuple[Inputs, State]:
        channels = 67 if wide else 5
        weights = torch.tensor([0.5, 0.25, 0.125], dtype=dtype)
        return (randn(generator, batch, length, channels, dtype=dtype), weights), {
            "y": randn(generator, batch, 3, channels, dtype=dtype)
        }


RECURRENCES = (
    EideticAttention(4, 2, 3),
    EideticAttention(3, 3, 7),
    EideticAttention(5, 0, 2),
    EideticAttention(4, 1, 0),
    EideticAttention(3, 0, 0, sliding=True),
    EideticAttention(4, 0, 3, sliding=True),
)
