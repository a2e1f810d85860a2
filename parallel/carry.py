"""A recurrence with a receive before and a send after it, as one autograd function.

The one thing to know: in backward the cotangents of the States travel the other way. A receive is posted before anything else. What
can be known early leaves early: a tail that lies whole in a rank's own tokens leaves before anything arrives, a linear recurrence
advances the arriving State before its outputs exist, one whose State is cheap makes it before its outputs; only what is none of
these is run first and sent then. Nothing waits for a send, and there is no collective over the sequence group inside the stack (but
where gathering is asked for), so a rank is free to go on to the next layer while the one to its right does this one.

With L layers of t seconds on P ranks, messages that take m seconds, and w seconds between having the entering State and having the
leaving one, a pass takes L t + (P - 1) (m + w): rank r trails rank 0 by r (m + w), once and not per layer. w is the largest of a
layer's carriers: 0 for a tail and for a linear recurrence, the State's part of the work where the State comes first, all of it (t)
for a recurrence that must run, which gives (L + P - 1) t.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from baton.kernels.protocol import Effect, Inputs, Leaf, LinearRecurrence, Recurrence, State, StateFirstRecurrence, zeros
from baton.parallel.sequence import Carrier, Direction, SequenceLink
from baton.parallel.spans import RECURRENCE, span


def carry(
    link: SequenceLink | None, recurrence: Recurrence, inputs: Inputs, pos: Tensor, state: State | None, where: str
) -> tuple[Tensor, State]:
    """`recurrence.run` over a sequence that the sequence group shares, each rank having the tokens that follow the last one's.

    state: what enters the first virtual segment (None: nothing read yet); the others are not asked. The leaving State of the last
    one is the sequence's; on the others it is what they sent, and has no gradient here. where: the mixer's name in the model, for
    errors and counts.

    Raises:
        ExchangeError: on a CPU, when a neighbour is gone or sends nothing.
    """
    with span(RECURRENCE, recurrence):
        return _carried(link, recurrence, inputs, pos, state, where)


def _carried(
    link: SequenceLink | None, recurrence: Recurrence, inputs: Inputs, pos: Tensor, state: State | None, where: str
) -> tuple[Tensor, State]:
    if link is None or not link.active:
        return recurrence.run(inputs, pos, state)
    passage = _Passage(link, recurrence, inputs, where)
    given = state if passage.place.before("right") is None else None
    if not recurrence.differentiable:
        with torch.no_grad():
            y, leaving, _, _ = _forward(passage, recurrence, inputs, pos, given)
        return y, leaving
    tensors = () if given is None else tuple(given[leaf.name] for leaf in passage.leaves)
    y, *found = _Carry.apply(passage, recurrence, pos, len(inputs), *inputs, *tensors)
    return y, {leaf.name: x for leaf, x in zip(passage.leaves, found, strict=True)}


class _Passage:
    """One carrier's messages: what arrives from either side and what leaves to it, or what the caller has there."""

    def __init__(self, link: SequenceLink, recurrence: Recurrence, inputs: Inputs, where: str) -> None:
        self.link, self.place = link, link.place
        self.carrier = Carrier(recurrence.name, where, link.place)
        self.leaves = recurrence.leaves(inputs)
        self.moving = tuple(leaf for leaf in self.leaves if leaf.grad)
        self.batch = inputs[0].shape[0]
        self.gathers = link.gathers and isinstance(recurrence, LinearRecurrence)

    def arriving(self, direction: Direction, given: State | None) -> Callable[[], State | None]:
        """Begin to receive, where there is somebody to receive from; the result waits. given: the caller's, where nobody is."""
        if self.place.before(direction) is None:
            return lambda: given
        return self.link.receive(direction, self.carrier, self._leaves(direction), self.batch)

    def send(self, direction: Direction, make: Callable[[], State]) -> State:
        """Make a State and hand it on, both aside."""
        self.link.aside.follow()
        with self.link.aside.stream():
            state, leaves = make(), self._leaves(direction)
            if self.link.observer is not None:
                self.link.observer(direction, self.carrier, state)
            if self.place.beyond(direction) is not None:
                self.link.send(direction, self.carrier, {leaf.name: state[leaf.name].to(leaf.dtype) for leaf in leaves}, leaves)
        return state

    def fold(self, direction: Direction, effect: Effect, given: State | None) -> State | None:
        """The State that reaches this rank in `direction`: all ranks gather their spans' effects, and each applies those before it.

        The first rank in that direction, whose entering State nobody else has, gives what leaves it in place of what its span adds.
        """
        first = self.place.before(direction) is None
        fields = {field.name: getattr(effect, field.name) for field in dataclasses.fields(effect)}  # type: ignore[arg-type]
        names = [(field, name) for field, state in fields.items() for name in state]
        self.link.aside.follow()
        with self.link.aside.stream():
            if first:
                assert given is not None
                fields = {**fields, "add": effect.advance(given)}
            wait = self.link.gather(direction, self.carrier, [fields[field][name] for field, name in names])
            if first:
                return given
            spans = wait()
            if direction == "left":
                spans.reverse()
            here = self.place.rank if direction == "right" else self.place.size - 1 - self.place.rank
            state: State = {}
            for n, span in enumerate(spans[:here]):
                for (field, name), x in zip(names, span, strict=True):
                    fields[field] = {**fields[field], name: x}
                state = fields["add"] if n == 0 else type(effect)(**fields).advance(state)
                # as it would have come in a message
                state = {name: x.contiguous() for name, x in state.items()}
        self.link.aside.join(state)
        return state

    def _leaves(self, direction: Direction) -> tuple[Leaf, ...]:
        return self.leaves if direction == "right" else self.moving


