"""A second CUDA stream for communication, or for copies to the host, beside the computation."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from baton.kernels.protocol import State


class SideStream:
    """A CUDA stream for communication or copies, next to the current stream that computes. On a CPU its methods do nothing.

    A tensor that is made on one of the two streams and read on the other must not be freed for reuse too early: tensors of the
    computing stream live until `join`, tensors made on the side stream are passed to `join`.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def use(self) -> Iterator[None]:
        """Run the body on the side stream."""
        if self._stream is None:
            yield
        else:
            with torch.cuda.stream(self._stream):
                yield

    def wait_current_stream(self) -> None:
        """The side stream waits for all work submitted to the current stream so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def mark(self) -> torch.cuda.Event | None:
        """A mark behind all work on the side stream so far, for `join_at`."""
        return None if self._stream is None else self._stream.record_event()

    def join_at(self, mark: torch.cuda.Event | None) -> None:
        """The current stream waits for the work on the side stream up to a mark."""
        if mark is not None:
            mark.wait()

    def join(self, state: State | None = None) -> None:
        """The current stream waits for all work on the side stream so far. state: made there and read from here on."""
        if self._stream is not None:
            current = torch.cuda.current_stream(self._stream.device)
            current.wait_stream(self._stream)
            for x in (state or {}).values():
                x.record_stream(current)
