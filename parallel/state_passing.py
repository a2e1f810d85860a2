"""A recurrence with a receive before and a send after it, as autograd functions around it.

The one thing to know: in backward the cotangents of the States travel the other way. The recurrence itself runs as it does where
nobody is beside it, once forwards and once backwards, and keeps for the backward pass what it keeps there; before it the State is
received, whose cotangent leaves when the pass comes back to that point, and behind it the State is handed on, for whose cotangent
the pass waits there. A tail that lies whole in a rank's own tokens leaves before anything arrives, a State that is cheap before the
outputs. Nothing waits for a send, and there is no collective over the sequence group inside the stack (but where gathering is asked
for), so a rank is free to go on to the next layer while the one to its right does this one.

With L layers of t seconds on P ranks, messages that take m seconds, and w seconds between having the entering State and having the
leaving one, a pass takes L t + (P - 1) (m + w): rank r trails rank 0 by r (m + w), once and not per layer. w is the largest of a
layer's carriers: 0 for a tail, the State's part of the work where the State comes first, all of the recurrence's work where it must
run. With the exchange "early" a linear recurrence has w of 0 too: it makes its span's effect on any State first, advances the
arriving one, sends it, and has its outputs then. That is more work in every layer, most of a second run, which pays where
(P - 1) w is more than L times that: among many ranks. "all_gather" makes the same effects, and all ranks gather them.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from baton.kernels.protocol import (
    Inputs,
    LinearRecurrence,
    Recurrence,
    State,
    StateFirstRecurrence,
    StateSpec,
    StateTransition,
    absent_state,
    zeros,
)
from baton.parallel.context_parallel import ContextLink, Direction, MessageTag
from baton.parallel.profiler_ranges import RECURRENCE, profiler_range


def run_recurrence(
    link: ContextLink | None, recurrence: Recurrence, inputs: Inputs, pos: Tensor, state: State | None, where: str,
    state_wanted: bool = True,
) -> tuple[Tensor, State]:  # fmt: skip
    """`recurrence.run` over a sequence that the sequence group shares, each rank having the tokens that follow the last one's.

    state: what enters the first virtual segment (None: nothing read yet); the others are not asked. The leaving State of the last
    one is the sequence's; on the others it is what they sent, and has no gradient here. where: the mixer's name in the model, for
    errors and counts. state_wanted: whether the caller takes what leaves; else it is made only where it is handed on.

    Raises:
        CommError: on a CPU, when a neighbour is gone or sends nothing.
    """
    with profiler_range(RECURRENCE, recurrence):
        if link is not None and link.active:
            return _linked(link, recurrence, inputs, pos, state, where)
        if state_wanted:
            return recurrence.run(inputs, pos, state)
        return recurrence.forward_no_state(inputs, pos, state), absent_state(recurrence.state_specs(inputs))


def _linked(
    link: ContextLink, recurrence: Recurrence, inputs: Inputs, pos: Tensor, state: State | None, where: str
) -> tuple[Tensor, State]:
    channel = _StateChannel(link, recurrence, inputs, where)
    given = state if channel.virtual_rank.prev("right") is None else None
    if channel.uses_transitions:
        tensors = () if given is None else tuple(given[leaf.name] for leaf in channel.state_specs)
        y, *found = _TransitionScan.apply(channel, recurrence, pos, len(inputs), *inputs, *tensors)
        return y, channel.named(found)
    with torch.set_grad_enabled(torch.is_grad_enabled() and recurrence.differentiable):
        return _around(channel, recurrence, inputs, pos, given)


class _StateChannel:
    """One carrier's messages: what arrives from either side and what leaves to it, or what the caller has there."""

    def __init__(self, link: ContextLink, recurrence: Recurrence, inputs: Inputs, where: str) -> None:
        self.link, self.virtual_rank = link, link.virtual_rank
        self.tag = MessageTag(recurrence.name, where, link.virtual_rank)
        self.state_specs = recurrence.state_specs(inputs)
        self.moving = tuple(leaf for leaf in self.state_specs if leaf.grad)
        self.batch = inputs[0].shape[0]
        self.gathers = link.gathers and isinstance(recurrence, LinearRecurrence)
        self.uses_transitions = self.gathers or (link.exchange == "early" and isinstance(recurrence, LinearRecurrence))

    def arriving(self, direction: Direction, given: State | None) -> Callable[[], State | None]:
        """Begin to receive, where there is somebody to receive from; the result waits. given: the caller's, where nobody is."""
        if self.virtual_rank.prev(direction) is None:
            return lambda: given
        return self.link.irecv(direction, self.tag, self._leaves(direction), self.batch)

    def send(self, direction: Direction, make: Callable[[], State]) -> State:
        """Make a State and hand it on, both aside."""
        self.link.side_stream.wait_current_stream()
        with self.link.side_stream.use():
            state, leaves = make(), self._leaves(direction)
            if self.link.observer is not None:
                self.link.observer(direction, self.tag, state)
            if self.virtual_rank.next(direction) is not None:
                self.link.send(direction, self.tag, {leaf.name: state[leaf.name].to(leaf.dtype) for leaf in leaves}, leaves)
        return state

    def fold(self, direction: Direction, effect: StateTransition, given: State | None) -> State | None:
        """The State that reaches this rank in `direction`: all ranks gather their spans' effects, and each applies those before it.

        The first rank in that direction, whose entering State nobody else has, gives what leaves it in place of what its span adds.
        """
        first = self.virtual_rank.prev(direction) is None
        fields = {field.name: getattr(effect, field.name) for field in dataclasses.fields(effect)}  # type: ignore[arg-type]
        names = [(field, name) for field, state in fields.items() for name in state]
        self.link.side_stream.wait_current_stream()
        with self.link.side_stream.use():
            if first:
                assert given is not None
                fields = {**fields, "add": effect.apply(given)}
            wait = self.link.gather(direction, self.tag, [fields[field][name] for field, name in names])
            if first:
                return given
            spans = wait()
            if direction == "left":
                spans.reverse()
            here = self.virtual_rank.rank if direction == "right" else self.virtual_rank.size - 1 - self.virtual_rank.rank
            state: State = {}
            for n, span in enumerate(spans[:here]):
                for (field, name), x in zip(names, span, strict=True):
                    fields[field] = {**fields[field], name: x}
                state = fields["add"] if n == 0 else type(effect)(**fields).apply(state)
                # as it would have come in a message
                state = {name: x.contiguous() for name, x in state.items()}
        self.link.side_stream.join(state)
        return state

    def named(self, leaves: Sequence[Tensor]) -> State:
        """Tensors in the order of the leaves, as a State."""
        return {leaf.name: x for leaf, x in zip(self.state_specs, leaves, strict=True)}

    def _leaves(self, direction: Direction) -> tuple[StateSpec, ...]:
        return self.state_specs if direction == "right" else self.moving


