"""Every recurrence's CPU implementation compared with its reference, a loop over tokens: time and memory of forward and backward.

All recurrences in `baton.kernels.registry` are checked against their references, on their wide examples, in float32, with one
thread on one core, with gradients to all inputs and to the entering State, and with packed documents. Of recurrences that differ
only in options, the first is timed (`--only` selects others). The two implementations alternate, and times are medians over
`--repetitions` (3 if one run takes long) of the thread's processor time, which other programs hardly affect. Memory is the peak of
live tensors beyond the inputs, the output gradients and earlier tensors, counted by storage at every operator. It is reproducible
but does not include scratch memory inside operators.

    python benchmarks/cpu_scan.py
"""

import argparse
import os
import statistics
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from report import Report
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from baton.kernels.protocol import Inputs, Recurrence, State
from baton.kernels.registry import recurrences

LANES, DOCUMENT = 3, 700  # sequences in a batch; tokens of a document, so that starts fall anywhere in a chunk
LENGTHS = (1024, 4096, 16384)
GATE_LENGTH = 300  # no whole number of chunks
EXACT, LINEAR = 1e-10, 1.1  # most relative error in float64; most bytes per token, over those at the shortest length
LONG_RUN = 2.0  # seconds of one run that allow for 3 repetitions only
FEWEST = 3  # repetitions there, and of every run of a definition

Form = Callable[[Inputs, Tensor, State], tuple[Tensor, State]]


