"""Messages between ranks: in order, sent without waiting, and never silently missing.

The one thing to know: a channel has a communicator of its own for one kind of message in one direction. Messages of two kinds that
met in one communicator would be matched in an order that the ranks need not agree on. A message that does not come ends this rank
with a sentence that names it: on a CPU where it is waited for; on a GPU, where nothing on the host waits, a thread watches.
"""

import contextlib
import datetime
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from baton.parallel.comm_timing import reporting, waiting
from baton.parallel.errors import ExchangeError

_POLL_S = 0.5
_LEAVING = "its messages to leave, which other ranks receive"


@dataclass(frozen=True)
class Arrival:
    """A message that is on its way.

    message: its memory, not to be read before `wait`. what: it is, and from whom. sentence: what to say if it does not come, given
    the seconds waited. kept: what must live until then.
    """

    message: Tensor
    what: str
    sentence: Callable[[float], str]
    _work: dist.Work
    kept: Tensor | None = None

    def wait(self) -> Tensor:
        """The message. On a GPU the current stream waits for it and the host does not.

        Raises:
            ExchangeError: on a CPU, when the other rank is gone or did not send in time.
        """
        since = time.monotonic()
        try:
            with waiting(self.what):
                self._work.wait()
        except RuntimeError as error:
            raise ExchangeError(f"{self.sentence(time.monotonic() - since)} ({_first_line(error)})") from None
        return self.message


class Channel:
    """One kind of message in one direction. group: a communicator that nothing else uses. timeout_s: seconds a message may take."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, timeout_s: float) -> None:
        self._group, self._device, self._timeout_s = group, device, timeout_s
        self._rank = dist.get_rank()
        self._sending: deque[tuple[dist.Work, Tensor, Callable[[float], str]]] = deque()
        self._lock = threading.Lock()
        self._seeing_off: threading.Thread | None = None
        self._failed: str | None = None

    def send(self, message: Tensor, to: int, what: str) -> None:
        """Hand a contiguous tensor to a global rank, without waiting; it must not be changed afterwards. what: for errors.

        Raises:
            ExchangeError: this message, or one sent before, cannot reach its rank.
        """

        def sentence(waited: float) -> str:
            return f"rank {self._rank}: {what} did not reach rank {to} {self._why(waited)}"

        if self._failed is not None:
            raise ExchangeError(self._failed)
        try:
            work = dist.isend(message, dst=to, group=self._group)
        except RuntimeError as error:
            raise ExchangeError(f"{sentence(0.0)} ({_first_line(error)})") from None
        assert work is not None
        if self._device.type == "cuda":
            while self._sending and self._sending[0][0].is_completed():
                self._sending.popleft()
            _watch(work, sentence, self._timeout_s)
        with self._lock:
            self._sending.append((work, message, sentence))  # the memory must live until it has left
            if self._device.type == "cpu" and self._seeing_off is None:
                self._seeing_off = threading.Thread(target=self._see_off, name="exchange sends", daemon=True)
                self._seeing_off.start()

    def expect(self, message: Tensor, source: int, what: str) -> Arrival:
        """Begin to receive into a contiguous tensor from a global rank. Messages arrive in the order in which they are expected."""

        def sentence(waited: float) -> str:
            return f"rank {self._rank}: {what} did not come from rank {source} {self._why(waited)}"

        try:
            work = dist.irecv(message, src=source, group=self._group)
        except RuntimeError as error:
            raise ExchangeError(f"{sentence(0.0)} ({_first_line(error)})") from None
        assert work is not None
        return self._begun(Arrival(message, f"{what}, from rank {source}", sentence, work))

    def gather(self, message: Tensor, what: str) -> Arrival:
        """Begin to gather a flat tensor of every rank of the channel, which all call it: [ranks, numel], in the channel's order."""

        def sentence(waited: float) -> str:
            return f"rank {self._rank}: {what} was not gathered {self._why(waited)}"

        found = message.new_empty(self._group.size(), message.numel())
        try:
            work = dist.all_gather(list(found.unbind()), message, group=self._group, async_op=True)
        except RuntimeError as error:
            raise ExchangeError(f"{sentence(0.0)} ({_first_line(error)})") from None
        assert work is not None
        return self._begun(Arrival(found, f"{what}, gathered", sentence, work, kept=message))

    def flush(self) -> None:
        """Wait until everything sent has left this rank.

        Raises:
            ExchangeError: on a CPU, when something cannot leave.
        """
        if self._device.type == "cuda":
            while self._sending:
                self._sending.popleft()[0].wait()
            with reporting(_LEAVING):
                torch.cuda.current_stream(self._device).synchronize()
            return
        while (thread := self._seeing_off) is not None:
            with reporting(_LEAVING):
                thread.join()
        if self._failed is not None:
            raise ExchangeError(self._failed)

    def _begun(self, arrival: Arrival) -> Arrival:
        if self._device.type == "cuda":
            _watch(arrival._work, arrival.sentence, self._timeout_s)
        return arrival

    def _see_off(self) -> None:
        """Release messages as they leave: gloo says that a send is complete to nobody but who waits for it."""
        while True:
            with self._lock:
                if not self._sending:
                    self._seeing_off = None
                    return
                work, _, sentence = self._sending[0]
            since = time.monotonic()
            try:
                work.wait()
            except RuntimeError as error:
                self._failed = self._failed or f"{sentence(time.monotonic() - since)} ({_first_line(error)})"
            with self._lock:
                self._sending.popleft()

    def _why(self, waited: float) -> str:
        return (
            f"(waited {waited:.1f} s of at most {self._timeout_s:g} s): that rank has died, or hangs, or waits for one that does; "
            f"its log says more"
        )


