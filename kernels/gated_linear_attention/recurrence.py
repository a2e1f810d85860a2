"""Gated linear attention as a LinearRecurrence."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from baton.kernels.common.chunked_autograd import state_dtype
from baton.kernels.common.example_inputs import extreme_log_gates, randn
from baton.kernels.common.head_groups import HeadGroups
from baton.kernels.gated_linear_attention.chunked import gla_final_state
from baton.kernels.gated_linear_attention.op import gated_linear_attention
from baton.kernels.gated_linear_attention.reference import Gate, along_state, gla_reference
from baton.kernels.gated_linear_attention.triton_launch import gla_final_state_triton, use_triton
from baton.kernels.matrix_step.triton_launch import matrix_step_triton
from baton.kernels.protocol import Inputs, LinearRecurrence, State, StateSpec, StateTransition


@dataclass(frozen=True)
class GatedLinearAttention(LinearRecurrence):
    """Inputs q, k, v and, unless gate is "none", g along time; State {S [batch, heads, d_key, d_value]}.

    See `op.gated_linear_attention`, also for keep_states. group: query heads per head; shared: one key and one query for all heads;
    key_heads: so many keys and queries, for the heads of a group each (0: neither). These three in examples; everything else reads
    them off the inputs.
    """

    gate: Gate
    scale: float = 1.0
    group: int = 1
    shared: bool = False
    key_heads: int = 0
    keep_states: bool = False

    @property
    def name(self) -> str:  # type: ignore[override]
        heads = "-shared" if self.shared else f"-grouped-{self.group}" if self.group > 1 else ""
        heads += f"-key-heads-{self.key_heads}" if self.key_heads else ""
        return f"gated_linear_attention-{self.gate}{heads}"

    @property
    def input_names(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("q", "k", "v") if self.gate == "none" else ("q", "k", "v", "g")

    @property
    def num_time_inputs(self) -> int:  # type: ignore[override]
        return len(self.input_names)

    def state_specs(self, inputs: Inputs) -> tuple[StateSpec, ...]:
        k, v = inputs[1], inputs[2]
        return (StateSpec("S", (v.shape[2], k.shape[3], v.shape[3]), state_dtype(*inputs), tp=0, grad=True),)

    def run(self, inputs: Inputs, pos: Tensor | None, state: State | None) -> tuple[Tensor, State]:
        initial = None if state is None else state["S"]
        y, S = gated_linear_attention(
            *inputs, gate=self.gate, scale=self.scale, pos=pos, initial_state=initial, keep_states=self.keep_states
        )
        return y, {"S": S}

    def step(self, inputs: Inputs, pos: Tensor | None, state: State) -> tuple[Tensor, State]:
        if not use_triton(inputs[0], state_dtype(*inputs)):
            return super().step(inputs, pos, state)
        y, S = matrix_step_triton(*inputs, gate=self.gate, scale=self.scale, pos=pos, state=state["S"])
        return y, {"S": S}

    def reference(self, inputs: Inputs, pos: Tensor | None, state: State | None) -> tuple[Tensor, State]:
        initial = None if state is None else state["S"]
        y, S = gla_reference(*inputs, gate=self.gate, scale=self.scale, pos=pos, initial_state=initial)
        return y, {"S": S}

    def transition_matrix(self, inputs: Inputs, pos: Tensor | None) -> State:
        """exp(sum of g): the product of the decays needs one sum over time."""
        dtype, v = state_dtype(*inputs), inputs[2]
        total = v.new_zeros(v.shape[0], v.shape[2], dtype=dtype) if self.gate == "none" else inputs[3].to(dtype).sum(1)
        decay = along_state(total, self.gate).exp()
        return {"S": decay if pos is None else decay.masked_fill((pos == 0).any(1)[:, None, None, None], 0.0)}

    @torch.no_grad()
    def begin(self, inputs: Inputs, pos: Tensor | None) -> tuple[State, StateTransition]:
        """The final State without outputs, which takes less time than `run`."""
        transition = self.transition_matrix(inputs, pos)
        _, k, v, *gates = inputs
        implementation = gla_final_state_triton if use_triton(k, state_dtype(*inputs)) else gla_final_state
        groups = HeadGroups.of(k, v)
        if groups is None:
            S = implementation(k, v, gates[0] if gates else None, gate=self.gate, pos=pos)
        else:
            k, v, *gates = map(groups.split, (k, v, *gates))
            S = implementation(k, v, gates[0] if gates else None, gate=self.gate, pos=groups.positions(pos))
            S = groups.joined_state(S)
        return transition, self.state_transition(transition, {"S": S})

    def example(self, generator: torch.Generator, batch: int, length: int, dtype: torch.dtype, wide: bool) -> tuple[Inputs, State]:
        heads, d_key, d_value = (3, 17, 35) if wide else (2, 5, 3)
        normal = partial(randn, generator, dtype=dtype)
        q_heads, k_heads = (1, 1) if self.shared else (heads * self.group, heads)
        if self.key_heads:
            q_heads, k_heads, heads = self.key_heads, self.key_heads, heads * self.key_heads
        q, k = normal(batch, length, q_heads, d_key), normal(batch, length, k_heads, d_key)
        v, S = normal(batch, length, heads, d_value), normal(batch, heads, d_key, d_value)
        if self.gate == "none":
            return (q, k, v), {"S": S}
        channels = {"key": (d_key,), "value": (d_value,), "scalar": ()}[self.gate]
        return (q, k, v, extreme_log_gates(generator, batch, length, heads, *channels, dtype=dtype)), {"S": S}


RECURRENCES = (
    GatedLinearAttention("key", scale=0.5),
    GatedLinearAttention("value", scale=0.5),
    GatedLinearAttention("scalar", scale=0.5),
    GatedLinearAttention("none", scale=0.5),
    GatedLinearAttention("key", group=3),
    GatedLinearAttention("value", group=2),
    GatedLinearAttention("scalar", group=2),
    GatedLinearAttention("key", shared=True),
    GatedLinearAttention("scalar", shared=True),
    GatedLinearAttention("scalar", key_heads=2),
)
