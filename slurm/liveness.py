"""Other nodes' signs of life: their agents write them into the attempt's folder. Ranks of this node: baton.launcher.liveness.

Lateness is measured by this node's own steady clock, as the time since something was last seen to change; clocks of other nodes and
times of files are never compared with it.
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
    """The other nodes that this one looks at: the first node at all, all others at the first, so that a death is seen whoever it
    befalls, and nobody reads more files than there are nodes."""

    def __init__(self, attempt: Path, nodes: Sequence[str], own: int, lost_s: float) -> None:
        self._attempt, self._lost_s = attempt, lost_s
        self._watched = [node for n, node in enumerate(nodes) if (n > 0) == (own == 0)]
        now = time.monotonic()
        self._seen: dict[str, tuple[int, float]] = dict.fromkeys(self._watched, (0, now))
        self._due = now

    def lost(self, now: float) -> str | None:
        """A node that has given no sign of life for too long, and has not ended by itself."""
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
        """The last known signs of life of the ranks on those nodes, and which of these are stopped by a signal."""
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