class LiveBytes(TorchDispatchMode):
    """Within this context, `peak` is the most that storages made within it held at once. Those of `known` tensors do not count."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._seen = {self._key(x): x for x in known}

    @staticmethod
    def _key(tensor: Tensor) -> int:
        return tensor.untyped_storage()._cdata

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and self._key(leaf) not in self._seen:
                self._add(leaf.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        self._seen[key] = None
        self.live += nbytes
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._remove, key, nbytes)

    def _remove(self, key: int, nbytes: int) -> None:
        del self._seen[key]
        self.live -= nbytes


@dataclass
class Case:
    """One recurrence at one length: leaves that want a gradient, cotangents of all that comes out, names of the State's leaves that
    have a gradient."""

    recurrence: Recurrence
    inputs: Inputs
    state: State
    pos: Tensor
    cotangents: list[Tensor]
    moving: set[str]

    @classmethod
    def make(cls, recurrence: Recurrence, length: int, dtype: torch.dtype) -> "Case":
        generator = torch.Generator().manual_seed(0)
        inputs, state = recurrence.example(generator, LANES, length, dtype, wide=True)
        inputs = tuple(x.requires_grad_() for x in inputs)
        state = {name: x.requires_grad_(x.is_floating_point()) for name, x in state.items()}
        # every lane begins elsewhere in a document
        pos = (torch.arange(length) + torch.arange(1, LANES + 1)[:, None] * 111) % DOCUMENT
        with torch.no_grad():
            y, leaving = recurrence.run(inputs, pos, state)
        moving = {leaf.name for leaf in recurrence.state_specs(inputs) if leaf.grad}
        outputs = [y, *(x for name, x in leaving.items() if name in moving)]
        cotangents = [torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in outputs]
        return cls(recurrence, inputs, state, pos, cotangents, moving)

    def tensors(self) -> list[Tensor]:
        """All tensors that exist before a run."""
        return [*self.inputs, *self.state.values(), self.pos, *self.cotangents]

    def go(self, form: Form) -> list[Tensor]:
        """Runs forward and backward; returns outputs and gradients."""
        y, leaving = form(self.inputs, self.pos, self.state)
        outputs = [y, *(x for name, x in leaving.items() if name in self.moving)]
        leaves = [x for x in (*self.inputs, *self.state.values()) if x.requires_grad]
        return [*outputs, *torch.autograd.grad(outputs, leaves, self.cotangents, allow_unused=True, materialize_grads=True)]

    def seconds(self, form: Form) -> float:
        start = time.process_time()
        self.go(form)
        return time.process_time() - start

    def peak_bytes(self, form: Form) -> int:
        with LiveBytes(self.tensors()) as memory:
            self.go(form)
        return memory.peak


def largest_error(recurrence: Recurrence) -> float:
    """Relative errors of outputs, final State and all gradients, in float64."""
    case = Case.make(recurrence, GATE_LENGTH, torch.float64)
    pairs = zip(case.go(recurrence.run), case.go(recurrence.reference), strict=True)
    return max(float((ours - exact).detach().norm() / exact.detach().norm().clamp(min=1e-300)) for ours, exact in pairs)


def measure(report: Report, recurrence: Recurrence, repetitions: int, reference_length: int) -> float:
    """Memory and times at all lengths of a recurrence whose gate has passed. Returns the seconds that its definition took."""
    name, form, first = str(recurrence), recurrence.run, LENGTHS[0]
    held: dict[int, float] = {}
    for length in LENGTHS:
        held[length] = Case.make(recurrence, length, torch.float32).peak_bytes(form) / (LANES * length)
    growth = max(held.values()) / held[first]
    figures = ", ".join(f"{bytes_per_token:,.0f} at T {length}" for length, bytes_per_token in held.items())
    linear = f"{name}, memory"
    report.gate(
        linear, growth <= LINEAR, f"{name} in chunks holds, in bytes/token, {figures}: at most {growth:.2f} <= {LINEAR} times"
    )
    speed: dict[int, float] = {}
    spent = 0.0
    for length in LENGTHS:
        case, label, tokens = Case.make(recurrence, length, torch.float32), f"{name}, T {length}", LANES * length
        ours, theirs = [], []
        while len(ours) < (repetitions if max(ours, default=0.0) < LONG_RUN else FEWEST):
            ours.append(case.seconds(form))
            if length <= reference_length and len(theirs) < FEWEST:
                theirs.append(case.seconds(recurrence.reference))
        speed[length] = tokens / statistics.median(ours)
        if length != first:
            itself = f"itself at T {first}"
            report.row(label, "tokens/s", speed[length], itself, speed[first], gate=name)
            report.row(label, "bytes/token", held[length], itself, held[first], gate=linear, higher_is_better=False)
        if theirs:
            report.row(label, "tokens/s", speed[length], "definition", tokens / statistics.median(theirs), gate=name)
            start = time.process_time()
            peak = case.peak_bytes(recurrence.reference) / tokens
            spent += sum(theirs) + time.process_time() - start
            report.row(label, "bytes/token", held[length], "definition", peak, gate=linear, higher_is_better=False)
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5, help="of every measurement; the median is shown (default 5)")
    parser.add_argument(
        "--reference-length",
        type=int,
        default=LENGTHS[0],
        help=f"longest T at which definitions are run; their time grows with its square (default {LENGTHS[0]})",
    )
    parser.add_argument("--only", help="a part of the names of the recurrences to check and time, all options (default: see above)")
    arguments = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    report = Report("cpu_scan")
    chosen = [recurrence for recurrence in recurrences() if (arguments.only or "") in str(recurrence)]
    for recurrence in chosen:
        error = largest_error(recurrence)
        detail = f"{recurrence} in float64 equals its definition, gradients too, T {GATE_LENGTH}: {error:.1e} <= {EXACT}"
        report.gate(str(recurrence), error <= EXACT, detail)
    # a name is that of the recurrence, then its options
    firsts = {str(recurrence).split("-")[0]: recurrence for recurrence in reversed(chosen)}
    timed = chosen if arguments.only else [recurrence for recurrence in chosen if recurrence in firsts.values()]
    spent = sum(measure(report, recurrence, arguments.repetitions, arguments.reference_length) for recurrence in timed)
    left_out = [length for length in LENGTHS if length > arguments.reference_length]
    report.say(f"definitions took {spent:.0f} s; left out at T {', '.join(map(str, left_out)) or '(none)'}")
    report.say(f"checked and not timed: {', '.join(str(r) for r in chosen if r not in timed) or 'none'}")
    report.save()


if __name__ == "__main__":
    main()
