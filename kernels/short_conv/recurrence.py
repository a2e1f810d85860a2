"""The short convolution as a `Recurrence` whose State is a tail of inputs, for state passing and for tests."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from baton.kernels.common.example_inputs import randn
from baton.kernels.protocol import Inputs, Recurrence, State, StateSpec
from baton.kernels.short_conv.op import Activation, short_conv, unit_heads
from baton.kernels.short_conv.reference import short_conv_reference
from baton.kernels.short_conv.triton_launch import short_conv_step_triton, unit_of_kernels, use_triton


@dataclass(frozen=True)
class ShortConv(Recurrence):
    """Input x along time, then weight, bias; State {conv [batch, width - 1, channels]} in x's dtype. See `op.short_conv`."""

    activation: Activation | None = None
    unit_width: int | None = None
    unit_eps: float = 0.0
    input_names = ("x", "weight", "bias")
    num_time_inputs = 1
    split_bitwise_exact = True

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"short_conv-{self.activation}" + ("" if self.unit_width is None else f"-unit-{self.unit_width}")

    @property
    def _options(self) -> dict[str, Any]:
        return {"activation": self.activation, "unit_width": self.unit_width, "unit_eps": self.unit_eps}

    def state_specs(self, inputs: Inputs) -> tuple[StateSpec, ...]:
        channels, width = inputs[1].shape
        return (StateSpec("conv", (width - 1, channels), inputs[0].dtype, tp=1, grad=True),)

    def run(self, inputs: Inputs, pos: Tensor | None, state: State | None) -> tuple[Tensor, State]:
        y, tail = short_conv(*inputs, pos=pos, tail=None if state is None else state["conv"], **self._options)
        return y, {"conv": tail}

    def forward_no_state(self, inputs: Inputs, pos: Tensor | None, state: State | None) -> Tensor:
        tail = None if state is None else state["conv"]
        return short_conv(*inputs, pos=pos, tail=tail, need_tail=False, **self._options)[0]

    def step(self, inputs: Inputs, pos: Tensor | None, state: State) -> tuple[Tensor, State]:
        if not use_triton(inputs[0]):
            return super().step(inputs, pos, state)
        unit = unit_of_kernels(self.unit_width, self.unit_eps)
        y, tail = short_conv_step_triton(*inputs, pos=pos, tail=state["conv"], silu=self.activation == "silu", unit=unit)
        return y if unit else unit_heads(y, self.unit_width, self.unit_eps), {"conv": tail}

    def reference(self, inputs: Inputs, pos: Tensor | None, state: State | None) -> tuple[Tensor, State]:
        tail = None if state is None else state["conv"]
        y, tail = short_conv_reference(*inputs, pos=pos, tail=tail, **self._options)
        return y, {"conv": tail}

    def tail_state(self, inputs: Inputs, pos: Tensor | None) -> State | None:
        n = inputs[1].shape[1] - 1
        return {"conv": inputs[0][:, inputs[0].shape[1] - n :].contiguous()} if inputs[0].shape[1] >= n else None

    def example(self, generator: torch.Generator, batch: int, length: int, dtype: torch.dtype, wide: bool) -> tuple[Inputs, State]:
        heads, width = (67 if wide else 5), 4
        channels = heads * (self.unit_width or 1)
        normal = partial(randn, generator, dtype=dtype)
        inputs = (normal(batch, length, channels), normal(channels, width), normal(channels))
        return inputs, {"conv": normal(batch, width - 1, channels)}


RECURRENCES = (ShortConv(None), ShortConv("silu"), ShortConv("silu", 8, 1e-5))
