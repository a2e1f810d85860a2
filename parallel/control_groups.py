"""Limits of memory that Linux's control groups (cgroups, versions 1 and 2) set this process, as SLURM and containers do.

A group's limit holds for all processes in it and in the groups below, so this process has those of its own group and of all around
it. Where they lie is read from the table of mounts: a container often sees its own group as the outermost one, under another name.
"""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")


@dataclass(frozen=True)
class _Names:
    """Names of files, and of numbers in memory.stat: of the whole group with what is below it."""

    limits: tuple[str, ...]
    used: str
    cached: str
    shared: str


_NAMES = {
    # memory.high is no hard limit, but what goes over it is slowed down until it is below again, which page-locked memory never is
    "cgroup2": _Names(("memory.max", "memory.high"), "memory.current", "file", "shmem"),
    "cgroup": _Names(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_cache", "total_shmem"),
}


def host_memory(root: Path = ROOT) -> int:
    """Bytes of memory of this machine, or of this process's control groups, where they may have less. It does not depend on what
    is in use now. root: of the file system; tests have one of their own."""
    limits = [limit for folder, names in _groups(root) for limit in _limits(folder, names)]
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *limits])


def room_in_groups(root: Path = ROOT) -> int | None:
    """Bytes that this process can still get by its control groups, whose file caches give way; None: they set no limit."""
    found = []
    for folder, names in _groups(root):
        with suppress(OSError, ValueError):
            used = int(_text(folder / names.used))
            stat = dict(line.split() for line in _text(folder / "memory.stat").splitlines())
            cached, shared = (int(stat.get(name, 0)) for name in (names.cached, names.shared))
            # files in memory (tmpfs) are counted as cached, and stay
            found += [limit - used + max(0, cached - shared) for limit in _limits(folder, names)]
    return max(0, min(found)) if found else None


def _limits(folder: Path, names: _Names) -> Iterator[int]:
    for name in names.limits:
        with suppress(OSError, ValueError):  # the outermost group has no such file; "max" is no limit
            yield int(_text(folder / name))


def _groups(root: Path) -> Iterator[tuple[Path, _Names]]:
    """Folders of this process's groups that may limit memory, from its own outwards."""
    try:
        table, own_groups = _text(root / "proc/self/mountinfo"), _text(root / "proc/self/cgroup")
    except OSError:
        return
    mounts = sorted(_mounts(table), key=lambda mount: len(mount[1]))
    for number, controllers, own in re.findall(r"^(\d+):([^:\n]*):(/.*)$", own_groups, re.MULTILINE):
        kind = "cgroup" if "memory" in controllers.split(",") else "cgroup2" if number == "0" else None
        known = [mount for mount in mounts if mount[0] == kind]
        # a part of the tree may be mounted a second time, for others
        around = [mount for mount in known if Path(own).is_relative_to(mount[1])]
        for mounted, outermost, point in around[:1] or known[:1]:
            top = root / point.lstrip("/")
            folder = top / Path(own).relative_to(outermost if around else "/")
            yield from ((one, _NAMES[mounted]) for one in (folder, *folder.parents) if one.is_relative_to(top))


def _mounts(text: str) -> Iterator[tuple[str, str, str]]:
    """Of groups that may limit memory: "cgroup" or "cgroup2", the group that is mounted, and where."""
    for line in text.split("\n"):
        before, _, after = line.partition(" - ")
        kind, options = after.partition(" ")[0], after.rpartition(" ")[2]
        words = before.split(" ")
        if len(words) > 4 and (kind == "cgroup2" or (kind == "cgroup" and "memory" in options.split(","))):
            yield kind, _unescaped(words[3]), _unescaped(words[4])


def _unescaped(word: str) -> str:
    """A path of the table of mounts, in which blanks and backslashes are octal numbers."""
    return word.replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="surrogateescape")
