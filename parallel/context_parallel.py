"""Sequence parallelism: a rank is a segment. A State arrives from the left neighbour, and leaves to the right.

The one thing to know: segment s on rank r of P is virtual segment v = s P + r. States go from v to v + 1, cotangents from v to v -
1, and the link knows who that is: the neighbour, at the group's ends the other end, or, with one rank, this process itself. What
enters v = 0 and what leaves the last are the caller's. What is sent when is decided in `parallel.state_passing`; nothing else of a
model knows about it.

Entering States are kept with the graph, so that recomputation of activations exchanges nothing.
"""

import os
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from baton.kernels.protocol import State, StateSpec, flat_nbytes, from_flat, to_flat
from baton.parallel import compat
from baton.parallel.config import LayoutConfig
from baton.parallel.errors import CommError, LayoutError
from baton.parallel.p2p import Channel, make_channels

Direction = Literal["right", "left"]
"""States go right, cotangents left."""

_STEP: dict[Direction, int] = {"right": 1, "left": -1}
_NOUN: dict[Direction, str] = {"right": "the State", "left": "the cotangent of the State"}


@dataclass(frozen=True)
class VirtualRank:
    """A virtual segment: `segment` of `segments` on `rank` of `size`."""

    rank: int
    size: int
    segment: int = 0
    segments: int = 1

    def offset(self, step: int) -> "VirtualRank | None":
        """The virtual segment `step` after this one; None beyond the first and the last."""
        segment, rank = divmod(self.segment * self.size + self.rank + step, self.size)
        return VirtualRank(rank, self.size, segment, self.segments) if 0 <= segment < self.segments else None

    def next(self, direction: Direction) -> "VirtualRank | None":
        """Where what goes in `direction` goes from here."""
        return self.offset(_STEP[direction])

    def prev(self, direction: Direction) -> "VirtualRank | None":
        """Where what goes in `direction` comes from."""
        return self.offset(-_STEP[direction])


@dataclass(frozen=True)
class MessageTag:
    """One recurrence of one layer at one place: what errors and counts call a message. where: the mixer's name in the model."""

    name: str
    where: str
    virtual_rank: VirtualRank

    def what(self, direction: Direction) -> str:
        segment = f", segment {self.virtual_rank.segment}" if self.virtual_rank.segments > 1 else ""
        return f"{_NOUN[direction]} of {self.name} in {self.where}{segment}"


class SideStream:
    """A stream beside the one that computes, for what waits for messages; on a CPU, nothing of that.

    What was made on one of the two and is read on the other must not be freed for reuse too early: tensors of the computing stream
    live until `join`, those made aside are handed to `join`.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def use(self) -> Iterator[None]:
        """Within it work goes aside."""
        if self._stream is None:
            yield
        else:
            with torch.cuda.stream(self._stream):
                yield

    def wait_current_stream(self) -> None:
        """What goes aside from here waits for what the computing stream has been given so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def join(self, state: State | None = None) -> None:
        """What is computed from here waits for what went aside so far; `state` was made there."""
        if self._stream is not None:
            current = torch.cuda.current_stream(self._stream.device)
            current.wait_stream(self._stream)
            for x in (state or {}).values():
                x.record_stream(current)


