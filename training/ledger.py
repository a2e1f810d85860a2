"""ledger.jsonl: where every second of every attempt went. Only ever appended to, by whoever knows: one line, one write.

The one thing to know: the main rank's time is cut into spans without gaps, each of which belongs to one thing, so that the sums
are the clock's. What was worked in vain is only known later: steps beyond the checkpoint that the next attempt started from are
counted as lost by whoever reads (training.goodput). Torch-free.

Rows, all with `kind` and `time` (seconds of the clock):
  submitted  {job}                                           a job was handed to SLURM, or goes back into its queue
  attempt    {attempt, job, nodes, layout}                   an attempt begins: its folder is there
  preflight  {attempt, seconds, bad}                         nodes were checked
  start      {attempt, step}                                 the main rank goes on from `step`; its process began at `time`
  spans      {attempt, since, step, seconds: {part: s}}      its time since `since`, up to having done `step`
  end        {attempt, status, reason, nodes}                an attempt is over
  excluded   {node, reason}                                  a node is not used any more
  readmitted {node}                                          it is, again
  stopped    {reason}                                        nobody starts the run again by itself
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from baton.data_pipeline.storage import append_line

NAME = "ledger.jsonl"

EVERY_S = 10.0
"""Seconds between rows of the main rank, at most: what a kill leaves unsaid."""


def append(folder: Path, kind: str, **values: Any) -> None:
    """Add a row to a run directory's ledger. Raises OSError."""
    append_line(folder / NAME, json.dumps({"kind": kind, "time": time.time()} | values))


def read(folder: Path) -> list[dict[str, Any]]:
    """All rows; a line that a full disk or a kill cut short is left out."""
    path = folder / NAME
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and {"kind", "time"} <= row.keys():
            rows.append(row)
    return rows


class Account:
    """The main rank's time, from the start of its process on. folder: the run directory; attempt: number of this start; on: whether
    this rank keeps it. A disk that does not take a row keeps it waiting, and the run goes on."""

    def __init__(self, folder: Path, attempt: int, *, on: bool, since: float) -> None:
        self._folder, self._attempt, self._on = folder, attempt, on
        self._since = self._mark = since
        self._seconds: dict[str, float] = {}
        self._step = 0
        self._waiting: list[tuple[str, dict[str, Any]]] = []

    def start(self, step: int) -> None:
        """The run goes on from `step`."""
        self._step = step
        self._add("start", time=self._since, step=step)

    def spent(self, part: str) -> None:
        """The time since the last call belongs to `part`."""
        now = time.time()
        self._seconds[part] = self._seconds.get(part, 0.0) + now - self._mark
        self._mark = now

    def move(self, part: str, to: str, seconds: float) -> None:
        """So much of what was counted as `part` was really `to`."""
        seconds = min(max(0.0, seconds), self._seconds.get(part, 0.0))
        self._seconds[part] = self._seconds.get(part, 0.0) - seconds
        self._seconds[to] = self._seconds.get(to, 0.0) + seconds

    @contextmanager
    def spending(self, part: str) -> Iterator[None]:
        """What happens inside belongs to `part`; what was before it, to other things."""
        self.spent("other")
        yield
        self.spent(part)

    def done(self, step: int, *, write: bool = False) -> None:
        """`step` is done. write: put it down now, because a checkpoint holds it; else when it is time to."""
        self._step = step
        if write or self._mark - self._since >= EVERY_S:
            self.flush()

    def flush(self) -> None:
        """Put down what has been spent so far."""
        if self._seconds:
            self._add("spans", time=self._mark, since=self._since, step=self._step, seconds=self._seconds)
        self._since, self._seconds = self._mark, {}

    def _add(self, kind: str, **values: Any) -> None:
        if not self._on:
            return
        self._waiting.append((kind, {"attempt": self._attempt, **values}))
        try:
            while self._waiting:
                name, row = self._waiting[0]
                append(self._folder, name, **row)
                self._waiting.pop(0)
        except OSError as error:
            print(f"{NAME} is behind ({error}); it is completed once there is room, the run goes on", flush=True)
