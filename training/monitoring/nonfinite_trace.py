"""Which module made the first value that is not finite: a step run once more, with every module's output and gradient looked at.

The one thing to know: parameters and the States that entered are those of the step that failed, so the failure comes back; one that
does not is the machine's. A module is named when what went into it was finite and what came out of it was not; what only passes it
on is not named, so that the first of many ranks can be told from those it has infected.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
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
    """What a rank has found, and when: the least of all ranks' findings is the first.

    phase: index in parameter, forward, loss, backward, gradient. micro_batch, segment, then place (of the stage, and of the module
    in it) say when; row and column: of the micro-batch, where known (else -1), column in the whole sequence.
    """

    phase: int
    micro_batch: int
    segment: int
    stage: int
    module_index: int
    context_rank: int
    rank: int
    data_rank: int
    name: str
    row: int = -1
    column: int = -1

    @property
    def is_parameter(self) -> bool:
        """Whether a parameter itself is wrong, so that no document has done it."""
        return _PHASES[self.phase] == "parameter"

    def __str__(self) -> str:
        what = _MESSAGES[_PHASES[self.phase]].format(name=self.name)
        return f"{what} (rank {self.rank}" + (")" if self.phase == 0 else f", micro-batch {self.micro_batch})")


class NonFiniteTrace:
    """Looks at one run of a step. at: the operation under way, to be set before each."""

    def __init__(self, model: LanguageModel, mesh: Mesh, span: int) -> None:
        """span: tokens of a segment on this rank."""
        self._model, self._mesh, self._span = model, mesh, span
        self._module_index = {name: module_index for module_index, (name, _) in enumerate(model.named_modules())}
        self.operation: Operation | None = None
        self._reports: list[NonFiniteReport] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Within it a run of the step is looked at."""
        handles: list[Any] = []
        for name, module in self._model.named_modules():
            if name:
                handles.append(module.register_forward_hook(self._after(name)))
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
        """The step's loss on this rank."""
        if not bool(torch.isfinite(total)) and not any(f.phase <= 1 for f in self._reports):
            self._add("loss", "")

    def first_report(self) -> NonFiniteReport | None:
        """The first finding of all ranks, on all of them; None: it did not happen again. Every rank calls it."""
        of_ranks: list[Any] = [None] * self._mesh.world_size
        dist.all_gather_object(of_ranks, astuple(min(self._reports)) if self._reports else None)
        return min((NonFiniteReport(*report) for report in of_ranks if report is not None), default=None)

    def _after(self, name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            for x in _tensors(output):
                if x.requires_grad:
                    x.register_hook(self._gradient("backward", name))
                if not bool(torch.isfinite(x).all()) and all(bool(torch.isfinite(i).all()) for i in _tensors(inputs)):
                    self._add("forward", name, x)

        return hook

    def _gradient(self, phase: str, name: str) -> Any:
        def hook(gradient: Tensor | None) -> None:
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
        # backwards the last segment and the last module come first
        turn, module_index = (-1, -self._module_index.get(name, 0)) if number >= 3 else (1, self._module_index.get(name, 0))
        row, column = (-1, -1) if where is None else self._position(where)
        if column >= 0:
            column += (s * mesh.layout.context + mesh.context_rank) * self._span
        when = number, n, turn * s, turn * mesh.pipeline_rank, module_index, turn * mesh.context_rank
        self._reports.append(NonFiniteReport(*when, mesh.rank, mesh.data_rank, name, row, column))

    def _position(self, x: Tensor) -> tuple[int, int]:
        """Row and local column of the first value that is not finite; (-1, -1) where the shape does not tell."""
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
