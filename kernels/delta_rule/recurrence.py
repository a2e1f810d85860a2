"""The delta rule as a LinearRecurrence with a transition matrix per head."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import normalize

from baton.kernels.common.autocast import without_autocast
from baton.kernels.common.chunked_autograd import state_dtype
from baton.kernels.common.example_inputs import extreme_gates, extreme_log_gates, randn
from baton.kernels.common.head_groups import HeadGroups
from baton.kernels.delta_rule.chunked import delta_rule_transition
from baton.kernels.delta_rule.op import delta_rule
from baton.kernels.delta_rule.reference import delta_rule_reference
from baton.kernels.delta_rule.triton_launch import delta_rule_transition_triton
from baton.kernels.gated_linear_attention.triton_launch import use_triton
from baton.kernels.matrix_step.triton_launch import matrix_step_triton
from baton.kernels.protocol import Inputs, LinearRecurrence, MatrixAffine, State, StateSpec, StateTransition


@dataclass(frozen=True)
class DeltaRule(LinearRecurrence):
    """Inputs q, k, v, beta and, if gated, g along time; State {S [batch, heads, d_key, d_value]}. See `op.delta_rule`, also for
    keep_states.

    scale: of the output; None: d_key ** -0.5. In examples, everything else reads them off the inputs: by_channel, whether g is of
    the keys' channels; key_heads, number of heads of keys and queries, each for a group of heads (0: every head has its own).
    """

    gated: bool
    by_channel: bool = False
    scale: float | None = None
    key_heads: int = 0
    keep_states: bool = False

    @property
    def name(self) -> str:  # type: ignore[override]
        rule = ("gated_delta_rule" if self.gated else "delta_rule") + ("-by-channel" if self.by_channel else "")
        return rule + (f"-key-heads-{self.key_heads}" if self.key_heads else "")

    @property
    def input_names(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("q", "k", "v", "beta", "g") if self.gated else ("q", "k", "v", "beta")

    @property
    def num_time_inputs(self) -> int:  # type: ignore[override]
        return len(self.input_names)

    def state_specs(self, inputs: Inputs) -> tuple[StateSpec, ...]:
        k, v = inputs[1], inputs[2]
        shape = (v.shape[2], k.shape[3], v.shape[3])
        return (StateSpec("S", shape, state_dtype(*inputs), tp=0, grad=True),)

    def run(self, inputs: Inputs, pos: Tensor | None, state: State | None) -> tuple[Tensor, State]:
        initial = None if state is None else state["S"]
        y, S = delta_rule(*inputs, scale=self.scale, pos=pos, initial_state=initial, keep_states=self.keep_states)
        return y, {"S": S}

    def step(self, inputs: Inputs, pos: Tensor | None, state: State) -> tuple[Tensor, State]:
        if not use_triton(inputs[0], state_dtype(*inputs)):
            return super().step(inputs, pos, state)
        q, k, v, beta, *gates = inputs
        g, scale = gates[0] if gates else None, k.shape[3] ** -0.5 if self.scale is None else self.scale
        gate = "none" if g is None else "key" if g.ndim == 4 else "scalar"
        y, S = matrix_step_triton(q, k, v, g, gate=gate, scale=scale, pos=pos, state=state["S"], beta=beta)
        return y, {"S": S}

    def reference(self, inputs: Inputs, pos: Tensor | None, state: State | None) -> tuple[Tensor, State]:
        y, S = delta_rule_reference(*inputs, scale=self.scale, pos=pos, initial_state=None if state is None else state["S"])
        return y, {"S": S}

    def transition_matrix(self, inputs: Inputs, pos: Tensor | None) -> State:
        """The product of all exp(g) (I - beta k k^T), the last one leftmost, [batch, heads, d_key, d_key]."""
        return {"S": self._transition(inputs, pos)[0]}

    def state_transition(self, transition: State, add: State) -> StateTransition:
        return MatrixAffine(transition, add)

    def adjoint(self, transition: State) -> State:
        return {"S": transition["S"].transpose(2, 3)}

    def begin(self, inputs: Inputs, pos: Tensor | None) -> tuple[State, StateTransition]:
        """One pass without queries for both parts: the transition and what is added share everything but their columns."""
        matrix, add = self._transition(inputs, pos)
        return {"S": matrix}, self.state_transition({"S": matrix}, {"S": add})

    def _transition(self, inputs: Inputs, pos: Tensor | None) -> tuple[Tensor, Tensor]:
        _, k, v, beta, *gate = inputs
        implementation = delta_rule_transition_triton if use_triton(k, state_dtype(*inputs)) else delta_rule_transition
        groups = HeadGroups.of(k, v)
        with torch.no_grad(), without_autocast(k):
            if groups is None:
                return implementation(k, v, beta, gate[0] if gate else None, pos=pos)
            k, v, beta, *gate = map(groups.split, (k, v, beta, *gate))
            M, add = implementation(k, v, beta, gate[0] if gate else None, pos=groups.positions(pos))
            return groups.joined_state(M), groups.joined_state(add)

    def example(self, generator: torch.Generator, batch: int, length: int, dtype: torch.dtype, wide: bool) -> tuple[Inputs, State]:
        """Keys of length 1, as the mixers make them, some equal to the one before and some 0; beta from 0 to 2."""
        heads, d_key, d_value = (3, 17, 19) if wide else (2, 3, 4)
        key_heads, heads = self.key_heads or heads, heads * max(1, self.key_heads)
        normal = partial(randn, generator, dtype=dtype)
        k = normalize(normal(batch, length, key_heads, d_key), dim=-1)
        again, nothing = torch.rand(2, batch, length, key_heads, 1, generator=generator)
        k = torch.where(again < 0.2, k.roll(1, dims=1), k).masked_fill(nothing < 0.1, 0.0)
        beta = 2 * extreme_gates(generator, batch, length, heads, dtype=dtype)
        rule = (normal(batch, length, key_heads, d_key), k, normal(batch, length, heads, d_value), beta)
        channels = (d_key,) if self.by_channel else ()
        gate = (extreme_log_gates(generator, batch, length, heads, *channels, dtype=dtype),) if self.gated else ()
        return (*rule, *gate), {"S": normal(batch, heads, d_key, d_value)}


RECURRENCES = (
    DeltaRule(gated=False),
    DeltaRule(gated=True),
    DeltaRule(gated=True, key_heads=2),
    DeltaRule(gated=True, by_channel=True),
)
