"""The time of profiled steps by category, from the events of a trace; categories add up to the steps' time. Torch-free.

Every moment of a step is counted once. On a GPU it belongs to the running kernel; of several, to one that is not
communication, since communication hidden behind computation costs nothing; if no kernel runs, the GPU is idle or waits for
data. On a CPU it belongs to the innermost operator of the training thread; if there is none, the thread is idle or waits
for data or other ranks.

Events are those of a Chrome trace as torch.profiler writes it; times are microseconds.
"""

import bisect
import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

from baton.parallel.profiler_ranges import MARK, STEP
from baton.training.monitoring import profile_categories as classes

_ON_HOST = ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver")
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHED = "a kernel that was launched in time"
_LARGEST = 8
"""Kernels that are named of each category."""


@dataclass
class Kernel:
    """A kernel, or on a CPU an operator. ms: per step, not counting time attributed to others. calls: per step."""

    name: str
    ms: float = 0.0
    calls: float = 0.0


@dataclass
class ProfileTable:
    """Table of the profiled steps.

    Attributes:
        steps: of each step {step, ms, categories: {category: ms}}.
        kernels: of each category, largest first.
        hidden_ms: communication behind computation, per step; in no sum.
    """

    on_gpu: bool
    steps: list[dict[str, Any]] = field(default_factory=list)
    kernels: dict[str, list[Kernel]] = field(default_factory=dict)
    hidden_ms: float = 0.0

    @property
    def ms(self) -> float:
        """Mean time from the beginning of a step to that of the next."""
        return float(sum(step["ms"] for step in self.steps)) / len(self.steps)

    @property
    def categories(self) -> dict[str, float]:
        """ms per step; they add up to `ms`."""
        return {name: sum(step["categories"][name] for step in self.steps) / len(self.steps) for name in classes.CATEGORIES}

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "on_gpu": self.on_gpu,
            "ms": self.ms,
            "categories": {
                name: {"ms": ms, "share": ms / self.ms, "largest": [vars(k) for k in self.kernels.get(name, [])[:_LARGEST]]}
                for name, ms in self.categories.items()
            },
            "exchange_hidden_ms": self.hidden_ms,
            "steps": self.steps,
        }

    def lines(self) -> Iterator[str]:
        """The table, for people."""
        yield f"{'category':<18}{'ms/step':>11}{'share':>8}{'calls':>9}  largest"
        for name, ms in self.categories.items():
            kernels = self.kernels.get(name, [])
            calls = sum(kernel.calls for kernel in kernels)
            largest = f"{kernels[0].ms:,.2f} ms {_short(kernels[0].name)}" if kernels else ""
            label = {"elementwise": "other elementwise"}.get(name, name)
            shown = f"{calls:>9,.0f}  {largest}" if calls else f"{'':>9}  {self._meaning(name)}"
            yield f"{label:<18}{ms:>11,.2f}{ms / self.ms:>8.1%}{shown}".rstrip()
        yield f"{'together':<18}{sum(self.categories.values()):>11,.2f}  of {self.ms:,.2f} ms from step to step"
        if self.hidden_ms:
            yield f"{'hidden exchange':<18}{self.hidden_ms:>11,.2f}  behind computation, in no sum"
        for kernel in self.kernels.get(classes.UNCLASSIFIED, [])[:_LARGEST]:
            yield f"  unclassified: {kernel.ms:,.2f} ms in {kernel.calls:,.0f} calls of {_short(kernel.name)}"
        for kernel in self.kernels.get(classes.IDLE, [])[:_LARGEST]:
            yield f"  idle: {kernel.ms:,.2f} ms in {kernel.calls:,.0f} gaps before {_short(kernel.name)}"

    def _meaning(self, name: str) -> str:
        if name != classes.IDLE:
            return ""
        return "the GPU has nothing to do" if self.on_gpu else "no operator runs: Python between them"


@dataclass
class _Interval:
    """An interval of a step in microseconds, its category, and the kernel or operator that ran."""

    begin: float
    end: float
    category: str
    name: str = ""
    number: int = -1


