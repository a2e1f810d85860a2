"""States passed from rank to rank: a receive before a recurrence and a send after it, as autograd functions around it.

In the backward pass the gradients of the States go the other way: the function that received a State sends its gradient, and the
function that sent a State waits for its gradient. The recurrence between them runs as on a single rank, once forward and once
backward, and saves the same tensors. A tail State that lies whole in a rank's own tokens is sent before anything is received; a
State that is cheap to compute is sent before the outputs are computed. No send is waited for, and there is no collective over the
context group inside the stack (except with context_comm "all_gather"), so a rank goes on to the next layer while its right
neighbour works on this one. (A pass that is recorded as a CUDA graph ends when all that it sends has left.)

Time: let L layers take t seconds each on P ranks, a message m seconds, and let w be the seconds from receiving the initial State to
having the final one. A pass takes L t + (P - 1) (m + w): rank r trails rank 0 by r (m + w), once and not per layer. w is the
largest among a layer's recurrences: 0 for a tail, the State's part of the work for a recurrence that computes its State first, the
whole recurrence otherwise. With "early" w is 0 for linear recurrences too: a rank computes its span's transition first, applies it
to the State it receives, sends the result, and then computes its outputs. That costs most of a second run in every layer, and pays
where (P - 1) w is more than L times that cost, among many ranks. "all_gather" computes the same transitions, which all ranks
gather.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from baton.kernels.protocol import (
    GatheredRecurrence,
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
from baton.parallel.gathered_attention import run_gathered
from baton.parallel.profiler_ranges import RECURRENCE, profiler_range


def run_recurrence(
    link: ContextLink | None, recurrence: Recurrence, inputs: Inputs, pos: Tensor, state: State | None, where: str,
    need_final_state: bool = True,
) -> tuple[Tensor, State]:  # fmt: skip
    """`recurrence.run` over a sequence that the ranks of the context group share, each having the tokens that follow its left
    neighbour's. state: initial State of the first virtual segment (None: zeros); ignored on the others. where: the mixer's name
    in the model, for errors and counts. need_final_state: whether the caller uses the final State; otherwise it is computed
    only where it is sent. The final State is the sequence's on the last virtual segment; on the others it is the one that was sent,
    and has no gradient here.

    Raises:
        CommError: on a CPU, when a neighbour is gone or sends nothing.
    """
    with profiler_range(RECURRENCE, recurrence):
        if isinstance(recurrence, GatheredRecurrence) and link is not None and state is None:
            return run_gathered(link, recurrence, inputs, pos, where)
        if link is not None:
            return _run_linked(link, recurrence, inputs, pos, state, where)
        if need_final_state:
            return recurrence.run(inputs, pos, state)
        return recurrence.forward_no_state(inputs, pos, state), absent_state(recurrence.state_specs(inputs))


def _run_linked(
    link: ContextLink, recurrence: Recurrence, inputs: Inputs, pos: Tensor, state: State | None, where: str
) -> tuple[Tensor, State]:
    channel = _StateChannel(link, recurrence, inputs, where)
    caller_state = state if channel.virtual_rank.prev("right") is None else None
    if channel.uses_transitions:
        tensors = () if caller_state is None else tuple(caller_state[spec.name] for spec in channel.state_specs)
        y, *tensors_out = _TransitionScan.apply(channel, recurrence, pos, len(inputs), *inputs, *tensors)
        return y, channel.as_state(tensors_out)
    with torch.set_grad_enabled(torch.is_grad_enabled() and recurrence.differentiable):
        return _run_between_messages(channel, recurrence, inputs, pos, caller_state)


class _StateChannel:
    """Sends and receives the States of one recurrence. At the ends of the sequence, where there is no neighbour, the caller's State
    takes the place of a received one."""

    def __init__(self, link: ContextLink, recurrence: Recurrence, inputs: Inputs, where: str) -> None:
        self.link, self.virtual_rank = link, link.virtual_rank
        self.tag = MessageTag(recurrence.name, where, link.virtual_rank)
        self.state_specs = recurrence.state_specs(inputs)
        self.differentiable = tuple(spec for spec in self.state_specs if spec.grad)
        self.batch = inputs[0].shape[0]
        self.gathers = link.gathers and isinstance(recurrence, LinearRecurrence)
        self.uses_transitions = self.gathers or (link.exchange == "early" and isinstance(recurrence, LinearRecurrence))

    def irecv(self, direction: Direction, caller_state: State | None) -> Callable[[], State | None]:
        """Begin to receive, where there is a neighbour; the result waits for the State. caller_state: the result where there is
        none."""
        if self.virtual_rank.prev(direction) is None:
            return lambda: caller_state
        return self.link.irecv(direction, self.tag, self._specs(direction), self.batch)

    def send(self, direction: Direction, make: Callable[[], State]) -> State:
        """Compute a State on the side stream and send it."""
        self.link.side_stream.wait_current_stream()
        with self.link.side_stream.use():
            state, specs = make(), self._specs(direction)
            if self.link.observer is not None:
                self.link.observer.observe(direction, self.tag, state)
            if self.virtual_rank.next(direction) is not None:
                self.link.send(direction, self.tag, {spec.name: state[spec.name].to(spec.dtype) for spec in specs}, specs)
        return state

    def fold_gathered(self, direction: Direction, effect: StateTransition, caller_state: State | None) -> State | None:
        """The State that reaches this rank in `direction`: all ranks gather the transitions of their spans, and each applies those
        before its own.

        The first rank in that direction contributes its final State in place of what its span adds, because no other rank has its
        initial State.
        """
        first = self.virtual_rank.prev(direction) is None
        fields = {field.name: getattr(effect, field.name) for field in dataclasses.fields(effect)}  # type: ignore[arg-type]
        names = [(field, name) for field, state in fields.items() for name in state]
        self.link.side_stream.wait_current_stream()
        with self.link.side_stream.use():
            if first:
                assert caller_state is not None
                fields = {**fields, "add": effect.apply(caller_state)}
            wait = self.link.gather(direction, self.tag, [fields[field][name] for field, name in names])
            if first:
                return caller_state
            spans = wait()
            if direction == "left":
                spans.reverse()
            here = self.virtual_rank.rank if direction == "right" else self.virtual_rank.size - 1 - self.virtual_rank.rank
            state: State = {}
            for n, span in enumerate(spans[:here]):
                for (field, name), x in zip(names, span, strict=True):
                    fields[field] = {**fields[field], name: x}
                state = fields["add"] if n == 0 else type(effect)(**fields).apply(state)
                # in the layout that a message would have
                state = {name: x.contiguous() for name, x in state.items()}
        self.link.side_stream.join(state)
        return state

    def as_state(self, tensors: Sequence[Tensor]) -> State:
        """Tensors in the order of the specs as a State."""
        return {spec.name: x for spec, x in zip(self.state_specs, tensors, strict=True)}

    def _specs(self, direction: Direction) -> tuple[StateSpec, ...]:
        return self.state_specs if direction == "right" else self.differentiable


Make = Callable[[Inputs, State], State]
"""The final State from inputs and the initial State."""
InputSlice = tuple[slice, int]
"""The tokens that a tail State is computed from, and the number of leading inputs that have a time dimension."""


def _run_between_messages(
    channel: "_StateChannel", recurrence: Recurrence, inputs: Inputs, pos: Tensor, caller_state: State | None
) -> tuple[Tensor, State]:
    """The recurrence as it is, between the functions that receive and send."""
    if isinstance(recurrence, StateFirstRecurrence):
        initial_state = _recv_state(channel, caller_state, lambda: recurrence.initial(inputs))
        assert initial_state is not None
        inputs, initial_state, final_state = _send_state_first(
            channel, lambda x, s: recurrence.final_state(x, pos, s), None, inputs, initial_state
        )
        return recurrence.forward_no_state(inputs, pos, initial_state), final_state
    with torch.no_grad():
        tail = recurrence.tail_state(inputs, pos)
    if tail is not None:
        rows = max(x.shape[1] for x in tail.values() if x.dim() > 1)

        def last(x: Inputs, _: State) -> State:
            tail = recurrence.tail_state(x, pos[:, -x[0].shape[1] :])
            assert tail is not None
            return tail

        input_slice = slice(inputs[0].shape[1] - rows, None), recurrence.num_time_inputs
        inputs, _, final_state = _send_state_first(channel, last, input_slice, inputs, {})
        return recurrence.forward_no_state(inputs, pos, _recv_state(channel, caller_state)), final_state
    make_initial = (
        (lambda: zeros(channel.state_specs, channel.batch, inputs[0].device)) if isinstance(recurrence, LinearRecurrence) else None
    )
    initial_state = _recv_state(channel, caller_state, make_initial)
    y, final_state = recurrence.run(inputs, pos, initial_state)
    return _send_state(channel, y, final_state, initial_state or {})


def _recv_state(
    channel: _StateChannel, caller_state: State | None, make_initial: Callable[[], State] | None = None
) -> State | None:
    """The initial State: received, or the caller's, or `make_initial`'s where nothing was read before (None: None)."""
    link = channel.link
    wait = link.saved_state if link.recomputing else channel.irecv("right", caller_state)
    state = wait()
    if state is not None:
        state = {name: x.detach() for name, x in state.items()}
    link.save_state(state)
    if state is None:
        if make_initial is None:
            return None
        with torch.no_grad():
            state = make_initial()
    tensors = () if caller_state is None else tuple(caller_state[spec.name] for spec in channel.state_specs)
    return channel.as_state(_RecvState.apply(channel, state, _anchor(state), *tensors))


def _anchor(state: State) -> Tensor:
    """An empty tensor that requires a gradient, so that autograd runs `_RecvState.backward` whatever the State comes from."""
    return torch.empty(0, device=next(iter(state.values())).device, requires_grad=True)


class _RecvState(torch.autograd.Function):
    """The received State; backward sends its gradient."""

    @staticmethod
    def forward(ctx: Any, channel: _StateChannel, state: State, anchor: Tensor, *caller_state: Tensor) -> tuple[Tensor, ...]:
        ctx.channel, ctx.caller_state = channel, bool(caller_state)
        # views, because in a recomputation the tensors are those of the first pass
        tensors_out = [state[spec.name].view_as(state[spec.name]) for spec in channel.state_specs]
        ctx.mark_non_differentiable(*(x for x, spec in zip(tensors_out, channel.state_specs, strict=True) if not spec.grad))
        return tuple(tensors_out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dstate: Tensor) -> tuple[Any, ...]:
        channel = ctx.channel
        dinitial_state = {spec.name: dx for spec, dx in zip(channel.state_specs, dstate, strict=True) if spec.grad}
        channel.send("left", lambda: dinitial_state)
        channel.link.side_stream.join(dinitial_state)
        return (None, None, None, *([dinitial_state.get(spec.name) for spec in channel.state_specs] if ctx.caller_state else []))


def _send_state(channel: _StateChannel, y: Tensor, final_state: State, initial_state: State) -> tuple[Tensor, State]:
    """Send the final State. Returns the outputs and the final State; the backward pass waits for its gradient before it goes on.

    initial_state: from `_recv_state`, as an input of the autograd node, so that the backward pass reaches it in any case.
    """
    own = [final_state[spec.name] for spec in channel.state_specs]
    y, *tensors_out = _SendState.apply(channel, y, *own, *initial_state.values())
    return y, channel.as_state(tensors_out)


class _SendState(torch.autograd.Function):
    """Identity on outputs and final State, which is sent; backward receives the State's gradient."""

    @staticmethod
    def forward(ctx: Any, channel: _StateChannel, y: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.channel, ctx.n_initial = channel, len(tensors) - len(channel.state_specs)
        final_state = tensors[: len(channel.state_specs)]
        _send(channel, channel.as_state(final_state))
        tensors_out = [x if spec.grad else x.detach() for x, spec in zip(final_state, channel.state_specs, strict=True)]
        ctx.mark_non_differentiable(*(x for x, spec in zip(tensors_out, channel.state_specs, strict=True) if not spec.grad))
        return y, *tensors_out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, *dfinal_state: Tensor) -> tuple[Any, ...]:
        channel = ctx.channel
        grad = _recv_grad(channel, dfinal_state)
        return (None, dy, *(grad.get(spec.name) for spec in channel.state_specs), *(None,) * ctx.n_initial)


