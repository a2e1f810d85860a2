"""Heartbeats: each rank writes what it is doing into a small file, which the process that started it reads. Torch-free.

The training thread itself writes them, because another thread would go on while training hangs. The file is memory-mapped,
so that a heartbeat costs about a microsecond. Every operation of a step, layer, collective, callback and block of a
checkpoint writes one.
"""

import mmap
import os
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

HEARTBEAT_DIR = "BATON_HEARTBEATS"
"""Environment variable with the heartbeats' folder, on a disk of the node. If it is not set, heartbeats are not written."""

SIZE = 1024
_HEAD = struct.Struct("<qqqd??HH")
_DOING, _WAITING = slice(64, 256), slice(256, SIZE)
_NEEDED = _DOING.stop - _DOING.start, _WAITING.stop - _WAITING.start


@dataclass(frozen=True)
class Beat:
    """One rank's last heartbeat.

    Attributes:
        step: being worked on; 0 before the first.
        doing: the phase and the place in it.
        count: phases so far; ranks of a layout without pipeline stages go through the same ones.
        time: wall-clock time, seconds.
        pulse: heartbeats so far.
        slow: the phase may compile kernels or read a checkpoint, and has as much time as a start.
        waiting: the collective or message that this rank waits for, as "all_reduce over ranks 0, 1"; "" if none.
        gpu: its collectives run on a GPU, where the host does not wait for them.
    """

    step: int
    doing: str
    count: int
    time: float
    pulse: int = 0
    slow: bool = False
    waiting: str = ""
    gpu: bool = False


class Heartbeat:
    """Writes one rank's heartbeats. path: its file, made by `create_file`; None: heartbeats are not read, and not written."""

    def __init__(self, path: Path | None) -> None:
        self._memory: mmap.mmap | None = None
        if path is not None:
            with open(path, "r+b") as file:
                self._memory = mmap.mmap(file.fileno(), SIZE)
        self._step, self._phase, self._count, self._pulse = 0, "", 0, 0
        self._doing = self._waiting = b""
        self._cold, self._slow = True, False
        self.gpu = False

    def beat(self, step: int, doing: str, *, slow: bool = False) -> None:
        """A phase begins, or an operation has ended."""
        if self._memory is None:
            return
        self._step, self._phase, self._slow = step, doing, slow
        self._count += 1
        self._doing, self._waiting = doing.encode(), b""
        self._write()

    def set_location(self, place: str) -> None:
        """The phase has come to a place, such as a layer."""
        if self._memory is not None:
            self._doing = f"{self._phase}, {place}".encode()
            self._write()

    def set_waiting(self, what: str) -> None:
        """The rank begins to wait for other ranks; "": it no longer waits."""
        if self._memory is not None:
            self._waiting = what.encode()
            self._write()

    def set_warm(self, yes: bool = True) -> None:
        """Whether the kernels of the next steps are compiled, because a step of the same shape was made; until then every
        phase is slow."""
        self._cold = not yes

    def watch_gpu(self, waited_for: Callable[[], str], every_s: float = 1.0) -> None:
        """Start a thread that records which collective the GPU is in while the host is silent. It does not count as a
        heartbeat.

        waited_for: returns that collective, "" if there is none.
        """

        def look() -> None:
            since, noted = self._pulse, ""
            while True:
                time.sleep(every_s)
                if self._pulse != since:
                    since, noted = self._pulse, ""
                # nothing is asked of the GPU while the host is busy, which may be recording a graph
                elif not self._waiting and (found := waited_for()) != noted and self._pulse == since:
                    noted = found
                    self._write(found.encode())

        if self._memory is not None:
            self.gpu = True
            threading.Thread(target=look, name="signs of the GPU", daemon=True).start()

    def _write(self, on_gpu: bytes | None = None) -> None:
        memory = self._memory
        assert memory is not None
        self._pulse += on_gpu is None
        doing, waiting = self._doing[: _NEEDED[0]], (self._waiting if on_gpu is None else on_gpu)[: _NEEDED[1]]
        memory[_DOING.start : _DOING.start + len(doing)] = doing
        memory[_WAITING.start : _WAITING.start + len(waiting)] = waiting
        numbers = self._pulse, self._count, self._step, time.time(), self._slow or self._cold, self.gpu
        _HEAD.pack_into(memory, 0, *numbers, len(doing), len(waiting))


_own: Heartbeat | None = None


def own_heartbeat() -> Heartbeat:
    """This process's heartbeat."""
    global _own
    if _own is None:
        folder = os.environ.get(HEARTBEAT_DIR)
        _own = Heartbeat(None if folder is None else heartbeat_path(Path(folder), int(os.environ["RANK"])))
    return _own


def reset() -> None:
    """Called in a process forked by a rank, which must not write heartbeats for it."""
    global _own
    _own = None


def heartbeat_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}"


def create_file(folder: Path, rank: int) -> None:
    """Create a rank's file before the rank starts. Raises OSError if there is no room: a mapped file must not run out of it
    later."""
    descriptor = os.open(heartbeat_path(folder, rank), os.O_RDWR | os.O_CREAT, 0o644)
    try:
        os.posix_fallocate(descriptor, 0, SIZE)
    finally:
        os.close(descriptor)


def read_beat(folder: Path, rank: int) -> Beat | None:
    """A rank's last heartbeat; None before the first. Texts may be torn while the rank writes; those of a silent rank are
    whole."""
    try:
        content = heartbeat_path(folder, rank).read_bytes()
        pulse, count, step, when, slow, gpu, doing, waiting = _HEAD.unpack_from(content)
    except (OSError, struct.error):
        return None
    if pulse == 0:
        return None
    texts = [
        content[place.start : place.start + size].decode(errors="replace") for place, size in ((_DOING, doing), (_WAITING, waiting))
    ]
    return Beat(step, texts[0], count, when, pulse, slow, texts[1], gpu)