def channels(groups: Sequence[Sequence[int]], count: int, device: torch.device, timeout_s: float) -> list[Channel] | None:
    """`count` channels for each list of global ranks; those of this rank's list, None if it is in none.

    Every rank of the world calls it with the same lists: making a communicator is collective.
    """
    found = None
    # NCCL's own timeout ends a process without saying what it waited for: it comes after ours
    timeout = datetime.timedelta(seconds=timeout_s if device.type == "cpu" else 1.5 * timeout_s + 10)
    for ranks in groups:
        made = [dist.new_group(list(ranks), timeout=timeout) for _ in range(count)]
        if dist.get_rank() in ranks:
            found = [Channel(group, device, timeout_s) for group in made]
    return found


class Completes(Protocol):
    """Work that knows whether it is done."""

    def is_completed(self) -> bool: ...


class Watch:
    """Works with deadlines. end: called with the sentence of the one that is overdue the longest. clock: seconds.

    A deadline counts from when the work was handed over, so on a GPU it includes what is queued before it.
    """

    def __init__(self, end: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._end, self._clock = end, clock
        self._lock = threading.Lock()
        self._works: list[tuple[float, float, Completes, Callable[[float], str]]] = []

    def add(self, work: Completes, sentence: Callable[[float], str], timeout_s: float) -> None:
        """Watch a work until it is completed. sentence: given the seconds waited."""
        now = self._clock()
        with self._lock:
            self._works.append((now + timeout_s, now, work, sentence))

    def look(self) -> None:
        """Forget what is completed, and end with what is overdue."""
        with self._lock:
            # another channel's messages may be done before older ones, and may have less time
            self._works = [watched for watched in self._works if not watched[2].is_completed()]
            now, works = self._clock(), list(self._works)
        overdue = [(deadline, since, sentence) for deadline, since, _, sentence in works if now > deadline]
        if overdue:
            _, since, sentence = min(overdue, key=lambda one: one[0])
            self._end(sentence(now - since))

    def __len__(self) -> int:
        return len(self._works)


def _end_process(sentence: str) -> None:
    # the host may be stuck in a call that never returns, so nobody could catch an exception
    with contextlib.suppress(OSError):
        print(f"baton: {sentence}", flush=True)
        sys.stderr.flush()
    os._exit(ExchangeError.exit_status)


_works = Watch(_end_process)
_watcher: threading.Thread | None = None


def _watch(work: dist.Work, sentence: Callable[[float], str], timeout_s: float) -> None:
    global _watcher
    _works.add(work, sentence, timeout_s)
    if _watcher is None:
        _watcher = threading.Thread(target=_watch_forever, name="exchange watch", daemon=True)
        _watcher.start()


def _watch_forever() -> None:
    while True:
        _works.look()
        time.sleep(_POLL_S)


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]
