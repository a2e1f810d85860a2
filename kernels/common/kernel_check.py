"""Every recurrence against its definition on the machine at hand: compilers have made wrong kernels for new GPUs without a word.

The one thing to know: a check runs a recurrence as training does, in float32 or bfloat16, on its own wide example with documents
packed and a State that enters and leaves, inputs and positions being views of wider ones, and compares outputs, States and all
gradients with the loop over tokens in float64 on the CPU, on the same rounded inputs; then once more, for the same bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.kernels.common.example_inputs import positions
from baton.kernels.protocol import Inputs, Recurrence, State

FLOAT32_LIMIT = 2e-5
CHAOS = 30  # times what the definition loses in float32 may be lost where a last bit grows, or inputs are extreme
_BATCH, _TOKENS = 3, 70


@dataclass(frozen=True)
class KernelCheckResult:
    """What a check found.

    tensor: the one that is worst beside what it may be off, "y", "leaving NAME", "d input N" or "d entering NAME". error:
    ||a - b|| / ||b||, absolute where b is 0. limit: the most it may be. repeatable: two runs had the same bits.
    """

    recurrence: str
    dtype: torch.dtype
    tensor: str
    error: float
    limit: float
    repeatable: bool

    @property
    def passed(self) -> bool:
        return self.error <= self.limit and self.repeatable  # nan is not

    def __str__(self) -> str:
        said = "" if self.repeatable else ", two runs differ"
        verdict = "passed" if self.passed else "FAILED"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.recurrence:<44} {dtype:<9} {self.error:.1e} of {self.limit:.1e} ({self.tensor}){said}: {verdict}"


_Example = tuple[Inputs, State, Tensor]
"""What goes into a recurrence and its positions, on the CPU."""


@dataclass(frozen=True)
class Reference:
    """What a recurrence's definition computes of an example, on the CPU.

    expected: outputs, States and gradients by name, in float64. rounded: the same in float32, which decides how far a result may be
    off where a last bit grows; None: fixed limits do.
    """

    recurrence: Recurrence
    dtype: torch.dtype
    example: _Example
    expected: dict[str, Tensor]
    rounded: dict[str, Tensor] | None


def reference(recurrence: Recurrence, dtype: torch.dtype, *, extreme: bool = False) -> Reference:
    """Compute what `check` compares with. dtype, extreme: as `check`."""
    example, cpu = _example(recurrence, dtype, extreme), torch.device("cpu")
    expected = _run(recurrence, example, True, cpu, torch.float64)
    rounded = _run(recurrence, example, True, cpu, torch.float32) if extreme or recurrence.error_amplifying else None
    return Reference(recurrence, dtype, example, expected, rounded)


def check(recurrence: Recurrence, device: torch.device, dtype: torch.dtype, *, extreme: bool = False) -> KernelCheckResult:
    """Compare. dtype: of what runs along time; extreme: gates, steps and keys that reach the ends of their ranges."""
    return compare(reference(recurrence, dtype, extreme=extreme), device)


def compare(wanted: Reference, device: torch.device) -> KernelCheckResult:
    """Compare what the device computes with the reference."""
    recurrence, dtype = wanted.recurrence, wanted.dtype

    def run() -> dict[str, Tensor]:
        return {name: x.cpu() for name, x in _run(recurrence, wanted.example, False, device, None).items()}

    found, again = run(), run()
    least = FLOAT32_LIMIT if dtype == torch.float32 else recurrence.bfloat16_limit
    rows = []
    for name, want in wanted.expected.items():
        limit = least if wanted.rounded is None else max(least, CHAOS * _error(wanted.rounded[name], want))
        rows.append((_error(found[name], want), limit, name))
    # nan first: it is larger than any limit, but compares as smaller
    error, limit, worst = max(rows, key=lambda row: (row[0] != row[0], row[0] / row[1]))
    return KernelCheckResult(
        str(recurrence), dtype, worst, error, limit, all(torch.equal(again[name], x) for name, x in found.items())
    )


def launch(recurrence: Recurrence, device: torch.device, dtype: torch.dtype) -> None:
    """Do on the device what `check` does there, and look at nothing."""
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
    """The definition or what runs use, on a device, in a dtype or in that of the example."""
    inputs, state, pos = example

    def leaf(x: Tensor, view: bool = False) -> Tensor:
        x = x.detach().to(where)
        x = x.to(cast or x.dtype) if x.is_floating_point() else x
        return (_part_of_wider(x, dim=-1) if view else x).requires_grad_(x.is_floating_point())

    own = tuple(leaf(x, view=n < recurrence.num_time_inputs and not defined) for n, x in enumerate(inputs))
    entering = {name: leaf(x) for name, x in state.items()}
    with torch.enable_grad():
        y, leaving = (recurrence.reference if defined else recurrence.run)(own, _part_of_wider(pos.to(where), dim=1), entering)
        return results(y, leaving, own, entering, 2)


def results(y: Tensor, state: State, inputs: Inputs, entering: State, seed: int) -> dict[str, Tensor]:
    """Outputs, leaving State and the gradients of everything for random cotangents, by name."""
    grads = gradients([y, *moving(state).values()], [*inputs, *moving(entering).values()], torch.Generator().manual_seed(seed))
    names = [*(f"d input {n}" for n in range(len(inputs))), *(f"d entering {name}" for name in moving(entering))]
    found = {"y": y, **{f"leaving {name}": x for name, x in state.items()}, **dict(zip(names, grads, strict=True))}
    return {name: x.detach() for name, x in found.items()}


def gradients(outputs: Sequence[Tensor], leaves: Sequence[Tensor], generator: torch.Generator) -> tuple[Tensor, ...]:
    """Gradients of all leaves for random cotangents of all outputs that have one, the final state's included."""
    # numbers that bfloat16 can hold, so that outputs of every precision get the same ones
    cotangents = [torch.randn(x.shape, generator=generator).to(torch.bfloat16).to(x.device, x.dtype) for x in outputs]
    reached = [(x, dx) for x, dx in zip(outputs, cotangents, strict=True) if x.requires_grad]
    return torch.autograd.grad(
        [x for x, _ in reached], leaves, [dx for _, dx in reached], allow_unused=True, materialize_grads=True
    )


def moving(state: State) -> State:
    """The leaves that can have a gradient."""
    return {name: x for name, x in state.items() if x.is_floating_point()}


def _part_of_wider(x: Tensor, dim: int) -> Tensor:
    """x as a view of a tensor twice as large along dim, which holds another thing beside it."""
    return torch.cat((x, x.flip(dim)), dim).narrow(dim, 0, x.shape[dim])


def _error(found: Tensor, expected: Tensor) -> float:
    difference, size = (found.double() - expected.double()).norm(), expected.double().norm()
    return float(difference / size if size else difference)
