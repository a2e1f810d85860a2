"""Measures the parts of a step without slowing it: host clocks on a CPU, CUDA events on a GPU, read once it has come to them."""

import time
from collections.abc import Callable, Sequence

import torch

PARTS = ("data", "forward", "backward", "optimizer")
"""Parts of every step; with recomputed segments there is forward_no_grad too."""


class StepTimer:
    """Times of a step's parts. `mark(part)` ends the span since the previous mark. on_mark: called with each part."""

    def __init__(self, device: torch.device, on_mark: Callable[[str], None] = lambda part: None) -> None:
        self._device, self._on_mark = device, on_mark
        self._marks: list[tuple[str, float | torch.cuda.Event]] = []
        self.start()

    def _now(self) -> "float | torch.cuda.Event":
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def start(self) -> None:
        """Begin a step."""
        self._marks = [("", self._now())]

    def mark(self, part: str) -> None:
        """Charge the time since the last mark to `part`."""
        self._marks.append((part, self._now()))
        self._on_mark(part)

    def spans(self) -> "StepSpans":
        """The parts of the step up to the last mark."""
        return StepSpans(self._marks)


class StepSpans:
    """The parts of one step. On a GPU their times are known when it has come to the step's last mark."""

    def __init__(self, marks: Sequence[tuple[str, float | torch.cuda.Event]]) -> None:
        self._marks = marks

    def are_known(self) -> bool:
        """Whether `seconds` has nothing to wait for."""
        last = self._marks[-1][1]
        return isinstance(last, float) or last.query()

    def seconds(self) -> dict[str, float]:
        """Seconds of each part. Waits for the step's last mark."""
        last = self._marks[-1][1]
        if not isinstance(last, float):
            last.synchronize()
        sums = dict.fromkeys(PARTS, 0.0)
        for (_, before), (part, after) in zip(self._marks, self._marks[1:]):
            if isinstance(before, float):
                assert isinstance(after, float)
                sums[part] = sums.get(part, 0.0) + after - before
            else:
                assert not isinstance(after, float)
                sums[part] = sums.get(part, 0.0) + before.elapsed_time(after) / 1000.0
        return sums
