"""Errors of the command line and the configuration, and the mapping from any exception to an exit status and a message."""

import errno

from baton.data_pipeline.errors import StorageError, error_reason, is_transient

_OF_DISKS = (errno.EIO, errno.ESTALE, errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Errno values that count as errors of storage even without a file name."""

_NO_MEMORY = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""Messages of out-of-memory errors that have no exception type of their own: NCCL's, torch's for host memory, cuBLAS's."""


class ConfigError(Exception):
    """A configuration cannot be used. The message says in one line what is wrong, where, and what to do."""

    exit_status = 2


class ProcessEndedError(Exception):
    """A process that this one had started was ended by the system or by somebody."""

    exit_status = 1


class BusyError(Exception):
    """Another process holds or creates the run directory. The same command works when that process has ended, so exit_status is 75
    (sysexits' EX_TEMPFAIL).

    job: the SLURM job of that process; None: it has none, or it is unknown.
    """

    exit_status = 75

    def __init__(self, message: str, job: str | None = None) -> None:
        super().__init__(message)
        self.job = job


def explained(error: Exception) -> tuple[int | None, str]:
    """The exit status and message of an error. Status None: a bug, whose traceback is needed.

    Errors of file systems need no traceback; their message has the file and the system's message.
    """
    status = getattr(error, "exit_status", None)
    if status is not None:
        return int(status), str(error)
    if isinstance(error, OSError) and (error.filename is not None or error.errno in _OF_DISKS):
        text = f"{error.filename or 'a file'}: cannot be read or written ({error_reason(error)})"
        return (StorageError.exit_status, f"{text}; start again once its file system answers") if is_transient(error) else (2, text)
    return None, str(error)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error or its cause is out of memory on a device or the host."""
    while error is not None:
        if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # torch's, which is not imported for this
            return True
        if isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY):
            return True
        error = error.__cause__ or error.__context__
    return False
