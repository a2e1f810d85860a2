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
from baton.parallel.errors import ExchangeError, LayoutError
from baton.parallel.p2p import Channel, channels

Direction = Literal["right", "left"]
"""States go right, cotangents left."""

_STEP: dict[Direction, int] = {"right": 1, "left": -1}
_NOUN: dict[Direction, str] = {"right": "the State", "left": "the cotangent of the State"}


@dataclass(frozen=True)
class Place:
    """A virtual segment: `segment` of `segments` on `rank` of `size`."""

    rank: int
    size: int
    segment: int = 0
    segments: int = 1

    def beside(self, step: int) -> "Place | None":
        """The virtual segment `step` after this one; None beyond the first and the last."""
        segment, rank = divmod(self.segment * self.size + self.rank + step, self.size)
        return Place(rank, self.size, segment, self.segments) if 0 <= segment < self.segments else None

    def beyond(self, direction: Direction) -> "Place | None":
        """Where what goes in `direction` goes from here."""
        return self.beside(_STEP[direction])

    def before(self, direction: Direction) -> "Place | None":
        """Where what goes in `direction` comes from."""
        return self.beside(-_STEP[direction])


@dataclass(frozen=True)
class Carrier:
    """One recurrence of one layer at one place: what errors and counts call a message. where: the mixer's name in the model."""

    name: str
    where: str
    place: Place

    def what(self, direction: Direction) -> str:
        segment = f", segment {self.place.segment}" if self.place.segments > 1 else ""
        return f"{_NOUN[direction]} of {self.name} in {self.where}{segment}"


class Aside:
    """A stream beside the one that computes, for what waits for messages; on a CPU, nothing of that.

    What was made on one of the two and is read on the other must not be freed for reuse too early: tensors of the computing stream
    live until `join`, those made aside are handed to `join`.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Within it work goes aside."""
        if self._stream is None:
            yield
        else:
            with torch.cuda.stream(self._stream):
                yield

    def follow(self) -> None:
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


