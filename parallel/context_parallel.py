"""Context parallelism: each rank has a segment of every sequence, receives the State from its left neighbour and sends to the
right. (Papers also call it sequence parallelism.) Initial States are saved with the graph, so that recomputation of activations
exchanges nothing.

Segment s on rank r of P is virtual rank v = s P + r. States go from v to v + 1, gradients of States from v to v - 1. `ContextLink`
knows where that is: the neighbour, at the ends of the group the other end, or, with a single rank, this process itself. The caller
has the initial State of v = 0 and the final State of the last virtual rank. `parallel.state_passing` decides what is sent when.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol, cast

import torch
from torch import Tensor

from baton.kernels.protocol import State, StateSpec
from baton.kernels.state_message import flat_nbytes, from_flat, to_flat
from baton.parallel import compat
from baton.parallel.config import LayoutConfig
from baton.parallel.earlier_keys import EarlierKeys, KeyStore
from baton.parallel.errors import CommError, LayoutError
from baton.parallel.local_states import LocalStates
from baton.parallel.p2p import Channel, make_channels
from baton.parallel.side_stream import SideStream

Direction = Literal["right", "left"]
"""States go right, gradients of States left."""

_STEP: dict[Direction, int] = {"right": 1, "left": -1}
_NOUN: dict[Direction, str] = {"right": "the State", "left": "the gradient of the State"}


@dataclass(frozen=True)
class VirtualRank:
    """A segment of a sequence: `segment` of `segments` on `rank` of `size`."""

    rank: int
    size: int
    segment: int = 0
    segments: int = 1

    def offset(self, step: int) -> "VirtualRank | None":
        """The virtual rank `step` after this one; None before the first and after the last."""
        segment, rank = divmod(self.segment * self.size + self.rank + step, self.size)
        return VirtualRank(rank, self.size, segment, self.segments) if 0 <= segment < self.segments else None

    def next(self, direction: Direction) -> "VirtualRank | None":
        """The destination of what goes in `direction` from here."""
        return self.offset(_STEP[direction])

    def prev(self, direction: Direction) -> "VirtualRank | None":
        """The source of what comes to here in `direction`."""
        return self.offset(-_STEP[direction])


@dataclass(frozen=True)
class MessageTag:
    """Names a message in errors and counts. name: of the recurrence. where: the mixer's name in the model."""

    name: str
    where: str
    virtual_rank: VirtualRank

    def describe(self, direction: Direction) -> str:
        segment = f", segment {self.virtual_rank.segment}" if self.virtual_rank.segments > 1 else ""
        return f"{_NOUN[direction]} of {self.name} in {self.where}{segment}"


class StateObserver(Protocol):
    """What looks at States on their way between ranks."""

    def observe(self, direction: Direction, tag: MessageTag, state: State) -> None:
        """A State, or its gradient, that leaves a segment. Runs on the side stream, and may be recorded as part of a CUDA graph."""

    def start(self) -> None:
        """Forget what was observed."""


