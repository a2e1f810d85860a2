"""Input files in pieces that workers can share, and the records of a piece.

Pieces are byte ranges of JSON lines, row groups of a Parquet table, otherwise the whole file. A document's id depends on its
source's name and its record's place in it, not on the pieces.
"""

import io
import os
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from typing import BinaryIO

from baton.data_pipeline.archive import read_tar
from baton.data_pipeline.compressed import Decompressed
from baton.data_pipeline.config import IdsConfig
from baton.data_pipeline.errors import InputError, error_reason, is_transient
from baton.data_pipeline.formats import (
    HEAD_BYTES,
    JSON_SUFFIXES,
    Format,
    FormatError,
    format_of,
    is_table,
    known_not_text,
    open_content,
)
from baton.data_pipeline.input_files import DocumentIds, InputFile, InputPiece, Rejected
from baton.data_pipeline.json_values import read_values
from baton.data_pipeline.records import BOM, Record, accept, read_lines
from baton.data_pipeline.token_files import read_ids, split_ids


def split_source(source: InputFile, piece_bytes: int, text_field: str, ids: IdsConfig | None = None) -> list[InputPiece]:
    """Pieces of about `piece_bytes` each where the format allows it. ids: of token ids; None: the file holds text. Raises DataError
    for a table without the column, and for a file of token ids that is not what it says."""
    if ids is not None:
        try:
            return split_ids(source, piece_bytes, ids)
        except OSError as error:
            raise InputError(source.name, source.path, error_reason(error), is_transient(error)) from error
    whole = [InputPiece(source, 0, source.size, source.size)]
    if source.name.endswith(".parquet"):
        from baton.data_pipeline.parquet import split_parquet

        with suppress(InputError):  # it is named when it is read, as everything that cannot be
            return split_parquet(source, piece_bytes, text_field) if source.size else whole
    if source.name.endswith(JSON_SUFFIXES):
        with suppress(OSError, EOFError, FormatError), open(source.path, "rb") as file:
            if format_of(source.name, file) == Format("lines"):
                cuts = [*range(0, max(source.size, 1), piece_bytes), source.size]
                return [InputPiece(source, start, stop, stop - start) for start, stop in pairwise(cuts)]
    return whole


def read_piece(piece: InputPiece, text_field: str, ids: IdsConfig | None = None) -> Iterator[Record | DocumentIds]:
    """The records of a piece, in order. Raises InputError when the file has changed, is damaged, cannot be read or lacks the text
    column, and when it was named as an input and is nothing that can be read here."""
    source = piece.source
    try:
        status = os.stat(source.path)
        if (status.st_size, status.st_mtime_ns) != (source.size, source.mtime_ns):
            raise InputError(source.name, source.path, "it changed while it was read; leave the inputs alone meanwhile")
        yield from _read(piece, text_field) if ids is None else read_ids(piece, ids)
    except FormatError as error:
        if source.named:
            raise InputError(source.name, source.path, str(error)) from error
        yield Rejected(source.name, 0, "invalid utf-8" if "UTF-" in str(error) else "not text", str(error))
    except (OSError, EOFError) as error:
        raise InputError(source.name, source.path, error_reason(error), is_transient(error)) from error


def _read(piece: InputPiece, text_field: str) -> Iterator[Record]:
    source = piece.source
    with open(source.path, "rb", buffering=1 << 20) as file:
        found = format_of(source.name, file)
        if found.content == "parquet":
            from baton.data_pipeline.parquet import read_parquet

            yield from read_parquet(piece, text_field)
            return
        if found.content == "arrow":
            from baton.data_pipeline.arrow import read_arrow

            yield from read_arrow(source, text_field)
            return
        file.seek(0)
        with open_content(file, found.compression) as content:
            if found == Format("lines") and source.size:
                yield from read_lines(source.name, content, text_field, piece.start, piece.stop)
                return
            empty = True
            for record in _read_whole(source, found, content, text_field):
                empty = False
                yield record
            if empty:
                yield Rejected(source.name, 0, "empty", "no record in the file" if source.size else "the file has no bytes")
            raw = content.raw
            if isinstance(raw, Decompressed):
                while content.read(1 << 20):  # what is behind a tar's end
                    pass
                if raw.stray is not None:
                    stray = raw.stray
                    what = f"{stray.count:,} bytes after the last {found.compression} member ({stray.head!r}…) were left out"
                    yield Rejected(source.name, stray.start, "stray bytes", what)


def _read_whole(source: InputFile, found: Format, content: io.BufferedReader, text_field: str) -> Iterator[Record]:
    if found.content == "tar":
        return read_tar(source.name, content, text_field)
    if found.content == "text":
        return _read_text(source, content)
    if found.content == "values":
        return read_values(source, content, text_field)
    return read_lines(source.name, content, text_field)


def _read_text(source: InputFile, content: BinaryIO) -> Iterator[Record]:
    if source.named and is_table(source.name):
        raise FormatError("it is a table as text, and would be one document; write its text column as JSON lines or Parquet")
    text = content.read()
    what = known_not_text(text[:HEAD_BYTES])
    if what is not None:
        raise FormatError(f"it is {what}" + ("; make it UTF-8" if what.startswith("text") else ""))
    if b"\0" in text:
        raise FormatError(f"it is no text: it has a NUL byte at byte {text.index(0):,}")
    yield accept(source.name, 0, text.removeprefix(BOM))
