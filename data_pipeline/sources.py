"""Where documents come from: text files, .jsonl (plain, .gz, .zst) and .parquet, read as pieces that workers can share.

The one thing to know: a `Piece` is a part of one input file that can be read on its own (a byte range of a .jsonl, some row groups
of a .parquet, otherwise the whole file), and a document's id depends only on its source's name and its record number, not on the
pieces.
"""

import fnmatch
import gzip
import hashlib
import io
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

from baton.data_pipeline.errors import DataError

_JSONL = (".jsonl", ".jsonl.gz", ".jsonl.zst")


@dataclass(frozen=True)
class Source:
    """One input file. `name` is how ids and reports call it: the input's own name and the path below it, with slashes."""

    name: str
    path: str
    size: int
    mtime_ns: int


@dataclass(frozen=True)
class Piece:
    """The part `start <= position < stop` of a source: bytes of a .jsonl, row groups of a .parquet, bytes of anything else (all of
    them).

    size: input bytes this piece stands for (for .parquet: uncompressed bytes of the text column); only used to balance and to show
    progress.
    """

    source: Source
    start: int
    stop: int
    size: int


@dataclass(frozen=True)
class Document:
    """One accepted record: its id (32 hex digits) and its text as UTF-8."""

    id: str
    text: bytes


@dataclass(frozen=True)
class Rejected:
    """One record that is no document. record: byte offset of the line (.jsonl, uncompressed), row (.parquet) or 0 (text file)."""

    source: str
    record: int
    reason: str
    detail: str