def _forward(
    passage: _Passage, recurrence: Recurrence, inputs: Inputs, pos: Tensor, given: State | None
) -> tuple[Tensor, State, State | None, State]:
    """Outputs, leaving State, entering State, and a linear recurrence's transition ({} for others)."""
    link, replaying = passage.link, passage.link.replaying
    arriving = link.replayed if replaying else passage.arriving("right", given) if not passage.gathers else None

    def enter(effect: Effect | None = None) -> State | None:
        if arriving is not None:
            state = arriving()
        else:
            assert effect is not None
            if given is None and passage.place.before("right") is None:
                state = passage.fold("right", effect, zeros(passage.leaves, passage.batch, inputs[0].device))
            else:
                state = passage.fold("right", effect, given)
        link.keep(state)
        return state

    def send(make: Callable[[], State]) -> State:
        return make() if replaying or passage.gathers else passage.send("right", make)

    transition: State = {}
    if isinstance(recurrence, LinearRecurrence):
        transition, effect = recurrence.begin(inputs, pos)
        entering = enter(effect)
        if entering is None:
            entering = zeros(passage.leaves, passage.batch, inputs[0].device)
        entered = entering
        leaving = send(lambda: effect.advance(entered))
        y = recurrence.finish(inputs, pos, entering)
    elif isinstance(recurrence, StateFirstRecurrence):
        entering = enter()
        entered = recurrence.initial(inputs) if entering is None else entering
        first = recurrence.leave(inputs, pos, entered)
        leaving = send(lambda: first)
        y = recurrence.read(inputs, pos, entered)
    elif (early := recurrence.early(inputs, pos)) is not None:
        leaving = send(lambda: early)
        entering = enter()
        y = recurrence.run(inputs, pos, entering)[0]
    else:
        entering = enter()
        y, last = recurrence.run(inputs, pos, entering)
        leaving = send(lambda: last)
    link.aside.join(leaving)
    return y, leaving, entering, transition


class _Carry(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, passage: _Passage, recurrence: Recurrence, pos: Tensor, n_inputs: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        inputs, leaves = tensors[:n_inputs], passage.leaves
        given = {leaf.name: x for leaf, x in zip(leaves, tensors[n_inputs:], strict=True)} if len(tensors) > n_inputs else None
        y, leaving, entering, transition = _forward(passage, recurrence, inputs, pos, given)
        ctx.passage, ctx.recurrence, ctx.n_inputs = passage, recurrence, n_inputs
        ctx.given, ctx.entered = given is not None, entering is not None
        ctx.names = tuple(transition)
        ctx.save_for_backward(pos, *inputs, *(entering[leaf.name] for leaf in leaves if entering is not None), *transition.values())
        found = [leaving[leaf.name].clone() for leaf in leaves]
        ctx.mark_non_differentiable(*(x for x, leaf in zip(found, leaves, strict=True) if not leaf.grad))
        return y, *found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, *dfound: Tensor) -> tuple[Any, ...]:
        passage, recurrence, leaves = ctx.passage, ctx.recurrence, ctx.passage.leaves
        pos, *saved = ctx.saved_tensors
        inputs, rest = tuple(saved[: ctx.n_inputs]), saved[ctx.n_inputs :]
        entering = {leaf.name: x for leaf, x in zip(leaves, rest, strict=False)} if ctx.entered else None
        transition = dict(zip(ctx.names, rest[len(leaves) :], strict=True)) if ctx.names else {}
        used = {leaf.name: dx for leaf, dx in zip(leaves, dfound, strict=True) if leaf.grad}
        grads, dentering = _backward(passage, recurrence, inputs, pos, entering, transition, dy, used)
        dgiven = [dentering.get(leaf.name) for leaf in leaves] if ctx.given else []
        return (None, None, None, None, *grads, *dgiven)