def _send_state_first(
    channel: _StateChannel, make: Make, input_slice: InputSlice | None, inputs: Inputs, initial_state: State
) -> tuple[Inputs, State, State]:
    """Compute the final State and send it before the outputs. Returns inputs and initial State for the outputs, and the final
    State. input_slice: what the State is computed from; None: all of the inputs.

    The backward pass waits for the final State's gradient after the outputs' gradient has passed.
    """
    n = len(inputs)
    tensors = _SendStateFirst.apply(channel, make, input_slice, n, tuple(initial_state), *inputs, *initial_state.values())
    state = dict(zip(initial_state, tensors[n : n + len(initial_state)], strict=True))
    return tensors[:n], state, channel.as_state(tensors[n + len(initial_state) :])


class _SendStateFirst(torch.autograd.Function):
    """Identity on inputs and initial State, and the final State computed from them, which is sent; backward receives its gradient
    and adds what follows from it to theirs."""

    @staticmethod
    def forward(
        ctx: Any,
        channel: _StateChannel,
        make: Make,
        input_slice: InputSlice | None,
        n: int,
        names: tuple[str, ...],
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.channel, ctx.make, ctx.input_slice, ctx.n, ctx.names = channel, make, input_slice, n, names
        ctx.save_for_backward(*tensors)
        final_state = make(tensors[:n], dict(zip(names, tensors[n:], strict=True)))
        _send(channel, final_state)
        tensors_out = [final_state[spec.name] for spec in channel.state_specs]
        ctx.mark_non_differentiable(
            *(x for x in tensors if not x.is_floating_point()),
            *(x for x, spec in zip(tensors_out, channel.state_specs, strict=True) if not spec.grad),
        )
        return *tensors, *tensors_out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *douts: Tensor) -> tuple[Any, ...]:
        channel, tensors, n = ctx.channel, ctx.saved_tensors, ctx.n
        grads = list(douts[: len(tensors)])
        dstate = _recv_grad(channel, douts[len(tensors) :])
        slices = [_input_slice(ctx.input_slice, number, x) for number, x in enumerate(tensors)]
        with torch.enable_grad():
            copies = [x.detach().requires_grad_(x.is_floating_point()) for x in slices]
            final_state = ctx.make(tuple(copies[:n]), dict(zip(ctx.names, copies[n:], strict=True)))
        reached = [spec.name for spec in channel.differentiable if final_state[spec.name].requires_grad]
        wanted = [number for number, x in enumerate(copies) if x.requires_grad and ctx.needs_input_grad[5 + number]]
        if reached and wanted:
            outputs, sources = [final_state[name] for name in reached], [copies[number] for number in wanted]
            more = torch.autograd.grad(outputs, sources, [dstate[name] for name in reached], allow_unused=True)
            for number, grad in zip(wanted, more, strict=True):
                if grad is not None:
                    # not in place: autograd may use the same tensor elsewhere
                    grads[number] = grads[number].clone()
                    _input_slice(ctx.input_slice, number, grads[number]).add_(grad)
        return (None,) * 5 + tuple(grads)


