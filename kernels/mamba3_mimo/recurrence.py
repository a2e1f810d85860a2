"""Mamba-3's recurrence with several inputs and outputs per head as a LinearRecurrence."""

from dataclasses import dataclass

import torch
from torch import Tensor

from baton.kernels.common.chunked_autograd import state_dtype
from baton.kernels.common.example_inputs import randn
from baton.kernels.mamba3.recurrence import Mamba3
from baton.kernels.mamba3_mimo.op import mamba3_mimo
from baton.kernels.mamba3_mimo.reference import mamba3_mimo_reference
from baton.kernels.protocol import Inputs, LinearRecurrence, State, StateSpec


@dataclass(frozen=True)
class Mamba3MIMO(Mamba3):
    """Inputs x, B, C, dt, g, lam, theta along time, then B_bias, C_bias, D, mimo_x; State {h [batch, heads, d_state, head_dim], k
    [batch, heads, rank, d_state], x [batch, heads, rank, head_dim]}. See `op.mamba3_mimo`. A span of tokens does to the State what
    it does with one input (`mamba3.transitions`)."""

    name = "mamba3_mimo"
    input_names = (*Mamba3.input_names, "mimo_x")

    def state_specs(self, inputs: Inputs) -> tuple[StateSpec, ...]:
        heads, head_dim, (rank, d_state), dtype = *inputs[0].shape[2:], inputs[1].shape[3:], state_dtype(*inputs)
        shapes = {"h": (heads, d_state, head_dim), "k": (heads, rank, d_state), "x": (heads, rank, head_dim)}
        return tuple(StateSpec(name, shape, dtype, tp=0, grad=True) for name, shape in shapes.items())

    def run(self, inputs: Inputs, pos: Tensor | None, state: State | None) -> tuple[Tensor, State]:
        return mamba3_mimo(*inputs, pos=pos, initial_state=state, recompute_activations=self.recompute_activations)

    def step(self, inputs: Inputs, pos: Tensor | None, state: State) -> tuple[Tensor, State]:
        return LinearRecurrence.step(self, inputs, pos, state)  # the kernel has heads with one input

    def reference(self, inputs: Inputs, pos: Tensor | None, state: State | None) -> tuple[Tensor, State]:
        return mamba3_mimo_reference(*inputs, pos=pos, initial_state=state)

    def example(self, generator: torch.Generator, batch: int, length: int, dtype: torch.dtype, wide: bool) -> tuple[Inputs, State]:
        """Of one input, with 3 of all that several have; 4 if wide."""
        rank = 4 if wide else 3
        (x, B, C, *gates, B_bias, C_bias, D), state = super().example(generator, batch, length, dtype, wide)
        B, C, B_bias, C_bias, k, v = (
            randn(generator, *a.shape[:-1], rank, a.shape[-1], dtype=dtype) for a in (B, C, B_bias, C_bias, state["k"], state["x"])
        )
        mimo_x = randn(generator, x.shape[2], rank, x.shape[3], dtype=dtype)
        return (x, B, C, *gates, B_bias, C_bias, D, mimo_x), {"h": state["h"], "k": k, "x": v}


RECURRENCES = (Mamba3MIMO(),)