def _backward(
    passage: _Passage,
    recurrence: Recurrence,
    inputs: Inputs,
    pos: Tensor,
    entering: State | None,
    transition: State,
    dy: Tensor,
    used: State,
) -> tuple[tuple[Tensor, ...], State]:
    """Gradients of the inputs and the entering State's cotangent. used: what those who used the leaving State here gave it."""
    arriving = None if passage.gathers else passage.arriving("left", used)

    def arrived() -> State:
        assert arriving is not None
        found = arriving()
        assert found is not None
        return found

    def send(make: Callable[[], State]) -> State:
        return make() if passage.gathers else passage.send("left", make)

    if isinstance(recurrence, LinearRecurrence):
        assert entering is not None
        effect = recurrence.begin_backward(inputs, pos, transition, entering, dy)
        dleaving = passage.fold("left", effect, used) if passage.gathers else arrived()
        assert dleaving is not None
        dentering = send(lambda: effect.advance(dleaving))
        grads = recurrence.finish_backward(inputs, pos, entering, dy, dleaving)
    elif isinstance(recurrence, StateFirstRecurrence):
        # the outputs' part needs nothing from the right
        grads, read = _pull_back(lambda x, s: [recurrence.read(x, pos, s)], recurrence, inputs, entering, lambda: [dy])
        names = [leaf.name for leaf in passage.moving]
        more, left = _pull_back(
            lambda x, s: list(map(recurrence.leave(x, pos, s).__getitem__, names)),
            recurrence,
            inputs,
            entering,
            lambda: list(map(arrived().__getitem__, names)),
        )
        dentering = send(lambda: {name: read[name] + left[name] for name in names})
        grads = tuple(map(torch.add, grads, more))
    else:
        with torch.enable_grad():
            copies = tuple(x.detach().requires_grad_(x.is_floating_point()) for x in inputs)
            early = recurrence.early(copies, pos)
        if early is None:
            grads, dentering = recurrence.pull_back(inputs, pos, entering, dy, arrived())
            send(lambda: dentering)
        else:
            # the entering State does not reach the leaving one, so its cotangent does not wait
            grads, dentering = recurrence.pull_back(inputs, pos, entering, dy, None)
            send(lambda: dentering)
            grads = _add_early(grads, early, copies, arrived())
    passage.link.aside.join(dentering)
    return grads, dentering


def _pull_back(
    function: Callable[[Inputs, State], list[Tensor]],
    recurrence: StateFirstRecurrence,
    inputs: Inputs,
    state: State | None,
    cotangents: Callable[[], list[Tensor]],
) -> tuple[tuple[Tensor, ...], State]:
    """Gradients of inputs and State of one phase; the cotangents are asked for when its graph is made."""
    given = recurrence.initial(inputs) if state is None else state
    with torch.enable_grad():
        copies = [x.detach().requires_grad_(x.is_floating_point()) for x in (*inputs, *given.values())]
        outputs = function(tuple(copies[: len(inputs)]), dict(zip(given, copies[len(inputs) :], strict=True)))
    reached = [(y, dy) for y, dy in zip(outputs, cotangents(), strict=True) if y.requires_grad]
    wanted = [x for x in copies if x.requires_grad]
    found = iter(_grads([y for y, _ in reached], wanted, [dy for _, dy in reached]))
    grads = [next(found) if x.requires_grad else torch.zeros_like(x) for x in copies]
    return tuple(grads[: len(inputs)]), dict(zip(given, grads[len(inputs) :], strict=True))


def _add_early(grads: tuple[Tensor, ...], early: State, inputs: Inputs, dleaving: State) -> tuple[Tensor, ...]:
    """Gradients plus what the early leaving State's cotangent gives the inputs it was made of."""
    reached = [name for name, x in early.items() if x.requires_grad]
    wanted = [x for x in inputs if x.requires_grad]
    found = iter(_grads([early[name] for name in reached], wanted, [dleaving[name] for name in reached]))
    return tuple(grad + next(found) if x.requires_grad else grad for grad, x in zip(grads, inputs, strict=True))


def _grads(outputs: list[Tensor], wanted: list[Tensor], cotangents: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(outputs, wanted, cotangents, allow_unused=True, materialize_grads=True)