class ContextLink:
    """This rank's place in the context group and its connections.

    A link of one rank exchanges nothing but goes through the same steps, so one rank with P segments computes the bits of P ranks.

    Args:
        rank, ranks: the rank's number in the group, and the group's global ranks.
        channels: "right", "left", "wraparound right" (from the last rank to the first's next segment), "wraparound left", and with
            exchange "all_gather", or for full attention (`add_gather`), also "gather"; none for a group of one.
        exchange: how States of linear recurrences cross the group: "ring", "early", or "all_gather", which folds in rank order and
            has early's bits.

    Attributes:
        sent: messages and bytes sent, by ("right" | "left", recurrence's name) and ("right bytes" | "left bytes", its name). A
            gathered message counts once, its bytes once per receiving rank.
        sent_by_layer: the same by (.., where, name).
        local: what a single rank hands to its own next segment.
        key_store: what full attention keeps of earlier segments.
        observer: told of every State and gradient that leaves a segment here, also at the ends of the sequence; not of gathered
            ones, nor in a recomputation.
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
        self.local = LocalStates()
        self._states_to_save: list[State | None] | None = None
        self._saved_states: Iterator[State | None] | None = None
        self._wraparounds: list[tuple[Direction, MessageTag, Tensor, int]] = []
        self._sequence = 0
        self.key_store = KeyStore(device)
        self.observer: StateObserver | None = None
        self.sent: Counter[tuple[str, str]] = Counter()
        self.sent_by_layer: Counter[tuple[str, str, str]] = Counter()

    @property
    def virtual_rank(self) -> VirtualRank:
        """The virtual rank that this rank works on."""
        return self._virtual_rank

    @property
    def gathers(self) -> bool:
        """Whether States of linear recurrences are gathered now.

        Not with several segments: the first rank's next segment begins with the last rank's final State, so a collective would hold
        all ranks in one layer of one segment, where the ring lets the first rank go on.
        """
        return self.exchange == "all_gather" and self.size > 1 and self._virtual_rank.segments == 1

    @contextmanager
    def segment(self, number: int, *, count: int, sequence: int = 0) -> Iterator[None]:
        """Within it this rank's tokens are its span of segment `number` of `count`; each segment has a span per rank. sequence:
        tells sequences apart whose segments take turns.

        The forward pass runs the segments in ascending order, the backward pass in descending order, in one call of backward or in
        one each. In between a segment may be run again, see `recomputation`.

        Raises:
            ValueError: there is no such segment.
            CommError: with one rank, when the previous pass did not run to its last segment and back.
        """
        if not 0 <= number < count:
            raise ValueError(f"segment {number} of {count}: segments are numbered from 0 to {count - 1}")
        if number == 0 and not self.recomputing and (left := self.local.waiting()):
            direction, virtual_rank, name, where = cast("tuple[Direction, VirtualRank, str, str]", next(iter(left)))
            what = MessageTag(name, where, virtual_rank).describe(direction)
            what += " was not taken in the pass before: go to the last segment forwards, and to the first backwards"
            raise CommError(f"rank {self._ranks[self.rank]}: {what}")
        self._send_wraparounds()
        before = self._virtual_rank, self._sequence
        self._virtual_rank, self._sequence = VirtualRank(self.rank, self.size, number, count), sequence
        try:
            yield
            self._send_wraparounds()
        finally:
            self._virtual_rank, self._sequence = before

    def send(self, direction: Direction, tag: MessageTag, state: State, specs: tuple[StateSpec, ...]) -> None:
        """Send a State to the next virtual rank in `direction` without waiting: a State to the right, which has the next tokens, a
        State's gradient to the left. specs: the entries to send, each in its spec's dtype. There must be such a rank."""
        target = tag.virtual_rank.next(direction)
        assert target is not None
        if not specs:
            return
        if self.size == 1:
            self.local.put((direction, target, tag.name, tag.where), {spec.name: state[spec.name] for spec in specs})
            return
        self._send_wraparounds(but=(direction, tag.virtual_rank.segment))
        message = to_flat(state, specs)
        self.count(direction, tag, message.numel())
        channel, wraparound = self._channel(direction, tag.virtual_rank, target)
        if wraparound:
            self._wraparounds.append((direction, tag, message, self._ranks[target.rank]))
        else:
            channel.send(message, self._ranks[target.rank], tag.describe(direction))

    def irecv(self, direction: Direction, tag: MessageTag, specs: tuple[StateSpec, ...], batch: int) -> Callable[[], State]:
        """Begin to receive what is sent in `direction`: "right", the State of the left neighbour; "left", the gradient of the State
        that was sent to the right neighbour. The result waits for it. There must be such a neighbour.

        On a GPU the receive begins as soon as it can, and its kernel spins until the message is there. Begun only when the
        computing stream gets here, each receive delayed that stream: between two H200s a pass of Mamba 1.4B over 16k tokens per
        rank took 459 ms instead of 428.
        """
        source = tag.virtual_rank.prev(direction)
        assert source is not None
        if not specs:
            return dict
        if self.size == 1:
            return lambda: self._take_local(direction, tag)
        self._send_wraparounds(but=(direction, tag.virtual_rank.segment))
        channel, _ = self._channel(direction, source, tag.virtual_rank)
        with self.side_stream.use():
            message = torch.empty(flat_nbytes(specs, batch), dtype=torch.uint8, device=self.device)
            arrival = channel.irecv(message, self._ranks[source.rank], tag.describe(direction))

        def wait() -> State:
            with self.side_stream.use():
                state = from_flat(arrival.wait(), specs, batch)
            self.side_stream.join(state)
            return state

        return wait

    def gather(self, direction: Direction, tag: MessageTag, parts: list[Tensor]) -> Callable[[], list[list[Tensor]]]:
        """Begin to gather every rank's `parts`, which have the same shapes, strides and dtypes on all ranks; the result waits for
        all."""
        specs = tuple(StateSpec(str(n), tuple(x.shape[1:]), x.dtype, None, grad=False) for n, x in enumerate(parts))
        message = to_flat({spec.name: x for spec, x in zip(specs, parts, strict=True)}, specs)
        arrival = self.channels["gather"].gather(message, tag.describe(direction))
        self.count(direction, tag, message.numel() * (self.size - 1))

        def wait() -> list[list[Tensor]]:
            found = []
            for row in arrival.wait():
                views = from_flat(row, specs, parts[0].shape[0]).values()
                # in the sender's strides: the last bit of a matrix product may depend on them
                found.append([torch.empty_like(own).copy_(x) for own, x in zip(parts, views, strict=True)])
            return found

        return wait

    def earlier_keys(self, tag: MessageTag) -> EarlierKeys:
        """What a recurrence that gathers its inputs keeps of the segments before this one."""
        segment, key = tag.virtual_rank, (self._sequence, tag.where, tag.name)
        begins = segment.segments == 1 or (segment.segment == 0 and not self.recomputing)
        return self.key_store.begin(key, segment.segments) if begins else self.key_store.of(key)

    def send_wraparound(self, state: State, specs: tuple[StateSpec, ...]) -> None:
        """From the last rank to the first: the final State of all layers of the last virtual rank, as one message."""
        message = to_flat(state, specs)
        tag = MessageTag("all recurrences", "all layers", self._virtual_rank)
        self.channels["wraparound right"].send(message, self._ranks[0], tag.describe("right"))
        self.count("right", tag, message.numel())

    def recv_wraparound(self, specs: tuple[StateSpec, ...], batch: int) -> State:
        """On the first rank: the State that the last one sent by `send_wraparound`."""
        tag = MessageTag("all recurrences", "all layers", self._virtual_rank)
        with self.side_stream.use():
            message = torch.empty(flat_nbytes(specs, batch), dtype=torch.uint8, device=self.device)
            state = from_flat(
                self.channels["wraparound right"].irecv(message, self._ranks[-1], tag.describe("right")).wait(), specs, batch
            )
        self.side_stream.join(state)
        return state

    @contextmanager
    def recordable_pass(self) -> Iterator[None]:
        """Around a pass that may be recorded as a CUDA graph, so that all of it is: what runs on the side stream and all messages
        begin after what was submitted to the current stream before, and the current stream then waits for them."""
        self.side_stream.wait_current_stream()
        yield
        self._send_wraparounds()
        for channel in self.channels.values():
            channel.join_sends()
        self.side_stream.join()

    def wait(self) -> None:
        """Wait until everything sent has left this rank."""
        self._send_wraparounds()
        for channel in self.channels.values():
            channel.flush()

    def recomputation(
        self, saved: list[State | None] | None = None
    ) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Contexts for a first forward pass, whose initial States are saved, and for its recomputation, which reads them.

        The recomputation exchanges nothing in its forward pass. Where the first pass had no graph, the recomputation makes it, and
        gradients of States are exchanged from there. saved: an empty list for these States, or of them; None: a new one.
        """
        found = [] if saved is None else saved
        at: list[tuple[VirtualRank, int]] = []  # a recomputation in a backward pass is of that segment, wherever this rank is then

        @contextmanager
        def first() -> Iterator[None]:
            before, self._states_to_save = self._states_to_save, found
            at[:] = [(self._virtual_rank, self._sequence)]
            try:
                yield
            finally:
                self._states_to_save = before

        @contextmanager
        def again() -> Iterator[None]:
            # a recomputation saves nothing here; contexts nested in it save for their own recomputation
            before = self._saved_states, self._states_to_save, self._virtual_rank, self._sequence
            self._saved_states, self._states_to_save = iter(found), None
            self._virtual_rank, self._sequence = at[0] if at else before[2:]
            try:
                yield
            finally:
                self._saved_states, self._states_to_save, self._virtual_rank, self._sequence = before

        return first(), again()

    @property
    def recomputing(self) -> bool:
        """Whether this is a recomputation."""
        return self._saved_states is not None

    def saved_state(self) -> State | None:
        """The initial State at this point of the first pass."""
        assert self._saved_states is not None
        return next(self._saved_states)

    def save_state(self, state: State | None) -> None:
        """Save an initial State for a recomputation."""
        if self._states_to_save is not None:
            self._states_to_save.append(state)

    def _take_local(self, direction: Direction, tag: MessageTag) -> State:
        state = self.local.take((direction, tag.virtual_rank, tag.name, tag.where))
        if state is None:
            what = f"{tag.describe(direction)} is not there: go from the first segment to the last forwards, and back"
            raise CommError(f"rank {self._ranks[self.rank]}: {what}")
        return state

    def _send_wraparounds(self, but: tuple[Direction, int] | None = None) -> None:
        """Send the deferred messages from one end of the group to the other's next segment. but: not while (direction, segment) is
        in progress.

        Deferred, because sending at once can deadlock: on a GPU a send is a kernel that spins until its receiver is there; the
        receiver reaches its next segment after finishing this one, for which it may need this rank's receives; and CUDA waits for
        spinning kernels when it connects two ranks or loads a kernel for the first time. So this rank begins everything else of the
        segment first. The rank at the other end is delayed by no more than the State takes through the group, which is how far this
        one trails it.
        """
        if not self._wraparounds or (self._wraparounds[0][0], self._wraparounds[0][1].virtual_rank.segment) == but:
            return
        waiting, self._wraparounds = self._wraparounds, []
        with self.side_stream.use():
            for direction, tag, message, target in waiting:
                self.channels[f"wraparound {direction}"].send(message, target, tag.describe(direction))

    def _channel(self, direction: Direction, source: VirtualRank, target: VirtualRank) -> tuple[Channel, bool]:
        """The channel for a message, and whether it is a wraparound."""
        # A backend that works through a communicator's operations in order would deadlock with two ranks if both kinds met in one:
        # rank 1's hand-over to rank 0's next segment waits until rank 0 takes it, rank 0 takes it after all that it sends for this
        # segment, and of that rank 1 takes nothing before its own hand-over is done.
        wraparound = source.segment != target.segment
        return self.channels[f"wraparound {direction}" if wraparound else direction], wraparound

    def count(self, direction: Direction, tag: MessageTag, nbytes: int) -> None:
        """Count a message in `sent` and `sent_by_layer`."""
        for key, n in ((direction, 1), (f"{direction} bytes", nbytes)):
            self.sent[key, tag.name] += n
            self.sent_by_layer[key, tag.where, tag.name] += n


