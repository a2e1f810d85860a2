"""The selective scan as a `LinearRecurrence`, for state passing and for tests."""

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.kernels.common.chunked_autograd import state_dtype
from baton.kernels.common.example_inputs import extreme_steps, randn
from baton.kernels.diagonal_scan.triton_launch import (
    ScanInputs,
    diagonal_scan_triton,
    state_transition_backward_triton,
    state_transition_triton,
    use_triton,
)
from baton.kernels.protocol import Inputs, LinearRecurrence, State, StateSpec, StateTransition
from baton.kernels.selective_scan.op import Discretization, selective_scan
from baton.kernels.selective_scan.reference import selective_scan_reference


@dataclass(frozen=True)
class SelectiveScan(LinearRecurrence):
    """Inputs x, dt, B, C along time, then A, D; State {h [batch, channels, d_state]}. See `op.selective_scan`.

    activated: dt is before the softplus, and dt_bias is last. gated: that, and z along time.
    """

    discretization: Discretization = "euler"
    gated: bool = False
    activated: bool = False

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"selective_scan-{self.discretization}{'-gated' if self.gated else '-activated' if self.activated else ''}"

    @property
    def input_names(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("x", "dt", "B", "C", *(("z",) if self.gated else ()), "A", "D", *(("dt_bias",) if self._softplus else ()))

    @property
    def num_time_inputs(self) -> int:  # type: ignore[override]
        return 5 if self.gated else 4

    @property
    def split_bitwise_exact(self) -> bool:  # type: ignore[override]
        return not self._softplus

    def state_specs(self, inputs: Inputs) -> tuple[StateSpec, ...]:
        return (StateSpec("h", tuple(self._named(inputs)["A"].shape), state_dtype(*inputs), tp=0, grad=True),)

    def run(self, inputs: Inputs, pos: Tensor | None, state: State | None) -> tuple[Tensor, State]:
        given = {**self._named(inputs), "dt_softplus": self._softplus, "discretization": self.discretization}
        y, h = selective_scan(**given, pos=pos, initial_state=None if state is None else state["h"])  # type: ignore[arg-type]
        return y, {"h": h}

    def step(self, inputs: Inputs, pos: Tensor | None, state: State) -> tuple[Tensor, State]:
        if not self._in_triton(inputs):
            return super().step(inputs, pos, state)
        y, h = diagonal_scan_triton(
            self._scanned(inputs), pos=pos, initial_state=state["h"], activate=self._softplus, zoh=self._zoh, overwrite_state=True
        )
        return y, {"h": h}

    def reference(self, inputs: Inputs, pos: Tensor | None, state: State | None) -> tuple[Tensor, State]:
        named = self._named(inputs)
        x, dt, A, B, C, D = (named[name] for name in ("x", "dt", "A", "B", "C", "D"))
        initial = None if state is None else state["h"]
        if self._softplus:
            dt = F.softplus(dt + named["dt_bias"])
        y, h = selective_scan_reference(x, dt, A, B, C, D, pos=pos, initial_state=initial, discretization=self.discretization)
        return (y * F.silu(named["z"]) if self.gated else y), {"h": h}

    def transition_matrix(self, inputs: Inputs, pos: Tensor | None) -> State:
        """exp(A sum of dt): the product of the decays needs one sum over time."""
        named, dtype = self._named(inputs), state_dtype(*inputs)
        dt = named["dt"].to(dtype)
        if self._softplus:
            dt = F.softplus(dt + named["dt_bias"].to(dtype))
        decay = torch.exp(dt.sum(1)[:, :, None] * named["A"].to(dtype))
        return {"h": decay if pos is None else decay.masked_fill((pos == 0).any(1)[:, None, None], 0.0)}

    def begin(self, inputs: Inputs, pos: Tensor | None) -> tuple[State, StateTransition]:
        if not self._in_triton(inputs):
            return super().begin(inputs, pos)
        decay, add = state_transition_triton(self._scanned(inputs), pos=pos, activate=self._softplus, zoh=self._zoh)
        return {"h": decay}, self.state_transition({"h": decay}, {"h": add})

    def begin_backward(self, inputs: Inputs, pos: Tensor | None, transition: State, state: State, dy: Tensor) -> StateTransition:
        if not self._in_triton(inputs):
            return super().begin_backward(inputs, pos, transition, state, dy)
        add = state_transition_backward_triton(self._scanned(inputs), dy, pos=pos, activate=self._softplus, zoh=self._zoh)
        return self.state_transition(transition, {"h": add})

    def _in_triton(self, inputs: Inputs) -> bool:
        return use_triton(inputs[0], state_dtype(*inputs))

    @property
    def _softplus(self) -> bool:
        return self.gated or self.activated

    @property
    def _zoh(self) -> bool:
        return self.discretization == "zoh"

    def _named(self, inputs: Inputs) -> dict[str, Tensor]:
        return dict(zip(self.input_names, inputs, strict=True))

    def _scanned(self, inputs: Inputs) -> ScanInputs:
        named = self._named(inputs)
        x, dt, A, B, C, D = (named[name] for name in ("x", "dt", "A", "B", "C", "D"))
        return ScanInputs(x, dt, A, B, C, D, named.get("z"), named.get("dt_bias"))

    def example(self, generator: torch.Generator, batch: int, length: int, dtype: torch.dtype, wide: bool) -> tuple[Inputs, State]:
        channels, d_state = (67, 17) if wide else (5, 3)
        normal = partial(randn, generator, dtype=dtype)
        x, dt = normal(batch, length, channels), extreme_steps(generator, batch, length, channels, dtype=dtype)
        A = -torch.exp(normal(channels, d_state))
        B, C = normal(batch, length, d_state), normal(batch, length, d_state)
        inputs: Inputs = (x, dt, B, C, A, normal(channels))
        if self._softplus:
            # inverse softplus: the smallest step sizes are far below 0 there
            before = dt + torch.log(-torch.expm1(-dt.clamp(min=1e-12)))
            z = (normal(batch, length, channels),) if self.gated else ()
            inputs = (x, before, B, C, *z, A, normal(channels), normal(channels))
        return inputs, {"h": normal(batch, channels, d_state)}

    def smooth(self, inputs: Inputs) -> Inputs:
        step = inputs[1].clamp(-3.0, 2.0) if self._softplus else (inputs[1] + 0.3).clamp(max=2.0)
        return (inputs[0], step, *inputs[2:])


RECURRENCES = (
    SelectiveScan("euler"),
    SelectiveScan("zoh"),
    SelectiveScan("euler", gated=True),
    SelectiveScan("zoh", gated=True),
    SelectiveScan("euler", activated=True),
)
