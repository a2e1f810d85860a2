"""Longhorn as a `LinearRecurrence`, for state passing and for tests."""

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.kernels.common.chunked_autograd import state_dtype
from baton.kernels.common.example_inputs import extreme_gates, extreme_keys, randn
from baton.kernels.diagonal_scan.triton_launch import (
    ScanInputs,
    diagonal_scan_triton,
    state_transition_backward_triton,
    state_transition_triton,
    use_triton,
)
from baton.kernels.longhorn.op import longhorn
from baton.kernels.longhorn.reference import longhorn_reference
from baton.kernels.protocol import Inputs, LinearRecurrence, State, StateSpec, StateTransition


@dataclass(frozen=True)
class Longhorn(LinearRecurrence):
    """Inputs x, k, q, beta along time, then D; State {S [batch, channels, d_state]}. See `op.longhorn`.

    gated: also z along time, and beta_bias last; beta is before the sigmoid.
    """

    gated: bool = False

    @property
    def name(self) -> str:  # type: ignore[override]
        return "longhorn-gated" if self.gated else "longhorn"

    @property
    def input_names(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("x", "k", "q", "beta", "z", "D", "beta_bias") if self.gated else ("x", "k", "q", "beta", "D")

    @property
    def num_time_inputs(self) -> int:  # type: ignore[override]
        return 5 if self.gated else 4

    @property
    def split_bitwise_exact(self) -> bool:  # type: ignore[override]
        return not self.gated

    def state_specs(self, inputs: Inputs) -> tuple[StateSpec, ...]:
        shape = (inputs[0].shape[2], inputs[1].shape[2])
        return (StateSpec("S", shape, state_dtype(*inputs), tp=0, grad=True),)

    def run(self, inputs: Inputs, pos: Tensor | None, state: State | None) -> tuple[Tensor, State]:
        given = {**self._named(inputs), "beta_sigmoid": self.gated}
        y, S = longhorn(**given, pos=pos, initial_state=None if state is None else state["S"])  # type: ignore[arg-type]
        return y, {"S": S}

    def step(self, inputs: Inputs, pos: Tensor | None, state: State) -> tuple[Tensor, State]:
        if not use_triton(inputs[0], state_dtype(*inputs)):
            return super().step(inputs, pos, state)
        y, S = diagonal_scan_triton(
            self._scanned(inputs), pos=pos, initial_state=state["S"], activate=self.gated, overwrite_state=True
        )
        return y, {"S": S}

    def reference(self, inputs: Inputs, pos: Tensor | None, state: State | None) -> tuple[Tensor, State]:
        named = self._named(inputs)
        beta = torch.sigmoid(named["beta"] + named["beta_bias"]) if self.gated else named["beta"]
        x, k, q, D = (named[name] for name in ("x", "k", "q", "D"))
        y, S = longhorn_reference(x, k, q, beta, D, pos=pos, initial_state=None if state is None else state["S"])
        return (y * F.silu(named["z"]) if self.gated else y), {"S": S}

    def transition_matrix(self, inputs: Inputs, pos: Tensor | None) -> State:
        """The product of the decays: the final state of a run that starts from ones and has x = 0."""
        named, dtype = self._named(inputs), state_dtype(*inputs)
        x, k, q, beta, D = (named[name] for name in ("x", "k", "q", "beta", "D"))
        ones = torch.ones(x.shape[0], x.shape[2], k.shape[2], dtype=dtype, device=x.device)
        options = {"beta_bias": named.get("beta_bias"), "beta_sigmoid": self.gated, "pos": pos, "initial_state": ones}
        return {"S": longhorn(torch.zeros_like(x), k, q, beta, D, **options)[1]}  # type: ignore[arg-type]

    def begin(self, inputs: Inputs, pos: Tensor | None) -> tuple[State, StateTransition]:
        if not use_triton(inputs[0], state_dtype(*inputs)):
            return super().begin(inputs, pos)
        decay, add = state_transition_triton(self._scanned(inputs), pos=pos, activate=self.gated)
        return {"S": decay}, self.state_transition({"S": decay}, {"S": add})

    def begin_backward(self, inputs: Inputs, pos: Tensor | None, transition: State, state: State, dy: Tensor) -> StateTransition:
        if not use_triton(inputs[0], state_dtype(*inputs)):
            return super().begin_backward(inputs, pos, transition, state, dy)
        return self.state_transition(
            transition, {"S": state_transition_backward_triton(self._scanned(inputs), dy, pos=pos, activate=self.gated)}
        )

    def _named(self, inputs: Inputs) -> dict[str, Tensor]:
        return dict(zip(self.input_names, inputs, strict=True))

    def _scanned(self, inputs: Inputs) -> ScanInputs:
        named = self._named(inputs)
        x, beta, k, q, D = (named[name] for name in ("x", "beta", "k", "q", "D"))
        return ScanInputs(x, beta, None, k, q, D, named.get("z"), named.get("beta_bias"))

    def example(self, generator: torch.Generator, batch: int, length: int, dtype: torch.dtype, wide: bool) -> tuple[Inputs, State]:
        channels, d_state = (67, 17) if wide else (5, 3)
        normal = partial(randn, generator, dtype=dtype)
        k = extreme_keys(generator, batch, length, d_state, dtype=dtype)
        beta = extreme_gates(generator, batch, length, channels, dtype=dtype)
        x, q = normal(batch, length, channels), normal(batch, length, d_state)
        inputs: Inputs = (x, k, q, beta, normal(channels))
        if self.gated:
            inputs = (x, k, q, torch.logit(beta, 1e-9), normal(batch, length, channels), normal(channels), normal(channels))
        return inputs, {"S": normal(batch, channels, d_state)}

    def smooth(self, inputs: Inputs) -> Inputs:
        return (inputs[0], inputs[1].clamp(-2.0, 2.0), *inputs[2:])


RECURRENCES = (Longhorn(), Longhorn(gated=True))
