"""The one exception this package raises on purpose. Its text is one line that says what is wrong, where, and what to do next."""


class DataError(Exception):
    """Bad input: a damaged shard, a mismatched tokenizer, an impossible lane layout, ...

    The command line prints `str(error)` and exits with `exit_status`; no traceback is needed to act on it.
    """

    exit_status = 2