def context_link(layout: LayoutConfig, rank: int, device: torch.device, timeout_s: float) -> ContextLink | None:
    """This rank's link; None where the context groups have one rank. Every rank of the world calls it.

    timeout_s: seconds that a State may take to arrive.

    Raises:
        LayoutError: all streams of the GPU share one hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1, as megatron-core advises for
            tensor parallelism alone). A send that spins until its receiver is there would block everything submitted after it.
    """
    if layout.context == 1:
        return None
    if device.type == "cuda" and os.environ.get(compat.QUEUES) == "1":
        raise LayoutError(
            f"{compat.QUEUES}=1 is set; with sequence ranks messages would wait for each other: unset it, or use 8 to 32"
        )
    groups = _context_groups(layout)
    made = dict(zip(("right", "left"), make_channels(groups, 2, device, timeout_s) or (), strict=True))
    ends = make_channels([[ranks[0], ranks[-1]] for ranks in groups], 2, device, timeout_s)
    made |= dict(zip(("wraparound right", "wraparound left"), ends or (), strict=False))
    own = next(ranks for ranks in groups if rank in ranks)
    link = ContextLink(own.index(rank), own, device, made, layout.context_comm)
    if layout.context_comm == "all_gather":
        add_gather(link, layout)
    return link


def add_gather(link: ContextLink, layout: LayoutConfig) -> None:
    """Give a link the channel for collectives, which full attention needs, unless it has one. Every rank of the world calls it."""
    if "gather" not in link.channels:
        made = make_channels(_context_groups(layout), 1, link.device, link.channels["right"].timeout_s)
        link.channels |= dict(zip(("gather",), made or (), strict=True))


def _context_groups(layout: LayoutConfig) -> list[list[int]]:
    firsts = [rank for rank in range(layout.world_size) if rank // layout.tensor % layout.context == 0]
    return [[first + n * layout.tensor for n in range(layout.context)] for first in firsts]
