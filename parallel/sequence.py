"""Sequence parallelism: a rank is a segment. A State arrives from the left neighbour, and leaves to the right.

The one thing to know: `carry` is a recurrence with a receive before and a send after it, as one autograd function; in backward
the cotangents of the States travel the other way. Nothing else of a model knows about it. What can be known early leaves early: a
linear recurrence advances the arriving State before its outputs exist, a tail that lies whole in a rank's own tokens leaves before
anything arrives; only what is neither is run first and sent then. There is no collective over the sequence group inside the stack,
so rank r is free to go on to the next layer while rank r + 1 does this one.

Entering States are kept with the graph, so that recomputation of activations exchanges nothing.
"""

from collections import Counter, deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from baton.kernels.protocol import Effect, Inputs, Leaf, LinearRecurrence, Recurrence, State, flat_nbytes, from_flat, to_flat, zeros


class SequenceLink:
    """This rank's place in the sequence group, and its neighbours.

    rank, size: in the group. right, left: global ranks of the neighbours, None at the ends. Each direction has a communicator of
    its own: with two ranks messages of the two directions would meet in one, in no agreed order.
    A link of one rank exchanges nothing, but takes the same steps: so one rank with P segments has the bits of P ranks.
    counted: messages and bytes sent, by ("right" | "left", recurrence's name).
    """

    def __init__(
        self,
        rank: int,
        size: int,
        ranks: list[int],
        to_right: dist.ProcessGroup | None,
        to_left: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        self.rank, self.size, self.device = rank, size, device
        self.left = ranks[rank - 1] if rank > 0 else None
        self.right = ranks[rank + 1] if rank + 1 < size else None
        self._groups = {"right": to_right, "left": to_left}
        self._sending: deque[tuple[dist.Work, Tensor]] = deque()
        self._kept: list[State | None] | None = None
        self._replay: Iterator[State | None] | None = None
        self._alone = False
        self.counted: Counter[tuple[str, str]] = Counter()

    @property
    def active(self) -> bool:
        """Whether States go through here: not while every rank works for itself."""
        return not self._alone

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Within it every rank has whole sequences: decoding, a monitor's text."""
        before, self._alone = self._alone, True
        try:
            yield
        finally:
            self._alone = before

    def send(self, direction: str, state: State, leaves: tuple[Leaf, ...], name: str) -> None:
        """Hand a State on without waiting, one message of each leaf's own type; nothing at the end of the group."""
        neighbour = self.right if direction == "right" else self.left
        if neighbour is None or not leaves:
            return
        message = to_flat(state, leaves)
        while self._sending and self._sending[0][0].is_completed():
            self._sending.popleft()
        work = dist.isend(message, dst=neighbour, group=self._groups[direction])
        assert work is not None
        self._sending.append((work, message))  # the memory must live until it has left
        self.counted[direction, name] += 1
        self.counted[f"{direction} bytes", name] += message.numel()

    def receive(self, direction: str, leaves: tuple[Leaf, ...], batch: int) -> State:
        """The State that travels in `direction`, from the neighbour on the other side. Waits for it."""
        neighbour = self.left if direction == "right" else self.right
        assert neighbour is not None
        if not leaves:
            return {}
        message = torch.empty(flat_nbytes(leaves, batch), dtype=torch.uint8, device=self.device)
        dist.recv(message, src=neighbour, group=self._groups[direction])
        return from_flat(message, leaves, batch)

    def wait(self) -> None:
        """Until everything sent has left this rank."""
        while self._sending:
            self._sending.popleft()[0].wait()

    def recomputation(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Contexts of a first forward pass, whose entering States are kept, and of its recomputation, which is given them."""
        kept: list[State | None] = []

        @contextmanager
        def first() -> Iterator[None]:
            before, self._kept = self._kept, kept
            try:
                yield
            finally:
                self._kept = before

        @contextmanager
        def again() -> Iterator[None]:
            before, self._replay = self._replay, iter(kept)
            try:
                yield
            finally:
                self._replay = before

        return first(), again()

    def entering(self, recurrence: Recurrence, inputs: Inputs, given: State | None) -> State | None:
        """The State that enters this rank's tokens: what the caller gave at the group's beginning, else what arrives."""
        if self._replay is not None:
            return next(self._replay)
        if self.left is None:
            state = given
        else:
            state = self.receive("right", recurrence.leaves(inputs), inputs[0].shape[0])
        if self._kept is not None:
            self._kept.append(state)
        return state

    @property
    def replaying(self) -> bool:
        """Whether this is a recomputation."""
        return self._replay is not None


def carry(
    link: SequenceLink | None, recurrence: Recurrence, inputs: Inputs, pos: Tensor, state: State | None
) -> tuple[Tensor, State]:
    """`recurrence.run` over a sequence that the sequence group shares, each rank having the tokens that follow the last one's.

    state: what enters the first rank (None: nothing read yet); the other ranks are not asked. The leaving State of the last rank is
    the sequence's; on the others it is what they sent, and has no gradient here.
    """
    if link is None or not link.active:
        return recurrence.run(inputs, pos, state)
    given = state if link.left is None else None
    if not recurrence.differentiable:
        with torch.no_grad():
            y, leaving, _, _ = _forward(link, recurrence, inputs, pos, given)
        return y, leaving
    leaves = recurrence.leaves(inputs)
    tensors = () if given is None else tuple(given[leaf.name] for leaf in leaves)
    y, *found = _Carry.apply(link, recurrence, leaves, pos, len(inputs), *inputs, *tensors)
    return y, {leaf.name: x for leaf, x in zip(leaves, found, strict=True)}


def _forward(
    link: SequenceLink, recurrence: Recurrence, inputs: Inputs, pos: Tensor, given: State | None
) -> tuple[Tensor, State, State | None, State]:
    """Outputs, leaving State, entering State, and a linear recurrence's transition ({} for others)."""
    leaves, batch = recurrence.leaves(inputs), inputs[0].shape[0]

    def send(state: State) -> None:
        if not link.replaying:
            link.send("right", state, leaves, recurrence.name)

    if isinstance(recurrence, LinearRecurrence):
        transition, effect = recurrence.begin(inputs, pos)
        entering = link.entering(recurrence, inputs, given)
        if entering is None:
            entering = zeros(leaves, batch, inputs[0].device)
        leaving = effect.advance(entering)
        send(leaving)
        return recurrence.finish(inputs, pos, entering), leaving, entering, transition
    early = recurrence.early(inputs, pos)
    if early is not None:
        send(early)
    entering = link.entering(recurrence, inputs, given)
    y, leaving = recurrence.run(inputs, pos, entering)
    if early is None:
        send(leaving)
    return y, leaving, entering, {}


class _Carry(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        link: SequenceLink,
        recurrence: Recurrence,
        leaves: tuple[Leaf, ...],
        pos: Tensor,
        n_inputs: int,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        inputs = tensors[:n_inputs]
        given = {leaf.name: x for leaf, x in zip(leaves, tensors[n_inputs:], strict=True)} if len(tensors) > n_inputs else None
        y, leaving, entering, transition = _forward(link, recurrence, inputs, pos, given)
        ctx.link, ctx.recurrence, ctx.leaves, ctx.n_inputs = link, recurrence, leaves, n_inputs
        ctx.given, ctx.entered = given is not None, entering is not None
        ctx.names = tuple(transition)
        ctx.save_for_backward(pos, *inputs, *(entering.values() if entering is not None else ()), *transition.values())
        found = [leaving[leaf.name].clone() for leaf in leaves]
        ctx.mark_non_differentiable(*(x for x, leaf in zip(found, leaves, strict=True) if not leaf.grad))
        return y, *found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, *dfound: Tensor) -> tuple[Any, ...]:
        link, recurrence, leaves = ctx.link, ctx.recurrence, ctx.leaves
        pos, *saved = ctx.saved_tensors
        inputs, rest = tuple(saved[: ctx.n_inputs]), saved[ctx.n_inputs :]
        entering = {leaf.name: x for leaf, x in zip(leaves, rest, strict=False)} if ctx.entered else None
        moving = tuple(leaf for leaf in leaves if leaf.grad)

        def arriving() -> State:
            """The leaving State's cotangent: from the right, and at the group's end from whoever used the State."""
            if link.right is not None:
                return link.receive("left", moving, dy.shape[0])
            return {leaf.name: dx for leaf, dx in zip(leaves, dfound, strict=True) if leaf.grad}

        def send(dstate: State) -> None:
            if link.left is None:
                return
            link.send("left", {leaf.name: dstate[leaf.name].to(leaf.dtype) for leaf in moving}, moving, recurrence.name)

        early = None
        if isinstance(recurrence, LinearRecurrence):
            assert entering is not None
            transition = dict(zip(ctx.names, rest[len(leaves) :], strict=True))
            effect: Effect = recurrence.begin_backward(inputs, pos, transition, entering, dy)
            dleaving = arriving()
            dentering = effect.advance(dleaving)
            send(dentering)
            grads = recurrence.finish_backward(inputs, pos, entering, dy, dleaving)
        else:
            with torch.enable_grad():
                leaves_of_early = tuple(x.detach().requires_grad_(x.is_floating_point()) for x in inputs)
                early = recurrence.early(leaves_of_early, pos)
            if early is None:
                grads, dentering = recurrence.pull_back(inputs, pos, entering, dy, arriving())
                send(dentering)
            else:
                # the entering State does not reach the leaving one, so its cotangent does not wait
                grads, dentering = recurrence.pull_back(inputs, pos, entering, dy, None)
                send(dentering)
                grads = _add_early(grads, early, leaves_of_early, arriving())
        dgiven = [dentering.get(leaf.name) for leaf in leaves] if ctx.given else []
        return (None, None, None, None, None, *grads, *dgiven)


def _add_early(grads: tuple[Tensor, ...], early: State, inputs: Inputs, dleaving: State) -> tuple[Tensor, ...]:
    """Gradients plus what the early leaving State's cotangent gives the inputs it was made of."""
    reached = [name for name, x in early.items() if x.requires_grad]
    wanted = [x for x in inputs if x.requires_grad]
    found = iter(
        torch.autograd.grad(
            [early[name] for name in reached],
            wanted,
            [dleaving[name] for name in reached],
            allow_unused=True,
            materialize_grads=True,
        )
    )
    return tuple(grad + next(found) if x.requires_grad else grad for grad, x in zip(grads, inputs, strict=True))
