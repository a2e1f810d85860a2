"""The way of a step's micro-batches through this stage, segment by segment.

The one thing to know: where a gradient goes through several segments, these are surveyed first, forward and without a graph, and
only what entered them is kept; then, from the last to the first, each is run again with a graph, which takes the entering States
that were kept, and back-propagated, cotangents going from segment to segment as they do from rank to rank (parallel.state_passing).
The State that leaves a segment the second time must have the bits of the first: were a kernel not to repeat itself, gradients would
be those of another run.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from baton.data_pipeline.batches import IGNORE_INDEX
from baton.models.lm import LanguageModel, States
from baton.parallel.pipeline import Operation
from baton.training.bptt.lane_states import LaneStates
from baton.training.monitoring.replica_check import fingerprint


@dataclass(frozen=True)
class TokenBatch:
    """tokens, labels int64 [B, T] (label IGNORE_INDEX counts nothing), pos int32 [B, T]; on the model's device.

    Of a sequence in segments T is this rank's spans of them, one after the other. lanes: of each row, where lanes carry something.
    """

    tokens: Tensor
    labels: Tensor
    pos: Tensor
    lanes: tuple[int, ...] = ()

    def count_labels(self) -> Tensor:
        """Labels that count, int64 []."""
        return (self.labels != IGNORE_INDEX).sum()

    def segment(self, number: int, of: int) -> "TokenBatch":
        """This rank's span of a segment."""
        tokens, labels, pos = (x.chunk(of, dim=1)[number] for x in (self.tokens, self.labels, self.pos))
        return TokenBatch(tokens, labels, pos, self.lanes)


@dataclass(frozen=True)
class Segments:
    """How a sequence is cut. count: segments; gradient: how many a gradient goes back through."""

    count: int = 1
    gradient_segments: int = 1


@dataclass
class _SavedSegment:
    """What is kept of a segment until it is run again. x: what the stage before sent; fingerprints: of the leaving State."""

    x: Tensor | None
    again: AbstractContextManager[Any]
    fingerprints: Tensor


