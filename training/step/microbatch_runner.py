"""Runs a step's micro-batches through this pipeline stage, segment by segment.

`MicrobatchRunner.run_operation` carries out one operation of the schedule (`parallel.pipeline.StepSchedule`). If a gradient
goes back through several segments, all but the last first run forward without a graph, and only the States that entered
them are kept. Then, from the last segment to the first, each runs forward again with a graph, from its kept State, and
backward; State gradients pass from segment to segment as they do from rank to rank (`parallel.state_passing`).

The State after the second forward pass must have the bits of the first: a kernel that does not repeat exactly would give
the gradient of another computation. `mismatched_states` compares them.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from baton.data_pipeline.packing import Batch
from baton.models.forward_context import ForwardContext
from baton.models.lm import LanguageModel, States
from baton.parallel.pipeline import Operation, StepSchedule
from baton.training.bptt.lane_states import LaneStates
from baton.training.monitoring.replica_check import fingerprint


@dataclass
class _SavedSegment:
    """What is kept of a segment between its two forward passes.

    x: hidden vectors from the previous stage, None on the first stage. again: context of the second pass, which reuses the
    recorded States. fingerprints: of the final State, int64 [States].
    """

    x: Tensor | None
    again: AbstractContextManager[Any]
    fingerprints: Tensor


class MicrobatchRunner:
    """Runs the operations of one step.

    scale: factor of the losses; a tensor [] if the host need not know it. lanes: None if lanes carry no State. forward_context: of
    every forward pass, which needs the final State where it is compared or carried on.

    total: sum of the scaled losses, float32 []; 0 except on the last stage.
    """

    def __init__(
        self,
        model: LanguageModel,
        batches: Sequence[Batch[Tensor]],
        scale: float | Tensor,
        schedule: StepSchedule,
        lanes: LaneStates | None,
        forward_context: ForwardContext,
    ) -> None:
        self._model, self._batches, self._scale, self._lanes = model, batches, scale, lanes
        self._schedule, self._pipeline, self._context = schedule, model.pipeline, forward_context
        self._saved_segments: dict[tuple[int, int], _SavedSegment] = {}
        self._activations: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._wraparound: int | None = None
        self._comparisons: list[tuple[int, Tensor]] = []
        self.total = torch.zeros((), device=batches[0].tokens.device)

    def run_operation(self, operation: Operation) -> None:
        """Run one operation. Operations must come in the order of the schedule."""
        at = operation.micro_batch, operation.segment
        {"forward_no_grad": self._forward_no_grad, "forward": self._forward, "backward": self._backward}[operation.kind](*at)

    def finish(self) -> None:
        """Complete the step after its last operation."""
        self._recv_wraparound()

    def states_match(self) -> Tensor:
        """Whether `mismatched_states` is empty, bool [], without waiting for it."""
        return (
            torch.stack([same.all() for _, same in self._comparisons]).all()
            if self._comparisons
            else torch.ones_like(self.total, dtype=torch.bool)
        )

    def mismatched_states(self) -> list[str]:
        """Names of the States whose bits differed between a segment's two forward passes."""
        return mismatched_states(self._model, self._comparisons)

    def _forward_no_grad(self, n: int, s: int) -> None:
        stage, batch = self._model.stage, self._batches[n].segment(s, self._schedule.segments)
        x = batch.tokens if stage.first else self._receive("forward", batch)
        first, again = self._model.recomputation(self._context.link)
        initial_states = self._initial_states(n, s)
        with torch.no_grad(), self._virtual_segment(n, s), first:
            y, final_states = self._model(x, batch.pos, initial_states, self._context)
        if not stage.last:
            assert self._pipeline is not None
            self._pipeline.send("forward", y)
        self._saved_segments[n, s] = _SavedSegment(None if stage.first else x, again, fingerprints(final_states, self.total.device))

    def _forward(self, n: int, s: int) -> None:
        stage, batch = self._model.stage, self._batches[n].segment(s, self._schedule.segments)
        saved = self._saved_segments.pop((n, s), None)
        x = batch.tokens
        if not stage.first:
            x = self._receive("forward", batch) if saved is None else saved.x  # type: ignore[assignment]
            x.requires_grad_()
        initial_states = self._initial_states(n, s) if saved is None else None
        context = replace(self._context, need_final_state=saved is not None or self._lanes is not None)
        with nullcontext() if saved is None else saved.again, self._virtual_segment(n, s):
            y, final_states = self._model(x, batch.pos, initial_states, context)
        if saved is not None:
            self._comparisons.append((s, fingerprints(final_states, self.total.device) == saved.fingerprints))
        elif self._lanes is not None:
            self._emit_state(n, final_states)
        if stage.last:
            loss = self._model.loss(y, batch.labels)
            y = loss * (self._scale.to(loss.dtype) if isinstance(self._scale, Tensor) else self._scale)
            self.total += y.detach()
        elif saved is None:
            assert self._pipeline is not None
            self._pipeline.send("forward", y)
        self._activations[n, s] = x, y

    def _backward(self, n: int, s: int) -> None:
        stage = self._model.stage
        x, y = self._activations.pop((n, s))
        dy = None if stage.last else self._receive("backward", self._batches[n].segment(s, self._schedule.segments))
        torch.autograd.backward([y], [dy])
        if not stage.first:
            assert self._pipeline is not None
            assert x.grad is not None
            self._pipeline.send("backward", x.grad)

    def _virtual_segment(self, n: int, s: int) -> AbstractContextManager[None]:
        """The link's context for a segment, counted within its group of segments that share a gradient."""
        link, together = self._context.link, self._schedule.gradient_segments
        if link is None or self._schedule.segments == 1:
            return nullcontext()
        return link.segment(s % together, count=together, sequence=n)

    def _initial_states(self, n: int, s: int) -> States | None:
        """The lanes' States for the first segment of a group on the first context rank; None elsewhere."""
        if self._lanes is None or s % self._schedule.gradient_segments:
            return None
        self._recv_wraparound()
        link = self._context.link
        return self._lanes.read(self._batches[n].lanes) if link is None or link.rank == 0 else None

    def _emit_state(self, n: int, final_states: States) -> None:
        """Store the State after a group's last segment in the lanes, or send it there: the last context rank has it, the first
        stores it."""
        assert self._lanes is not None
        link = self._context.link
        if link is None or link.size == 1:
            self._lanes.write(self._batches[n].lanes, final_states)
        elif link.rank == link.size - 1:
            link.send_wraparound(self._lanes.to_message(final_states), self._lanes.message_specs)
        elif link.rank == 0:
            self._wraparound = n

    def _recv_wraparound(self) -> None:
        """Receive what the last context rank sent to the first.

        Deferred to the next use: an earlier receive would stall the GPU (see `_receive`).
        """
        if self._wraparound is not None:
            link, lanes, batch = self._context.link, self._lanes, self._batches[self._wraparound]
            assert link is not None
            assert lanes is not None
            lanes.write(batch.lanes, lanes.from_message(link.recv_wraparound(lanes.message_specs, len(batch.lanes))))
            self._wraparound = None

    def _receive(self, kind: Literal["forward", "backward"], batch: Batch[Tensor]) -> Tensor:
        """Receive hidden vectors or their gradient from a neighbouring stage.

        Called only when the operation needs them. On a GPU a receive is a spinning kernel, and CUDA, which loads a kernel
        at its first launch, waits for running kernels: receives posted ahead of the schedule can make two stages wait for
        each other.
        """
        assert self._pipeline is not None
        return self._pipeline.irecv(kind, self._model.hidden_shape(batch.tokens), self._model.hidden_dtype).wait()


def fingerprints(states: States, device: torch.device) -> Tensor:
    """Fingerprints of all layers' States, int64 [States]."""
    prints = [fingerprint(x) for state in states.values() for x in state.values()]
    return torch.stack(prints) if prints else torch.zeros(0, dtype=torch.int64, device=device)


def mismatched_states(model: LanguageModel, comparisons: Sequence[tuple[int, Tensor]]) -> list[str]:
    """Names of the States whose fingerprints differed. comparisons: (segment, whether they are equal, bool [States])."""
    if not comparisons:
        return []
    names = [f"{leaf.name} of layer {n}" for n, leaves in model.state_specs.items() for leaf in leaves]
    found = []
    for segment, same in zip([s for s, _ in comparisons], torch.stack([x for _, x in comparisons]).tolist(), strict=True):
        found += [f"{name}, segment {segment}" for name, equal in zip(names, same, strict=True) if not equal]
    return found
