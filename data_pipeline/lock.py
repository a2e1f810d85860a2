"""A lock that one process at a time holds, on any file system: flock, else a POSIX lock, else a lock file.

`exclusive` uses the first kind that the file system supports. The system releases flock and POSIX locks when their process ends. A
lock file stays after a kill: it is taken over when its process is known to have ended (the same boot of the same machine), and is
otherwise named in the error, to be deleted by hand. The file of the lock says who holds it, for information only.
"""

import errno
import fcntl
import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

# errors by which file systems and kernels say that they have no such lock (524 is the kernel's own ENOTSUPP, which some leak)
_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL, 524}
_HELD = {errno.EAGAIN, errno.EACCES}
_JOB_VARIABLES = ("SLURM_JOB_ID", "SLURM_JOBID")

_held_here: set[str] = set()  # POSIX locks do not exclude a process from itself, and closing the file again would drop them


class LockHeldError(Exception):
    """Another process holds the lock.

    Attributes: `holder`, who ("process 4711 on node17 (job 12)", or "another process"); `remedy`, what to do about a lock that its
    process has left behind ("": the system does it); `record`, what the holder wrote about itself: host, pid, job, since (seconds
    of the clock), where it is known.
    """

    def __init__(self, record: dict[str, Any], remedy: str = "") -> None:
        self.record, self.remedy = record, remedy
        self.holder = _described(record)
        super().__init__(f"held by {self.holder}{remedy}")


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold the lock of `path`, a file that is made where it is not there, until the context ends.

    Raises LockHeldError at once when another process, or this one, holds it; OSError when the file cannot be opened for writing.
    """
    name = os.path.realpath(path)
    if name in _held_here:
        raise LockHeldError(_own_record())
    handle, kind = _locked(path)
    _held_here.add(name)
    try:
        if kind is None:
            with _lock_file(path.with_name(path.name + ".held")):
                yield
        else:
            with suppress(OSError):  # a full disk: the lock holds without the record
                os.ftruncate(handle, 0)
                os.pwrite(handle, json.dumps(_own_record()).encode(), 0)
            yield
            with suppress(OSError):
                os.ftruncate(handle, 0)
    finally:
        _held_here.discard(name)
        os.close(handle)


def _locked(path: Path) -> tuple[int, Callable[..., None] | None]:
    """The opened file and the call that locked it; None: this file system has neither kind of lock."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            for call in (fcntl.flock, fcntl.lockf):
                try:
                    call(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError as error:
                    if error.errno in _HELD:
                        raise LockHeldError(_parsed(os.pread(handle, 4096, 0))) from None
                    if error.errno not in _NO_LOCKS:
                        raise
                    continue
                with suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(handle), os.stat(path)):
                        return handle, call
                break  # its last holder has deleted the file: lock the one that is there now
            else:
                return handle, None
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


@contextmanager
def _lock_file(path: Path) -> Iterator[None]:
    own = json.dumps(_own_record()).encode()
    for _ in range(2):
        try:
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            break
        except FileExistsError:
            with suppress(FileNotFoundError):
                _take_away(path)
    else:
        raise LockHeldError({})
    try:
        written = os.write(handle, own)
        if written < len(own):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    except OSError:  # a lock file without an owner's name would never be taken over
        path.unlink()
        raise
    finally:
        os.close(handle)
    try:
        yield
    finally:
        with suppress(FileNotFoundError):
            if path.read_bytes() == own:
                path.unlink()


def _take_away(path: Path) -> None:
    """Remove a lock file whose process has ended. Raises LockHeldError when it has not, or when that is not known."""
    content = path.read_bytes()
    record = _parsed(content)
    held = LockHeldError(record, f"; if that process has ended, delete {path}")
    if not _has_ended(record):
        raise held
    aside = path.with_name(f"{path.name}.{platform.node()}.{os.getpid()}")
    os.rename(path, aside)
    ours = aside.read_bytes() == content  # else another process took the old one away first, and this is its new one
    if not ours:
        with suppress(FileExistsError):
            os.link(aside, path)
    aside.unlink()
    if not ours:
        raise held


def _has_ended(record: dict[str, Any]) -> bool:
    """Whether a process is known to have ended: of this boot of this machine, and of this container."""
    if not record or any(record.get(key) != value for key, value in _machine().items()):
        return False
    try:
        os.kill(record["pid"], 0)
    except ProcessLookupError:
        return True
    except OSError:  # another user's
        pass
    state, began = _state(record["pid"])
    return state in ("Z", "X") or began not in ("", record.get("began"))  # a zombie, or another process of the same number


def _own_record() -> dict[str, Any]:
    job = next((os.environ[name] for name in _JOB_VARIABLES if os.environ.get(name)), None)
    return _machine() | {"pid": os.getpid(), "began": _state(os.getpid())[1], "job": job, "since": time.time()}


def _machine() -> dict[str, str]:
    """What two processes have in common that see each other's numbers."""
    found = {"host": platform.node(), "boot": "", "pids": ""}
    with suppress(OSError):
        found["boot"] = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        found["pids"] = os.readlink("/proc/self/ns/pid")
    return found


def _state(pid: int) -> tuple[str, str]:
    """A process's state letter and its start in clock ticks since boot; empty where the system does not say."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]


def _parsed(content: bytes) -> dict[str, Any]:
    try:
        record = json.loads(content)
    except ValueError:
        return {}
    known = isinstance(record, dict) and isinstance(record.get("pid"), int) and isinstance(record.get("host"), str)
    return record if known else {}


def _described(record: dict[str, Any]) -> str:
    if not record:
        return "another process"
    job = f" (job {record['job']})" if record.get("job") else ""
    return f"process {record['pid']} on {record['host']}{job}"
