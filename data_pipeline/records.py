"""Records: text that becomes a document, or what is none and why; JSON lines."""

import io
import json
from collections.abc import Iterator

from baton.data_pipeline.input_files import Document, Rejected, document_id

Record = Document | Rejected
BOM = b"\xef\xbb\xbf"
"""UTF-8's byte order mark, which some editors write in front of a file's text."""


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
            yield parse(source, offset + position, line.removeprefix(BOM) if not position else line, text_field)
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
