"""How long ranks wait for one another: the time inside torch.distributed's blocking calls, whoever makes them.

The one thing to know: on a GPU nothing on the host waits, so the time is the stream's, between two events around each call;
messages that travel while something is computed cost nothing, and are not counted until somebody waits for them. What is recorded
in a CUDA graph has no events: nothing looks between its kernels, so what it waits for is part of what it computes.

`report_to` names a function that is told of each wait, so that a rank that hangs can say what it waits for.
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
    """Of this process, since it was last read."""

    def __init__(self) -> None:
        self.inside = False
        self.seconds = 0.0
        self.events: list[tuple[torch.cuda.Event, torch.cuda.Event, str]] = []
        self.reporter: Callable[[str], None] = lambda what: None
        self.names: dict[tuple[str, int], tuple[str, Any]] = {}


_wait_state = _WaitState()


def set_wait_reporter(reporter: Callable[[str], None]) -> None:
    """From now on `told` is called with what this rank waits for when it begins to, and with "" when that has come."""
    _wait_state.reporter = reporter


def install() -> None:
    """Time the calls from now on. To be called before megatron-core and DeepSpeed are imported, which keep some of them."""
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
    """What is waited for in a collective: its name, and the ranks that take part, as "all_reduce over ranks 0, 1"."""
    group = dist.group.WORLD if group is None else group
    key = name, id(group)
    if key not in _wait_state.names:
        try:
            ranks = ", ".join(map(str, dist.get_process_group_ranks(group)))
        except (RuntimeError, KeyError, ValueError):  # not a member, or no world yet: the call itself says so
            return name
        _wait_state.names[key] = f"{name} over ranks {ranks}", group  # kept: another group must not get its id
    return _wait_state.names[key][0]


@contextmanager
def timed_wait(what: str = "other ranks") -> Iterator[None]:
    """The time inside is spent waiting for other ranks. what: for, in words."""
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
    """Waited since this was last asked. On a GPU its stream has come so far by then, or is waited for."""
    total = _wait_state.seconds
    for before, after, _ in _wait_state.events:
        after.synchronize()
        total += before.elapsed_time(after) / 1000.0
    _wait_state.seconds, _wait_state.events = 0.0, []
    return total


@contextmanager
def reported_wait(what: str) -> Iterator[None]:
    """Within it this rank waits for others. It is not counted: most of that time went by while something was computed."""
    _wait_state.reporter(what)
    try:
        yield
    finally:
        _wait_state.reporter("")


def current_gpu_wait() -> str:
    """What one of this rank's streams waits for at this moment; "" where all compute, or are done. From another thread, while the
    host is silent: it asks the GPU, which may not be asked while a graph is recorded."""
    for before, after, what in list(_wait_state.events):
        if before.query() and not after.query():
            return what
    return ""
