"""The run's event log, events.jsonl: steps that were refused, skipped or rolled back, and changed settings."""

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from baton.data_pipeline.file_io import append_line

EVENTS = "events.jsonl"


class EventLog:
    """RUN/events.jsonl: a line for everything that interrupted training, and for every changed setting.

    Lines are appended and synced; no restart cuts them off. enabled: on the main rank only.
    """

    def __init__(self, folder: Path, enabled: bool) -> None:
        self._path, self._enabled = folder / EVENTS, enabled

    def read(self) -> list[dict[str, Any]]:
        """All events so far, of earlier starts too."""
        return read_events(self._path.parent)

    def write(self, kind: str, step: int, **about: Any) -> None:
        """Append an event.

        kind: skip, rollback or stop, with the step (counted from 1) that was not made; or change, with the number of steps
        made before it.
        """
        if not self._enabled:
            return
        line = json.dumps({"kind": kind, "step": step, "time": time.time(), **about})
        try:
            append_line(self._path, line, sync=True)
        except OSError as error:
            print(f"events.jsonl could not be written ({error}): {line}", flush=True)


def read_events(folder: Path) -> list[dict[str, Any]]:
    """Events of a run; lines that were cut short are left out."""
    found = []
    path = folder / EVENTS
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        with suppress(ValueError):
            found.append(json.loads(line))
    return found
