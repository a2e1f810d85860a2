"""Point-to-point messages between ranks: in order, sent without waiting, and with an error when one does not arrive.

A channel has a communicator of its own for one kind of message in one direction: two kinds in one communicator would be matched in
an order on which the ranks need not agree. A message that does not arrive ends this rank with an error that names it. On a CPU the
error is raised where the message is waited for. On a GPU, where the host does not wait, a watchdog thread ends the process.
Messages that are recorded in a CUDA graph have no host that watches them: there, silence of the whole rank is what is noticed
(layout.timeout_s).
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

from baton.parallel.comm_timing import reported_wait, timed_wait
from baton.parallel.errors import CommError

_POLL_S = 0.5
_LEAVING = "its messages to leave, which other ranks receive"  # completes "rank 0 waits for ..."


@dataclass(frozen=True)
class PendingRecv:
    """A message that is being received.

    message: its memory, not to be read before `wait`. label: what it is and from which rank. error_text: the error for a message
    that does not arrive, given the seconds waited. keepalive: a tensor that must live until then.
    """

    message: Tensor
    label: str
    error_text: Callable[[float], str]
    _work: dist.Work
    keepalive: Tensor | None = None

    def wait(self) -> Tensor:
        """The message. On a GPU the current stream waits for it, not the host.

        Raises:
            CommError: on a CPU, when the other rank is gone or did not send in time.
        """
        since = time.monotonic()
        try:
            with timed_wait(self.label):
                self._work.wait()
        except RuntimeError as error:
            raise CommError(f"{self.error_text(time.monotonic() - since)} ({_first_line(error)})") from None
        return self.message


class Channel:
    """One kind of message in one direction. group: a communicator that nothing else uses. timeout_s: seconds that a message may
    take."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, timeout_s: float) -> None:
        self._group, self._device, self.timeout_s = group, device, timeout_s
        self._rank = dist.get_rank()
        self._pending_sends: deque[tuple[dist.Work, Tensor, Callable[[float], str]]] = deque()
        self._lock = threading.Lock()
        self._drain_thread: threading.Thread | None = None
        self._failed: str | None = None

    def send(self, message: Tensor, to: int, label: str) -> None:
        """Send a contiguous tensor to a global rank without waiting. It must not be changed afterwards. label: names it in errors.

        Raises:
            CommError: this message or an earlier one cannot reach its rank.
        """

        def error_text(waited: float) -> str:
            return f"rank {self._rank}: {label} did not reach rank {to} {self._why(waited)}"

        if self._failed is not None:
            raise CommError(self._failed)
        try:
            work = dist.isend(message, dst=to, group=self._group)
        except RuntimeError as error:
            raise CommError(f"{error_text(0.0)} ({_first_line(error)})") from None
        assert work is not None
        if self._device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            self._forget_sent()
            _watch(work, error_text, self.timeout_s)
        with self._lock:
            self._pending_sends.append((work, message, error_text))  # keeps the memory alive until it is sent
            if self._device.type == "cpu" and self._drain_thread is None:
                self._drain_thread = threading.Thread(target=self._drain_sends, name="exchange sends", daemon=True)
                self._drain_thread.start()

    def irecv(self, message: Tensor, source: int, label: str) -> PendingRecv:
        """Begin to receive into a contiguous tensor from a global rank. Messages arrive in the order of these calls."""

        def error_text(waited: float) -> str:
            return f"rank {self._rank}: {label} did not come from rank {source} {self._why(waited)}"

        try:
            work = dist.irecv(message, src=source, group=self._group)
        except RuntimeError as error:
            raise CommError(f"{error_text(0.0)} ({_first_line(error)})") from None
        assert work is not None
        return self._begun(PendingRecv(message, f"{label}, from rank {source}", error_text, work))

    def gather(self, message: Tensor, label: str) -> PendingRecv:
        """Begin to gather a flat tensor of every rank of the channel: [ranks, numel], in the channel's order. All its ranks call
        it."""

        def error_text(waited: float) -> str:
            return f"rank {self._rank}: {label} was not gathered {self._why(waited)}"

        if self._device.type == "cuda":  # gathers are completed in order, so that one waits for earlier ones in any case
            (self.join_sends if torch.cuda.is_current_stream_capturing() else self._forget_sent)()
        found = message.new_empty(self._group.size(), message.numel())
        try:
            work = dist.all_gather(list(found.unbind()), message, group=self._group, async_op=True)
        except RuntimeError as error:
            raise CommError(f"{error_text(0.0)} ({_first_line(error)})") from None
        assert work is not None
        if self._device.type == "cuda":  # the first rank reads nothing of what it gathers, and waits for it with what it sends
            with self._lock:
                self._pending_sends.append((work, message, error_text))
        return self._begun(PendingRecv(found, f"{label}, gathered", error_text, work, keepalive=message))

    def all_to_all(self, message: Tensor, sent: Sequence[int], received: Sequence[int], label: str) -> PendingRecv:
        """Begin to send a part of a flat tensor to each rank of the channel and to receive one from each. sent, received: elements
        of the parts, in the channel's order. All its ranks call it."""

        def error_text(waited: float) -> str:
            return f"rank {self._rank}: {label} were not exchanged {self._why(waited)}"

        found = message.new_empty(sum(received))
        try:
            work = dist.all_to_all_single(found, message, list(received), list(sent), group=self._group, async_op=True)
        except RuntimeError as error:
            raise CommError(f"{error_text(0.0)} ({_first_line(error)})") from None
        assert work is not None
        return self._begun(PendingRecv(found, f"{label}, exchanged", error_text, work, keepalive=message))

    def _forget_sent(self) -> None:
        """On a GPU, let go of messages that have been sent."""
        while self._pending_sends and self._pending_sends[0][0].is_completed():
            self._pending_sends.popleft()

    def join_sends(self) -> None:
        """On a GPU, let the current stream wait until everything sent has left this rank, and not the host. A pass that is recorded
        as a CUDA graph ends with it."""
        if self._device.type == "cuda":
            while self._pending_sends:
                self._pending_sends.popleft()[0].wait()

    def flush(self) -> None:
        """Wait until everything sent has left this rank.

        Raises:
            CommError: on a CPU, when something cannot be sent.
        """
        if self._device.type == "cuda":
            self.join_sends()
            with reported_wait(_LEAVING):
                torch.cuda.current_stream(self._device).synchronize()
            return
        while (thread := self._drain_thread) is not None:
            with reported_wait(_LEAVING):
                thread.join()
        if self._failed is not None:
            raise CommError(self._failed)

    def _begun(self, arrival: PendingRecv) -> PendingRecv:
        if self._device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            _watch(arrival._work, arrival.error_text, self.timeout_s)
        return arrival

    def _drain_sends(self) -> None:
        """Release messages when they are sent. gloo reports a completed send only to a thread that waits for it."""
        left = True
        while left:
            # in a frame of its own, which has let go of the message when `flush` sees that there is no thread any more
            self._wait_for_first_send()
            with self._lock:
                self._pending_sends.popleft()
                left = bool(self._pending_sends)
                if not left:
                    self._drain_thread = None

    def _wait_for_first_send(self) -> None:
        with self._lock:
            work, _, error_text = self._pending_sends[0]
        since = time.monotonic()
        try:
            work.wait()
        except RuntimeError as error:
            self._failed = self._failed or f"{error_text(time.monotonic() - since)} ({_first_line(error)})"

    def _why(self, waited: float) -> str:
        return (
            f"(waited {waited:.1f} s of at most {self.timeout_s:g} s): that rank has died, or hangs, or waits for one that does; "
            f"its log says more"
        )


