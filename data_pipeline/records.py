"""The records of an input file: documents, and what is none and why.

A file is read in pieces that workers can share: byte ranges of JSON lines, row groups of a Parquet table, otherwise the whole file.
A document's id depends on its source's name and its record's place in it, not on the pieces.
"""

import io
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from typing import BinaryIO

from baton.data_pipeline.compressed import Decompressed
from baton.data_pipeline.errors import InputError
from baton.data_pipeline.file_io import error_reason, is_transient
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
from baton.data_pipeline.input_files import Document, InputFile, InputPiece, Rejected, document_id

Record = Document | Rejected
_BOM = b"\xef\xbb\xbf"  # UTF-8's byte order mark, which some editors write in front of a file's text
_BLANK = re.compile(r"[ \t\r\n]*")
_AHEAD_BYTES = 1 << 18


def split_source(source: InputFile, piece_bytes: int, text_field: str) -> list[InputPiece]:
    """Pieces of about `piece_bytes` each where the format allows it. Raises DataError for a Parquet table without the
    text column."""
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


def read_piece(piece: InputPiece, text_field: str) -> Iterator[Record]:
    """The records of a piece, in order. Raises InputError when the file has changed, is damaged, cannot be read or lacks the text
    column, and when it was named as an input and is nothing that can be read here."""
    source = piece.source
    try:
        status = os.stat(source.path)
        if (status.st_size, status.st_mtime_ns) != (source.size, source.mtime_ns):
            raise InputError(source.name, source.path, "it changed while it was read; leave the inputs alone meanwhile")
        yield from _read(piece, text_field)
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
        from baton.data_pipeline.archive import read_tar

        return read_tar(source.name, content, text_field)
    if found.content == "text":
        return _read_text(source, content)
    if found.content == "values":
        return _read_values(source, content, text_field)
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
    yield accept(source.name, 0, text.removeprefix(_BOM))


def accept(source: str, record: int, text: bytes) -> Record:
    """The document of some UTF-8 text, or why it is none."""
    try:
        blank = not text.decode().strip()
    except UnicodeDecodeError as error:
        return Rejected(source, record, "invalid utf-8", f"{error.reason} at byte {error.start} of the text")
    if blank:
        return Rejected(source, record, "empty", "nothing but whitespace" if text else "no text")
    return Document(document_id(source, record), text)


def read_lines(
    source: str, lines: io.BufferedReader, text_field: str, start: int = 0, stop: int | None = None, offset: int = 0
) -> Iterator[Record]:
    """JSON lines that *begin* at `start <= byte < stop` (None: all that there are). Blank lines are no records.

    offset: of the stream's first byte in the source: records are called by their bytes, so that a range needs no look at what
    precedes it.
    """
    position = start
    if position:  # the line that is under way here belongs to the piece before; one that begins exactly here does not
        lines.seek(position - 1)
        position += len(lines.readline()) - 1
    while stop is None or position < stop:
        line = lines.readline()
        if not line:
            return
        if line.strip():
            yield parse(source, offset + position, line.removeprefix(_BOM) if not position else line, text_field)
        position += len(line)


def parse(source: str, record: int, line: bytes, text_field: str) -> Record:
    """The document of a JSON object in UTF-8, or why it is none."""
    try:
        value = json.loads(line.decode())
    except UnicodeDecodeError as error:
        return Rejected(source, record, "invalid utf-8", f"{error.reason} at byte {error.start} of the line")
    except (ValueError, RecursionError) as error:
        return Rejected(source, record, "broken json", str(error))
    if not isinstance(value, dict):
        return Rejected(source, record, "broken json", f"the line is a JSON {type(value).__name__}, not an object")
    if text_field not in value:
        return Rejected(source, record, "missing field", f"no field {text_field!r} among {', '.join(map(repr, sorted(value)[:8]))}")
    text = value[text_field]
    if not isinstance(text, str):
        return Rejected(source, record, "missing field", f"field {text_field!r} is a {type(text).__name__}, not a string")
    try:
        return accept(source, record, text.encode())
    except UnicodeEncodeError as error:
        return Rejected(source, record, "invalid utf-8", f"lone surrogate at character {error.start} of the text")


def _read_values(source: InputFile, content: BinaryIO, text_field: str) -> Iterator[Record]:
    """JSON values behind each other, or the elements of arrays. In memory are a value and what was read ahead."""
    ahead = _Ahead(content.read)
    inside = due = False  # in an array; a value has been read there, and a comma or the array's end is due
    while sign := ahead.sign():
        if inside and sign == "]":
            inside = due = False
        elif due and sign == ",":
            due = False
        elif not inside and sign == "[":
            inside = True
        elif due:
            raise InputError(source.name, source.path, f"not JSON at byte {ahead.at:,} (no comma between elements of an array)")
        else:
            at = ahead.at
            try:
                value = ahead.value()
            except ValueError as error:
                raise InputError(source.name, source.path, f"not JSON at byte {ahead.at:,} ({error})") from error
            due = inside
            yield parse(source.name, at, value, text_field)
            continue
        ahead.skip()
    if inside:
        raise EOFError(f"its JSON array has no end at byte {ahead.at:,}, where the file ends")


class _Ahead:
    """What follows in a stream of JSON, read ahead as far as the value at hand needs.

    The bytes are held as Latin-1, in which positions are bytes: JSON's own signs are ASCII. Attributes: `at`, byte of the stream.
    """

    def __init__(self, read: Callable[[int], bytes]) -> None:
        self._read, self._decode = read, json.JSONDecoder().raw_decode
        self._text, self._next, self._before = "", 0, 0  # the byte of the stream that `_text` begins at
        self._more(_AHEAD_BYTES)
        self._next = len(_BOM) if self._text.startswith(_BOM.decode("latin-1")) else 0

    @property
    def at(self) -> int:
        return self._before + self._next

    def _more(self, count: int) -> bool:
        block = self._read(count)
        self._before += self._next
        self._text, self._next = self._text[self._next :] + block.decode("latin-1"), 0
        return bool(block)

    def sign(self) -> str:
        """The first character that is not blank, which is not consumed; empty at the end."""
        while True:
            blank = _BLANK.match(self._text, self._next)
            assert blank is not None
            self._next = blank.end()
            if self._next < len(self._text) or not self._more(_AHEAD_BYTES):
                return self._text[self._next : self._next + 1]

    def skip(self) -> None:
        """Consume a character."""
        self._next += 1

    def value(self) -> bytes:
        """Consume a JSON value. Raises ValueError when there is none."""
        while True:
            count = max(_AHEAD_BYTES, len(self._text) - self._next)  # twice as much each time: long values stay linear
            try:
                _, end = self._decode(self._text, self._next)
            except json.JSONDecodeError as error:
                cut_off = "Unterminated string" in error.msg or error.pos > len(self._text) - 16
                if cut_off and self._more(count):
                    continue
                raise ValueError(error.msg) from error
            except RecursionError as error:
                raise ValueError("nested too deeply") from error
            if end == len(self._text) and self._more(count):  # a number may go on
                continue
            found = self._text[self._next : end].encode("latin-1")
            self._next = end
            return found
