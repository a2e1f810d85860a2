"""The generalized delta rule as a LinearRecurrence with a transition matrix per head."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import normalize

from baton.kernels.common.chunked_autograd import state_dtype
from baton.kernels.common.example_inputs import extreme_gates, extreme_log_gates, randn
from baton.kernels.generalized_delta_rule.chunked import generalized_delta_rule_transition
from baton.kernels.generalized_delta_rule.op import generalized_delta_rule
from baton.kernels.generalized_delta_rule.reference import generalized_delta_rule_reference
from baton.kernels.protocol import Inputs, LinearRecurrence, MatrixAffine, State, StateSpec, StateTransition


@dataclass(frozen=True)
class GeneralizedDeltaRule(LinearRecurrence):
    """Inputs r, k, v, a, b, g along time; State {S [batch, heads, d_key, d_value]}. See `op.generalized_delta_rule`.

    scale: of the output.
    """

    scale: float = 1.0
    name = "generalized_delta_rule"
    input_names = ("r", "k", "v", "a", "b", "g")
    num_time_inputs = 6

    def state_specs(self, inputs: Inputs) -> tuple[StateSpec, ...]:
        k, v = inputs[1], inputs[2]
        return (StateSpec("S", (k.shape[2], k.shape[3], v.shape[3]), state_dtype(*inputs), tp=0, grad=True),)

    def run(self, inputs: Inputs, pos: Tensor | None, state: State | None) -> tuple[Tensor, State]:
        initial_state = None if state is None else state["S"]
        o, S = generalized_delta_rule(*inputs, scale=self.scale, pos=pos, initial_state=initial_state)
        return o, {"S": S}

    def reference(self, inputs: Inputs, pos: Tensor | None, state: State | None) -> tuple[Tensor, State]:
        initial_state = None if state is None else state["S"]
        o, S = generalized_delta_rule_reference(*inputs, scale=self.scale, pos=pos, initial_state=initial_state)
        return o, {"S": S}

    def transition_matrix(self, inputs: Inputs, pos: Tensor | None) -> State:
        """The product of all Diag(exp(g)) + b a^T, the last one leftmost, [batch, heads, d_key, d_key]."""
        return {"S": generalized_delta_rule_transition(*inputs[1:], pos=pos)[0]}

    def state_transition(self, transition: State, add: State) -> StateTransition:
        return MatrixAffine(transition, add)

    def adjoint(self, transition: State) -> State:
        return {"S": transition["S"].transpose(2, 3)}

    def begin(self, inputs: Inputs, pos: Tensor | None) -> tuple[State, StateTransition]:
        """One pass that reads nothing for both parts: the transition and what is added share everything but their columns."""
        matrix, add = generalized_delta_rule_transition(*inputs[1:], pos=pos)
        return {"S": matrix}, self.state_transition({"S": matrix}, {"S": add})

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
        return (normal(*shape), normal(*shape), normal(*shape[:3], d_value), a, -strengths * a, g), {
            "S": normal(batch, heads, d_key, d_value)
        }


RECURRENCES = (GeneralizedDeltaRule(),)
