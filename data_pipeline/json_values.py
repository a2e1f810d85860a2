"""Reads JSON that is not one value a line: values one after the other, or the elements of arrays."""

import json
import re
from collections.abc import Callable, Iterator
from typing import BinaryIO

from baton.data_pipeline.errors import InputError
from baton.data_pipeline.input_files import InputFile
from baton.data_pipeline.records import BOM, Record, parse

_BLANK = re.compile(r"[ \t\r\n]*")
_AHEAD_BYTES = 1 << 18


def read_values(source: InputFile, content: BinaryIO, text_field: str) -> Iterator[Record]:
    """A record of each value. In memory are a value and what was read ahead. Raises InputError: not JSON; EOFError: an array is cut
    off."""
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
        self._next = len(BOM) if self._text.startswith(BOM.decode("latin-1")) else 0

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
