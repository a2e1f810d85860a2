"""Documents in a column of an Arrow file: IPC files and streams, such as `datasets` saves to disk."""

from collections.abc import Iterator
from typing import Any

import pyarrow
import pyarrow.ipc

from baton.data_pipeline.errors import InputError, is_transient
from baton.data_pipeline.input_files import InputFile, Rejected
from baton.data_pipeline.parquet import AnyIds, check_column, id_lists, texts
from baton.data_pipeline.records import Record, accept


def check_arrow(source: InputFile, field: str, *, ids: bool) -> None:
    """Raises InputError for a damaged file, DataError without such a column of strings (ids: of lists of integers)."""
    with _Opened(source) as (schema, _):
        check_column(source, schema, field, ids=ids)


def read_arrow(source: InputFile, text_field: str) -> Iterator[Record]:
    """The rows of a file of text."""
    row = 0
    for column in _columns(source, text_field, ids=False):
        for text in texts(column):
            yield (
                Rejected(source.name, row, "missing field", "the value is null") if text is None else accept(source.name, row, text)
            )
            row += 1
    if not row:
        yield Rejected(source.name, 0, "empty", "the table has no rows")


def read_arrow_ids(source: InputFile, field: str) -> Iterator[tuple[int, AnyIds | Rejected]]:
    """The rows of a file of token ids: their numbers and ids."""
    row = 0
    for column in _columns(source, field, ids=True):
        yield from id_lists(source.name, column, row)
        row += len(column)


def _columns(source: InputFile, field: str, *, ids: bool) -> Iterator[Any]:
    with _Opened(source) as (schema, batches):
        check_column(source, schema, field, ids=ids)
        try:
            for batch in batches:
                for start in range(0, batch.num_rows, 256):
                    yield batch.column(field).slice(start, 256)
        except (OSError, pyarrow.ArrowException) as error:
            what = f"it is cut off or damaged: {error}"
            raise InputError(source.name, source.path, what, is_transient(error)) from error


class _Opened:
    """An opened file: its schema and its record batches."""

    def __init__(self, source: InputFile) -> None:
        self._source = source

    def __enter__(self) -> tuple[Any, Iterator[Any]]:
        source = self._source
        try:
            self._file = pyarrow.memory_map(source.path)
            head = self._file.read(6)
            self._file.seek(0)
            if head == b"ARROW1":
                reader = pyarrow.ipc.open_file(self._file)
                return reader.schema, (reader.get_batch(i) for i in range(reader.num_record_batches))
            stream = pyarrow.ipc.open_stream(self._file)
            return stream.schema, iter(stream)
        except (OSError, pyarrow.ArrowException) as error:
            raise InputError(source.name, source.path, f"it is no sound Arrow file: {error}", is_transient(error)) from error

    def __exit__(self, *_: object) -> None:
        self._file.close()
