"""Exceptions that this package raises on purpose. Their text is one line: what is wrong, where, and what to do."""


class DataError(Exception):
    """Bad input: a damaged shard, a mismatched tokenizer, an impossible lane layout, ...

    The command line prints `str(error)` and exits with `exit_status`; no traceback is needed to act on it.
    """

    exit_status = 2


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
