"""Exceptions that this package raises on purpose, and which errors of file systems are transient.

An exception's text is one line: what is wrong, where, and what to do.

A read error says nothing about a file's bytes. A file server that fails over returns EIO or ESTALE once, and the next read
succeeds; a quota is raised, a disk is emptied. Such errors are transient: they are retried, and then raised as `StorageError`,
whose exit status asks for another start. Errors that only a person can fix (a missing file, no permission) are not.
"""

import errno
import os


class DataError(Exception):
    """Bad input: a damaged shard, a mismatched tokenizer, an impossible lane layout, ...

    The command line prints `str(error)` and exits with `exit_status`; no traceback is needed to act on it.
    """

    exit_status = 2


class NewerFormatError(DataError):
    """What a later version of Baton wrote, and this one would understand wrongly."""


class StorageError(Exception):
    """A file that cannot be read or written at present. Nothing is known to be wrong with it, and a later start may succeed.

    (74: sysexits' "input/output error")
    """

    exit_status = 74


class FolderBusyError(DataError):
    """A folder that another process prepares. The same command works when that process has ended.

    (75: sysexits' "try again later")
    """

    exit_status = 75


class UnknownEodError(DataError):
    """A tokenizer that does not say which of its tokens ends a document, or has not the one that was named.

    Attributes: `path`, its file; `vocab_size`, its ids are 0 <= id < vocab_size.
    """

    def __init__(self, message: str, path: str, vocab_size: int) -> None:
        super().__init__(message, path, vocab_size)
        self.path, self.vocab_size = path, vocab_size

    def __str__(self) -> str:
        return str(self.args[0])


class InputError(DataError):
    """One input file that cannot be read; others can.

    Attributes: `source`, the file's name in reports; `path`; `what`, why it cannot be read; `is_transient`, whether reading it
    again may succeed.
    """

    def __init__(self, source: str, path: str, what: str, is_transient: bool = False) -> None:
        what = " ".join(what.split())
        super().__init__(source, path, what, is_transient)
        self.source, self.path, self.what, self.is_transient = source, path, what, is_transient

    def __str__(self) -> str:
        return f"cannot read the input {self.path}: {self.what}; restore the file or exclude it"


_PERMANENT = "NOENT NOTDIR ISDIR ACCES PERM ROFS LOOP NAMETOOLONG EXIST NOTEMPTY INVAL"
PERMANENT = frozenset(getattr(errno, f"E{name}") for name in _PERMANENT.split())
"""Errors that a retry does not fix: the path or its permissions are wrong."""


def is_transient(error: BaseException) -> bool:
    """Whether this is a file system's error, and the same request may succeed later."""
    return isinstance(error, OSError) and error.errno is not None and error.errno not in PERMANENT


def error_reason(error: BaseException) -> str:
    """The error in a few words, without the path, which is part of the surrounding sentence."""
    return getattr(error, "strerror", None) or str(error)


def unreadable(path: str | os.PathLike[str], error: BaseException) -> StorageError:
    """The error for a file that cannot be read at present, though it may be intact."""
    return StorageError(
        f"{path}: cannot be read at present ({error_reason(error)}); the file may be sound: start again once its file system "
        "answers"
    )
