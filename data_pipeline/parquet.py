"""Documents in a column of a Parquet table: text, of every type that strings have there, or lists of token ids."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow
import pyarrow.parquet
import pyarrow.types

from baton.data_pipeline.errors import DataError, InputError, is_transient
from baton.data_pipeline.input_files import InputFile, InputPiece, Rejected
from baton.data_pipeline.records import Record, accept

AnyIds = npt.NDArray[np.integer[Any]]

# polars writes string_view and, of categories, dictionaries; others leave out that binary is text; pandas makes null of all-null
_STRINGS = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view", "null")


def split_parquet(source: InputFile, piece_bytes: int, field: str, *, ids: bool = False) -> list[InputPiece]:
    """Row groups, together of about `piece_bytes` each. A piece's size is the uncompressed bytes of the column. ids: it holds lists
    of token ids, not text."""
    metadata = _open(source, field, ids=ids).metadata
    paths = [metadata.schema.column(i).path for i in range(metadata.num_columns)]
    column = next(i for i, path in enumerate(paths) if path == field or path.startswith(f"{field}."))
    pieces: list[InputPiece] = []
    start, size = 0, 0
    for group in range(metadata.num_row_groups):
        size += metadata.row_group(group).column(column).total_uncompressed_size
        if size >= piece_bytes or group + 1 == metadata.num_row_groups:
            pieces.append(InputPiece(source, start, group + 1, size))
            start, size = group + 1, 0
    return pieces or [InputPiece(source, 0, 0, source.size)]


def read_parquet(piece: InputPiece, text_field: str) -> Iterator[Record]:
    """The rows of a piece's row groups. A file that split_source did not know for Parquet is one piece of bytes: all its rows."""
    name = piece.source.name
    empty = True
    for row, column in _columns(piece, text_field, ids=False):
        empty = False
        for number, text in enumerate(texts(column), row):
            yield Rejected(name, number, "missing field", "the value is null") if text is None else accept(name, number, text)
    if empty and not piece.start:
        yield Rejected(name, 0, "empty", "the table has no rows")


def read_id_lists(piece: InputPiece, field: str) -> Iterator[tuple[int, AnyIds | Rejected]]:
    """The rows of a piece's row groups: their numbers and token ids."""
    for row, column in _columns(piece, field, ids=True):
        yield from id_lists(piece.source.name, column, row)


def texts(column: Any) -> list[bytes | None]:
    """A column's values as bytes: arrow does not check that its strings are UTF-8."""
    if pyarrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    found: list[bytes | None] = column.cast(pyarrow.large_binary()).to_pylist()
    return found


def id_lists(name: str, column: Any, row: int) -> Iterator[tuple[int, AnyIds | Rejected]]:
    """A column's lists. row: the number of its first value; name: the file's."""
    for number, value in enumerate(column, row):
        if not value.is_valid:
            yield number, Rejected(name, number, "missing field", "the value is null")
        elif value.values.null_count:
            yield number, Rejected(name, number, "missing field", "an id is null")
        else:
            yield number, value.values.to_numpy(zero_copy_only=False)


def check_column(source: InputFile, schema: Any, field: str, *, ids: bool) -> None:
    """Raises DataError unless a table has one column of that name, of strings (ids: of lists of integers)."""
    option, holds = ("--ids-field", "lists of integer ids") if ids else ("--text-field", "strings")
    found = schema.get_all_field_indices(field)
    if not found:
        raise DataError(f"{source.path} has no column {field!r} but {', '.join(schema.names)}; name the column with {option}")
    if len(found) > 1:
        raise DataError(f"{source.path} has {len(found)} columns {field!r}; rename all but the one that holds the documents")
    kind = schema.field(found[0]).type
    if ids:
        lists = pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind) or pyarrow.types.is_fixed_size_list(kind)
        right = lists and pyarrow.types.is_integer(kind.value_type)
    else:
        right = str(kind.value_type if pyarrow.types.is_dictionary(kind) else kind) in _STRINGS
    if not right:
        raise DataError(f"column {field!r} of {source.path} holds {kind}, not {holds}; name the column with {option}")


def _columns(piece: InputPiece, field: str, *, ids: bool) -> Iterator[tuple[int, Any]]:
    """The column in parts, and the number of each one's first row."""
    table = _open(piece.source, field, ids=ids)
    metadata = table.metadata
    row = sum(metadata.row_group(group).num_rows for group in range(min(piece.start, metadata.num_row_groups)))
    groups = list(range(piece.start, min(piece.stop, metadata.num_row_groups)))
    try:
        for batch in table.iter_batches(256, row_groups=groups, columns=[field]) if metadata.num_rows else ():
            yield row, batch.column(0)
            row += batch.num_rows
    except (OSError, pyarrow.ArrowException) as error:
        what = f"it cannot be read from row {row:,} on: {error}"
        raise InputError(piece.source.name, piece.source.path, what, is_transient(error)) from error


def _open(source: InputFile, field: str, *, ids: bool) -> Any:
    try:
        table = pyarrow.parquet.ParquetFile(source.path)
        schema = table.schema_arrow
    except (OSError, pyarrow.ArrowException) as error:
        raise InputError(source.name, source.path, f"it is no sound parquet: {error}", is_transient(error)) from error
    check_column(source, schema, field, ids=ids)
    return table
