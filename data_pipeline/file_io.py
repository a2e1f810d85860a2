"""Files on disks and file servers that fail for a while: reading again, and lines that are appended whole.

A read error says nothing about the bytes of a file. A file server that fails over answers EIO or ESTALE once, and the next read
succeeds; a quota is raised, a disk is emptied. Such errors are met by trying again, and then by `StorageError`, whose exit status
asks for another start. Errors that only a person can mend (a missing file, no permission) are raised at once.
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
"""Seconds before the second try and each further one: longer than a failed request, shorter than a launcher's patience."""

_PERMANENT = "NOENT NOTDIR ISDIR ACCES PERM ROFS LOOP NAMETOOLONG EXIST NOTEMPTY INVAL"
PERMANENT = frozenset(getattr(errno, f"E{name}") for name in _PERMANENT.split())
"""Errors that trying again does not mend: the path or its permissions are wrong."""


def is_transient(error: BaseException) -> bool:
    """Whether an error is of a file system, and the same request may succeed later."""
    return isinstance(error, OSError) and error.errno is not None and error.errno not in PERMANENT


def retry_transient(work: Callable[[], T]) -> T:
    """What `work` returns. It is tried again after errors that may pass; raises the last OSError."""
    for pause in PAUSES_S:
        try:
            return work()
        except OSError as error:
            if not is_transient(error):
                raise
            time.sleep(pause)
    return work()


def error_reason(error: BaseException) -> str:
    """The error in a few words, without the path: that is part of the sentence around it."""
    return getattr(error, "strerror", None) or str(error)


def unreadable(path: str | os.PathLike[str], error: BaseException) -> StorageError:
    """The error for a file that could not be read, though it may be sound."""
    return StorageError(
        f"{path}: cannot be read at present ({error_reason(error)}); the file may be sound: start again once its file system "
        "answers"
    )


def read_text(path: Path) -> str:
    """A text file in UTF-8. Raises StorageError when it cannot be read at present, and OSErrors that do not pass."""
    try:
        return retry_transient(lambda: path.read_text(encoding="utf-8"))
    except OSError as error:
        if is_transient(error):
            raise unreadable(path, error) from None
        raise


def append_line(path: Path, line: str, *, sync: bool = False) -> None:
    """Add a line, without its end mark, to a text file. A line that a full disk or a kill has cut short before stays alone: the new
    one begins on a line of its own. sync: flush it to the disk. Raises OSError: the line is not there as a whole."""
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
    """Make a folder's entries durable: files that were made, renamed or removed in it. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
