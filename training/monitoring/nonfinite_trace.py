"""Finds the module that produced the first non-finite value, by running the step again with hooks on every module.

Parameters and initial States are those of the failed step, so the failure repeats; one that does not repeat is a hardware
fault. A module is reported if its inputs were finite and its output is not. Modules that only pass on non-finite values are
not reported, which tells the rank of origin from those that its collectives infected.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from baton.models.lm import LanguageModel
from baton.parallel.mesh import Mesh
from baton.parallel.pipeline import Operation

_PHASES = ("parameter", "forward", "loss", "backward", "gradient")
_MESSAGES = {
    "parameter": "parameter {name} holds values that are not finite",
    "forward": "the first value that is not finite comes out of {name}",
    "loss": "the loss is not finite, and all that goes into it is",
    "backward": "the first gradient that is not finite reaches the output of {name}",
    "gradient": "the gradient of {name} is not finite, and all gradients that lead to it are",
}


@dataclass(frozen=True, order=True)
class NonFiniteReport:
    """A rank's report, ordered by time: the least report of all ranks comes first.

    Attributes:
        phase: index into parameter, forward, loss, backward, gradient.
        micro_batch, segment, stage, event: when it happened; events are outputs and gradients, numbered in each rank's order.
        row, column: position in the micro-batch, column in the whole sequence; -1 if not known.
    """

    phase: int
    micro_batch: int
    segment: int
    stage: int
    event: int
    context_rank: int
    rank: int
    data_rank: int
    name: str
    row: int = -1
    column: int = -1

    @property
    def is_parameter(self) -> bool:
        """Whether a parameter itself is not finite, so that no document is the cause."""
        return _PHASES[self.phase] == "parameter"

    def __str__(self) -> str:
        what = _MESSAGES[_PHASES[self.phase]].format(name=self.name)
        return f"{what} (rank {self.rank}" + (")" if self.phase == 0 else f", micro-batch {self.micro_batch})")


class NonFiniteTrace:
    """Watches one run of a step. operation: the current one, to be set before each. summed_finite: bool [], whether this rank's
    gradients are finite when those of all micro-batches are summed, to be set at the end."""

    summed_finite: Tensor

    def __init__(self, model: LanguageModel, mesh: Mesh, span: int) -> None:
        """span: tokens of a segment on this rank."""
        self._model, self._mesh, self._span = model, mesh, span
        self._layer = ""
        self._events = 0
        self.operation: Operation | None = None
        self._reports: list[NonFiniteReport] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Context in which the step is run again: hooks check every output and gradient."""
        handles: list[Any] = []
        for name, module in self._model.named_modules():
            if name:
                handles.append(module.register_forward_hook(self._after(name)))
        for number, layer in self._model.layers.items():
            handles.append(layer.register_forward_pre_hook(partial(self._enter, number)))
        for name, parameter in self._model.named_parameters():
            if not bool(torch.isfinite(parameter).all()):
                self._add("parameter", name)
            if parameter.requires_grad:
                handles.append(parameter.register_hook(self._gradient("gradient", name)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def check_loss(self, total: Tensor) -> None:
        """Check the step's loss on this rank."""
        if not bool(torch.isfinite(total)) and not any(f.phase <= 1 for f in self._reports):
            self._add("loss", "")

    def first_report(self) -> NonFiniteReport | None:
        """The first report of all ranks, on all ranks; None if all values were finite. Collective."""
        of_ranks: list[Any] = [None] * self._mesh.world_size
        dist.all_gather_object(of_ranks, astuple(self._own_report()) if self._reports else None)
        return min((NonFiniteReport(*report) for report in of_ranks if report is not None), default=None)

    def _own_report(self) -> NonFiniteReport:
        """This rank's first one. If its shape does not tell the place, what it infected, as the output of its layer, may."""
        first, *later = sorted(self._reports)
        operation = first.phase, first.micro_batch, first.segment
        same = (report for report in (first, *later) if (report.phase, report.micro_batch, report.segment) == operation)
        placed = next((report for report in same if report.column >= 0), first)
        return replace(first, row=placed.row, column=placed.column)

    def _enter(self, number: str, module: nn.Module, inputs: Any) -> None:
        self._layer = f"layers.{number}."

    def _after(self, module_name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            self._events += 1
            # what several layers share is named by the one that uses it
            name = self._layer + module_name.removeprefix("shared.") if module_name.startswith("shared.") else module_name
            for x in _tensors(output):
                if x.requires_grad:
                    x.register_hook(self._gradient("backward", name))
                if not bool(torch.isfinite(x).all()) and all(bool(torch.isfinite(i).all()) for i in _tensors(inputs)):
                    self._add("forward", name, x)

        return hook

    def _gradient(self, phase: str, name: str) -> Any:
        def hook(gradient: Tensor | None) -> None:
            self._events += 1
            # autograd goes on to what it infects: only the first one on this rank says anything
            if (
                gradient is not None
                and not any(report.phase >= 3 for report in self._reports)
                and not bool(torch.isfinite(gradient).all())
            ):
                self._add(phase, name, gradient if phase == "backward" else None)

        return hook

    def _add(self, phase: str, name: str, where: Tensor | None = None) -> None:
        mesh, at, number = self._mesh, self.operation, _PHASES.index(phase)
        n, s = (-1, 0) if at is None or phase == "parameter" else (at.micro_batch, at.segment)
        turn = -1 if number >= 3 else 1  # backwards the last segment comes first
        row, column = (-1, -1) if where is None else self._position(where)
        if column >= 0:
            column += (s * mesh.layout.context + mesh.context_rank) * self._span
        when = number, n, turn * s, turn * mesh.pipeline_rank, self._events, turn * mesh.context_rank
        self._reports.append(NonFiniteReport(*when, mesh.rank, mesh.data_rank, name, row, column))

    def _position(self, x: Tensor) -> tuple[int, int]:
        """Row and local column of the first non-finite value; (-1, -1) if the shape does not tell."""
        bad = (~torch.isfinite(x)).flatten(1).any(dim=1) if x.dim() > 1 else ~torch.isfinite(x)
        if x.dim() >= 2 and x.shape[1] == self._span:
            wrong = (~torch.isfinite(x)).reshape(x.shape[0], self._span, -1).any(dim=2)
            row, column = divmod(int(wrong.flatten().int().argmax()), self._span)
            return row, column
        if len(bad) % self._span == 0:  # rows and tokens in one dimension, as linear layers take them
            row, column = divmod(int(bad.int().argmax()), self._span)
            return row, column
        return -1, -1


def _tensors(value: Any) -> Iterator[Tensor]:
    """Floating-point tensors in nested tuples, lists and dictionaries."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, dict):
        for x in value.values():
            yield from _tensors(x)
    elif isinstance(value, (tuple, list)):
        for x in value:
            yield from _tensors(x)