class ContextLink:
    """This rank's place in the sequence group, and its neighbours.

    rank, ranks: its number in the group and the group's global ranks. channels: "right", "left", "wraparound right" (from the last
    rank to the first's next segment), "wraparound left" and, with exchange "all_gather", "gather"; none for a group of one. A link
    of one rank exchanges nothing, but takes the same steps: so one rank with P segments has the bits of P ranks.

    exchange: how States of linear recurrences cross the group: relayed, made and relayed early, or gathered by all and folded in
    rank order, which are early's bits.
    counted: messages and bytes sent, by ("right" | "left", recurrence's name) and ("right bytes" | "left bytes", its name);
    counted_by_layer: the same by (.., where, its name). A gathered message counts as one, its bytes once per rank it goes to.
    observer: is called with every State and cotangent that leaves a segment here, also those that leave the sequence: (direction,
    carrier, State), on the stream beside the one that computes; not with gathered ones, nor in a recomputation.
    """

    def __init__(
        self,
        rank: int,
        ranks: Sequence[int],
        device: torch.device,
        channels: Mapping[str, Channel] | None = None,
        exchange: Literal["ring", "early", "all_gather"] = "ring",
    ) -> None:
        self.rank, self.size, self.device, self.exchange = rank, len(ranks), device, exchange
        self.channels = dict(channels or {})
        self.side_stream = SideStream(device)
        self._ranks = ranks
        self._virtual_rank = VirtualRank(rank, self.size)
        self._local_states: defaultdict[tuple[Direction, VirtualRank, str, str], deque[State]] = defaultdict(deque)
        self._states_to_save: list[State | None] | None = None
        self._saved_states: Iterator[State | None] | None = None
        self._local_only = False
        self._wraparounds: list[tuple[Direction, MessageTag, Tensor, int]] = []
        self.observer: Callable[[Direction, MessageTag, State], None] | None = None
        self.sent: Counter[tuple[str, str]] = Counter()
        self.sent_by_layer: Counter[tuple[str, str, str]] = Counter()

    @property
    def active(self) -> bool:
        """Whether States go through here: not while every rank works for itself."""
        return not self._local_only

    @property
    def virtual_rank(self) -> VirtualRank:
        """The virtual segment that this rank works on."""
        return self._virtual_rank

    @property
    def gathers(self) -> bool:
        """Whether States of linear recurrences are gathered now.

        Not over several segments: the first rank's next segment begins with what leaves the last rank, so a collective would keep
        all ranks in one layer of one segment, where a relay lets the first go on.
        """
        return self.exchange == "all_gather" and self.size > 1 and self._virtual_rank.segments == 1

    @contextmanager
    def local_only(self) -> Iterator[None]:
        """Within it every rank has whole sequences: decoding, a monitor's text."""
        before, self._local_only = self._local_only, True
        try:
            yield
        finally:
            self._local_only = before

    @contextmanager
    def segment(self, number: int, *, of: int) -> Iterator[None]:
        """Within it this rank's tokens are its span of segment `number` of `of`, each of them a span per rank.

        Forwards the segments come in ascending order; backwards in descending order, in one call of backward or one each. Between
        forwards and backwards a segment may be run again, as `recomputation` says.

        Raises:
            ValueError: there is no such segment.
            CommError: with one rank, when the pass before did not go to its last segment and back.
        """
        if not 0 <= number < of:
            raise ValueError(f"segment {number} of {of}: segments are numbered from 0 to {of - 1}")
        if number == 0 and not self.recomputing and (left := [key for key, states in self._local_states.items() if states]):
            direction, virtual_rank, name, where = left[0]
            what = MessageTag(name, where, virtual_rank).what(direction)
            raise CommError(
                f"rank {self._ranks[self.rank]}: {what} was not taken in the pass before: go to the last segment forwards, "
                f"and to the first backwards"
            )
        self._send_wraparounds()
        before, self._virtual_rank = self._virtual_rank, VirtualRank(self.rank, self.size, number, of)
        try:
            yield
            self._send_wraparounds()
        finally:
            self._virtual_rank = before

    def send(self, direction: Direction, tag: MessageTag, state: State, leaves: tuple[StateSpec, ...]) -> None:
        """Hand a State on without waiting, one message of each leaf's own type. Not at the end it goes to."""
        target = tag.virtual_rank.next(direction)
        assert target is not None
        if not leaves:
            return
        if self.size == 1:
            own = {leaf.name: _compact(state[leaf.name]) for leaf in leaves}
            self._local_states[direction, target, tag.name, tag.where].append(own)
            return
        self._send_wraparounds(but=(direction, tag.virtual_rank.segment))
        message = to_flat(state, leaves)
        self._count(direction, tag, message.numel())
        channel, wraparound = self._channel(direction, tag.virtual_rank, target)
        if wraparound:
            self._wraparounds.append((direction, tag, message, self._ranks[target.rank]))
        else:
            channel.send(message, self._ranks[target.rank], tag.what(direction))

    def irecv(self, direction: Direction, tag: MessageTag, leaves: tuple[StateSpec, ...], batch: int) -> Callable[[], State]:
        """Begin to receive the State that goes in `direction` to here; the result waits for it. Not at the end it comes from.

        On a GPU it begins as soon as it can, and spins until the message is there. Begun only when the computing stream comes to
        here, each receive kept that waiting: between two H200s a pass of Mamba 1.4B over 16k tokens a rank took 459 ms, not 428.
        """
        source = tag.virtual_rank.prev(direction)
        assert source is not None
        if not leaves:
            return dict
        if self.size == 1:
            return lambda: self._take_local(direction, tag)
        self._send_wraparounds(but=(direction, tag.virtual_rank.segment))
        channel, _ = self._channel(direction, source, tag.virtual_rank)
        with self.side_stream.use():
            message = torch.empty(flat_nbytes(leaves, batch), dtype=torch.uint8, device=self.device)
            arrival = channel.irecv(message, self._ranks[source.rank], tag.what(direction))

        def wait() -> State:
            with self.side_stream.use():
                state = from_flat(arrival.wait(), leaves, batch)
            self.side_stream.join(state)
            return state

        return wait

    def gather(self, direction: Direction, tag: MessageTag, parts: list[Tensor]) -> Callable[[], list[list[Tensor]]]:
        """Begin to gather every rank's `parts`, of the same shapes, strides and types everywhere; the result waits for all."""
        leaves = tuple(StateSpec(str(n), tuple(x.shape[1:]), x.dtype, None, grad=False) for n, x in enumerate(parts))
        message = to_flat({leaf.name: x for leaf, x in zip(leaves, parts, strict=True)}, leaves)
        arrival = self.channels["gather"].gather(message, tag.what(direction))
        self._count(direction, tag, message.numel() * (self.size - 1))

        def wait() -> list[list[Tensor]]:
            found = []
            for row in arrival.wait():
                views = from_flat(row, leaves, parts[0].shape[0]).values()
                # in the strides of the rank that sent them: a product of matrices may depend on these to its last bit
                found.append([torch.empty_like(own).copy_(x) for own, x in zip(parts, views, strict=True)])
            return found

        return wait

    def send_wraparound(self, state: State, leaves: tuple[StateSpec, ...]) -> None:
        """From the last rank to the first: what leaves the last virtual segment of all layers, as one message."""
        message = to_flat(state, leaves)
        tag = MessageTag("all recurrences", "all layers", self._virtual_rank)
        self.channels["wraparound right"].send(message, self._ranks[0], tag.what("right"))
        self._count("right", tag, message.numel())

    def recv_wraparound(self, leaves: tuple[StateSpec, ...], batch: int) -> State:
        """On the first rank: what the last one sent by `send_around`."""
        tag = MessageTag("all recurrences", "all layers", self._virtual_rank)
        with self.side_stream.use():
            message = torch.empty(flat_nbytes(leaves, batch), dtype=torch.uint8, device=self.device)
            state = from_flat(
                self.channels["wraparound right"].irecv(message, self._ranks[-1], tag.what("right")).wait(), leaves, batch
            )
        self.side_stream.join(state)
        return state

    def wait(self) -> None:
        """Until everything sent has left this rank."""
        self._send_wraparounds()
        for channel in self.channels.values():
            channel.flush()

    def recomputation(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Contexts of a first forward pass, whose entering States are kept, and of its recomputation, which is given them.

        The recomputation exchanges nothing forwards. Where the first pass had no graph, the recomputation makes it, and cotangents
        go their way from there.
        """
        kept: list[State | None] = []

        @contextmanager
        def first() -> Iterator[None]:
            before, self._states_to_save = self._states_to_save, kept
            try:
                yield
            finally:
                self._states_to_save = before

        @contextmanager
        def again() -> Iterator[None]:
            # what is kept of a recomputation is for one of its own parts: activations of a segment that is itself run again
            before, self._saved_states, self._states_to_save = (self._saved_states, self._states_to_save), iter(kept), None
            try:
                yield
            finally:
                self._saved_states, self._states_to_save = before

        return first(), again()

    @property
    def recomputing(self) -> bool:
        """Whether this is a recomputation."""
        return self._saved_states is not None

    def saved_state(self) -> State | None:
        """The State that entered here in the first pass."""
        assert self._saved_states is not None
        return next(self._saved_states)

    def save_state(self, state: State | None) -> None:
        """Remember what entered here, for a recomputation."""
        if self._states_to_save is not None:
            self._states_to_save.append(state)

    def _take_local(self, direction: Direction, tag: MessageTag) -> State:
        waiting = self._local_states[direction, tag.virtual_rank, tag.name, tag.where]
        if not waiting:
            raise CommError(
                f"rank {self._ranks[self.rank]}: {tag.what(direction)} is not there: go from the first segment to the last "
                f"forwards, and from the last to the first backwards"
            )
        return waiting.popleft()

    def _send_wraparounds(self, but: tuple[Direction, int] | None = None) -> None:
        """Send what waits to go from one end of the group to the other's next segment. but: not while (direction, segment) is what
        is being done.

        It waits until this rank has begun everything else that it does in a segment. On a GPU a send is a kernel that spins until
        its receiver is there, and the receiver comes to its next segment when it has done with this one, for which it may need that
        this rank goes on receiving. Yet CUDA waits for what spins when it connects two ranks or loads a kernel for the first time.
        The rank at the other end is late by no more than the State takes through the group: that is how far behind this one is.
        """
        if not self._wraparounds or (self._wraparounds[0][0], self._wraparounds[0][1].virtual_rank.segment) == but:
            return
        waiting, self._wraparounds = self._wraparounds, []
        with self.side_stream.use():
            for direction, tag, message, target in waiting:
                self.channels[f"wraparound {direction}"].send(message, target, tag.what(direction))

    def _channel(self, direction: Direction, source: VirtualRank, target: VirtualRank) -> tuple[Channel, bool]:
        """The one for a message, and whether it goes around."""
        # A backend that works through a communicator's operations in order would deadlock with two ranks if both kinds met in one:
        # rank 1's hand-over to rank 0's next segment waits until rank 0 takes it, rank 0 takes it after all that it sends for this
        # segment, and of that rank 1 takes nothing before its own hand-over is done.
        wraparound = source.segment != target.segment
        return self.channels[f"wraparound {direction}" if wraparound else direction], wraparound

    def _count(self, direction: Direction, tag: MessageTag, nbytes: int) -> None:
        for key, n in ((direction, 1), (f"{direction} bytes", nbytes)):
            self.sent[key, tag.name] += n
            self.sent_by_layer[key, tag.where, tag.name] += n


def _compact(x: Tensor) -> Tensor:
    """x, in no more memory than it needs: a tail is the end of a whole span, which would be kept with it."""
    return x.clone() if x.untyped_storage().nbytes() > x.nbytes else x


def context_link(layout: LayoutConfig, rank: int, device: torch.device, timeout_s: float) -> ContextLink | None:
    """This rank's link; None where the layout's sequence groups are one rank each. Every rank of the world calls it.

    timeout_s: seconds that a State may take to come.

    Raises:
        LayoutError: all streams of the GPU share one hardware queue, as megatron-core advises for tensor parallelism alone. There
            a hand-over that spins until its receiver is there keeps all that comes after it from starting.
    """
    if layout.context == 1:
        return None
    if device.type == "cuda" and os.environ.get(compat.QUEUES) == "1":
        raise LayoutError(
            f"{compat.QUEUES}=1 is set; with sequence ranks messages would wait for each other: unset it, or use 8 to 32"
        )
    firsts = [rank for rank in range(layout.world_size) if rank // layout.tensor % layout.context == 0]
    groups = [[first + n * layout.tensor for n in range(layout.context)] for first in firsts]
    made = dict(zip(("right", "left"), make_channels(groups, 2, device, timeout_s) or (), strict=True))
    ends = make_channels([[ranks[0], ranks[-1]] for ranks in groups], 2, device, timeout_s)
    made |= dict(zip(("wraparound right", "wraparound left"), ends or (), strict=False))
    if layout.context_comm == "all_gather":
        made |= dict(zip(("gather",), make_channels(groups, 1, device, timeout_s) or (), strict=True))
    own = next(ranks for ranks in groups if rank in ranks)
    return ContextLink(own.index(rank), own, device, made, layout.context_comm)