class SequenceLink:
    """This rank's place in the sequence group, and its neighbours.

    rank, ranks: its number in the group and the group's global ranks. channels: "right", "left", "around right" (from the last rank
    to the first's next segment), "around left" and, where exchange is "all_gather", "gather"; none for a group of one.
    A link of one rank exchanges nothing, but takes the same steps: so one rank with P segments has the bits of P ranks.

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
        self.aside = Aside(device)
        self._ranks = ranks
        self._place = Place(rank, self.size)
        self._here: defaultdict[tuple[Direction, Place, str, str], deque[State]] = defaultdict(deque)
        self._kept: list[State | None] | None = None
        self._replay: Iterator[State | None] | None = None
        self._local_only = False
        self._around: list[tuple[Direction, Carrier, Tensor, int]] = []
        self.observer: Callable[[Direction, Carrier, State], None] | None = None
        self.counted: Counter[tuple[str, str]] = Counter()
        self.counted_by_layer: Counter[tuple[str, str, str]] = Counter()

    @property
    def active(self) -> bool:
        """Whether States go through here: not while every rank works for itself."""
        return not self._local_only

    @property
    def place(self) -> Place:
        """The virtual segment that this rank works on."""
        return self._place

    @property
    def gathers(self) -> bool:
        """Whether States of linear recurrences are gathered now.

        Not over several segments: the first rank's next segment begins with what leaves the last rank, so a collective would keep
        all ranks in one layer of one segment, where a relay lets the first go on.
        """
        return self.exchange == "all_gather" and self.size > 1 and self._place.segments == 1

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
            ExchangeError: with one rank, when the pass before did not go to its last segment and back.
        """
        if not 0 <= number < of:
            raise ValueError(f"segment {number} of {of}: segments are numbered from 0 to {of - 1}")
        if number == 0 and not self.replaying and (left := [key for key, states in self._here.items() if states]):
            direction, place, name, where = left[0]
            what = Carrier(name, where, place).what(direction)
            raise ExchangeError(
                f"rank {self._ranks[self.rank]}: {what} was not taken in the pass before: go to the last segment forwards, "
                f"and to the first backwards"
            )
        self._go_around()
        before, self._place = self._place, Place(self.rank, self.size, number, of)
        try:
            yield
            self._go_around()
        finally:
            self._place = before

    def send(self, direction: Direction, carrier: Carrier, state: State, leaves: tuple[StateSpec, ...]) -> None:
        """Hand a State on without waiting, one message of each leaf's own type. Not at the end it goes to."""
        target = carrier.place.beyond(direction)
        assert target is not None
        if not leaves:
            return
        if self.size == 1:
            own = {leaf.name: _compact(state[leaf.name]) for leaf in leaves}
            self._here[direction, target, carrier.name, carrier.where].append(own)
            return
        self._go_around(but=(direction, carrier.place.segment))
        message = to_flat(state, leaves)
        self._count(direction, carrier, message.numel())
        channel, around = self._channel(direction, carrier.place, target)
        if around:
            self._around.append((direction, carrier, message, self._ranks[target.rank]))
        else:
            channel.send(message, self._ranks[target.rank], carrier.what(direction))

    def receive(self, direction: Direction, carrier: Carrier, leaves: tuple[StateSpec, ...], batch: int) -> Callable[[], State]:
        """Begin to receive the State that goes in `direction` to here; the result waits for it. Not at the end it comes from.

        On a GPU it begins as soon as it can, and spins until the message is there. Begun only when the computing stream comes to
        here, each receive kept that waiting: between two H200s a pass of Mamba 1.4B over 16k tokens a rank took 459 ms, not 428.
        """
        source = carrier.place.before(direction)
        assert source is not None
        if not leaves:
            return dict
        if self.size == 1:
            return lambda: self._take(direction, carrier)
        self._go_around(but=(direction, carrier.place.segment))
        channel, _ = self._channel(direction, source, carrier.place)
        with self.aside.stream():
            message = torch.empty(flat_nbytes(leaves, batch), dtype=torch.uint8, device=self.device)
            arrival = channel.expect(message, self._ranks[source.rank], carrier.what(direction))

        def wait() -> State:
            with self.aside.stream():
                state = from_flat(arrival.wait(), leaves, batch)
            self.aside.join(state)
            return state

        return wait

    def gather(self, direction: Direction, carrier: Carrier, parts: list[Tensor]) -> Callable[[], list[list[Tensor]]]:
        """Begin to gather every rank's `parts`, of the same shapes, strides and types everywhere; the result waits for all."""
        leaves = tuple(StateSpec(str(n), tuple(x.shape[1:]), x.dtype, None, grad=False) for n, x in enumerate(parts))
        message = to_flat({leaf.name: x for leaf, x in zip(leaves, parts, strict=True)}, leaves)
        arrival = self.channels["gather"].gather(message, carrier.what(direction))
        self._count(direction, carrier, message.numel() * (self.size - 1))

        def wait() -> list[list[Tensor]]:
            found = []
            for row in arrival.wait():
                views = from_flat(row, leaves, parts[0].shape[0]).values()
                # in the strides of the rank that sent them: a product of matrices may depend on these to its last bit
                found.append([torch.empty_like(own).copy_(x) for own, x in zip(parts, views, strict=True)])
            return found

        return wait

    def send_around(self, state: State, leaves: tuple[StateSpec, ...]) -> None:
        """From the last rank to the first: what leaves the last virtual segment of all layers, as one message."""
        message = to_flat(state, leaves)
        carrier = Carrier("all recurrences", "all layers", self._place)
        self.channels["around right"].send(message, self._ranks[0], carrier.what("right"))
        self._count("right", carrier, message.numel())

    def receive_around(self, leaves: tuple[StateSpec, ...], batch: int) -> State:
        """On the first rank: what the last one sent by `send_around`."""
        carrier = Carrier("all recurrences", "all layers", self._place)
        with self.aside.stream():
            message = torch.empty(flat_nbytes(leaves, batch), dtype=torch.uint8, device=self.device)
            state = from_flat(
                self.channels["around right"].expect(message, self._ranks[-1], carrier.what("right")).wait(), leaves, batch
            )
        self.aside.join(state)
        return state

    def wait(self) -> None:
        """Until everything sent has left this rank."""
        self._go_around()
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
            before, self._kept = self._kept, kept
            try:
                yield
            finally:
                self._kept = before

        @contextmanager
        def again() -> Iterator[None]:
            # what is kept of a recomputation is for one of its own parts: activations of a segment that is itself run again
            before, self._replay, self._kept = (self._replay, self._kept), iter(kept), None
            try:
                yield
            finally:
                self._replay, self._kept = before

        return first(), again()

    @property
    def replaying(self) -> bool:
        """Whether this is a recomputation."""
        return self._replay is not None

    def replayed(self) -> State | None:
        """The State that entered here in the first pass."""
        assert self._replay is not None
        return next(self._replay)

    def keep(self, state: State | None) -> None:
        """Remember what entered here, for a recomputation."""
        if self._kept is not None:
            self._kept.append(state)

    def _take(self, direction: Direction, carrier: Carrier) -> State:
        waiting = self._here[direction, carrier.place, carrier.name, carrier.where]
        if not waiting:
            raise ExchangeError(
                f"rank {self._ranks[self.rank]}: {carrier.what(direction)} is not there: go from the first segment to the last "
                f"forwards, and from the last to the first backwards"
            )
        return waiting.popleft()

    def _go_around(self, but: tuple[Direction, int] | None = None) -> None:
        """Send what waits to go from one end of the group to the other's next segment. but: not while (direction, segment) is what
        is being done.

        It waits until this rank has begun everything else that it does in a segment. On a GPU a send is a kernel that spins until
        its receiver is there, and the receiver comes to its next segment when it has done with this one, for which it may need that
        this rank goes on receiving. Yet CUDA waits for what spins when it connects two ranks or loads a kernel for the first time.
        The rank at the other end is late by no more than the State takes through the group: that is how far behind this one is.
        """
        if not self._around or (self._around[0][0], self._around[0][1].place.segment) == but:
            return
        waiting, self._around = self._around, []
        with self.aside.stream():
            for direction, carrier, message, target in waiting:
                self.channels[f"around {direction}"].send(message, target, carrier.what(direction))

    def _channel(self, direction: Direction, source: Place, target: Place) -> tuple[Channel, bool]:
        """The one for a message, and whether it goes around."""
        # A backend that works through a communicator's operations in order would deadlock with two ranks if both kinds met in one:
        # rank 1's hand-over to rank 0's next segment waits until rank 0 takes it, rank 0 takes it after all that it sends for this
        # segment, and of that rank 1 takes nothing before its own hand-over is done.
        around = source.segment != target.segment
        return self.channels[f"around {direction}" if around else direction], around

    def _count(self, direction: Direction, carrier: Carrier, nbytes: int) -> None:
        for key, n in ((direction, 1), (f"{direction} bytes", nbytes)):
            self.counted[key, carrier.name] += n
            self.counted_by_layer[key, carrier.where, carrier.name] += n


def _compact(x: Tensor) -> Tensor:
    """x, in no more memory than it needs: a tail is the end of a whole span, which would be kept with it."""
    return x.clone() if x.untyped_storage().nbytes() > x.nbytes else x


def sequence_link(layout: LayoutConfig, rank: int, device: torch.device, timeout_s: float) -> SequenceLink | None:
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
    made = dict(zip(("right", "left"), channels(groups, 2, device, timeout_s) or (), strict=True))
    ends = channels([[ranks[0], ranks[-1]] for ranks in groups], 2, device, timeout_s)
    made |= dict(zip(("around right", "around left"), ends or (), strict=False))
    if layout.context_comm == "all_gather":
        made |= dict(zip(("gather",), channels(groups, 1, device, timeout_s) or (), strict=True))
    own = next(ranks for ranks in groups if rank in ranks)
    return SequenceLink(own.index(rank), own, device, made, layout.context_comm)
