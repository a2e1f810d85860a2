"""The run's event log, events.jsonl: steps that were refused, skipped or rolled back, and changed settings."""

import json
import time
from pathlib import Path
from typing import Any

from baton.data_pipeline.file_io import append_line, retry_transient

EVENTS = "events.jsonl"


class EventLog:
    """RUN/events.jsonl: a line for everything that interrupted training, and for every changed setting.

    Lines are appended and synced; no restart cuts them off. enabled: on the main rank only. path: the file.
    """

    def __init__(self, folder: Path, enabled: bool) -> None:
        self.path, self._enabled = folder / EVENTS, enabled

    def read(self) -> list[dict[str, Any]]:
        """All events so far, of earlier starts too. Raises OSError."""
        return read_events(self.path.parent)

    def write(self, kind: str, step: int, **about: Any) -> None:
        """Append an event.

        kind: skip, rollback or stop, with the step (counted from 1) that was not made; or change, with the number of steps
        made before it.
        """
        if not self._enabled:
            return
        line = json.dumps({"kind": kind, "step": step, "time": time.time(), **about})
        try:
            append_line(self.path, line, sync=True)
        except OSError as error:
            print(f"events.jsonl could not be written ({error}): {line}", flush=True)


def read_events(folder: Path) -> list[dict[str, Any]]:
    """Events of a run; lines that are none, as those that were cut short, are left out. Raises OSError."""
    path = folder / EVENTS
    try:
        lines = retry_transient(path.read_bytes).splitlines()
    except FileNotFoundError:
        return []
    found = map(_event, lines)
    return [event for event in found if event is not None]


def _event(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_event = isinstance(event, dict) and isinstance(event.get("kind"), str) and isinstance(event.get("step"), int)
    return event if is_event else None