Make = Callable[[Inputs, State], State]
"""A leaving State from inputs and the entering State."""
Piece = tuple[slice, int]
"""The tokens that a tail is made of, and how many of the inputs, the first ones, run along time."""


def _around(
    channel: "_StateChannel", recurrence: Recurrence, inputs: Inputs, pos: Tensor, given: State | None
) -> tuple[Tensor, State]:
    """The recurrence as it is, between what receives and what hands on."""
    if isinstance(recurrence, StateFirstRecurrence):
        entering = _recv_state(channel, given, lambda: recurrence.initial(inputs))
        assert entering is not None
        inputs, entering, leaving = _send_state_early(
            channel, lambda x, s: recurrence.final_state(x, pos, s), None, inputs, entering
        )
        return recurrence.forward_no_state(inputs, pos, entering), leaving
    with torch.no_grad():
        tail = recurrence.tail_state(inputs, pos)
    if tail is not None:
        rows = max(x.shape[1] for x in tail.values() if x.dim() > 1)

        def last(x: Inputs, _: State) -> State:
            found = recurrence.tail_state(x, pos[:, -x[0].shape[1] :])
            assert found is not None
            return found

        piece = slice(inputs[0].shape[1] - rows, None), recurrence.num_time_inputs
        inputs, _, leaving = _send_state_early(channel, last, piece, inputs, {})
        return recurrence.forward_no_state(inputs, pos, _recv_state(channel, given)), leaving
    nothing = (
        (lambda: zeros(channel.state_specs, channel.batch, inputs[0].device)) if isinstance(recurrence, LinearRecurrence) else None
    )
    entering = _recv_state(channel, given, nothing)
    y, leaving = recurrence.run(inputs, pos, entering)
    return _send_state(channel, y, leaving, entering or {})


def _recv_state(channel: _StateChannel, given: State | None, nothing: Callable[[], State] | None = None) -> State | None:
    """What enters here: received, or the caller's, or what a recurrence enters with that has read nothing (None: None)."""
    link = channel.link
    arriving = link.saved_state if link.recomputing else channel.arriving("right", given)
    state = arriving()
    if state is not None:
        state = {name: x.detach() for name, x in state.items()}
    link.save_state(state)
    if state is None:
        if nothing is None:
            return None
        with torch.no_grad():
            state = nothing()
    tensors = () if given is None else tuple(given[leaf.name] for leaf in channel.state_specs)
    return channel.named(_RecvState.apply(channel, state, _anchor(state), *tensors))


