"""RWKV-6's recurrence as a LinearRecurrence."""

from dataclasses import dataclass

import torch
from torch import Tensor

from baton.kernels.common.chunked_autograd import state_dtype
from baton.kernels.common.example_inputs import randn
from baton.kernels.gated_linear_attention.recurrence import GatedLinearAttention
from baton.kernels.gated_linear_attention.triton_launch import use_triton
from baton.kernels.matrix_step.triton_launch import matrix_step_triton
from baton.kernels.protocol import Inputs, LinearRecurrence, State, StateSpec, StateTransition
from baton.kernels.wkv6.op import wkv6
from baton.kernels.wkv6.reference import wkv6_reference

_STATES = GatedLinearAttention("key")
"""The recurrence with the same states, whose outputs differ."""


@dataclass(frozen=True)
class WKV6(LinearRecurrence):
    """Inputs r, k, v, g along time, then u; State {S [batch, heads, d_key, d_value]}. See `op.wkv6`."""

    name = "wkv6"
    input_names = ("r", "k", "v", "g", "u")
    num_time_inputs = 4

    def state_specs(self, inputs: Inputs) -> tuple[StateSpec, ...]:
        return _STATES.state_specs(inputs)

    def run(self, inputs: Inputs, pos: Tensor | None, state: State | None) -> tuple[Tensor, State]:
        y, S = wkv6(*inputs, pos=pos, initial_state=None if state is None else state["S"])
        return y, {"S": S}

    def step(self, inputs: Inputs, pos: Tensor | None, state: State) -> tuple[Tensor, State]:
        if not use_triton(inputs[0], state_dtype(*inputs)):
            return super().step(inputs, pos, state)
        *of_token, u = inputs
        y, S = matrix_step_triton(*of_token, gate="key", scale=1.0, pos=pos, state=state["S"], bonus=u)
        return y, {"S": S}

    def reference(self, inputs: Inputs, pos: Tensor | None, state: State | None) -> tuple[Tensor, State]:
        y, S = wkv6_reference(*inputs, pos=pos, initial_state=None if state is None else state["S"])
        return y, {"S": S}

    def transition_matrix(self, inputs: Inputs, pos: Tensor | None) -> State:
        return _STATES.transition_matrix(inputs[:4], pos)

    def begin(self, inputs: Inputs, pos: Tensor | None) -> tuple[State, StateTransition]:
        return _STATES.begin(inputs[:4], pos)

    def example(self, generator: torch.Generator, batch: int, length: int, dtype: torch.dtype, wide: bool) -> tuple[Inputs, State]:
        (*inputs, g), state = _STATES.example(generator, batch, length, dtype, wide)
        return (*inputs, g, randn(generator, *g.shape[2:], dtype=dtype)), state


RECURRENCES = (WKV6(),)
