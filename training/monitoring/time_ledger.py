"""ledger.jsonl: the append-only record of where every second of every attempt went. Torch-free.

The main rank's time is cut into spans without gaps, each of which belongs to one part, so that their sum is elapsed time.
Whether a step was lost (repeated by a later attempt, because it came after that attempt's checkpoint) is only known later:
readers work it out (`monitoring.goodput`).

Clocks of machines differ and may jump. So the order of rows is that of the file, and spans are measured by the machine's
steady clock: each row also has `boot`, the boot of the machine that wrote it, and `up`, its steady clock at `time`.
Differences of `up` within one `boot` are exact; `monitoring.goodput` combines the rows of several machines.

Rows, all with `kind` and `time` (seconds since 1970):
  submitted  {job}                                           a job was handed to SLURM, or goes back into its queue
  attempt    {attempt, job, nodes, layout}                   an attempt begins: its folder is there
  preflight  {attempt, seconds, bad}                         nodes were checked
  start      {attempt, step}                                 the main rank goes on from `step`; its process began at `time`
  spans      {attempt, since, step, seconds: {part: s}}      its time since `since`, up to having done `step`
  end        {attempt, status, reason, nodes}                an attempt is over
  excluded   {node, reason}                                  a node is not used any more
  readmitted {node}                                          it is, again
  stopped    {reason}                                        the run is not started again automatically
"""

import json
import os
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

from baton.data_pipeline.file_io import append_line, retry_transient

NAME = "ledger.jsonl"

EVERY_S = 10.0
"""Seconds between rows of the main rank, at most: what a kill leaves unsaid."""


def steady_time() -> float:
    """Seconds since this machine booted, on a clock that is never set and that all its processes share."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


PROCESS_START_VARIABLE = "BATON_BEGAN"
"""The variable in which a forked rank finds when the process was started that imported for it."""


def process_start_time() -> float:
    """When this process started, or the one that imported modules and forked it, on the steady clock."""
    if (began := os.environ.get(PROCESS_START_VARIABLE)) is not None:
        return float(began)
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return int(fields[19]) / os.sysconf("SC_CLK_TCK")


@lru_cache
def boot_id() -> str:
    """Identifies this boot of this machine; "" if the system does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def append_row(folder: Path, kind: str, **values: Any) -> None:
    """Append a row to a run's ledger, retrying for some seconds if the disk refuses it. Raises OSError."""
    retry_transient(lambda: append_row_once(folder, kind, **values))


def append_row_once(folder: Path, kind: str, **values: Any) -> None:
    """Append a row to a run's ledger. Raises OSError."""
    now, up = time.time(), steady_time()
    row: dict[str, Any] = {"kind": kind, "time": now} | values
    if boot_id() and "up" not in row:
        row |= {"boot": boot_id(), "up": up - (now - row["time"])}
    append_line(folder / NAME, json.dumps(row))


_NEEDED = {
    "attempt": ("attempt", "layout"),
    "start": ("attempt", "step"),
    "spans": ("attempt", "since", "step", "seconds"),
    "end": ("attempt", "status"),
    "excluded": ("node",),
    "readmitted": ("node",),
}
"""What readers need of rows, by kind."""


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """All rows; lines that are none, as those that were cut short, are left out. Readers ignore kinds, and values, that they do not
    know: a later version's."""
    path = folder / NAME
    rows = []
    for line in retry_transient(lambda: path.read_text(encoding="utf-8")).splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if not isinstance(row, dict) or not isinstance(kind := row.get("kind"), str):
            continue
        if isinstance(row.get("time"), int | float) and row.keys() >= {*_NEEDED.get(kind, ())}:
            rows.append(row)
    return rows


class TimeLedger:
    """Accounts for the main rank's time from the start of its process on. Rows that the disk refuses wait, and the run goes
    on.

    folder: the run directory. attempt: number of this start. enabled: whether this rank writes. since: start of its process
    (steady clock).
    """

    def __init__(self, folder: Path, attempt: int, *, enabled: bool, since: float) -> None:
        self._folder, self._attempt, self._enabled = folder, attempt, enabled
        self._since = self._mark = since
        self._offset = time.time() - steady_time()  # a clock that is set meanwhile changes nothing
        self._seconds: dict[str, float] = {}
        self._step = 0
        self._waiting: list[tuple[str, dict[str, Any]]] = []

    def start(self, step: int) -> None:
        """The run goes on from `step`."""
        self._step = step
        self._add("start", self._since, step=step)

    def charge(self, part: str) -> None:
        """Charge the time since the previous call to `part`."""
        now = steady_time()
        self._seconds[part] = self._seconds.get(part, 0.0) + now - self._mark
        self._mark = now

    def reassign(self, part: str, to: str, seconds: float) -> None:
        """Move seconds that were charged to `part` to another part."""
        seconds = min(max(0.0, seconds), self._seconds.get(part, 0.0))
        self._seconds[part] = self._seconds.get(part, 0.0) - seconds
        self._seconds[to] = self._seconds.get(to, 0.0) + seconds

    def step_done(self, step: int, *, write: bool = False) -> None:
        """`step` is done. write: write a row now, because a checkpoint holds the step; else once EVERY_S have passed."""
        self._step = step
        if write or self._mark - self._since >= EVERY_S:
            self.flush()

    def flush(self) -> None:
        """Write what was charged since the last row."""
        if self._seconds:
            since = self._since + self._offset
            self._add("spans", self._mark, since=since, step=self._step, seconds=self._seconds)
        self._since, self._seconds = self._mark, {}

    def _add(self, kind: str, up: float, **values: Any) -> None:
        if not self._enabled:
            return
        when = {"time": up + self._offset, "boot": boot_id(), "up": up}
        self._waiting.append((kind, {"attempt": self._attempt, **when, **values}))
        try:
            while self._waiting:
                name, row = self._waiting[0]
                append_row_once(self._folder, name, **row)
                self._waiting.pop(0)
        except OSError as error:
            print(f"{NAME} is behind ({error}); it is completed once there is room, the run goes on", flush=True)
