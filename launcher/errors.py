"""Errors of the command line and the configuration, and what becomes of any error there."""

from baton.data_pipeline.errors import StorageError
from baton.data_pipeline.storage import may_pass, why


class ConfigError(Exception):
    """A configuration that cannot be used: what, where and what to do, in one line."""

    exit_status = 2


def explained(error: Exception) -> tuple[int | None, str]:
    """The exit status and the sentence of an error. None: it is a fault of the program, whose traceback is needed.

    A file system's error that names its file needs none: the file, and what the system said, are all there is to know.
    """
    status = getattr(error, "exit_status", None)
    if status is not None:
        return int(status), str(error)
    if isinstance(error, OSError) and error.errno is not None and error.filename is not None:
        text = f"{error.filename}: cannot be read or written ({why(error)})"
        return (StorageError.exit_status, f"{text}; start again once its file system answers") if may_pass(error) else (2, text)
    return None, str(error)
