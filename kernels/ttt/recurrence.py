"""Test-time training as a `SequentialRecurrence`, for state passing and for tests."""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from baton.kernels.common.chunked_autograd import state_dtype
from baton.kernels.common.example_inputs import randn
from baton.kernels.protocol import Inputs, SequentialRecurrence, State, StateSpec
from baton.kernels.ttt.op import ttt
from baton.kernels.ttt.reference import state_names, ttt_reference

Model = Literal["linear", "mlp"]


@dataclass(frozen=True)
class TTT(SequentialRecurrence):
    """Inputs q, k, v, lr along time, then step_scale, norm_weight, norm_bias and the initial weights; State: differences from these
    and sums of gradients in the mini-batch. See `op.ttt`.

    A State of zeros is the initial one. mini_batch: tokens of a mini-batch in examples; the inputs have it otherwise.
    """

    model: Model = "linear"
    mini_batch: int = 5
    num_time_inputs = 4
    needs_pos = True
    no_kernel = "it has a form in PyTorch alone"
    # gradients of gradients: inputs rounded to bfloat16 are compared, the inner steps are in float32
    bfloat16_limit = 1e-2

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"ttt-{self.model}"

    @property
    def input_names(self) -> tuple[str, ...]:  # type: ignore[override]
        layers = 1 if self.model == "linear" else 2
        return ("q", "k", "v", "lr", "step_scale", "norm_weight", "norm_bias", *state_names(layers)[: 2 * layers])

    def state_specs(self, inputs: Inputs) -> tuple[StateSpec, ...]:
        weights, dtype = inputs[7:], state_dtype(*inputs)
        names = state_names(len(weights) // 2)
        return tuple(
            StateSpec(name, tuple(w.shape), dtype, tp=0, grad=True) for name, w in zip(names, (*weights, *weights), strict=True)
        )

    def run(self, inputs: Inputs, pos: Tensor | None, state: State | None) -> tuple[Tensor, State]:
        return ttt(*inputs, pos=pos, initial_state=state)  # type: ignore[arg-type]

    def reference(self, inputs: Inputs, pos: Tensor | None, state: State | None) -> tuple[Tensor, State]:
        return ttt_reference(*inputs, pos=pos, initial_state=state)  # type: ignore[arg-type]

    def example(self, generator: torch.Generator, batch: int, length: int, dtype: torch.dtype, wide: bool) -> tuple[Inputs, State]:
        """Learning rates from 0 to those of the authors' code at its largest."""
        heads, d = (3, 17) if wide else (2, 4)
        hidden = d if self.model == "linear" else 2 * d + 1
        normal, along = partial(randn, generator, dtype=dtype), (batch, length, heads)
        lr = torch.rand(*along, generator=generator, dtype=dtype) / d
        lr[torch.rand(*along, generator=generator) < 0.1] = 0.0
        step_scale = 1 / torch.arange(1, self.mini_batch + 1, dtype=dtype) + 0.1 * torch.rand(
            self.mini_batch, generator=generator, dtype=dtype
        )
        weights = [d**-0.5 * normal(heads, d, hidden), 0.1 * normal(heads, hidden)]
        if self.model == "mlp":
            weights += [hidden**-0.5 * normal(heads, hidden, d), 0.1 * normal(heads, d)]
        inputs = (*(normal(*along, d) for _ in "qkv"), lr, step_scale, 1 + 0.1 * normal(heads, d), 0.1 * normal(heads, d), *weights)
        names = state_names(len(weights) // 2)
        return inputs, {name: 0.1 * normal(batch, *w.shape) for name, w in zip(names, (*weights, *weights), strict=True)}


RECURRENCES = (TTT("linear"), TTT("mlp"))
