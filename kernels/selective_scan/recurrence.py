"""The selective scan as a linear recurrence, for those who hand its state on and those who test it."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from baton.kernels.diagonal_scan.triton import Inputs as ScanInputs
from baton.kernels.diagonal_scan.triton import effect, effect_backward, in_triton
from baton.kernels.examples import extreme_steps, randn
from baton.kernels.in_chunks import compute_dtype
from baton.kernels.protocol import Effect, Inputs, Leaf, LinearRecurrence, State
from baton.kernels.selective_scan.op import Discretization, selective_scan
from baton.kernels.selective_scan.reference import selective_scan_reference


@dataclass(frozen=True)
class SelectiveScan(LinearRecurrence):
    """Inputs u, delta, B, C along time, then A, D; State {h [batch, channels, d_state]}. See `op.selective_scan`."""

    discretization: Discretization = "euler"
    input_names = ("u", "delta", "B", "C", "A", "D")
    along = 4
    exact_cuts = True

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"selective_scan-{self.discretization}"

    def leaves(self, inputs: Inputs) -> tuple[Leaf, ...]:
        return (Leaf("h", tuple(inputs[4].shape), compute_dtype(*inputs), tp=0, grad=True),)

    def run(self, inputs: Inputs, pos: Tensor | None, state: State | None) -> tuple[Tensor, State]:
        u, delta, B, C, A, D = inputs
        initial = None if state is None else state["h"]
        y, h = selective_scan(u, delta, A, B, C, D, pos=pos, initial_state=initial, discretization=self.discretization)
        return y, {"h": h}

    def reference(self, inputs: Inputs, pos: Tensor | None, state: State | None) -> tuple[Tensor, State]:
        u, delta, B, C, A, D = inputs
        initial = None if state is None else state["h"]
        y, h = selective_scan_reference(u, delta, A, B, C, D, pos=pos, initial_state=initial, discretization=self.discretization)
        return y, {"h": h}

    def transition(self, inputs: Inputs, pos: Tensor | None) -> State:
        """exp(A sum of delta): the product of the decays needs one sum over time."""
        _, delta, _, _, A, _ = inputs
        dtype = compute_dtype(*inputs)
        decay = torch.exp(delta.to(dtype).sum(1)[:, :, None] * A.to(dtype))
        return {"h": decay if pos is None else decay.masked_fill((pos == 0).any(1)[:, None, None], 0.0)}

    def begin(self, inputs: Inputs, pos: Tensor | None) -> tuple[State, Effect]:
        if not self._in_triton(inputs):
            return super().begin(inputs, pos)
        decay, add = effect(_scanned(inputs), pos=pos)
        return {"h": decay}, self.effect({"h": decay}, {"h": add})

    def begin_backward(self, inputs: Inputs, pos: Tensor | None, transition: State, state: State, dy: Tensor) -> Effect:
        if not self._in_triton(inputs):
            return super().begin_backward(inputs, pos, transition, state, dy)
        return self.effect(transition, {"h": effect_backward(_scanned(inputs), dy, pos=pos)})

    def _in_triton(self, inputs: Inputs) -> bool:
        return self.discretization == "euler" and in_triton(inputs[0], compute_dtype(*inputs))

    def example(self, generator: torch.Generator, batch: int, length: int, dtype: torch.dtype, wide: bool) -> tuple[Inputs, State]:
        channels, d_state = (67, 17) if wide else (5, 3)
        normal = partial(randn, generator, dtype=dtype)
        u, delta = normal(batch, length, channels), extreme_steps(generator, batch, length, channels, dtype=dtype)
        A = -torch.exp(normal(channels, d_state))
        B, C = normal(batch, length, d_state), normal(batch, length, d_state)
        return (u, delta, B, C, A, normal(channels)), {"h": normal(batch, channels, d_state)}

    def smooth(self, inputs: Inputs) -> Inputs:
        return (inputs[0], (inputs[1] + 0.3).clamp(max=2.0), *inputs[2:])


def _scanned(inputs: Inputs) -> ScanInputs:
    u, delta, B, C, A, D = inputs
    return ScanInputs(u, delta, B, C, D, A)


RECURRENCES = (SelectiveScan("euler"), SelectiveScan("zoh"))
