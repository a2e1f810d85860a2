"""Keys and values of a sequence's earlier segments, which full attention reads again in every later one, and their gradients.

`EarlierKeys` keeps them on the device. `OffloadedKeys` keeps them in the host's memory and brings those of one layer to the device
for a pass through it, which needs them there in one piece anyway. Both give the same bits: what is added is added on the device, in
the same order and dtype.

Copies to the device are on the stream that computes: it needs them next. Copies to the host are on a side stream, while the
attention runs or the next segment's gradient arrives; the computing stream waits for them before the pass through the layer ends,
so that no memory is used again too early, and a read of the host's memory finds what was written.
"""

from collections import deque
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from baton.kernels.protocol import Inputs
from baton.parallel.host_memory import HostMemory
from baton.parallel.side_stream import SideStream

BUFFERS = 2
"""Gradients of a segment on the device at a time: one arrives while the other one leaves."""


class EarlierKeys:
    """One rank's gathered inputs of the segments of a sequence, in one layer, and their gradients.

    rows: by segment, tensors [B, span, ...]. grads: by segment, from later segments, float32 or the inputs' wider dtype.
    """

    def __init__(self) -> None:
        self.rows: list[Inputs] = []
        self.grads: dict[int, list[Tensor]] = {}

    def join(self, segment: int, own: Inputs, *, keep: bool) -> Inputs:
        """The rows of the segments before this one and its own, [B, (segment + 1) span, ...]. keep: its own, for later ones."""
        rows = [*self.rows[:segment], own]
        if keep and segment < len(self.rows):  # it runs again, with the same bits; what was behind it is not read any more
            del self.rows[segment + 1 :]
        elif keep:
            # a part of a projection's result, say, would stay in memory with the whole
            self.rows.append(tuple(x.clone() if x.untyped_storage().nbytes() > x.nbytes else x for x in own))
        return own if segment == 0 else tuple(torch.cat(parts, dim=1) for parts in zip(*rows, strict=True))

    def add_grads(self, grads: Sequence[Sequence[Tensor]]) -> None:
        """Add a later segment's gradients to those of the first len(grads) segments, which become the store's."""
        for segment, of_segment in enumerate(grads):
            earlier = self.grads.get(segment)
            new = list(of_segment)
            self.grads[segment] = new if earlier is None else [a.add_(b) for a, b in zip(earlier, new, strict=True)]

    def take_grads(self, segment: int) -> Sequence[Tensor] | None:
        """The sum of the gradients of a segment, which is then forgotten; None: there is none."""
        return self.grads.pop(segment, None)

    def end_pass(self) -> None:
        """A pass through the layer ends: what it had on the device may be overwritten."""

    def clear(self) -> None:
        """Keep nothing of the sequence any longer."""
        self.rows.clear()
        self.grads.clear()


class OffloadedKeys(EarlierKeys):
    """The same in the host's memory, of a sequence of `segments` segments.

    host_rows: by input, [B, (segments - 1) span, ...], of which the first `stored` segments are filled. host_grads: by input, the
    same shape in the gradients' dtype; `summed` are the segments that have one.
    """

    def __init__(self, host: HostMemory, stream: SideStream, segments: int) -> None:
        super().__init__()
        self._host, self._stream, self._earlier = host, stream, segments - 1
        self.host_rows: list[Tensor] = []
        self.host_grads: list[Tensor] = []
        self.stored, self.summed = 0, set[int]()
        self._leaving: deque[tuple[list[Tensor], torch.cuda.Event | None]] = deque()

    def join(self, segment: int, own: Inputs, *, keep: bool) -> Inputs:
        span, joined = own[0].shape[1], own
        if segment:
            joined = tuple(x.new_empty(x.shape[0], (segment + 1) * span, *x.shape[2:]) for x in own)
            for x, host, last in zip(joined, self.host_rows, own, strict=True):
                _copy(x[:, : segment * span], host[:, : segment * span])
                _of(segment, span, x).copy_(last)
        if keep and segment == self.stored:  # a second run of the segment has the same bits
            self.host_rows = self.host_rows or self._memory(own)
            for x, host in zip(joined, self.host_rows, strict=True):
                self._send(_of(segment, span, host), x[:, segment * span :])
            self.stored += 1
        return joined

    def add_grads(self, grads: Sequence[Sequence[Tensor]]) -> None:
        for segment, of_segment in enumerate(grads):
            self.host_grads = self.host_grads or self._memory(of_segment)
            for grad, host in zip(of_segment, self.host_grads, strict=True):
                while len(self._leaving) >= BUFFERS:
                    self._stream.join_at(self._leaving.popleft()[1])
                sums = _of(segment, grad.shape[1], host)
                self._send(sums, self._fetch(sums).add_(grad) if segment in self.summed else grad)
            self.summed.add(segment)

    def take_grads(self, segment: int) -> Sequence[Tensor] | None:
        if segment not in self.summed:
            return None
        self.end_pass()
        self.summed.remove(segment)
        return [self._fetch(_of(segment, host.shape[1] // self._earlier, host)) for host in self.host_grads]

    def end_pass(self) -> None:
        self._stream.join()
        self._leaving.clear()

    def clear(self) -> None:
        self.end_pass()
        for x in (*self.host_rows, *self.host_grads):
            self._host.give_back(x)
        self.host_rows, self.host_grads, self.stored = [], [], 0
        self.summed.clear()

    def _memory(self, like: Sequence[Tensor]) -> list[Tensor]:
        """Of all segments but the last. like: of one segment."""
        return [self._host.empty((x.shape[0], self._earlier * x.shape[1], *x.shape[2:]), x.dtype) for x in like]

    def _fetch(self, host: Tensor) -> Tensor:
        x = torch.empty(host.shape, dtype=host.dtype, device=self._host.device)
        _copy(x, host)
        return x

    def _send(self, host: Tensor, x: Tensor) -> None:
        """Begin to copy to the host what the computing stream has made; it lives until the copy has ended."""
        rows = [row.contiguous() for row in x]
        self._stream.wait_current_stream()
        with self._stream.use():
            _copy(host, rows)
        self._leaving.append((rows, self._stream.mark()))


class KeyStore:
    """What the full attention of a model keeps of earlier segments. offload: in the host's memory.

    host: the host's memory, which is kept from step to step.
    """

    def __init__(self, device: torch.device, *, offload: bool = False) -> None:
        self.offload, self.host = offload, HostMemory(device)
        self._stream = SideStream(device)
        self._kept: dict[Hashable, EarlierKeys] = {}

    def begin(self, key: Hashable, segments: int) -> EarlierKeys:
        """Of a sequence of `segments` segments that begins, by recurrence and sequence."""
        if segments == 1:
            return EarlierKeys()
        if (before := self._kept.get(key)) is not None:
            before.clear()  # its backward pass did not come
        self._kept[key] = OffloadedKeys(self.host, self._stream, segments) if self.offload else EarlierKeys()
        return self._kept[key]

    def of(self, key: Hashable) -> EarlierKeys:
        """Of a sequence that has begun."""
        return self._kept[key]

    def kept(self) -> list[EarlierKeys]:
        """Of all recurrences and sequences that have begun, the ended ones, which keep nothing, too."""
        return list(self._kept.values())


def _of(segment: int, span: int, x: Tensor) -> Tensor:
    return x[:, segment * span : (segment + 1) * span]


def _copy(to: Tensor, rows: Tensor | Sequence[Tensor]) -> None:
    """Between the host and the device, row by row: a row's tokens are in one piece on both sides."""
    for of_row, x in zip(to, rows, strict=True):
        of_row.copy_(x, non_blocking=True)