class _HostTimeline:
    """Events of the host's threads, nested."""

    def __init__(self, events: Sequence[dict[str, Any]], flows: Iterable[dict[str, Any]]) -> None:
        self.events = sorted(events, key=lambda e: (e["ts"], -e["dur"]))
        self.parents = [-1] * len(self.events)
        open_: defaultdict[Any, list[int]] = defaultdict(list)
        for n, event in enumerate(self.events):
            stack = open_[event["tid"]]
            while stack and self.end(stack[-1]) <= event["ts"]:
                stack.pop()
            self.parents[n] = stack[-1] if stack else -1
            stack.append(n)
        marks = [(e["ts"], e["name"].removeprefix(MARK)) for e in self.events if e["name"].startswith(MARK)]
        # what comes after a step's last mark is in no part of it, and not in the next step's first
        marks = sorted([*marks, *((e["ts"] + e["dur"], "") for e in self.events if e["name"].startswith(STEP))])
        self._mark_times, self._mark_names = [ts for ts, _ in marks], [name for _, name in marks]
        self._forward = self._links(flows)
        self._around: list[int | None] = [None] * len(self.events)
        self._launches: dict[tuple[str, Any], int] = {}
        for n, event in enumerate(self.events):
            for key in ("correlation", "External id"):
                if key in event.get("args", ()) and (key == "correlation" or event["cat"] == "cpu_op"):
                    self._launches[key, event["args"][key]] = n

    def end(self, n: int) -> float:
        return float(self.events[n]["ts"] + self.events[n]["dur"])

    def _links(self, flows: Iterable[dict[str, Any]]) -> dict[int, int]:
        """Of each backward operator the forward one whose gradient it makes."""
        at = {(e["tid"], e["ts"]): n for n, e in enumerate(self.events) if e["cat"] == "cpu_op"}
        begins: dict[Any, int] = {}
        ends: dict[Any, int] = {}
        for flow in flows:
            n = at.get((flow["tid"], flow["ts"]))
            if n is not None:
                (begins if flow["ph"] == "s" else ends)[flow["id"]] = n
        return {n: begins[key] for key, n in ends.items() if key in begins}

    def phase(self, ts: float) -> str:
        """The part of the step that a moment is in: it ends at the next mark."""
        n = bisect.bisect_left(self._mark_times, ts)
        return self._mark_names[n] if n < len(self._mark_names) else ""

    def scope_rules(self, n: int) -> int:
        """The rules that apply to what is inside event n, itself and its phase included."""
        if n < 0 or self.events[n]["name"].startswith(STEP):
            return 0
        found = self._around[n]
        if found is None:
            self._around[n] = 0  # of what is being asked for: a link that leads back ends here
            event = self.events[n]
            found = classes.scope_rules(event["name"]) | self.scope_rules(self.parents[n])
            if n in self._forward:
                # the phase of the forward pass is not that of its gradient, and no rule asks for it
                found |= self.scope_rules(self._forward[n])
            if self.parents[n] < 0 or self.events[self.parents[n]]["name"].startswith(STEP):
                found |= classes.scope_rules(classes.PHASE + self.phase(event["ts"]))
            self._around[n] = found
        return found

    def launch_scope_rules(self, kernel: dict[str, Any]) -> int:
        """The rules that apply to what a kernel was launched in: by its launch or, where that is not in the trace, its operator."""
        for key in ("correlation", "External id"):
            n = self._launches.get((key, kernel.get("args", {}).get(key)))
            if n is not None:
                return self.scope_rules(n)
        return 0

    def late(self, kernel: dict[str, Any], since: float) -> str:
        """In which part of the step a kernel was launched, and in what, outermost; "": it was launched before `since`, or that is
        not in the trace."""
        n = self._launches.get(("correlation", kernel.get("args", {}).get("correlation")))
        if n is None or self.events[n]["ts"] <= since:
            return ""
        phase = self.phase(self.events[n]["ts"]) or "callbacks"
        while self.parents[n] >= 0 and not self.events[self.parents[n]]["name"].startswith((STEP, MARK)):
            n = self.parents[n]
        return f"{phase}: {self.events[n]['name']}"

    def data_spans(self, begin: float, end: float) -> list[tuple[float, float]]:
        """When, within a step, the host gets its batch."""
        return [(begin, ts) for ts, name in zip(self._mark_times, self._mark_names) if name == "data" and begin < ts < end]


def tabulate(events: Sequence[dict[str, Any]], *, on_gpu: bool) -> ProfileTable:
    """The table of a trace's steps. on_gpu: whether they ran there. Raises ValueError where it holds no step or no kernel."""
    events = [e for e in events if e.get("ph") != "M"]
    steps = [e for e in events if e.get("cat") == "user_annotation" and e["name"].startswith(STEP)]
    if not steps:
        raise ValueError("the trace holds no whole step")
    host = _HostTimeline(
        [e for e in events if e.get("ph") == "X" and e.get("cat") in _ON_HOST], (e for e in events if e.get("cat") == "fwdbwd")
    )
    kernels = sorted((e for e in events if e.get("cat") in _ON_GPU and e.get("ph") == "X"), key=lambda e: float(e["ts"]))
    if on_gpu and not kernels:
        raise ValueError("the trace holds no kernels; may this process profile the GPU (CUPTI)?")
    table, found = ProfileTable(on_gpu), defaultdict[tuple[str, str], Kernel](lambda: Kernel(""))
    labels = [classes.category(classes.name_rules(kernel["name"]) | host.launch_scope_rules(kernel)) for kernel in kernels]
    for step in steps:
        begin, end = float(step["ts"]), float(step["ts"] + step["dur"])
        if on_gpu:
            intervals, hidden = _of_gpu(kernels, labels, begin, end)
            intervals = _explained(intervals, kernels, host)
            table.hidden_ms += hidden / 1000 / len(steps)
        else:
            intervals = _of_host(host, step["tid"], begin, end)
        sums, counted = dict.fromkeys(classes.CATEGORIES, 0.0), set[int]()
        for interval in _waiting_for_data(intervals, host.data_spans(begin, end)):
            sums[interval.category] += (interval.end - interval.begin) / 1000
            if interval.number >= 0:
                kernel = found[interval.category, interval.name]
                kernel.name = interval.name
                kernel.ms += (interval.end - interval.begin) / 1000 / len(steps)
                kernel.calls += (interval.number not in counted) / len(steps)
                counted.add(interval.number)
        number = int(step["name"].removeprefix(STEP))
        table.steps.append({"step": number, "ms": (end - begin) / 1000, "categories": sums})
    for category in classes.CATEGORIES:
        table.kernels[category] = sorted((k for (c, _), k in found.items() if c == category), key=lambda k: -k.ms)
    return table


