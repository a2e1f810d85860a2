"""mLSTM as a LinearRecurrence."""

from dataclasses import dataclass

import torch
from torch import Tensor

from baton.kernels.common.chunked_autograd import state_dtype
from baton.kernels.common.example_inputs import randn
from baton.kernels.gated_linear_attention.recurrence import GatedLinearAttention
from baton.kernels.gated_linear_attention.triton_launch import use_triton
from baton.kernels.mlstm.op import mlstm
from baton.kernels.mlstm.reference import mlstm_reference
from baton.kernels.mlstm.torch_impl import attention_inputs, mlstm_step
from baton.kernels.protocol import Affine, Inputs, LinearRecurrence, State, StateSpec, StateTransition

_STATES = GatedLinearAttention("scalar")
"""The recurrence with the same states, whose outputs differ."""


@dataclass(frozen=True)
class MLSTM(LinearRecurrence):
    """Inputs q, k, v, i, g along time; State {C [batch, heads, d_key, d_value + 1], its last column n}. See `op.mlstm`."""

    scale: float = 1.0
    name = "mlstm"
    input_names = ("q", "k", "v", "i", "g")
    num_time_inputs = 5
    # Rounding the products of keys and gates, and what is read, as on a GPU, moved the gradient of the example's forget gates by up
    # to 1.5e-2 and all other tensors by less than 1.2e-2.
    bfloat16_limit = 3e-2

    def state_specs(self, inputs: Inputs) -> tuple[StateSpec, ...]:
        _, k, v, *_ = inputs
        return (StateSpec("C", (v.shape[2], k.shape[3], v.shape[3] + 1), state_dtype(*inputs), tp=0, grad=True),)

    def run(self, inputs: Inputs, pos: Tensor | None, state: State | None) -> tuple[Tensor, State]:
        h, C = mlstm(*inputs, scale=self.scale, pos=pos, initial_state=None if state is None else state["C"])
        return h, {"C": C}

    def step(self, inputs: Inputs, pos: Tensor | None, state: State) -> tuple[Tensor, State]:
        if not use_triton(inputs[0], state_dtype(*inputs)):
            return super().step(inputs, pos, state)
        h, C = mlstm_step(*inputs, scale=self.scale, pos=pos, state=state["C"])
        return h, {"C": C}

    def reference(self, inputs: Inputs, pos: Tensor | None, state: State | None) -> tuple[Tensor, State]:
        h, C = mlstm_reference(*inputs, scale=self.scale, pos=pos, initial_state=None if state is None else state["C"])
        return h, {"C": C}

    def transition_matrix(self, inputs: Inputs, pos: Tensor | None) -> State:
        return {"C": _STATES.transition_matrix((*inputs[:3], inputs[4]), pos)["S"]}

    @torch.no_grad()
    def begin(self, inputs: Inputs, pos: Tensor | None) -> tuple[State, StateTransition]:
        """The final State without outputs, which takes less time than `run`."""
        transition, of_state = _STATES.begin(attention_inputs(*inputs), pos)
        assert isinstance(of_state, Affine)
        transition = {"C": transition["S"]}
        return transition, self.state_transition(transition, {"C": of_state.add["S"]})

    def example(self, generator: torch.Generator, batch: int, length: int, dtype: torch.dtype, wide: bool) -> tuple[Inputs, State]:
        """Input gates from exp(-8) to exp(4), and normalizers of either sign, below 1 and above. Keys are positive, and queries of
        one sign, for the error of a normalizer whose terms cancel has no bound in bfloat16."""
        (q, k, v, g), state = _STATES.example(generator, batch, length, dtype, wide)
        i = (3 * randn(generator, *g.shape, dtype=dtype) - 1).clamp(-8, 4)
        q = q.abs() * randn(generator, *g.shape, dtype=dtype).sign()[..., None]
        n = randn(generator, *state["S"].shape[:3], 1, dtype=dtype).abs()
        return (q, k.abs(), v, i, g), {"C": torch.cat((state["S"], n), dim=-1)}

    def smooth(self, inputs: Inputs) -> Inputs:
        """Small gates, beside which no normalizer crosses 1."""
        q, k, v, i, g = inputs
        return q, k, v, i / 8, g


RECURRENCES = (MLSTM(scale=0.5),)
