"""Files on disks and file servers that fail temporarily: retries, and appending whole lines.

Transient errors (`errors.is_transient`) are retried, and then raised as `StorageError`. Others are raised at once.
"""

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from baton.data_pipeline.errors import is_transient, unreadable

T = TypeVar("T")

PAUSES_S = (0.5, 2.0, 8.0)
"""Seconds before the second try and each further one: longer than a failed request, shorter than a launcher's time limit."""


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