def _anchor(state: State) -> Tensor:
    """Nothing, with a gradient: what makes autograd come back to where a State enters, whoever it is from."""
    return torch.empty(0, device=next(iter(state.values())).device, requires_grad=True)


class _RecvState(torch.autograd.Function):
    """The entering State; backwards its cotangent leaves."""

    @staticmethod
    def forward(ctx: Any, channel: _StateChannel, state: State, anchor: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        ctx.channel, ctx.given = channel, bool(given)
        # views: in a recomputation the tensors themselves are the first pass's
        found = [state[leaf.name].view_as(state[leaf.name]) for leaf in channel.state_specs]
        ctx.mark_non_differentiable(*(x for x, leaf in zip(found, channel.state_specs, strict=True) if not leaf.grad))
        return tuple(found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dstate: Tensor) -> tuple[Any, ...]:
        channel = ctx.channel
        dentering = {leaf.name: dx for leaf, dx in zip(channel.state_specs, dstate, strict=True) if leaf.grad}
        channel.send("left", lambda: dentering)
        channel.link.side_stream.join(dentering)
        return (None, None, None, *([dentering.get(leaf.name) for leaf in channel.state_specs] if ctx.given else []))


def _send_state(channel: _StateChannel, y: Tensor, leaving: State, entering: State) -> tuple[Tensor, State]:
    """Send what leaves; the outputs and the leaving State, for whose cotangent the backward pass waits before it goes on.

    entering: what `_recv_state` gave, so that the backward pass comes there whatever the outputs hang on.
    """
    own = [leaving[leaf.name] for leaf in channel.state_specs]
    y, *found = _SendState.apply(channel, y, *own, *entering.values())
    return y, channel.named(found)


class _SendState(torch.autograd.Function):
    """Outputs and leaving State as they are, which leaves; backwards its cotangent arrives."""

    @staticmethod
    def forward(ctx: Any, channel: _StateChannel, y: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.channel, ctx.entering = channel, len(tensors) - len(channel.state_specs)
        leaving = tensors[: len(channel.state_specs)]
        _send(channel, channel.named(leaving))
        found = [x if leaf.grad else x.detach() for x, leaf in zip(leaving, channel.state_specs, strict=True)]
        ctx.mark_non_differentiable(*(x for x, leaf in zip(found, channel.state_specs, strict=True) if not leaf.grad))
        return y, *found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, *dleaving: Tensor) -> tuple[Any, ...]:
        channel = ctx.channel
        arrived = _arrived(channel, dleaving)
        return (None, dy, *(arrived.get(leaf.name) for leaf in channel.state_specs), *(None,) * ctx.entering)


def _send_state_early(
    channel: _StateChannel, make: Make, piece: Piece | None, inputs: Inputs, entering: State
) -> tuple[Inputs, State, State]:
    """Make what leaves and send it before there are outputs; inputs and entering State as they are, for what makes the outputs,
    and the leaving State. piece: what of the inputs it is made of; None: all.

    Backwards the leaving State's cotangent is waited for when the outputs' has gone through.
    """
    n = len(inputs)
    tensors = _SendStateEarly.apply(channel, make, piece, n, tuple(entering), *inputs, *entering.values())
    state = dict(zip(entering, tensors[n : n + len(entering)], strict=True))
    return tensors[:n], state, channel.named(tensors[n + len(entering) :])


class _SendStateEarly(torch.autograd.Function):
    """Inputs and entering State as they are, and what is made of them, which leaves; backwards its cotangent arrives, and what it
    gives is added to theirs."""

    @staticmethod
    def forward(
        ctx: Any, channel: _StateChannel, make: Make, piece: Piece | None, n: int, names: tuple[str, ...], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.channel, ctx.make, ctx.piece, ctx.n, ctx.names = channel, make, piece, n, names
        ctx.save_for_backward(*tensors)
        leaving = make(tensors[:n], dict(zip(names, tensors[n:], strict=True)))
        _send(channel, leaving)
        found = [leaving[leaf.name] for leaf in channel.state_specs]
        ctx.mark_non_differentiable(
            *(x for x in tensors if not x.is_floating_point()),
            *(x for x, leaf in zip(found, channel.state_specs, strict=True) if not leaf.grad),
        )
        return *tensors, *found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        channel, tensors, n = ctx.channel, ctx.saved_tensors, ctx.n
        grads = list(cotangents[: len(tensors)])
        arrived = _arrived(channel, cotangents[len(tensors) :])
        taken = [_taken(ctx.piece, number, x) for number, x in enumerate(tensors)]
        with torch.enable_grad():
            copies = [x.detach().requires_grad_(x.is_floating_point()) for x in taken]
            leaving = ctx.make(tuple(copies[:n]), dict(zip(ctx.names, copies[n:], strict=True)))
        reached = [leaf.name for leaf in channel.moving if leaving[leaf.name].requires_grad]
        wanted = [number for number, x in enumerate(copies) if x.requires_grad and ctx.needs_input_grad[5 + number]]
        if reached and wanted:
            outputs, found = [leaving[name] for name in reached], [copies[number] for number in wanted]
            more = torch.autograd.grad(outputs, found, [arrived[name] for name in reached], allow_unused=True)
            for number, grad in zip(wanted, more, strict=True):
                if grad is not None:
                    # not in place: what comes may be somebody else's too
                    grads[number] = grads[number].clone()
                    _taken(ctx.piece, number, grads[number]).add_(grad)
        return (None,) * 5 + tuple(grads)


def _taken(piece: Piece | None, number: int, x: Tensor) -> Tensor:
    """Of the input of that number what a leaving State is made of."""
    return x if piece is None or number >= piece[1] else x[:, piece[0]]


def _send(channel: _StateChannel, leaving: State) -> None:
    """To the right, but not again in a recomputation."""
    if not channel.link.recomputing:
        channel.send("right", lambda: leaving)
    channel.link.side_stream.join(leaving)


def _arrived(channel: _StateChannel, dleaving: Sequence[Tensor]) -> State:
    """The leaving State's cotangent: from the right, or what the caller's use of it gave."""
    used = {leaf.name: dx for leaf, dx in zip(channel.state_specs, dleaving, strict=True) if leaf.grad}
    found = channel.arriving("left", used)()
    assert found is not None
    return found


class _TransitionScan(torch.autograd.Function):
    """A linear recurrence by its phases: what its span does to any State is made before one arrives."""

    @staticmethod
    def forward(
        ctx: Any, channel: _StateChannel, recurrence: LinearRecurrence, pos: Tensor, n_inputs: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        inputs, leaves, link = tensors[:n_inputs], channel.state_specs, channel.link
        given = channel.named(tensors[n_inputs:]) if len(tensors) > n_inputs else None
        nothing = given is None and channel.virtual_rank.prev("right") is None
        first = zeros(leaves, channel.batch, inputs[0].device) if nothing else given
        if link.recomputing:
            transition, effect = recurrence.begin(inputs, pos)
            state = link.saved_state()
        elif channel.gathers:
            transition, effect = recurrence.begin(inputs, pos)
            state = channel.fold("right", effect, first)
        else:
            arriving = channel.arriving("right", first)
            transition, effect = recurrence.begin(inputs, pos)
            state = arriving()
        assert state is not None
        entering = state
        link.save_state(entering)
        leaving = (
            effect.apply(entering) if link.recomputing or channel.gathers else channel.send("right", lambda: effect.apply(entering))
        )
        y = recurrence.finish(inputs, pos, entering)
        link.side_stream.join(leaving)
        ctx.channel, ctx.recurrence, ctx.n_inputs, ctx.given, ctx.names = (
            channel,
            recurrence,
            n_inputs,
            given is not None,
            tuple(transition),
        )
        ctx.save_for_backward(pos, *inputs, *(entering[leaf.name] for leaf in leaves), *transition.values())
        return y, *(leaving[leaf.name].clone() for leaf in leaves)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, *dleft: Tensor) -> tuple[Any, ...]:
        channel, recurrence, leaves = ctx.channel, ctx.recurrence, ctx.channel.state_specs
        pos, *saved = ctx.saved_tensors
        inputs, rest = tuple(saved[: ctx.n_inputs]), saved[ctx.n_inputs :]
        entering = channel.named(rest[: len(leaves)])
        transition = dict(zip(ctx.names, rest[len(leaves) :], strict=True))
        used = channel.named(dleft)
        arriving = None if channel.gathers else channel.arriving("left", used)
        effect = recurrence.begin_backward(inputs, pos, transition, entering, dy)
        dleaving = channel.fold("left", effect, used) if arriving is None else arriving()
        assert dleaving is not None
        arrived = dleaving
        dentering = effect.apply(arrived) if channel.gathers else channel.send("left", lambda: effect.apply(arrived))
        grads = recurrence.finish_backward(inputs, pos, entering, dy, arrived)
        channel.link.side_stream.join(dentering)
        return (None, None, None, None, *grads, *([dentering[leaf.name] for leaf in leaves] if ctx.given else []))
