"""Norms of the gradients that States receive at the boundaries of segments and ranks, and how far back a loss reaches.

During training the State gradient at a boundary comes from all losses to its right, mostly from the nearest. So its norm
shows whether gradients grow or vanish, but not how far they come from. `gradient_reach` measures that: only the last tokens
have a loss, and what arrives at a boundary has come all the way.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from baton.data_pipeline.packing import IGNORE_INDEX, Batch
from baton.kernels.protocol import State
from baton.models.lm import LanguageModel
from baton.parallel.context_parallel import ContextLink, Direction, MessageTag, StateObserver
from baton.parallel.mesh import Mesh
from baton.parallel.pipeline import StepSchedule
from baton.training.evaluation.long_context import context_of_segments, sum_over_ranks
from baton.training.step.microbatch_runner import MicrobatchRunner

REACH_THRESHOLD = 1e-3
"""Credit has faded where its norm is less than this share of what it is at the border nearest to the loss."""

Norms = dict[str, dict[str, list[float | None]]]
"""By recurrence, "mamba selective_scan-euler-gated", and layer: one for each border; None where nothing passes."""


@dataclass(frozen=True)
class StateGradients:
    """Norms of State gradients.

    Attributes:
        span: tokens from one boundary to the next.
        boundaries: number of spans before each boundary.
        norms: of the gradient of the loss with respect to the State at each boundary, over all sequences together.
    """

    span: int
    boundaries: list[int]
    norms: Norms

    def to_json(self) -> dict[str, Any]:
        """The values that metrics.jsonl records."""
        return {"span": self.span, "boundaries": self.boundaries, "norms": self.norms}

    def reach(self) -> dict[str, dict[str, int]]:
        """Tokens over which the gradient stays significant, by recurrence and layer.

        Counted from the boundary nearest to the loss to the farthest one where the norm is at least REACH_THRESHOLD of that
        at the nearest; 0 if no gradient arrives at the nearest one.
        """
        found: dict[str, dict[str, int]] = {}
        for name, of_layer in self.norms.items():
            for layer, norms in of_layer.items():
                nearest = norms[-1] or 0.0
                far = [
                    boundary
                    for boundary, norm in zip(self.boundaries, norms, strict=True)
                    if norm and norm >= REACH_THRESHOLD * nearest
                ]
                found.setdefault(name, {})[layer] = (self.boundaries[-1] - far[0]) * self.span if nearest and far else 0
        return found


class StateGradientMonitor:
    """Observes the State gradients that leave segments on this rank; sums of squares stay on the device until `read`.

    keep: sums stay in the same memory from `start` to `start`, as passes need that are recorded as CUDA graphs with the observer in
    them; the boundaries are then the same in all steps.

    Nothing is observed if context ranks all-gather their States (layout.context_comm) and sequences are not split in time.
    A State that all tensor ranks hold whole has the whole gradient on each of them, and counts once; under
    layout.sequence_parallel each rank has a part of its gradient, and the parts' squares are summed.
    """

    def __init__(self, model: LanguageModel, link: ContextLink, mesh: Mesh, *, keep: bool = False) -> None:
        self._link, self._mesh, self._keep = link, mesh, keep
        self._before: StateObserver | None = None
        # an observer sees tensors alone: what is held whole is known by its shape
        self._whole = {
            number: {leaf.shape for leaf in leaves if leaf.grad and leaf.tp is None and not model.sequence_parallel}
            for number, leaves in model.state_specs.items()
        }
        self._squares: defaultdict[tuple[str, str], dict[int, Tensor]] = defaultdict(dict)
        self._count = 0

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Context in which State gradients are observed."""
        self.start()
        try:
            yield
        finally:
            self.stop()

    def start(self) -> None:
        """Forget earlier observations and begin to observe, instead of another observer until `stop`."""
        if self._keep:
            if kept := [square for of_border in self._squares.values() for square in of_border.values()]:
                torch._foreach_zero_(kept)
        else:
            self._squares.clear()
            self._count = 0
        if self._link.observer is not self:
            self._before, self._link.observer = self._link.observer, self

    def stop(self) -> None:
        if self._link.observer is self:
            self._before, self._link.observer = None, self._before

    def read(self, span: int, *, cut: bool = False) -> StateGradients | None:
        """Observations of all ranks; None if no boundary was crossed. Collective.

        span: tokens from one boundary to the next. cut: include boundary 0, where truncated BPTT cuts the gradient off.
        """
        seen = {key: list(of_border.items()) for key, of_border in self._squares.items()}
        values = [square for of_border in seen.values() for _, square in of_border]
        numbers = iter(torch.stack(values).tolist() if values else [])
        first = 0 if cut else 1
        counts: list[int] = [0] * self._mesh.world_size
        dist.all_gather_object(counts, self._count)
        count = max(counts)
        own: dict[Any, list[float]] = {}
        for key, of_border in seen.items():
            squares, crossed = [0.0] * count, [0.0] * count
            for boundary, _ in of_border:
                squares[boundary], crossed[boundary] = next(numbers), 1.0
            own[*key, "squares"], own[*key, "passes"] = squares, crossed
        sums = sum_over_ranks(own)
        if count <= first:
            return None
        norms: Norms = {}
        for layer, name in sorted({key[:2] for key in sums}, key=lambda key: (int(key[0]), key[1])):
            found = zip(sums[layer, name, "squares"], sums[layer, name, "passes"], strict=True)
            norms.setdefault(name, {})[layer] = [square**0.5 if passed else None for square, passed in found][first:]
        return StateGradients(span, list(range(first, count)), norms)

    def observe(self, direction: Direction, tag: MessageTag, state: State) -> None:
        """Add the squares of a State's gradient to the sums."""
        if direction == "right":
            return
        place = tag.virtual_rank
        self._count = place.segments * place.size
        _, layer, block = tag.where.split(".", 2)
        boundary = place.segment * place.size + place.rank
        of_border = self._squares[layer, f"{block} {tag.name}"]
        for x in state.values():
            if not x.is_floating_point():
                continue
            # float64: a norm of 1e-30 squared is nothing in float32
            square = torch.linalg.vector_norm(x, dtype=torch.float64).square()
            if self._mesh.tensor_rank and tuple(x.shape[1:]) in self._whole[layer]:
                square = torch.zeros_like(square)
            if boundary not in of_border:
                of_border[boundary] = torch.zeros_like(square)
            of_border[boundary].add_(square)


