"""Compares recurrences with their reference on this machine, because compilers can generate wrong kernels for new GPUs silently.

A check runs a recurrence as training does, in float32 or bfloat16, on its wide example, with packed documents, an entering State,
and inputs and positions that are views of wider tensors. It compares outputs, the final State and all gradients with the loop over
tokens in float64 on the CPU, for the same rounded inputs. A second run must give the same bits, and so must one without a graph,
as the first of the two forward passes of segments with exact BPTT.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.kernels.common.example_inputs import positions
from baton.kernels.protocol import Inputs, Recurrence, State

FLOAT32_LIMIT = 2e-5
CHAOS = 30  # allowed multiple of the reference's own float32 error, for recurrences that amplify errors or extreme inputs
_BATCH, _TOKENS = 3, 70


@dataclass(frozen=True)
class KernelCheckResult:
    """Result of a check.

    tensor: the one with the largest ratio of error to limit: "y", "leaving NAME", "d input N" or "d entering NAME".
    error: its relative error ||a - b|| / ||b||; absolute if b is 0.
    limit: the allowed error.
    repeatable: whether two runs, and one without a graph, gave the same bits.
    """

    recurrence: str
    dtype: torch.dtype
    tensor: str
    error: float
    limit: float
    repeatable: bool

    @property
    def passed(self) -> bool:
        return self.error <= self.limit and self.repeatable  # false for NaN

    def __str__(self) -> str:
        said = "" if self.repeatable else ", runs differ"
        verdict = "passed" if self.passed else "FAILED"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.recurrence:<44} {dtype:<9} {self.error:.1e} of {self.limit:.1e} ({self.tensor}){said}: {verdict}"


_Example = tuple[Inputs, State, Tensor]
"""Inputs, entering State and positions of a recurrence, on the CPU."""


@dataclass(frozen=True)
class Reference:
    """Results of a recurrence's reference for an example, on the CPU.

    expected: outputs, States and gradients by name, in float64.
    rounded: the same in float32, whose error scales the limits of recurrences that amplify errors; None: the limits are fixed.
    """

    recurrence: Recurrence
    dtype: torch.dtype
    example: _Example
    expected: dict[str, Tensor]
    rounded: dict[str, Tensor] | None


def reference(recurrence: Recurrence, dtype: torch.dtype, *, extreme: bool = False) -> Reference:
    """Computes the reference results for `check`. dtype, extreme: as in `check`."""
    example, cpu = _example(recurrence, dtype, extreme), torch.device("cpu")
    expected = _run(recurrence, example, True, cpu, torch.float64)
    rounded = _run(recurrence, example, True, cpu, torch.float32) if extreme or recurrence.error_amplifying else None
    return Reference(recurrence, dtype, example, expected, rounded)


def check(recurrence: Recurrence, device: torch.device, dtype: torch.dtype, *, extreme: bool = False) -> KernelCheckResult:
    """Compares a recurrence on a device with its reference. dtype: of the inputs with a time dimension. extreme: use gates, step
    sizes and keys at the ends of their ranges."""
    return compare(reference(recurrence, dtype, extreme=extreme), device)


def compare(wanted: Reference, device: torch.device) -> KernelCheckResult:
    """Compare what the device computes with the reference."""
    recurrence, dtype = wanted.recurrence, wanted.dtype

    def run() -> dict[str, Tensor]:
        return {name: x.cpu() for name, x in _run(recurrence, wanted.example, False, device, None).items()}

    found, again = run(), run()
    with torch.no_grad():
        y, leaving, *_ = _forward(recurrence, wanted.example, False, device, None)
    plain = {"y": y, **{f"leaving {name}": x for name, x in leaving.items()}}
    repeatable = all(torch.equal(x.cpu(), found[name]) for other in (again, plain) for name, x in other.items())
    least = FLOAT32_LIMIT if dtype == torch.float32 else recurrence.bfloat16_limit
    rows = []
    for name, want in wanted.expected.items():
        limit = least if wanted.rounded is None else max(least, CHAOS * _error(wanted.rounded[name], want))
        rows.append((_error(found[name], want), limit, name))
    # NaN first: it exceeds any limit, but does not compare as larger
    error, limit, worst = max(rows, key=lambda row: (row[0] != row[0], row[0] / row[1]))
    return KernelCheckResult(str(recurrence), dtype, worst, error, limit, repeatable)


def launch(recurrence: Recurrence, device: torch.device, dtype: torch.dtype) -> None:
    """Runs on the device what `check` runs there, without a comparison, to compile its kernels."""
    _run(recurrence, _example(recurrence, dtype, False), False, device, None)


def _example(recurrence: Recurrence, dtype: torch.dtype, extreme: bool) -> _Example:
    inputs, state = recurrence.example(torch.Generator().manual_seed(0), _BATCH, _TOKENS, torch.float32, wide=True)
    inputs = inputs if extreme else recurrence.smooth(inputs)
    inputs = (*(x.to(dtype) for x in inputs[: recurrence.num_time_inputs]), *inputs[recurrence.num_time_inputs :])
    state = {leaf.name: state[leaf.name].to(leaf.dtype) for leaf in recurrence.state_specs(inputs)}
    return inputs, state, positions(torch.Generator().manual_seed(1), _BATCH, _TOKENS, 0.05).to(torch.int32)


def _run(
    recurrence: Recurrence, example: _Example, defined: bool, where: torch.device, cast: torch.dtype | None
) -> dict[str, Tensor]:
    """Outputs, State and gradients of `_forward`."""
    with torch.enable_grad():
        return results(*_forward(recurrence, example, defined, where, cast), 2)


def _forward(
    recurrence: Recurrence, example: _Example, defined: bool, where: torch.device, cast: torch.dtype | None
) -> tuple[Tensor, State, Inputs, State]:
    """Runs the reference or the implementation on a device, in a dtype or in that of the example; the outputs, the State that
    leaves, and the inputs and the State that enters."""
    inputs, state, pos = example

    def leaf(x: Tensor, view: bool = False) -> Tensor:
        x = x.detach().to(where)
        x = x.to(cast or x.dtype) if x.is_floating_point() else x
        return (_part_of_wider(x, dim=-1) if view else x).requires_grad_(x.is_floating_point())

    own = tuple(leaf(x, view=n < recurrence.num_time_inputs and not defined) for n, x in enumerate(inputs))
    entering = {name: leaf(x) for name, x in state.items()}
    y, leaving = (recurrence.reference if defined else recurrence.run)(own, _part_of_wider(pos.to(where), dim=1), entering)
    return y, leaving, own, entering


def results(y: Tensor, state: State, inputs: Inputs, entering: State, seed: int) -> dict[str, Tensor]:
    """Outputs, final State and all gradients for random gradients of the outputs, by name."""
    grads = gradients([y, *moving(state).values()], [*inputs, *moving(entering).values()], torch.Generator().manual_seed(seed))
    names = [*(f"d input {n}" for n in range(len(inputs))), *(f"d entering {name}" for name in moving(entering))]
    found = {"y": y, **{f"leaving {name}": x for name, x in state.items()}, **dict(zip(names, grads, strict=True))}
    return {name: x.detach() for name, x in found.items()}


def gradients(outputs: Sequence[Tensor], leaves: Sequence[Tensor], generator: torch.Generator) -> tuple[Tensor, ...]:
    """Gradients of all leaves for random gradients of all differentiable outputs, the final State included."""
    # values that bfloat16 can represent, so that outputs of every dtype get the same ones
    cotangents = [torch.randn(x.shape, generator=generator).to(torch.bfloat16).to(x.device, x.dtype) for x in outputs]
    reached = [(x, dx) for x, dx in zip(outputs, cotangents, strict=True) if x.requires_grad]
    return torch.autograd.grad(
        [x for x, _ in reached], leaves, [dx for _, dx in reached], allow_unused=True, materialize_grads=True
    )


def moving(state: State) -> State:
    """The leaves that can have a gradient."""
    return {name: x for name, x in state.items() if x.is_floating_point()}


def _part_of_wider(x: Tensor, dim: int) -> Tensor:
    """x as a view of a tensor that is twice as large along dim and has other values in the other half."""
    return torch.cat((x, x.flip(dim)), dim).narrow(dim, 0, x.shape[dim])


def _error(found: Tensor, expected: Tensor) -> float:
    difference, size = (found.double() - expected.double()).norm(), expected.double().norm()
    return float(difference / size if size else difference)
