"""Signs of life: each rank says what it is at, in a small file that the process which started it reads. Torch-free.

The one thing to know: it is the training thread itself that beats. A thread of its own would go on beating while training hangs.
"""

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

FOLDER = "BATON_HEARTBEATS"
"""The variable that names the folder, on a disk of the node; where it is not set nobody listens, and nothing is written."""

_WIDTH = 128


@dataclass(frozen=True)
class Beat:
    """step: being worked on (0 before the first). doing: what. count: beats so far. time: of the clock, seconds."""

    step: int
    doing: str
    count: int
    time: float


class Heartbeat:
    """One rank's. Every beat replaces the one before it, in place: a reader may see half of one, and reads again."""

    def __init__(self, rank: int) -> None:
        folder = os.environ.get(FOLDER)
        self._file = None if folder is None else os.open(Path(folder) / f"rank-{rank}", os.O_WRONLY | os.O_CREAT, 0o644)
        self._count = 0

    def beat(self, step: int, doing: str) -> None:
        if self._file is None:
            return
        self._count += 1
        text = json.dumps({"step": step, "doing": doing, "count": self._count, "time": time.time()})
        os.pwrite(self._file, text.ljust(_WIDTH).encode(), 0)


def read_beat(folder: Path, rank: int) -> Beat | None:
    """A rank's last sign of life; None before the first, or in the middle of one."""
    try:
        return Beat(**json.loads((folder / f"rank-{rank}").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
