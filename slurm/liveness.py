"""Heartbeats of other nodes, which their agents write to the attempt's folder. For ranks of this node see baton.launcher.liveness.

A heartbeat's age is measured with this node's monotonic clock, from the moment at which a change was last seen. Clocks of other
nodes and modification times of files are not used, because they may differ.
"""

import contextlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from baton.training.monitoring.heartbeat import Beat

LOOK_S = 2.0


class Nodes:
    """The nodes that this node watches: the first node watches all others, and they watch the first. Thus any node's death is
    noticed, and the number of files that are read grows only linearly with the number of nodes."""

    def __init__(self, attempt: Path, nodes: Sequence[str], own: int, lost_s: float) -> None:
        self._attempt, self._lost_s = attempt, lost_s
        self._watched = [node for n, node in enumerate(nodes) if (n > 0) == (own == 0)]
        now = time.monotonic()
        self._seen: dict[str, tuple[int, float]] = dict.fromkeys(self._watched, (0, now))
        self._due = now

    def lost(self, now: float) -> str | None:
        """A watched node whose heartbeat is too old and that has not ended by itself; None: there is none."""
        if now < self._due:
            return None
        self._due = now + LOOK_S
        for node, (count, since) in self._seen.items():
            found = _read(self._attempt / "nodes" / node).get("count", 0)
            if found != count:
                self._seen[node] = (found, now)
            elif now - since > self._lost_s and not (self._attempt / "nodes" / f"{node}.end").exists():
                return node
        return None

    def beats(self) -> tuple[dict[int, Beat], list[int]]:
        """The last known beats of the watched nodes' ranks, and the ranks that are stopped by a signal."""
        found, stopped = {}, []
        for node in self._watched:
            alive = _read(self._attempt / "nodes" / node)
            stopped += alive.get("stopped", [])
            for rank, beat in alive.get("ranks", {}).items():
                with contextlib.suppress(TypeError):
                    found[int(rank)] = Beat(**beat)
        return found, stopped


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
