"""Gated slot attention as a LinearRecurrence."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from baton.kernels.common.chunked_autograd import state_dtype
from baton.kernels.common.example_inputs import extreme_log_gates, randn
from baton.kernels.gated_linear_attention.triton_launch import use_triton
from baton.kernels.gated_slot_attention.chunked import gsa_final_state
from baton.kernels.gated_slot_attention.op import gated_slot_attention
from baton.kernels.gated_slot_attention.reference import SlotActivation, activated, gsa_reference
from baton.kernels.gated_slot_attention.step_launch import gsa_step_triton
from baton.kernels.gated_slot_attention.triton_launch import gsa_final_state_triton
from baton.kernels.protocol import Inputs, LinearRecurrence, State, StateSpec, StateTransition


@dataclass(frozen=True)
class GatedSlotAttention(LinearRecurrence):
    """Inputs q, k, v, g along time; State {k [batch, heads, d_key, slots], v [batch, heads, slots, d_value]}.

    Both leaves have one decay, so they travel together. See `op.gated_slot_attention`, also for
    gate_logit_normalizer, with which inputs are as a
    layer projects them. group: query heads per head, in examples; everything else reads it off the inputs.
    """

    slot_activation: SlotActivation = "softmax"
    scale: float = 1.0
    gate_logit_normalizer: float | None = None
    recompute_activations: bool = False
    keep_states: bool = False
    group: int = 1
    input_names = ("q", "k", "v", "g")
    num_time_inputs = 4
    # bfloat16 matmuls give scores a relative error of 1e-3, which the slot activation amplifies by the score's magnitude. The
    # largest errors measured: 5.9e-3 for the gradient of entering slots with grouped queries of few tokens, 5.1e-3 for all other
    # tensors
    bfloat16_limit = 6.5e-3

    @property
    def name(self) -> str:  # type: ignore[override]
        projected = "" if self.gate_logit_normalizer is None else "-projected"
        return f"gated_slot_attention-{self.slot_activation}{projected}" + (f"-grouped-{self.group}" if self.group > 1 else "")

    def state_specs(self, inputs: Inputs) -> tuple[StateSpec, ...]:
        _, k, v, g = inputs
        heads, slots, dtype = k.shape[2], g.shape[3], state_dtype(*inputs)
        return (
            StateSpec("k", (heads, k.shape[3], slots), dtype, tp=0, grad=True),
            StateSpec("v", (heads, slots, v.shape[3]), dtype, tp=0, grad=True),
        )

    def run(self, inputs: Inputs, pos: Tensor | None, state: State | None) -> tuple[Tensor, State]:
        return gated_slot_attention(
            *inputs, **self._options, recompute_activations=self.recompute_activations, keep_states=self.keep_states, pos=pos,
            initial_state=state,
        )  # fmt: skip

    def step(self, inputs: Inputs, pos: Tensor | None, state: State) -> tuple[Tensor, State]:
        if not use_triton(inputs[0], state_dtype(*inputs)):
            return super().step(inputs, pos, state)
        return gsa_step_triton(*inputs, **self._options, pos=pos, state=state)

    def reference(self, inputs: Inputs, pos: Tensor | None, state: State | None) -> tuple[Tensor, State]:
        return gsa_reference(*inputs, **self._options, pos=pos, initial_state=state)

    @property
    def _options(self) -> dict[str, Any]:
        return {"scale": self.scale, "slot_activation": self.slot_activation, "gate_logit_normalizer": self.gate_logit_normalizer}

    def transition_matrix(self, inputs: Inputs, pos: Tensor | None) -> State:
        """exp(sum of g), the same along either leaf's slots."""
        (g,) = activated(inputs[3:], self.gate_logit_normalizer)
        decay = g.to(state_dtype(*inputs)).sum(1).exp()
        if pos is not None:
            decay = decay.masked_fill((pos == 0).any(1)[:, None, None], 0.0)
        return {"k": decay[:, :, None, :], "v": decay[:, :, :, None]}

    @torch.no_grad()
    def begin(self, inputs: Inputs, pos: Tensor | None) -> tuple[State, StateTransition]:
        """The final State without outputs, which takes less time than `run`."""
        transition = self.transition_matrix(inputs, pos)
        implementation = gsa_final_state_triton if use_triton(inputs[0], state_dtype(*inputs)) else gsa_final_state
        return transition, self.state_transition(
            transition, implementation(*inputs[1:], gate_logit_normalizer=self.gate_logit_normalizer, pos=pos)
        )

    def example(self, generator: torch.Generator, batch: int, length: int, dtype: torch.dtype, wide: bool) -> tuple[Inputs, State]:
        heads, d_key, slots, d_value = (3, 17, 11, 35) if wide else (2, 5, 4, 3)
        normal = partial(randn, generator, dtype=dtype)
        q, k = normal(batch, length, heads * self.group, d_key), normal(batch, length, heads, d_key)
        gates = (batch, length, heads, slots)
        # of projected ones logarithms from nearly 0 to -50
        g = extreme_log_gates(generator, *gates, dtype=dtype) if self.gate_logit_normalizer is None else 8 * normal(*gates)
        inputs = (q, k, normal(batch, length, heads, d_value), g)
        return inputs, {"k": normal(batch, heads, d_key, slots), "v": normal(batch, heads, slots, d_value)}


RECURRENCES = (
    GatedSlotAttention("softmax"),
    GatedSlotAttention("relu2", scale=0.5),
    GatedSlotAttention("softmax", group=3),
    GatedSlotAttention("softmax", gate_logit_normalizer=0.5, group=2),
)
