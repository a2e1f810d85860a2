"""Files on disks and file servers that fail temporarily: retries, and appending whole lines.

A read error says nothing about a file's bytes. A file server that fails over returns EIO or ESTALE once, and the next read
succeeds; a quota is raised, a disk is emptied. Such errors are retried, and then raised as `StorageError`, whose exit status asks
for another start. Errors that only a person can fix (a missing file, no permission) are raised at once.
"""

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from baton.data_pipeline.errors import StorageError

T = TypeVar("T")

PAUSES_S = (0.5, 2.0, 8.0)
"""Seconds before the second try and each further one: longer than a failed request, shorter than a launcher's time limit."""

_PERMANENT = "NOENT NOTDIR ISDIR ACCES PERM ROFS LOOP NAMETOOLONG EXIST NOTEMPTY INVAL"
PERMANENT = frozenset(getattr(errno, f"E{name}") for name in _PERMANENT.split())
"""Errors that a retry does not fix: the path or its permissions are wrong."""


def is_transient(error: BaseException) -> bool:
    """Whether this is a file system's error, and the same request may succeed later."""
    return isinstance(error, OSError) and error.errno is not None and error.errno not in PERMANENT


def retry_transient(work: Callable[[], T]) -> T:
    """The result of `work`, tried again after transient errors. Raises the last OSError."""
    for pause in PAUSES_S:
        try:
            return work()
        except OSError as error:
            if not is_transient(error):
                raise
            time.sleep(pause)
    return work()


def error_reason(error: BaseException) -> str:
    """The error in a few words, without the path, which is part of the surrounding sentence."""
    return getattr(error, "strerror", None) or str(error)


def unreadable(path: str | os.PathLike[str], error: BaseException) -> StorageError:
    """The error for a file that cannot be read at present, though it may be intact."""
    return StorageError(
        f"{path}: cannot be read at present ({error_reason(error)}); the file may be sound: start again once its file system "
        "answers"
    )


def read_text(path: Path) -> str:
    """A text file in UTF-8. Raises StorageError after transient errors, other OSErrors at once."""
    try:
        return retry_transient(lambda: path.read_text(encoding="utf-8"))
    except OSError as error:
        if is_transient(error):
            raise unreadable(path, error) from None
        raise


def append_line(path: Path, line: str, *, sync: bool = False) -> None:
    """Append a line (without its newline) to a text file. A line that an earlier full disk or kill cut short stays as it is, and
    the new line begins after it. sync: flush it to the disk. Raises OSError: the line was not written whole."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        cut = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        data = (("\n" if cut else "") + line + "\n").encode()
        if os.write(descriptor, data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if sync:
            os.fsync(descriptor)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Make a folder's entries durable: files created, renamed or removed in it. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