def make_channels(groups: Sequence[Sequence[int]], count: int, device: torch.device, timeout_s: float) -> list[Channel] | None:
    """`count` channels for each list of global ranks. Returns those of this rank's list, None if it is in none.

    Every rank of the world calls it with the same lists: making a communicator is collective.
    """
    found = None
    # NCCL's own timeout ends a process without naming the message, so it is longer than ours
    timeout = datetime.timedelta(seconds=timeout_s if device.type == "cpu" else 1.5 * timeout_s + 10)
    for ranks in groups:
        made = [dist.new_group(list(ranks), timeout=timeout) for _ in range(count)]
        if dist.get_rank() in ranks:
            found = [Channel(group, device, timeout_s) for group in made]
    return found


class SupportsIsCompleted(Protocol):
    """Work that reports whether it is completed."""

    def is_completed(self) -> bool: ...


class Watchdog:
    """Deadlines of works. end: called with the error of the work that is overdue longest. clock: seconds.

    A deadline counts from the submission of the work, so on a GPU it includes what is queued before it.
    """

    def __init__(self, end: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._end, self._clock = end, clock
        self._lock = threading.Lock()
        self._works: list[tuple[float, float, SupportsIsCompleted, Callable[[float], str]]] = []

    def add(self, work: SupportsIsCompleted, error_text: Callable[[float], str], timeout_s: float) -> None:
        """Watch a work until it is completed. error_text: given the seconds waited."""
        now = self._clock()
        with self._lock:
            self._works.append((now + timeout_s, now, work, error_text))

    def check(self) -> None:
        """Forget completed works, and end with an overdue one."""
        with self._lock:
            # not in order: messages of other channels may complete earlier and have shorter timeouts
            self._works = [watched for watched in self._works if not watched[2].is_completed()]
            now, works = self._clock(), list(self._works)
        overdue = [(deadline, since, error_text) for deadline, since, _, error_text in works if now > deadline]
        if overdue:
            _, since, error_text = min(overdue, key=lambda one: one[0])
            self._end(error_text(now - since))

    def __len__(self) -> int:
        return len(self._works)


def _end_process(error_text: str) -> None:
    # the main thread may be in a call that never returns, where an exception would not be caught
    with contextlib.suppress(OSError):
        print(f"baton: {error_text}", flush=True)
        sys.stderr.flush()
    os._exit(CommError.exit_status)


_works = Watchdog(_end_process)
_watcher: threading.Thread | None = None


def _watch(work: dist.Work, error_text: Callable[[float], str], timeout_s: float) -> None:
    global _watcher
    _works.add(work, error_text, timeout_s)
    if _watcher is None:
        _watcher = threading.Thread(target=_watch_forever, name="exchange watch", daemon=True)
        _watcher.start()


def _watch_forever() -> None:
    while True:
        _works.check()
        time.sleep(_POLL_S)


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]
