"""What an input file is: decided by its first bytes where they tell, else by its name, and refused where neither is known."""

import io
import json
from dataclasses import dataclass
from typing import BinaryIO, Literal, cast

from baton.data_pipeline.compressed import SUFFIXES, DamagedError, Decompressed, compression_of

#: Ends of names whose files hold JSON, without what a compression adds.
JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
HEAD_BYTES = 1 << 16

Content = Literal["text", "lines", "values", "tar", "parquet", "arrow"]

_MAGIC = (
    (b"%PDF-", "a PDF document"),
    (b"\x7fELF", "a program (ELF)"),
    (b"PK\x03\x04", "a zip archive (or a document or .npz that is one)"),
    (b"PK\x05\x06", "an empty zip archive"),
    (b"7z\xbc\xaf\x27\x1c", "a 7-zip archive"),
    (b"Rar!\x1a\x07", "a RAR archive"),
    (b"\x04\x22\x4d\x18", "lz4 data"),
    (b"\xff\x06\x00\x00sNaPpY", "snappy data"),
    (b"\x1f\x9d", "data of the old `compress` (.Z)"),
    (b"\x89PNG", "a PNG picture"),
    (b"\xff\xd8\xff", "a JPEG picture"),
    (b"GIF8", "a GIF picture"),
    (b"Obj\x01", "an Avro file"),
    (b"ORC", "an ORC file"),
    (b"SQLite format 3\0", "an SQLite database"),
    (b"\x89HDF", "an HDF5 file"),
    (b"\x93NUMPY", "a NumPy array"),
    (b"WARC/", "a WARC archive"),
    (b"\xff\xfe\0\0", "text in UTF-32"),
    (b"\0\0\xfe\xff", "text in UTF-32"),
    (b"\xff\xfe", "text in UTF-16"),
    (b"\xfe\xff", "text in UTF-16"),
)
_TABLES = (".csv", ".tsv")


class FormatError(ValueError):
    """A file that is nothing that can be read here; the text says what it is and what to do."""


@dataclass(frozen=True)
class Format:
    """How a file is read. content: "text" (one document), "lines" (JSON, one value a line), "values" (JSON values behind each other
    or in an array), "tar" (samples as WebDataset has them), "parquet" or "arrow". compression: a key of
    `compressed.MAGIC`; "": none."""

    content: Content
    compression: str = ""


def format_of(name: str, file: BinaryIO) -> Format:
    """The format of a file of this name; `file` is at its beginning and is read a little.

    Raises FormatError, DamagedError when its name says that it is compressed and it is not so, and what `Decompressed` raises.
    """
    head = file.read(HEAD_BYTES)
    stem, suffix = _without_compression(name)
    compression = compression_of(head)
    if suffix and head and compression != SUFFIXES[suffix]:
        found = f"it is {compression}" if compression else "it does not begin as such a file does"
        raise DamagedError(f"not valid {SUFFIXES[suffix]} data, as its name's {suffix} says ({found})")
    if compression is not None:
        file.seek(0)
        stream = io.BufferedReader(Decompressed(cast(BinaryIO, _Kept(file)), compression))
        head = stream.read(HEAD_BYTES)
    content = _content_of(stem, head)
    if content in ("parquet", "arrow") and compression:
        raise FormatError(f"it is {'a Parquet' if content == 'parquet' else 'an Arrow'} file inside {compression}; decompress it")
    return Format(content, compression or "")


def open_content(file: BinaryIO, compression: str) -> io.BufferedReader:
    """The content of an opened file, closed with it. Of a compressed one `.raw` is a `Decompressed`."""
    if compression:
        return io.BufferedReader(Decompressed(file, compression), 1 << 20)
    return cast(io.BufferedReader, file)


def known_not_text(head: bytes) -> str | None:
    """What a file that begins with `head` is, where it is not text in UTF-8; None: it may be."""
    return next((what for magic, what in _MAGIC if head.startswith(magic)), None)


def is_table(name: str) -> bool:
    """Whether a name says that the file is a table as text."""
    return _without_compression(name)[0].lower().endswith(_TABLES)


class _Kept(io.RawIOBase):
    """A file that stays open when the stream over it is closed."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def read(self, size: int = -1) -> bytes:
        return self._file.read(size)


def _without_compression(name: str) -> tuple[str, str]:
    if name.endswith(".tgz"):
        return name[: -len(".tgz")] + ".tar", ".gz"
    suffix = next((suffix for suffix in SUFFIXES if name.endswith(suffix)), "")
    return name.removesuffix(suffix) if suffix else name, suffix


def _content_of(stem: str, head: bytes) -> Content:
    if head.startswith(b"PAR1") or (stem.endswith(".parquet") and head):
        return "parquet"
    if head.startswith(b"ARROW1") or (stem.endswith(".arrow") and head):
        return "arrow"
    if head[257:262] == b"ustar" or (stem.endswith(".tar") and head):
        return "tar"
    if not stem.endswith(JSON_SUFFIXES):
        return "lines" if not stem.endswith(".txt") and _are_records(head) else "text"
    what = known_not_text(head)
    if what is not None:
        raise FormatError(f"it is {what}; make it UTF-8" if what.startswith("text") else f"it is {what}, not JSON")
    return "values" if _spans_lines(head, json_lines=not stem.endswith(".json")) else "lines"


def _are_records(head: bytes) -> bool:
    """Whether a file without a telling name begins with several JSON objects, each on its line."""
    lines = head.split(b"\n")[:-1][:8]
    return len(lines) > 1 and all(isinstance(_parsed(line), dict) for line in lines)


def _parsed(line: bytes) -> object:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _spans_lines(head: bytes, json_lines: bool) -> bool:
    """Whether the JSON values of a file that begins with `head` are not one a line: an array, or objects over several lines.

    json_lines: its name says that they are one a line; a first line that is cut off is then a broken record.
    """
    head = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    line, end, rest = head.partition(b"\n")
    if head[:1] not in (b"[", b"{") or (head[:1] == b"{" and (json_lines or not end)):
        return False
    text = line.decode("latin-1").rstrip()
    try:
        json.JSONDecoder(strict=False).raw_decode(text)
    except json.JSONDecodeError as error:
        if "Unterminated string" in error.msg:
            return head[:1] == b"["
        return error.pos >= len(text) - 1 or head[:1] == b"["
    except RecursionError:
        return False
    return head[:1] == b"[" and not rest.strip()
