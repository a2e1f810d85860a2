"""Mamba-3's recurrence as a LinearRecurrence."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from baton.kernels.common.chunked_autograd import state_dtype
from baton.kernels.common.example_inputs import extreme_log_gates, randn
from baton.kernels.gated_linear_attention.triton_launch import use_triton
from baton.kernels.mamba3.op import mamba3
from baton.kernels.mamba3.reference import mamba3_reference
from baton.kernels.mamba3.transitions import GradientTransition, Transition
from baton.kernels.mamba3.triton_launch import step_triton
from baton.kernels.protocol import Inputs, LinearRecurrence, State, StateSpec, StateTransition


@dataclass(frozen=True)
class Mamba3(LinearRecurrence):
    """Inputs x, B, C, dt, g, lam, theta along time, then B_bias, C_bias, D; State {h [batch, heads, d_state, head_dim], k [batch,
    heads, d_state], x [batch, heads, head_dim]}. See `op.mamba3`, also for recompute_activations."""

    recompute_activations: bool = False
    name = "mamba3"
    input_names: ClassVar[tuple[str, ...]] = ("x", "B", "C", "dt", "g", "lam", "theta", "B_bias", "C_bias", "D")
    num_time_inputs = 7
    # the terms of an angle's gradient cancel: rounding turned q and k and their gradients costs 1.1e-2 of those of dt and theta
    bfloat16_limit = 1.5e-2

    def state_specs(self, inputs: Inputs) -> tuple[StateSpec, ...]:
        heads, head_dim, d_state, dtype = *inputs[0].shape[2:], inputs[1].shape[3], state_dtype(*inputs)
        shapes = {"h": (heads, d_state, head_dim), "k": (heads, d_state), "x": (heads, head_dim)}
        return tuple(StateSpec(name, shape, dtype, tp=0, grad=True) for name, shape in shapes.items())

    def run(self, inputs: Inputs, pos: Tensor | None, state: State | None) -> tuple[Tensor, State]:
        return mamba3(*inputs, pos=pos, initial_state=state, recompute_activations=self.recompute_activations)

    def step(self, inputs: Inputs, pos: Tensor | None, state: State) -> tuple[Tensor, State]:
        if not use_triton(inputs[0], state_dtype(*inputs)):
            return super().step(inputs, pos, state)
        return step_triton(*inputs, pos=pos, state=state)

    def reference(self, inputs: Inputs, pos: Tensor | None, state: State | None) -> tuple[Tensor, State]:
        return mamba3_reference(*inputs, pos=pos, initial_state=state)

    def transition_matrix(self, inputs: Inputs, pos: Tensor | None) -> State:
        """See `transitions.Transition`: decay, before, and cosine and sine of the angle."""
        _, _, _, dt, g, lam, theta, *_ = inputs
        dtype = state_dtype(*inputs)
        decay, before = g.to(dtype).sum(1).exp(), (1 - lam[:, 0].to(dtype)) * dt[:, 0].to(dtype)
        if pos is not None:
            decay = decay.masked_fill((pos == 0).any(1, keepdim=True), 0.0)
        angle = (dt.double()[..., None] * theta.double()[:, :, None]).sum(1)
        return {"decay": decay, "before": before, "cos": angle.cos().to(dtype), "sin": angle.sin().to(dtype)}

    def state_transition(self, transition: State, add: State) -> StateTransition:
        return Transition(transition, add)

    def begin_backward(self, inputs: Inputs, pos: Tensor | None, transition: State, state: State, dy: Tensor) -> StateTransition:
        _, add = self.vjp(inputs, pos, state, dy, None)
        return GradientTransition(transition, {"k": state["k"], "x": state["x"]}, add)

    def example(self, generator: torch.Generator, batch: int, length: int, dtype: torch.dtype, wide: bool) -> tuple[Inputs, State]:
        """Two groups of heads, steps of up to 3, with angles of several turns, shares of exactly 0 and 1."""
        groups, heads, d_state, head_dim, pairs = (2, 6, 22, 35, 7) if wide else (2, 4, 6, 3, 2)
        normal = partial(randn, generator, dtype=dtype)
        uniform = partial(torch.rand, generator=generator, dtype=dtype)
        B, C = (normal(batch, length, groups, d_state) for _ in range(2))
        lam = (1.5 * uniform(batch, length, heads) - 0.25).clamp(0.0, 1.0)
        inputs = (
            normal(batch, length, heads, head_dim),
            B,
            C,
            3 * uniform(batch, length, heads),
            extreme_log_gates(generator, batch, length, heads, dtype=dtype),
            lam,
            3 * normal(batch, length, pairs),
            normal(heads, d_state),
            normal(heads, d_state),
            normal(heads),
        )
        state = {"h": (d_state, head_dim), "k": (d_state,), "x": (head_dim,)}
        return inputs, {name: normal(batch, heads, *shape) for name, shape in state.items()}


RECURRENCES = (Mamba3(),)
