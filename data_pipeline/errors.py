"""The exceptions this package raises on purpose. Their text is one line that says what is wrong, where, and what to do next."""


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
