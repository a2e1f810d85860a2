"""Documents in a column of a Parquet table, of every type that strings have there."""

from collections.abc import Iterator
from typing import Any

import pyarrow
import pyarrow.parquet
import pyarrow.types

from baton.data_pipeline.errors import DataError, InputError, is_transient
from baton.data_pipeline.input_files import InputFile, InputPiece, Rejected
from baton.data_pipeline.records import Record, accept

# polars writes string_view and, of categories, dictionaries; others leave out that binary is text; pandas makes null of all-null
_STRINGS = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view", "null")


def split_parquet(source: InputFile, piece_bytes: int, text_field: str) -> list[InputPiece]:
    """Row groups, together of about `piece_bytes` each. A piece's size is the uncompressed bytes of the text column."""
    metadata = _open(source, text_field).metadata
    column = [metadata.schema.column(i).path for i in range(metadata.num_columns)].index(text_field)
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
    table = _open(piece.source, text_field)
    name, metadata = piece.source.name, table.metadata
    if not metadata.num_rows:
        yield Rejected(name, 0, "empty", "the table has no rows")
        return
    row = sum(metadata.row_group(group).num_rows for group in range(piece.start))
    groups = list(range(piece.start, min(piece.stop, metadata.num_row_groups)))
    try:
        for batch in table.iter_batches(256, row_groups=groups, columns=[text_field]):
            column = batch.column(0)
            if pyarrow.types.is_dictionary(column.type):
                column = column.dictionary_decode()
            # as bytes: arrow does not check that its strings are UTF-8
            for text in column.cast(pyarrow.large_binary()).to_pylist():
                yield Rejected(name, row, "missing field", "the value is null") if text is None else accept(name, row, text)
                row += 1
    except (OSError, pyarrow.ArrowException) as error:
        raise InputError(name, piece.source.path, f"it cannot be read from row {row:,} on: {error}", is_transient(error)) from error


def _open(source: InputFile, text_field: str) -> Any:
    try:
        table = pyarrow.parquet.ParquetFile(source.path)
        schema = table.schema_arrow
    except (OSError, pyarrow.ArrowException) as error:
        raise InputError(source.name, source.path, f"it is no sound parquet: {error}", is_transient(error)) from error
    found = schema.get_all_field_indices(text_field)
    if not found:
        raise DataError(
            f"{source.path} has no column {text_field!r} but {', '.join(schema.names)}; name the text column with --text-field"
        )
    if len(found) > 1:
        raise DataError(f"{source.path} has {len(found)} columns {text_field!r}; rename all but the one that holds the text")
    kind = schema.field(found[0]).type
    if str(kind.value_type if pyarrow.types.is_dictionary(kind) else kind) not in _STRINGS:
        raise DataError(f"column {text_field!r} of {source.path} holds {kind}, not strings; name the text column with --text-field")
    return table
