"""The RG-LRU as a linear recurrence, for state passing and for tests."""

from dataclasses import dataclass

import torch
from torch import Tensor

from baton.kernels.common.chunked_autograd import state_dtype
from baton.kernels.common.example_inputs import extreme_log_gates, randn
from baton.kernels.protocol import Inputs, LinearRecurrence, State, StateSpec
from baton.kernels.rg_lru.op import rg_lru
from baton.kernels.rg_lru.reference import LARGEST_LOG, rg_lru_reference


@dataclass(frozen=True)
class RGLRU(LinearRecurrence):
    """Inputs x, log_a along time; State {h [batch, channels]}. See `op.rg_lru`."""

    name = "rg_lru"
    input_names = ("x", "log_a")
    num_time_inputs = 2

    def state_specs(self, inputs: Inputs) -> tuple[StateSpec, ...]:
        return (StateSpec("h", (inputs[0].shape[2],), state_dtype(*inputs), tp=0, grad=True),)

    def run(self, inputs: Inputs, pos: Tensor | None, state: State | None) -> tuple[Tensor, State]:
        y, h = rg_lru(*inputs, pos=pos, initial_state=None if state is None else state["h"])
        return y, {"h": h}

    def reference(self, inputs: Inputs, pos: Tensor | None, state: State | None) -> tuple[Tensor, State]:
        y, h = rg_lru_reference(*inputs, pos=pos, initial_state=None if state is None else state["h"])
        return y, {"h": h}

    def transition_matrix(self, inputs: Inputs, pos: Tensor | None) -> State:
        decay = inputs[1].to(state_dtype(*inputs)).clamp(max=LARGEST_LOG).sum(1).exp()
        return {"h": decay if pos is None else decay.masked_fill((pos == 0).any(1, keepdim=True), 0.0)}

    def example(self, generator: torch.Generator, batch: int, length: int, dtype: torch.dtype, wide: bool) -> tuple[Inputs, State]:
        channels = 67 if wide else 5
        # not exactly 0, where a gradient is infinite
        log_a = extreme_log_gates(generator, batch, length, channels, dtype=dtype).clamp(max=-1e-6)
        return (randn(generator, batch, length, channels, dtype=dtype), log_a), {
            "h": randn(generator, batch, channels, dtype=dtype)
        }

    def smooth(self, inputs: Inputs) -> Inputs:
        return inputs[0], inputs[1].clamp(-3.0, -0.1)


RECURRENCES = (RGLRU(),)