def _of_gpu(kernels: Sequence[dict[str, Any]], labels: Sequence[str], begin: float, end: float) -> tuple[list[_Interval], float]:
    """A step's pieces, without gaps; microseconds of exchange behind other kernels."""
    inside = [n for n, k in enumerate(kernels) if k["ts"] < end and k["ts"] + k["dur"] > begin]
    starts = [(max(begin, float(kernels[n]["ts"])), n) for n in inside]
    ends = {n: min(end, float(kernels[n]["ts"] + kernels[n]["dur"])) for n in inside}
    # at every moment the first of those that run, exchanges last
    running: list[tuple[bool, float, int]] = []
    intervals: list[_Interval] = []
    now, at, shown = begin, 0, defaultdict[int, float](float)
    while now < end:
        while at < len(starts) and starts[at][0] <= now:
            start, n = starts[at]
            heapq.heappush(running, (labels[n] == "exchange", start, n))
            at += 1
        while running and ends[running[0][2]] <= now:
            heapq.heappop(running)
        following = starts[at][0] if at < len(starts) else end
        if not running:
            intervals.append(_Interval(now, following, classes.IDLE))
            now = following
            continue
        n = running[0][2]
        until = min(ends[n], following)
        intervals.append(_Interval(now, until, labels[n], kernels[n]["name"], n))
        shown[n] += until - now
        now = until
    exchanges = [n for n in inside if labels[n] == "exchange"]
    return intervals, sum(ends[n] - max(begin, float(kernels[n]["ts"])) - shown[n] for n in exchanges)


def _explained(intervals: Sequence[_Interval], kernels: Sequence[dict[str, Any]], host: _HostTimeline) -> list[_Interval]:
    """The pieces, those that are idle named by what the host was late to launch; or by the launch itself, which takes its time."""
    found: list[_Interval] = []
    for interval, following in zip_longest(intervals, intervals[1:]):
        if interval.category == classes.IDLE and following is not None and following.number >= 0:
            name = host.late(kernels[following.number], interval.begin) or _LAUNCHED
            interval = replace(interval, name=name, number=len(kernels) + following.number)
        found.append(interval)
    return found


def _of_host(host: _HostTimeline, thread: Any, begin: float, end: float) -> list[_Interval]:
    """A step's pieces, without gaps: the innermost event of the training thread at every moment."""
    intervals: list[_Interval] = []
    stack: list[int] = []
    now = begin

    def until(moment: float) -> None:
        nonlocal now
        moment = min(moment, end)
        if moment > now:
            intervals.append(_host_piece(host, stack[-1] if stack else -1, now, moment))
            now = moment

    for n, event in enumerate(host.events):
        if event["tid"] != thread or event["name"].startswith(STEP) or host.end(n) <= begin:
            continue
        if event["ts"] >= end:
            break
        while stack and host.end(stack[-1]) <= event["ts"]:
            until(host.end(stack[-1]))
            stack.pop()
        until(event["ts"])
        stack.append(n)
    while stack:
        until(host.end(stack[-1]))
        stack.pop()
    until(end)
    return intervals


def _host_piece(host: _HostTimeline, n: int, begin: float, end: float) -> _Interval:
    if n < 0:
        return _Interval(begin, end, classes.IDLE)
    event, rules = host.events[n], host.scope_rules(n)
    if event["cat"] == "user_annotation":
        # between operators: nothing but waiting for others has a name there
        waits = classes.category(rules) == "exchange"
        return _Interval(begin, end, "exchange", event["name"], n) if waits else _Interval(begin, end, classes.IDLE)
    return _Interval(begin, end, classes.category(rules | classes.name_rules(event["name"])), event["name"], n)


def _waiting_for_data(intervals: Iterable[_Interval], spans: Sequence[tuple[float, float]]) -> Iterator[_Interval]:
    """The pieces, those that are idle while the host gets its batch counted as data."""
    for interval in intervals:
        if interval.category != classes.IDLE:
            yield interval
            continue
        at = interval.begin
        for begin, end in spans:
            begin, end = max(begin, at), min(end, interval.end)
            if begin < end:
                yield replace(interval, begin=at, end=begin)
                yield _Interval(begin, end, "data")
                at = end
        yield replace(interval, begin=at)


def _short(name: str, width: int = 72) -> str:
    return name if len(name) <= width else f"{name[: width - 3]}..."