def gradient_reach(
    model: LanguageModel, batch: Batch[Tensor] | None, segments: int, span: int, mesh: Mesh
) -> StateGradients | None:
    """Norms at all boundaries of the gradient of the last span's mean loss. Collective; all ranks have the result.

    Args:
        batch: this rank's spans of `segments` segments of this data rank's rows, one after the other; None: it has no rows.
        span: tokens of a span.

    Parameters and their gradients stay as they are. Memory: activations of one segment, and a State for each segment.
    """
    last_rank = mesh.context_rank == mesh.layout.context - 1
    labels = torch.zeros((), dtype=torch.float64, device=mesh.device)
    if batch is not None:
        wanted = torch.full_like(batch.labels, IGNORE_INDEX)
        if last_rank:
            wanted[:, -span:] = batch.labels[:, -span:]
        batch = Batch(batch.tokens, wanted, batch.pos)
        labels += batch.count_labels()
    dist.all_reduce(labels, group=mesh.data_group)
    forward_context = context_of_segments(model, mesh)
    link = forward_context.link
    assert link is not None
    with _constant(model):
        watch = StateGradientMonitor(model, link, mesh)
        if batch is not None and float(labels):
            with watch.recording():
                scale, schedule = 1.0 / float(labels), StepSchedule(segments, segments)
                runner = MicrobatchRunner(model, [batch], scale, schedule, None, forward_context)
                for operation in schedule.operations(model.stage.index, model.stage.count, 1):
                    runner.run_operation(operation)
                runner.finish()
            for sent in (link, mesh.pipeline):
                if sent is not None:
                    sent.wait()
        return watch.read(span)


@contextmanager
def _constant(model: LanguageModel) -> Iterator[None]:
    """Context in which parameters have no gradient, and States do."""
    moving = [p for p in model.parameters() if p.requires_grad]
    # what enters a stage has a gradient anyway; the first one's embeddings are given one in the parameters' place
    hook = model.embedding.register_forward_hook(_moving) if model.stage.first else None
    for p in moving:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p in moving:
            p.requires_grad_(True)
        if hook is not None:
            hook.remove()


def _moving(module: Any, inputs: Any, output: Tensor) -> Tensor:
    return output.requires_grad_()