def _input_slice(input_slice: InputSlice | None, number: int, x: Tensor) -> Tensor:
    """The part of input `number` that the final State is computed from."""
    return x if input_slice is None or number >= input_slice[1] else x[:, input_slice[0]]


def _send(channel: _StateChannel, final_state: State) -> None:
    """Send to the right, except in a recomputation."""
    if not channel.link.recomputing:
        channel.send("right", lambda: final_state)
    channel.link.side_stream.join(final_state)


def _recv_grad(channel: _StateChannel, dfinal_state: Sequence[Tensor]) -> State:
    """The final State's gradient: from the right neighbour, or from the caller's use of the State."""
    used = {spec.name: dx for spec, dx in zip(channel.state_specs, dfinal_state, strict=True) if spec.grad}
    grad = channel.irecv("left", used)()
    assert grad is not None
    return grad


class _TransitionScan(torch.autograd.Function):
    """A linear recurrence in phases, for context_comm=early and all_gather: its span's transition is computed first."""

    @staticmethod
    def forward(
        ctx: Any, channel: _StateChannel, recurrence: LinearRecurrence, pos: Tensor, n_inputs: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        inputs, specs, link = tensors[:n_inputs], channel.state_specs, channel.link
        caller_state = channel.as_state(tensors[n_inputs:]) if len(tensors) > n_inputs else None
        starts_empty = caller_state is None and channel.virtual_rank.prev("right") is None
        first = zeros(specs, channel.batch, inputs[0].device) if starts_empty else caller_state
        if link.recomputing:
            transition, effect = recurrence.begin(inputs, pos)
            state = link.saved_state()
        elif channel.gathers:
            transition, effect = recurrence.begin(inputs, pos)
            state = channel.fold_gathered("right", effect, first)
        else:
            wait = channel.irecv("right", first)
            transition, effect = recurrence.begin(inputs, pos)
            state = wait()
        assert state is not None
        initial_state = state
        link.save_state(initial_state)
        final_state = (
            effect.apply(initial_state)
            if link.recomputing or channel.gathers
            else channel.send("right", lambda: effect.apply(initial_state))
        )
        y = recurrence.finish(inputs, pos, initial_state)
        link.side_stream.join(final_state)
        ctx.channel, ctx.recurrence, ctx.n_inputs, ctx.names = channel, recurrence, n_inputs, tuple(transition)
        ctx.caller_state = caller_state is not None
        ctx.save_for_backward(pos, *inputs, *(initial_state[spec.name] for spec in specs), *transition.values())
        return y, *(final_state[spec.name].clone() for spec in specs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, *dfinal: Tensor) -> tuple[Any, ...]:
        channel, recurrence, specs = ctx.channel, ctx.recurrence, ctx.channel.state_specs
        pos, *saved = ctx.saved_tensors
        inputs, rest = tuple(saved[: ctx.n_inputs]), saved[ctx.n_inputs :]
        initial_state = channel.as_state(rest[: len(specs)])
        transition = dict(zip(ctx.names, rest[len(specs) :], strict=True))
        used = channel.as_state(dfinal)
        wait = None if channel.gathers else channel.irecv("left", used)
        effect = recurrence.begin_backward(inputs, pos, transition, initial_state, dy)
        dfinal_state = channel.fold_gathered("left", effect, used) if wait is None else wait()
        assert dfinal_state is not None
        received = dfinal_state
        dinitial_state = effect.apply(received) if channel.gathers else channel.send("left", lambda: effect.apply(received))
        grads = recurrence.finish_backward(inputs, pos, initial_state, dy, received)
        channel.link.side_stream.join(dinitial_state)
        return (None, None, None, None, *grads, *([dinitial_state[spec.name] for spec in specs] if ctx.caller_state else []))
