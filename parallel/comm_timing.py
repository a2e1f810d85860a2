"""The time that ranks wait for each other in torch.distributed's blocking calls, also those of libraries.

On a GPU the host does not wait, so the time is the stream's, between two CUDA events around each call. Messages that are
transferred during computation cost nothing and count only when they are waited for. Calls that are captured in a CUDA graph have no
events; their time is part of the graph's.

`set_wait_reporter` registers a function that is called with each wait, so that a hanging rank can say what it waits for.
"""

import functools
import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from baton.parallel.profiler_ranges import EXCHANGE, profiler_range

_CALLS = (
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
)


class _WaitState:
    """Of this process, since the time was last taken."""

    def __init__(self) -> None:
        self.inside = False
        self.seconds = 0.0
        self.events: list[tuple[torch.cuda.Event, torch.cuda.Event, str]] = []
        self.reporter: Callable[[str], None] = lambda what: None
        self.names: dict[tuple[str, int], tuple[str, Any]] = {}


_wait_state = _WaitState()


def set_wait_reporter(reporter: Callable[[str], None]) -> None:
    """From now on `reporter` is called with what this rank waits for when a wait begins, and with "" when it ends."""
    _wait_state.reporter = reporter


def install() -> None:
    """Time the calls from now on. Called before megatron-core and DeepSpeed are imported, which keep references to some of them."""
    for name in _CALLS:
        call = getattr(dist, name)
        if not getattr(call, "_baton_timed", False):
            setattr(dist, name, _timed(call))


def _timed(call: Callable[..., Any]) -> Callable[..., Any]:
    place = list(inspect.signature(call).parameters).index("group")

    @functools.wraps(call)
    def timed(*words: Any, **named: Any) -> Any:
        if _wait_state.inside or named.get("async_op"):
            return call(*words, **named)
        group = words[place] if len(words) > place else named.get("group")
        with timed_wait(describe_collective(call.__name__, group)):
            return call(*words, **named)

    timed._baton_timed = True  # type: ignore[attr-defined]
    return timed


def describe_collective(name: str, group: "dist.ProcessGroup | None") -> str:
    """Names a collective with its ranks, such as "all_reduce over ranks 0, 1"."""
    group = dist.group.WORLD if group is None else group
    key = name, id(group)
    if key not in _wait_state.names:
        try:
            ranks = ", ".join(map(str, dist.get_process_group_ranks(group)))
        except (RuntimeError, KeyError, ValueError):  # not a member, or no world yet: the call itself raises
            return name
        _wait_state.names[key] = f"{name} over ranks {ranks}", group  # the group is kept, so that its id is not reused
    return _wait_state.names[key][0]


@contextmanager
def timed_wait(what: str = "other ranks") -> Iterator[None]:
    """The time of the body is spent waiting for other ranks. what: completes "waits for"."""
    if _wait_state.inside:
        yield
        return
    _wait_state.inside, events = True, None
    _wait_state.reporter(what)
    began = time.perf_counter()
    recorded = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    if torch.cuda.is_initialized() and not recorded:
        events = tuple(torch.cuda.Event(enable_timing=True) for _ in range(2))
        events[0].record()
    try:
        with profiler_range(EXCHANGE, "waiting"):
            yield
    finally:
        _wait_state.inside = False
        _wait_state.reporter("")
        if events is not None:
            events[1].record()
            _wait_state.events.append((events[0], events[1], what))
        elif not recorded:
            _wait_state.seconds += time.perf_counter() - began


def take_wait_seconds() -> float:
    """Seconds of the waits that have ended since the last call. It does not wait for a GPU: what is not over there is of a later
    call."""
    ended = [times for times in _wait_state.events if times[1].query()]
    total = _wait_state.seconds + sum(before.elapsed_time(after) for before, after, _ in ended) / 1000.0
    _wait_state.seconds = 0.0
    _wait_state.events = [times for times in _wait_state.events if times not in ended]
    return total


@contextmanager
def reported_wait(what: str) -> Iterator[None]:
    """Report a wait without timing it, because most of that time overlaps with computation."""
    _wait_state.reporter(what)
    try:
        yield
    finally:
        _wait_state.reporter("")


def current_gpu_wait() -> str:
    """What one of this rank's streams waits for now; "" where none waits. Called from another thread while the host is silent. It
    queries CUDA events, which is not allowed while a graph is captured."""
    for before, after, what in list(_wait_state.events):
        if before.query() and not after.query():
            return what
    return ""
