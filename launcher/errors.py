"""Errors of the command line and the configuration, and what becomes of any error there."""

import errno

from baton.data_pipeline.errors import StorageError, error_reason, is_transient

_OF_DISKS = (errno.EIO, errno.ESTALE, errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Errors that are of no other device, also where they do not name their file."""

_NO_MEMORY = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""What errors without a type of their own say: NCCL's, torch's of the host's memory, cuBLAS's."""


class ConfigError(Exception):
    """A configuration that cannot be used: what, where and what to do, in one line."""

    exit_status = 2


class BusyError(Exception):
    """A run directory that another process holds, or makes. This is not bad input: the same command works when that process has
    ended.

    job: the SLURM job of that process; None: it has none, or it is not known. (75: sysexits' "try again later")
    """

    exit_status = 75

    def __init__(self, message: str, job: str | None = None) -> None:
        super().__init__(message)
        self.job = job


def explained(error: Exception) -> tuple[int | None, str]:
    """The exit status and the sentence of an error. None: it is a fault of the program, whose traceback is needed.

    A file system's error needs none: the file, and what the system said, are all there is to know.
    """
    status = getattr(error, "exit_status", None)
    if status is not None:
        return int(status), str(error)
    if isinstance(error, OSError) and (error.filename is not None or error.errno in _OF_DISKS):
        text = f"{error.filename or 'a file'}: cannot be read or written ({error_reason(error)})"
        return (StorageError.exit_status, f"{text}; start again once its file system answers") if is_transient(error) else (2, text)
    return None, str(error)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or what it came from, says that a device or the host had no memory left."""
    while error is not None:
        if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # torch's, which is not imported for this
            return True
        if isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY):
            return True
        error = error.__cause__ or error.__context__
    return False
