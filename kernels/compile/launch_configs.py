"""Which tiles a kernel takes, by device and class of shapes: a table, launch_configs.json, that `baton tune` writes.

The one thing to know: nothing is timed in a run. Tiles decide the order in which numbers are added, so they are the same on every
rank and from start to start: a function of the table, of which a run's checkpoints keep the digest, and of shapes.
"""

import functools
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from baton.kernels.compile.aot import target
from baton.kernels.errors import TilesError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

PATH = Path(__file__).with_name("launch_configs.json")

Shape = dict[str, int | str]
"""What tiles depend on, by name."""


@dataclass(frozen=True)
class Entry:
    """A row of the table.

    device: a GPU's name as CUDA gives it, or its architecture ("sm_90"), which a name goes before. shape: what must be so for the
    row to hold; of several that hold, later ones and those of a device's name go before. why: what was measured, or the reason.
    """

    kernel: str
    device: str
    shape: Shape
    tiles: dict[str, int]
    why: str


@dataclass
class Request:
    """Tiles that were asked for: for which kernel, shape and sizes. times: how often."""

    kernel: str
    shape: Shape
    sizes: dict[str, int]
    times: int = field(default=1, compare=False)


_requests: list[Request] | None = None
_chosen: tuple[tuple[Entry, ...], dict[tuple[Any, ...], Any]] = ((), {})  # of which table, and what it gave

Tiles = TypeVar("Tiles", bound="DataclassInstance")


def read(path: Path = PATH) -> tuple[Entry, ...]:
    """Raises TilesError for a file that is not a table."""
    try:
        return tuple(Entry(**row) for row in json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise TilesError(f"{path}: not a table of tiles ({error}); restore it, or write a new one with `baton tune`") from None


def write(entries: tuple[Entry, ...], path: Path = PATH) -> None:
    """In the order of reading; whole or not at all. Raises TilesError where it cannot."""
    try:
        partial = path.with_name(f"{path.name}.partial")
        partial.write_text(json.dumps([asdict(entry) for entry in entries], indent=2) + "\n", encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise TilesError(f"{path}: cannot be written ({error.strerror}); name another with --table") from None
    table.cache_clear()


@functools.cache
def table() -> tuple[Entry, ...]:
    """The table that this process uses."""
    return read()


def digest() -> str:
    """Of what the table says, whatever it looks like."""
    rows = [{**asdict(entry), "why": ""} for entry in table()]
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()[:16]


def find(kernel: str, device: torch.device, shape: Shape, sizes: dict[str, int]) -> dict[str, int]:
    """The tiles that differ from a kernel's own defaults. sizes: of the call, for `requests`; the table does not look at them."""
    if _requests is not None:
        request = Request(kernel, shape, sizes)
        if request in _requests:
            _requests[_requests.index(request)].times += 1
        else:
            _requests.append(request)
    return of_device(kernel, names_of(device), shape)


def choose(kernel: str, default: Tiles, device: torch.device, shape: Shape, sizes: dict[str, int]) -> Tiles:
    """default with the tiles that `find` finds; default: a frozen dataclass. Looked up once for each table, device and shape."""
    global _chosen
    if _requests is not None or _chosen[0] is not table():
        _chosen = table(), {}
    _, known = _chosen
    key = (kernel, default, device, target(), *shape.items())
    tiles: Tiles | None = known.get(key)
    if tiles is None:
        tiles = known[key] = replace(default, **find(kernel, device, shape, sizes))
    return tiles


@contextmanager
def requests() -> Iterator[list[Request]]:
    """Within it, what tiles are asked for."""
    global _requests
    before, _requests = _requests, []
    try:
        yield _requests
    finally:
        _requests = before


def of_device(kernel: str, names: tuple[str, ...], shape: Shape) -> dict[str, int]:
    """As `find`, of a device that is called names."""
    tiles: dict[str, int] = {}
    for name in names:
        for entry in table():
            if (entry.kernel, entry.device) == (kernel, name) and entry.shape.items() <= shape.items():
                tiles |= entry.tiles
    return tiles


def names_of(device: torch.device) -> tuple[str, ...]:
    """What the table may call a device, the most particular last; nothing for a CPU."""
    wanted = target()
    return wanted.names if device.type == "meta" and wanted is not None else _names_of(device)


@functools.cache
def _names_of(device: torch.device) -> tuple[str, ...]:
    if device.type != "cuda":
        return ()
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}", torch.cuda.get_device_name(device)


def power_of_two(n: int) -> int:
    """The least that is not below n: sizes in classes."""
    return 1 << max(0, n - 1).bit_length()