class MicrobatchRunner:
    """Carries out operations. scale: of the losses. lanes: what lanes carry from step to step, or None.

    total: sum of the losses, scaled; 0 where no loss is. differing: leaves whose bits were others the second time, by place.
    """

    def __init__(
        self, model: LanguageModel, batches: Sequence[TokenBatch], scale: float, segments: Segments, lanes: LaneStates | None
    ) -> None:
        self._model, self._batches, self._scale, self._lanes = model, batches, scale, lanes
        self._segments, self._link = segments, model.pipeline
        self._saved_segments: dict[tuple[int, int], _SavedSegment] = {}
        self._activations: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._wraparound: int | None = None
        self._comparisons: list[tuple[int, Tensor]] = []
        self.total = torch.zeros((), device=batches[0].tokens.device)

    def run_operation(self, operation: Operation) -> None:
        at = operation.micro_batch, operation.segment
        {"forward_no_grad": self._forward_no_grad, "forward": self._forward, "backward": self._backward}[operation.kind](*at)

    def finish(self) -> None:
        """After the last operation."""
        self._recv_wraparound()

    def mismatched_states(self) -> list[str]:
        """Leaves of States that a segment did not leave with the same bits both times, by name."""
        if not self._comparisons:
            return []
        names = [f"{leaf.name} of layer {n}" for n, leaves in self._model.state_specs.items() for leaf in leaves]
        found = []
        for segment, same in zip(
            [s for s, _ in self._comparisons], torch.stack([x for _, x in self._comparisons]).tolist(), strict=True
        ):
            found += [f"{name}, segment {segment}" for name, equal in zip(names, same, strict=True) if not equal]
        return found

    def _forward_no_grad(self, n: int, s: int) -> None:
        stage, batch = self._model.stage, self._batches[n].segment(s, self._segments.count)
        x = batch.tokens if stage.first else self._receive("forward", batch)
        first, again = self._model.recomputation()
        initial_states = self._initial_states(n, s)
        with torch.no_grad(), self._virtual_segment(s), first:
            y, final_states = self._model(x, batch.pos, initial_states)
        if not stage.last:
            assert self._link is not None
            self._link.send("forward", y)
        self._saved_segments[n, s] = _SavedSegment(None if stage.first else x, again, _fingerprints(final_states))

    def _forward(self, n: int, s: int) -> None:
        stage, batch = self._model.stage, self._batches[n].segment(s, self._segments.count)
        saved = self._saved_segments.pop((n, s), None)
        x = batch.tokens
        if not stage.first:
            x = self._receive("forward", batch) if saved is None else saved.x  # type: ignore[assignment]
            x.requires_grad_()
        initial_states = self._initial_states(n, s) if saved is None else None
        with nullcontext() if saved is None else saved.again, self._virtual_segment(s):
            y, final_states = self._model(x, batch.pos, initial_states, saved is not None or self._lanes is not None)
        if saved is not None:
            self._comparisons.append((s, _fingerprints(final_states) == saved.fingerprints))
        elif self._lanes is not None:
            self._emit_state(n, final_states)
        if stage.last:
            y = self._model.loss(y, batch.labels) * self._scale
            self.total += y.detach()
        elif saved is None:
            assert self._link is not None
            self._link.send("forward", y)
        self._activations[n, s] = x, y

    def _backward(self, n: int, s: int) -> None:
        stage = self._model.stage
        x, y = self._activations.pop((n, s))
        dy = None if stage.last else self._receive("backward", self._batches[n].segment(s, self._segments.count))
        torch.autograd.backward([y], [dy])
        if not stage.first:
            assert self._link is not None
            assert x.grad is not None
            self._link.send("backward", x.grad)

    def _virtual_segment(self, s: int) -> AbstractContextManager[None]:
        """Among the segments that a gradient goes through together."""
        link, together = self._model.link, self._segments.gradient_segments
        return nullcontext() if link is None or self._segments.count == 1 else link.segment(s % together, of=together)

    def _initial_states(self, n: int, s: int) -> States | None:
        """What enters a segment from outside of those that a gradient goes through together."""
        if self._lanes is None or s % self._segments.gradient_segments:
            return None
        self._recv_wraparound()
        link = self._model.link
        return self._lanes.read(self._batches[n].lanes) if link is None or link.rank == 0 else None

    def _emit_state(self, n: int, final_states: States) -> None:
        """What leaves the last of those segments, to where it will enter."""
        assert self._lanes is not None
        link = self._model.link
        if link is None or link.size == 1:
            self._lanes.write(self._batches[n].lanes, final_states)
        elif link.rank == link.size - 1:
            link.send_wraparound(self._lanes.to_message(final_states), self._lanes.message_specs)
        elif link.rank == 0:
            self._wraparound = n

    def _recv_wraparound(self) -> None:
        """What the last rank has sent to the first; not before something has to be done with it, as all receives."""
        if self._wraparound is not None:
            link, lanes, batch = self._model.link, self._lanes, self._batches[self._wraparound]
            assert link is not None
            assert lanes is not None
            lanes.write(batch.lanes, lanes.from_message(link.recv_wraparound(lanes.message_specs, len(batch.lanes))))
            self._wraparound = None

    def _receive(self, kind: Literal["forward", "backward"], batch: TokenBatch) -> Tensor:
        """Not a moment before its operation: on a GPU a receive is a kernel that spins, and CUDA, which loads a kernel when it is
        first launched, waits for what is running. With receives ahead of the schedule two stages would wait for each other."""
        assert self._link is not None
        return self._link.irecv(kind, self._model.hidden_shape(batch.tokens), self._model.hidden_dtype).wait()


def _fingerprints(states: States) -> Tensor:
    """Of all leaves, int64 [leaves]."""
    prints = [fingerprint(x) for state in states.values() for x in state.values()]
    return torch.stack(prints) if prints else torch.zeros(0, dtype=torch.int64)
