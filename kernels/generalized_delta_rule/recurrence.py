"""The generalized delta rule as a LinearRecurrence with a transition matrix per head."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import normalize

from baton.kernels.common.autocast import without_autocast
from baton.kernels.common.chunked_autograd import state_dtype
from baton.kernels.common.example_inputs import extreme_gates, extreme_log_gates, randn
from baton.kernels.generalized_delta_rule.chunk_launch import decays_allow_chunks, generalized_delta_rule_transition_triton
from baton.kernels.generalized_delta_rule.chunked import generalized_delta_rule_transition
from baton.kernels.generalized_delta_rule.op import generalized_delta_rule
from baton.kernels.generalized_delta_rule.reference import generalized_delta_rule_reference
from baton.kernels.generalized_delta_rule.triton_launch import generalized_delta_rule_step_triton, use_triton
from baton.kernels.protocol import Inputs, LinearRecurrence, MatrixAffine, State, StateSpec, StateTransition


@dataclass(frozen=True)
class GeneralizedDeltaRule(LinearRecurrence):
    """Inputs r, k, v, a, b, g along time; State {S [batch, heads, d_key, d_value]}. See `op.generalized_delta_rule`.

    scale: of the output. lower_bound: of g, if one is known.
    """

    scale: float = 1.0
    lower_bound: float | None = None
    name = "generalized_delta_rule"
    input_names = ("r", "k", "v", "a", "b", "g")
    num_time_inputs = 6

    def state_specs(self, inputs: Inputs) -> tuple[StateSpec, ...]:
        k, v = inputs[1], inputs[2]
        return (StateSpec("S", (k.shape[2], k.shape[3], v.shape[3]), state_dtype(*inputs), tp=0, grad=True),)

    def run(self, inputs: Inputs, pos: Tensor | None, state: State | None) -> tuple[Tensor, State]:
        initial_state = None if state is None else state["S"]
        o, S = generalized_delta_rule(*inputs, scale=self.scale, pos=pos, initial_state=initial_state, lower_bound=self.lower_bound)
        return o, {"S": S}

    def step(self, inputs: Inputs, pos: Tensor | None, state: State) -> tuple[Tensor, State]:
        if not use_triton(inputs[1], state_dtype(*inputs)):
            return super().step(inputs, pos, state)
        o, S = generalized_delta_rule_step_triton(*inputs, scale=self.scale, pos=pos, state=state["S"])
        return o, {"S": S}

    def reference(self, inputs: Inputs, pos: Tensor | None, state: State | None) -> tuple[Tensor, State]:
        initial_state = None if state is None else state["S"]
        o, S = generalized_delta_rule_reference(*inputs, scale=self.scale, pos=pos, initial_state=initial_state)
        return o, {"S": S}

    def transition_matrix(self, inputs: Inputs, pos: Tensor | None) -> State:
        """The product of all Diag(exp(g)) + b a^T, the last one leftmost, [batch, heads, d_key, d_key]."""
        return {"S": self._transition(inputs, pos)[0]}

    def state_transition(self, transition: State, add: State) -> StateTransition:
        return MatrixAffine(transition, add)

    def adjoint(self, transition: State) -> State:
        return {"S": transition["S"].transpose(2, 3)}

    def begin(self, inputs: Inputs, pos: Tensor | None) -> tuple[State, StateTransition]:
        """One pass that reads nothing for both parts: the transition and what is added share everything but their columns."""
        matrix, add = self._transition(inputs, pos)
        return {"S": matrix}, self.state_transition({"S": matrix}, {"S": add})

    def _transition(self, inputs: Inputs, pos: Tensor | None) -> tuple[Tensor, Tensor]:
        by_kernels = use_triton(inputs[1], state_dtype(*inputs)) and decays_allow_chunks(self.lower_bound)
        implementation = generalized_delta_rule_transition_triton if by_kernels else generalized_delta_rule_transition
        with torch.no_grad(), without_autocast(inputs[1]):
            return implementation(*inputs[1:], pos=pos)

    def example(self, generator: torch.Generator, batch: int, length: int, dtype: torch.dtype, wide: bool) -> tuple[Inputs, State]:
        """a of length 1 and b of at most its length, not parallel to it, some tokens' equal to those before and some 0."""
        heads, d_key, d_value = (3, 17, 19) if wide else (2, 3, 4)
        normal = partial(randn, generator, dtype=dtype)
        shape = (batch, length, heads, d_key)
        a = normalize(normal(*shape), dim=-1)
        again, nothing = torch.rand(2, batch, length, heads, 1, generator=generator)
        a = torch.where(again < 0.2, a.roll(1, dims=1), a).masked_fill(nothing < 0.1, 0.0)
        strengths = extreme_gates(generator, *shape, dtype=dtype)
        g = extreme_log_gates(generator, *shape, dtype=dtype)
        if self.lower_bound is not None:
            g = g.clamp(min=self.lower_bound)
        return (normal(*shape), normal(*shape), normal(*shape[:3], d_value), a, -strengths * a, g), {
            "S": normal(batch, heads, d_key, d_value)
        }


RECURRENCES = (GeneralizedDeltaRule(), GeneralizedDeltaRule(lower_bound=-0.6))
