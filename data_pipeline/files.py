"""Atomic writes: a reader sees the old file or the whole new one. Files are written to `NAME.tmp` beside their place, flushed to
the disk, and renamed."""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from baton.data_pipeline.errors import DataError, StorageError, error_reason, is_transient, unreadable
from baton.data_pipeline.file_io import retry_transient

TEMPORARY = ".tmp"
LFS_POINTER = b"version https://git-lfs"
"""How a file begins that stands for another one, in a clone without Git LFS."""


class AtomicFile:
    """A binary file that appears under its name only in `commit`. Raises StorageError when it cannot be written at present (a full
    disk), DataError when it cannot be written at all."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._temporary = path.with_name(path.name + TEMPORARY)
        with self._explained():
            path.parent.mkdir(parents=True, exist_ok=True)
            self.handle: BinaryIO = open(self._temporary, "wb", buffering=1 << 20)  # noqa: SIM115 (closed by commit and discard)

    def write(self, block: bytes) -> None:
        with self._explained():
            self.handle.write(block)

    def commit(self) -> None:
        """Flush to the disk, close, and rename into place."""
        with self._explained():
            self.handle.flush()
            os.fsync(self.handle.fileno())
            self.handle.close()
            os.replace(self._temporary, self.path)

    def discard(self) -> None:
        """Close and delete what was written so far; does nothing after `commit`."""
        with suppress(OSError):  # closing flushes, which fails again on a full disk
            self.handle.close()
        self._temporary.unlink(missing_ok=True)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            with suppress(OSError):
                self._temporary.unlink(missing_ok=True)
            if is_transient(error):
                raise StorageError(
                    f"{self.path}: cannot be written at present ({error_reason(error)}); free some room, then start again"
                ) from error
            raise DataError(f"cannot write {self.path}: {error.strerror}; choose another folder") from error


def write_atomically(path: Path, content: bytes) -> None:
    """Write `content` to `path`, whole or not at all. Raises what `AtomicFile` does."""
    file = AtomicFile(path)
    try:
        file.write(content)
        file.commit()
    finally:
        file.discard()


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON with a trailing newline, whole or not at all. Raises what `AtomicFile` does."""
    write_atomically(path, (json.dumps(value, indent=1) + "\n").encode())  # ASCII: file names need not be Unicode


def read_json(path: Path, remedy: str) -> dict[str, Any]:
    """Read a JSON object; `remedy` ends the DataError raised when the file is missing or is no JSON object."""
    try:
        value = json.loads(retry_transient(path.read_bytes))
    except FileNotFoundError:
        raise DataError(f"{path} is missing; {remedy}") from None
    except OSError as error:
        if is_transient(error):
            raise unreadable(path, error) from error
        raise DataError(f"cannot read {path}: {error.strerror}; {remedy}") from error
    except ValueError as error:
        raise DataError(f"{path} is damaged (not JSON: {error}); {remedy}") from error
    if not isinstance(value, dict):
        raise DataError(f"{path} is damaged (not a JSON object); {remedy}")
    return value


def sha256_file(path: Path) -> str:
    """Hex sha256 of a file's content."""
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def fingerprint(value: Any) -> str:
    """Hex sha256 of a JSON-able value, independent of key order."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
