"""The launch configuration of a kernel by device and class of shapes: the table launch_configs.json, which `baton tune` writes.

A launch configuration is the tile sizes, warps and pipeline stages of a kernel. It decides the order in which numbers are added, so
it has to be the same on every rank and in every start of a run. It is therefore a function of this table and of shapes: nothing is
timed during a run, and checkpoints store the table's digest.
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

from baton.kernels.compile.aot import Target, target
from baton.kernels.errors import LaunchConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

PATH = Path(__file__).with_name("launch_configs.json")

Shape = dict[str, int | str]
"""What the launch configuration depends on, by name."""


@dataclass(frozen=True)
class Entry:
    """A row of the table.

    Attributes:
        kernel: the kernel's name, `KERNEL` in its op's triton_launch.py.
        device: a GPU's name as CUDA reports it, an architecture such as "sm_90", or the shared memory that a program can have, such
            as "99 KiB" (8.6, 8.9, 12.0 and 12.1).
        shape: the row applies where these items are a subset of the call's shape. Where several rows apply, later rows override
            earlier ones, rows of a GPU's name override those of its architecture, and those override rows of its shared memory.
        config: the fields that differ from the kernel's default.
        why: what was measured, or the reason.
    """

    kernel: str
    device: str
    shape: Shape
    config: dict[str, int]
    why: str


@dataclass
class Request:
    """A lookup in the table. shape: what the table is searched for; sizes: those of the call; times: number of such lookups."""

    kernel: str
    shape: Shape
    sizes: dict[str, int]
    times: int = field(default=1, compare=False)


_requests: list[Request] | None = None
_chosen: tuple[tuple[Entry, ...], dict[tuple[Any, ...], Any]] = ((), {})  # a table, and the configurations looked up in it

Config = TypeVar("Config", bound="DataclassInstance")


def read(path: Path = PATH) -> tuple[Entry, ...]:
    """The rows of a table's file. Raises LaunchConfigError if it is not a table."""
    try:
        return tuple(Entry(**row) for row in json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise LaunchConfigError(
            f"{path}: not a table of launch configurations ({error}); restore it, or write a new one with `baton tune`"
        ) from None


def write(entries: tuple[Entry, ...], path: Path = PATH) -> None:
    """Replace the table's file atomically. Raises LaunchConfigError if it cannot be written."""
    try:
        partial = path.with_name(f"{path.name}.partial")
        partial.write_text(json.dumps([asdict(entry) for entry in entries], indent=2) + "\n", encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise LaunchConfigError(f"{path}: cannot be written ({error.strerror}); name another with --table") from None
    table.cache_clear()


@functools.cache
def table() -> tuple[Entry, ...]:
    """The table that this process uses, read once."""
    return read()


def digest() -> str:
    """A hash of the table's contents without the reasons: 16 hexadecimal digits."""
    rows = [{**asdict(entry), "why": ""} for entry in table()]
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()[:16]


def find(kernel: str, device: torch.device, shape: Shape, sizes: dict[str, int]) -> dict[str, int]:
    """The fields that differ from the kernel's default. sizes: those of the call, for `record_requests`; not searched for."""
    if _requests is not None:
        request = Request(kernel, shape, sizes)
        if request in _requests:
            _requests[_requests.index(request)].times += 1
        else:
            _requests.append(request)
    return for_device_names(kernel, table_names(device), shape)


def choose(kernel: str, default: Config, device: torch.device, shape: Shape, sizes: dict[str, int]) -> Config:
    """`default`, a frozen dataclass, with the fields that `find` returns. Cached by table, device and shape."""
    global _chosen
    if _requests is not None or _chosen[0] is not table():
        _chosen = table(), {}
    _, known = _chosen
    key = (kernel, default, device, target(), *shape.items())
    config: Config | None = known.get(key)
    if config is None:
        config = known[key] = replace(default, **find(kernel, device, shape, sizes))
    return config


@contextmanager
def record_requests() -> Iterator[list[Request]]:
    """Collects the lookups made inside the context."""
    global _requests
    before, _requests = _requests, []
    try:
        yield _requests
    finally:
        _requests = before


def for_device_names(kernel: str, names: tuple[str, ...], shape: Shape) -> dict[str, int]:
    """As `find`, for a device with these table names."""
    config: dict[str, int] = {}
    for name in names:
        for entry in table():
            if (entry.kernel, entry.device) == (kernel, name) and entry.shape.items() <= shape.items():
                config |= entry.config
    return config


def table_names(device: torch.device) -> tuple[str, ...]:
    """The names by which the table may refer to a device, the most specific last; () for a CPU."""
    wanted = target()
    return wanted.names if device.type == "meta" and wanted is not None else _cuda_table_names(device)


@functools.cache
def _cuda_table_names(device: torch.device) -> tuple[str, ...]:
    if device.type != "cuda":
        return ()
    major, minor = torch.cuda.get_device_capability(device)
    return Target(10 * major + minor, torch.cuda.get_device_name(device)).names
