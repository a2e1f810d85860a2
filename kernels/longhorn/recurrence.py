"""Longhorn as a linear recurrence, for those who hand its state on and those who test it."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from baton.kernels.diagonal_scan.triton import Inputs as ScanInputs
from baton.kernels.diagonal_scan.triton import effect, effect_backward, in_triton
from baton.kernels.examples import extreme_gates, extreme_keys, randn
from baton.kernels.in_chunks import compute_dtype
from baton.kernels.longhorn.op import longhorn
from baton.kernels.longhorn.reference import longhorn_reference
from baton.kernels.protocol import Effect, Inputs, Leaf, LinearRecurrence, State


@dataclass(frozen=True)
class Longhorn(LinearRecurrence):
    """Inputs x, k, q, beta along time, then D; State {S [batch, channels, d_state]}. See `op.longhorn`."""

    name = "longhorn"
    input_names = ("x", "k", "q", "beta", "D")
    along = 4
    exact_cuts = True

    def leaves(self, inputs: Inputs) -> tuple[Leaf, ...]:
        shape = (inputs[0].shape[2], inputs[1].shape[2])
        return (Leaf("S", shape, compute_dtype(*inputs), tp=0, grad=True),)

    def run(self, inputs: Inputs, pos: Tensor | None, state: State | None) -> tuple[Tensor, State]:
        y, S = longhorn(*inputs, pos=pos, initial_state=None if state is None else state["S"])
        return y, {"S": S}

    def reference(self, inputs: Inputs, pos: Tensor | None, state: State | None) -> tuple[Tensor, State]:
        y, S = longhorn_reference(*inputs, pos=pos, initial_state=None if state is None else state["S"])
        return y, {"S": S}

    def transition(self, inputs: Inputs, pos: Tensor | None) -> State:
        """The product of the decays: what is left of a state of ones when nothing is added."""
        x, k, q, beta, D = inputs
        ones = torch.ones(x.shape[0], x.shape[2], k.shape[2], dtype=compute_dtype(*inputs), device=x.device)
        return {"S": longhorn(torch.zeros_like(x), k, q, beta, D, pos=pos, initial_state=ones)[1]}

    def begin(self, inputs: Inputs, pos: Tensor | None) -> tuple[State, Effect]:
        if not in_triton(inputs[0], compute_dtype(*inputs)):
            return super().begin(inputs, pos)
        decay, add = effect(_scanned(inputs), pos=pos)
        return {"S": decay}, self.effect({"S": decay}, {"S": add})

    def begin_backward(self, inputs: Inputs, pos: Tensor | None, transition: State, state: State, dy: Tensor) -> Effect:
        if not in_triton(inputs[0], compute_dtype(*inputs)):
            return super().begin_backward(inputs, pos, transition, state, dy)
        return self.effect(transition, {"S": effect_backward(_scanned(inputs), dy, pos=pos)})

    def example(self, generator: torch.Generator, batch: int, length: int, dtype: torch.dtype, wide: bool) -> tuple[Inputs, State]:
        channels, d_state = (67, 17) if wide else (5, 3)
        normal = partial(randn, generator, dtype=dtype)
        k = extreme_keys(generator, batch, length, d_state, dtype=dtype)
        beta = extreme_gates(generator, batch, length, channels, dtype=dtype)
        inputs = (normal(batch, length, channels), k, normal(batch, length, d_state), beta, normal(channels))
        return inputs, {"S": normal(batch, channels, d_state)}

    def smooth(self, inputs: Inputs) -> Inputs:
        return (inputs[0], inputs[1].clamp(-2.0, 2.0), *inputs[2:])


def _scanned(inputs: Inputs) -> ScanInputs:
    x, k, q, beta, D = inputs
    return ScanInputs(x, beta, k, q, D)


RECURRENCES = (Longhorn(),)