def document_id(source: str, record: int) -> str:
    """32 hex digits, without dots (webdataset splits a sample's key at the first one)."""
    return hashlib.blake2b(f"{source}\n{record}".encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()


def held_out(text: bytes, fraction: float) -> bool:
    """Whether a document of this UTF-8 text is for validation: a function of the text alone, so equal documents stay together."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=8, person=b"baton held out").digest()) < fraction * 2.0**64


def find_sources(
    inputs: Sequence[str | os.PathLike[str]], include: Sequence[str], exclude: Sequence[str], leave: Path | None = None
) -> list[Source]:
    """The input files, sorted by name. A file named as an input is always taken; a folder is walked, without following links to
    folders and without the folder `leave` (the output, which may be below an input).

    Raises DataError: a missing input, none that matches, or two files that would have the same name.
    """
    found: dict[str, Source] = {}
    for given in inputs:
        top = Path(os.path.abspath(given))
        if top.is_dir():
            paths = list(_walk(top, include, exclude, None if leave is None else leave.absolute()))
        elif top.is_file():
            paths = [top]
        else:
            raise DataError(f"the input {given} does not exist; correct the path (inputs are files or folders on this machine)")
        for path in paths:
            name = path.relative_to(top.parent).as_posix()
            try:
                status = path.stat()
            except OSError as error:
                raise DataError(f"cannot read the input {path}: {error.strerror}; make it readable or exclude it") from error
            if name in found and found[name].path != str(path):
                raise DataError(
                    f"the inputs {found[name].path} and {path} would both be called {name}; rename one of their folders"
                )
            found[name] = Source(name, str(path), status.st_size, status.st_mtime_ns)
    if not found:
        raise DataError(
            f"no file in {', '.join(map(str, inputs)) or 'an empty list of inputs'} matches {', '.join(include)}; see --include"
        )
    return [found[name] for name in sorted(found)]


def _walk(top: Path, include: Sequence[str], exclude: Sequence[str], leave: Path | None) -> Iterator[Path]:
    def unreadable(error: OSError) -> None:
        raise DataError(f"cannot read the folder {error.filename}: {error.strerror}; make it readable or exclude it") from error

    for folder, folders, names in os.walk(top, onerror=unreadable):
        below = Path(folder).relative_to(top)
        kept = (name for name in folders if not _matches((below / name).as_posix(), name, exclude))
        folders[:] = sorted(name for name in kept if Path(folder, name) != leave)
        for name in sorted(names):
            path = Path(folder, name)
            relative = (below / name).as_posix()
            if _matches(relative, name, include) and not _matches(relative, name, exclude) and path.is_file():
                yield path


def _matches(relative: str, name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(relative if "/" in pattern else name, pattern) for pattern in patterns)


def split_source(source: Source, piece_bytes: int, text_field: str) -> list[Piece]:
    """Pieces of about `piece_bytes` each where the format allows it. Raises DataError for an unreadable .parquet."""
    if source.name.endswith(".parquet"):
        return _split_parquet(source, piece_bytes, text_field)
    if source.name.endswith(".jsonl"):
        cuts = [*range(0, max(source.size, 1), piece_bytes), source.size]
        return [Piece(source, start, stop, stop - start) for start, stop in pairwise(cuts)]
    return [Piece(source, 0, source.size, source.size)]


def _split_parquet(source: Source, piece_bytes: int, text_field: str) -> list[Piece]:
    metadata = _open_parquet(source, text_field).metadata
    column = [metadata.schema.column(i).path for i in range(metadata.num_columns)].index(text_field)
    pieces: list[Piece] = []
    start, size = 0, 0
    for group in range(metadata.num_row_groups):
        size += metadata.row_group(group).column(column).total_uncompressed_size
        if size >= piece_bytes or group + 1 == metadata.num_row_groups:
            pieces.append(Piece(source, start, group + 1, size))
            start, size = group + 1, 0
    return pieces


def read_piece(piece: Piece, text_field: str) -> Iterator[Document | Rejected]:
    """The records of a piece, in order. Raises DataError when the file has changed, is damaged or lacks the text column."""
    source = piece.source
    try:
        status = os.stat(source.path)
        if (status.st_size, status.st_mtime_ns) != (source.size, source.mtime_ns):
            raise DataError(
                f"the input {source.path} changed while it was read; leave the inputs alone and prepare into a new folder"
            )
        if source.name.endswith(".parquet"):
            yield from _read_parquet(piece, text_field)
        elif source.name.endswith(_JSONL):
            yield from _read_jsonl(piece, text_field)
        else:
            yield _accept(source.name, 0, Path(source.path).read_bytes())
    except (OSError, EOFError) as error:
        raise DataError(f"cannot read the input {source.path}: {error}; restore the file or exclude it") from error


def _accept(source: str, record: int, text: bytes) -> Document | Rejected:
    try:
        blank = not text.decode().strip()
    except UnicodeDecodeError as error:
        return Rejected(source, record, "invalid utf-8", f"{error.reason} at byte {error.start} of the text")
    if blank:
        return Rejected(source, record, "empty", "nothing but whitespace" if text else "no text")
    return Document(document_id(source, record), text)


def _read_jsonl(piece: Piece, text_field: str) -> Iterator[Document | Rejected]:
    """Lines that *begin* in the piece. Blank lines are no records. Ids count bytes, so that a range needs no look at what precedes
    it."""
    name = piece.source.name
    with _open_lines(piece.source) as lines:
        position = piece.start
        if position:  # the line that is under way here belongs to the piece before; one that begins exactly here does not
            lines.seek(position - 1)
            position += len(lines.readline()) - 1
        compressed = not name.endswith(".jsonl")
        while compressed or position < piece.stop:
            line = lines.readline()
            if not line:
                return
            if line.strip():
                yield _parse(name, position, line, text_field)
            position += len(line)


def _parse(source: str, record: int, line: bytes, text_field: str) -> Document | Rejected:
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
        return _accept(source, record, text.encode())
    except UnicodeEncodeError as error:
        return Rejected(source, record, "invalid utf-8", f"lone surrogate at character {error.start} of the text")


def _open_lines(source: Source) -> BinaryIO:
    if source.name.endswith(".gz"):
        return gzip.open(source.path, "rb")  # type: ignore[return-value]  # a GzipFile reads as a BinaryIO
    if source.name.endswith(".zst"):
        import zstandard

        return io.BufferedReader(_Zstandard(source, zstandard), 1 << 20)
    return open(source.path, "rb", buffering=1 << 20)


class _Zstandard(io.RawIOBase):
    """All frames of a .zst file as one stream; a truncated one is an error, as it is for .gz."""

    def __init__(self, source: Source, zstandard: Any) -> None:
        self._file = open(source.path, "rb")  # noqa: SIM115 (closed by close)
        self._new = zstandard.ZstdDecompressor().decompressobj
        self._frame = self._new()
        self._fresh = True  # no byte of the current frame has been seen
        self._error = zstandard.ZstdError
        self._left = b""
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            block = self._left or self._file.read(1 << 20)
            self._left = b""
            if not block:
                if not self._fresh:
                    raise EOFError("the compressed file ends in the middle of a frame")
                return 0
            try:
                self._ready = memoryview(self._frame.decompress(block))
            except self._error as error:
                raise OSError(f"not valid zstandard data ({error})") from error
            self._fresh = False
            if self._frame.eof:
                self._left = self._frame.unused_data
                self._frame, self._fresh = self._new(), True
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def _open_parquet(source: Source, text_field: str) -> Any:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(source.path)
        schema = table.schema_arrow
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(
            f"cannot read the input {source.path} as parquet: {' '.join(str(error).split())}; restore or exclude it"
        ) from error
    if text_field not in schema.names:
        raise DataError(
            f"{source.path} has no column {text_field!r} but {', '.join(schema.names)}; name the text column with text_field"
        )
    kind = schema.field(text_field).type
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
        raise DataError(f"column {text_field!r} of {source.path} holds {kind}, not strings; name the text column with text_field")
    return table


def _read_parquet(piece: Piece, text_field: str) -> Iterator[Document | Rejected]:
    import pyarrow

    table = _open_parquet(piece.source, text_field)
    name = piece.source.name
    row = sum(table.metadata.row_group(group).num_rows for group in range(piece.start))
    try:
        for batch in table.iter_batches(256, row_groups=list(range(piece.start, piece.stop)), columns=[text_field]):
            # as bytes: arrow does not check that its strings are UTF-8
            for text in batch.column(0).cast(pyarrow.large_binary()).to_pylist():
                yield Rejected(name, row, "missing field", "the value is null") if text is None else _accept(name, row, text)
                row += 1
    except pyarrow.ArrowException as error:
        raise DataError(
            f"the input {piece.source.path} is damaged: {' '.join(str(error).split())}; restore or exclude it"
        ) from error
