"""The passes of a step's segments as functions on memory that stays in place, which is what can be recorded and replayed.

Segments have four roles. Of those that a gradient goes through together there is a first, which begins with what its lane carries
or with nothing, a last, behind which the gradient starts, and those between, which are all alike; or there is one that is alone,
as are sequences that are not cut in time. Each role has a forward and a backward pass, the first and those between also a forward
pass without a graph (`microbatch_runner` says why); so the passes of any number of segments are at most eight. What is of one
segment and not of its role is in fixed memory while it runs, and whoever replays the passes saves it meanwhile (`cuda_graphs`):
tokens, the State that enters, the results that are not computed again, and the fingerprints of the State that leaves. The State's
gradient stays where the pass before left it.

On one context rank States go through this memory; over several they are messages, which are part of the passes.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from baton.kernels.protocol import State, detach, zeros
from baton.models.block import SavedForRecomputation
from baton.models.lm import LanguageModel, States
from baton.parallel.context_parallel import Direction, MessageTag, StateObserver, VirtualRank
from baton.parallel.local_states import LocalStates
from baton.parallel.pipeline import StepSchedule
from baton.training.bptt.lane_states import LaneStates
from baton.training.step.fixed_memory import FixedStates, FixedTensors
from baton.training.step.microbatch_runner import fingerprints

Role = Literal["alone", "first", "between", "last"]


def role_of(segment: int, schedule: StepSchedule) -> Role:
    """The role of a segment of a sequence."""
    together = schedule.gradient_segments
    number = segment % together
    if together == 1:
        return "alone"
    return "first" if number == 0 else "last" if number == together - 1 else "between"


class FixedPasses:
    """Passes of segments of one shape.

    Args:
        like: tokens and labels int64, positions int32, [B, T] each, of a segment.

    Attributes:
        inputs, scale: what every pass reads: tokens, labels and positions; the factor of the losses, float32 [].
        total: sum of the scaled losses, float32 [].
        lane_states: States that lanes carry into a segment; None: lanes carry none.
        entering: what entered the segment, and after its pass without a graph what leaves it; None: nothing, or not known before
            all passes have run once.
        gradients: of what leaves the segment, and after its backward pass of what entered it; None as above.
        results: what a pass without a graph leaves to the one with a graph; None as above.
        given_prints: fingerprints of the State that left in the pass without a graph.
        prints, equal_prints, final_states: by role, what the last pass found: those fingerprints, whether they are the given ones,
            and the State for the lanes.
    """

    def __init__(self, model: LanguageModel, like: Sequence[Tensor], schedule: StepSchedule, lanes: LaneStates | None) -> None:
        self._model, self._link, self._schedule, self._device = model, model.link, schedule, like[0].device
        self._cut = self._link is not None and self._link.size == 1
        self._lanes = lanes
        assert self._cut or (schedule.gradient_segments == 1 and lanes is None)
        self.inputs = self._tokens, self._labels, self._pos = [x.clone() for x in like]
        self.scale, self.total = (make((), device=self._device) for make in (torch.ones, torch.zeros))
        rows = len(self._tokens)
        self.lane_states: States | None = (
            None if lanes is None else {n: zeros(specs, rows, self._device) for n, specs in lanes.state_specs.items()}
        )
        self.entering: FixedStates | None = None
        self.gradients: FixedStates | None = None
        self.results: FixedTensors | None = None
        count = sum(len(specs) for specs in model.state_specs.values())
        self.given_prints = torch.zeros(count, dtype=torch.int64, device=self._device)
        self.prints: dict[Role, Tensor] = {}
        self.equal_prints: dict[Role, Tensor] = {}
        self.final_states: dict[Role, States] = {}
        self._saved: dict[Role, SavedForRecomputation] = {}
        self._entered: dict[Role, frozenset[tuple[str, str]]] = {}  # whose gradients the role's backward pass leaves
        self._loss: Tensor | None = None

    def read_lanes(self, lanes: Sequence[int]) -> None:
        """Put what these lanes carry into `lane_states`."""
        if self._lanes is not None and self.lane_states is not None:
            self._lanes.read_into(self.lane_states, lanes)

    def forward_no_grad(self, role: Role) -> None:
        """Compute what leaves the segment."""
        saved = self._saved[role] = SavedForRecomputation()
        first, _ = self._model.recomputation(self._link, saved)
        with self._handing_on(role), torch.no_grad(), self._segment(role, enters=role == "between"), first:
            context = self._model.forward_context
            _, final_states = self._model(self._tokens, self._pos, self._initial_states(role), context)
        self.prints[role] = fingerprints(final_states, self._device)
        if saved.results:
            self.results = self.results or FixedTensors(saved.results, self._device)
            self.results.copy_(saved.results)
            saved.results[:] = self.results.tensors

    def forward(self, role: Role) -> None:
        """Add the loss. `backward` must follow."""
        again = role in ("first", "between")
        _, recomputation = self._model.recomputation(self._link, self._saved[role]) if again else (None, nullcontext())
        initial_states = None if again else self._initial_states(role)
        context = replace(self._model.forward_context, need_final_state=again or self._lanes is not None)
        with self._handing_on(role), recomputation, self._segment(role, enters=role == "last"):
            hidden, final_states = self._model(self._tokens, self._pos, initial_states, context)
        if again:
            self.equal_prints[role] = fingerprints(final_states, self._device) == self.given_prints
        elif self._lanes is not None:
            self.final_states[role] = {n: detach(state) for n, state in final_states.items()}
        loss = self._model.loss(hidden, self._labels) * self.scale
        self.total.add_(loss.detach())
        self._loss = loss

    def backward(self, role: Role) -> None:
        """Add the parameters' gradients."""
        assert self._loss is not None
        loss, self._loss = self._loss, None
        with self._handing_on(role):
            if self._link is not None and self.gradients is not None and role in ("first", "between"):
                self._link.local.give("left", self._virtual_rank(role), self.gradients.states)
            loss.backward()

    def observe(self, observer: StateObserver, role: Role, number: int) -> None:
        """Show what entered a segment's gradients, behind its backward pass. number: of the segment among its own."""
        at, of_role = VirtualRank(0, 1, number, self._schedule.gradient_segments), self._entered.get(role, frozenset())
        for (name, where), states in () if self.gradients is None else self.gradients.states.items():
            if (name, where) in of_role:
                for state in states:
                    observer.observe("left", MessageTag(name, where, at), state)

    def _initial_states(self, role: Role) -> States | None:
        return self.lane_states if role in ("alone", "first") else None

    def _virtual_rank(self, role: Role) -> VirtualRank:
        """One of the segments of the role."""
        together = self._schedule.gradient_segments
        return VirtualRank(0, 1, {"alone": 0, "first": 0, "between": 1, "last": together - 1}[role], together)

    @contextmanager
    def _segment(self, role: Role, *, enters: bool) -> Iterator[None]:
        """A forward pass of the role. enters: what leaves the segment before is taken from fixed memory."""
        if not self._cut:
            yield
            return
        assert self._link is not None
        at = self._virtual_rank(role)
        with self._link.segment(at.segment, count=at.segments):
            if enters and self.entering is not None:
                self._link.local.give("right", at, self.entering.states)
            yield

    @contextmanager
    def _handing_on(self, role: Role) -> Iterator[None]:
        """A whole pass, behind which what it hands on is in fixed memory."""
        link = self._link
        if link is None or not self._cut:
            with nullcontext() if link is None else link.recordable_pass():
                yield
            return
        observer, link.observer = link.observer, _Ends(link.local)
        try:
            with link.recordable_pass():
                yield
        finally:
            link.observer = observer
        for direction, states in link.local.take_all().items():
            if direction == "right":
                self.entering = self.entering or FixedStates(states, self._device)
                self.entering.copy_(states)
            else:
                self.gradients = self.gradients or FixedStates(states, self._device)
                self.gradients.copy_(states)
                self._entered[role] = frozenset(states)


class _Ends:
    """Keeps the gradients of what entered the first segment, which no other one takes."""

    def __init__(self, local: LocalStates) -> None:
        self._local = local

    def observe(self, direction: Direction, tag: MessageTag, state: State) -> None:
        if direction == "left" and tag.virtual_rank.next("left") is None and state:
            self._local.put((direction, None, tag.name, tag.where), state)

    def start(self) -> None:
        """Nothing is kept from pass to pass."""
