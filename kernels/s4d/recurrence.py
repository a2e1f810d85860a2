"""S4D as a linear recurrence, for state passing and for tests."""

from dataclasses import dataclass

import torch
from torch import Tensor

from baton.kernels.common.chunked_autograd import state_dtype
from baton.kernels.common.example_inputs import extreme_log_gates, randn
from baton.kernels.errors import expect_tensor
from baton.kernels.protocol import Inputs, LinearRecurrence, MatrixAffine, State, StateSpec, StateTransition
from baton.kernels.s4d.op import s4d
from baton.kernels.s4d.reference import s4d_reference


def _initial(state: State | None) -> Tensor | None:
    """The op's initial state; the op refuses what is no tensor. Raises KernelError."""
    h = None if state is None else state["h"]
    if not isinstance(h, Tensor):
        return h
    expect_tensor("s4d", "initial_state", h, ("batch", "channels", "d_state", "2", "1"), (-1, -1, -1, 2, 1), h.device)
    return h.squeeze(-1)


@dataclass(frozen=True)
class S4D(LinearRecurrence):
    """Input x along time, then log_decay, angle, C; State {h [batch, channels, d_state, 2, 1]}. See `op.s4d`.

    A state is a column of its real and imaginary parts, which a span multiplies by a rotation, a matrix of 2 x 2.
    """

    name = "s4d"
    input_names = ("x", "log_decay", "angle", "C")
    num_time_inputs = 1
    no_kernel = "it has a form in PyTorch alone"

    def state_specs(self, inputs: Inputs) -> tuple[StateSpec, ...]:
        return (StateSpec("h", (*inputs[3].shape, 1), state_dtype(*inputs), tp=0, grad=True),)

    def run(self, inputs: Inputs, pos: Tensor | None, state: State | None) -> tuple[Tensor, State]:
        y, h = s4d(*inputs, pos=pos, initial_state=_initial(state))
        return y, {"h": h[..., None]}

    def reference(self, inputs: Inputs, pos: Tensor | None, state: State | None) -> tuple[Tensor, State]:
        y, h = s4d_reference(*inputs, pos=pos, initial_state=_initial(state))
        return y, {"h": h[..., None]}

    def transition_matrix(self, inputs: Inputs, pos: Tensor | None) -> State:
        """The rotation and decay of the whole span, [batch, channels, d_state, 2, 2]."""
        x, (batch, length, _), dtype = inputs[0], inputs[0].shape, state_dtype(*inputs)
        # in float64: the angle of a long span has many turns
        log_decay, angle = (length * tensor.double() for tensor in inputs[1:3])
        re, im = ((log_decay.exp() * part).to(dtype) for part in (angle.cos(), angle.sin()))
        matrix = torch.stack((torch.stack((re, -im), dim=-1), torch.stack((im, re), dim=-1)), dim=-2).expand(batch, -1, -1, -1, -1)
        starts = torch.zeros(batch, dtype=torch.bool, device=x.device) if pos is None else (pos == 0).any(1)
        return {"h": matrix.masked_fill(starts[:, None, None, None, None], 0.0)}

    def state_transition(self, transition: State, add: State) -> StateTransition:
        return MatrixAffine(transition, add)

    def adjoint(self, transition: State) -> State:
        return {"h": transition["h"].mT}

    def example(self, generator: torch.Generator, batch: int, length: int, dtype: torch.dtype, wide: bool) -> tuple[Inputs, State]:
        channels, states = (67, 17) if wide else (5, 3)
        log_decay = extreme_log_gates(generator, channels, states, dtype=dtype)
        angle, C = 2 * randn(generator, channels, states, dtype=dtype), randn(generator, channels, states, 2, dtype=dtype)
        x = randn(generator, batch, length, channels, dtype=dtype)
        return (x, log_decay, angle, C), {"h": randn(generator, batch, channels, states, 2, 1, dtype=dtype)}


RECURRENCES = (S4D(),)
