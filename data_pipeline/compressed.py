"""Compressed input files as streams of their content: gzip, zstandard, xz and bzip2, any number of members behind each other.

A file that ends inside a member, or whose data do not decompress, is an error that says at which byte. Zeros behind a member are
padding. Few other bytes behind the last member are left out, as `gzip -d` does, and `Decompressed.stray` says where they are.
"""

import bz2
import io
import lzma
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO

import zstandard

_BLOCK = 1 << 17
_OUTPUT = 1 << 20
_STRAY_BYTES = 4096  # more than this behind a member is damage: a member whose beginning is lost

#: The name of a compression -> what its files begin with.
MAGIC = {"gzip": b"\x1f\x8b\x08", "zstandard": b"\x28\xb5\x2f\xfd", "xz": b"\xfd7zXZ\0", "bzip2": b"BZh"}
#: The end of a file's name -> the name of a compression.
SUFFIXES = {".gz": "gzip", ".zst": "zstandard", ".zstd": "zstandard", ".xz": "xz", ".bz2": "bzip2"}
_SKIPPABLE = b"\x2a\x4d\x18"  # of zstandard, behind a byte from 0x50 to 0x5f
_LONGEST = max(map(len, MAGIC.values()))


class DamagedError(OSError):
    """Compressed data that cannot be decompressed; the text says at which byte of the file."""


@dataclass(frozen=True)
class Stray:
    """Bytes behind the last member: where they begin in the file, how many they are (to its end), and the first of them."""

    start: int
    count: int
    head: bytes


def compression_of(head: bytes) -> str | None:
    """The compression of a file that begins with `head`."""
    if head[1:4] == _SKIPPABLE and 0x50 <= head[0] <= 0x5F:
        return "zstandard"
    return next((name for name, magic in MAGIC.items() if head.startswith(magic)), None)


class _Zlib:
    """zlib's decompressor with the interface of bz2's and lzma's."""

    def __init__(self) -> None:
        self._inner = zlib.decompressobj(31)
        self._tail = b""

    def decompress(self, data: bytes, most: int) -> bytes:
        before, data = self._inner.copy(), self._tail + data
        try:
            made = self._inner.decompress(data, most)
        except zlib.error:
            for at in range(len(data)):  # which byte is it that cannot be?
                try:
                    before.decompress(data[at : at + 1])
                except zlib.error as error:
                    raise _AtError(at - len(self._tail), str(error).rpartition(": ")[2]) from error
            raise
        self._tail = self._inner.unconsumed_tail
        return made

    @property
    def needs_input(self) -> bool:
        return not self._tail

    @property
    def eof(self) -> bool:
        return self._inner.eof

    @property
    def unused_data(self) -> bytes:
        return self._inner.unused_data


class _Zstandard:
    """zstandard's decompressor with the interface of bz2's and lzma's. Frames of `zstd --long=31` need a window of 2 GiB."""

    needs_input = True

    def __init__(self) -> None:
        self._inner = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()

    def decompress(self, data: bytes, _most: int) -> bytes:
        made: bytes = self._inner.decompress(data) if data else b""
        return made

    @property
    def eof(self) -> bool:
        return bool(self._inner.eof)

    @property
    def unused_data(self) -> bytes:
        return bytes(self._inner.unused_data)


class _AtError(Exception):
    """A decompressor's error: at which of the given bytes, and what."""


_DECODERS: dict[str, Callable[[], Any]] = {
    "gzip": _Zlib,
    "zstandard": _Zstandard,
    "xz": lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ),
    "bzip2": bz2.BZ2Decompressor,
}
_ERRORS = (_AtError, zlib.error, zstandard.ZstdError, lzma.LZMAError, OSError, EOFError, ValueError)


class Decompressed(io.RawIOBase):
    """The content of all members of a compressed file as one stream.

    Attributes: `stray`, when the stream has ended: what was left out behind the last member, or None. Reading raises EOFError for
    a file that ends inside a member, DamagedError for data that cannot be decompressed, OSError when the file cannot be read.
    """

    def __init__(self, file: BinaryIO, compression: str) -> None:
        """file: opened in binary, read from where it is and closed with the stream."""
        self.stray: Stray | None = None
        self._file, self._compression = file, compression
        self._decoder: Any = None
        self._rest = b""  # read from the file and not yet given to a decoder
        self._at = 0  # the byte of the file that `_rest` begins at
        self._member = 0  # the byte of the file that the current member begins at
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            if self._decoder is None and not self._next_member():
                return 0
            self._ready = memoryview(self._more())
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _more(self) -> bytes:
        """Some content of the current member; may be empty."""
        block = b""
        if self._decoder.needs_input:
            block = self._rest or self._file.read(_BLOCK)
            self._rest = b""
        try:
            made: bytes = self._decoder.decompress(block, _OUTPUT)
        except _ERRORS as error:
            raise self._damage(error, len(block)) from error
        self._at += len(block)
        if self._decoder.eof:
            self._rest = self._decoder.unused_data
            self._at -= len(self._rest)
            self._decoder = None
        elif self._decoder.needs_input and not block and not made:
            raise EOFError(
                f"the compressed file ends in the middle of a frame (that of byte {self._member:,}), at byte {self._at:,}"
            )
        return made

    def _damage(self, error: Exception, given: int) -> DamagedError:
        what, first, last = str(error), self._at, self._at + given
        if isinstance(error, _AtError):
            first = last = self._at + error.args[0]
            what = error.args[1]
        if what in ("incorrect data check", "incorrect length check"):
            return DamagedError(
                f"the checksum of the {self._compression} member of bytes {self._member:,} to {last:,} does not match"
            )
        where = f"at byte {first:,}" if first == last else f"between the bytes {first:,} and {last:,}"
        return DamagedError(f"not valid {self._compression} data {where} ({what})")

    def _next_member(self) -> bool:
        """Go to where a member begins; False: there is none."""
        first = self._at == 0
        self._fill(_LONGEST)
        if not first:
            while self._rest and not self._rest.strip(b"\0"):
                self._at += len(self._rest)
                self._rest = b""
                self._fill(_LONGEST)
            padding = len(self._rest) - len(self._rest.lstrip(b"\0"))
            self._at, self._rest = self._at + padding, self._rest[padding:]
            self._fill(_LONGEST)
        if not self._rest:
            return False
        if compression_of(self._rest) == self._compression:
            self._member, self._decoder = self._at, _DECODERS[self._compression]()
            return True
        if first:
            raise DamagedError(f"not valid {self._compression} data: it does not begin as such a file does")
        self._fill(_STRAY_BYTES + 1)
        at, count = self._at, len(self._rest)
        if count > _STRAY_BYTES or MAGIC[self._compression] in self._rest:
            raise DamagedError(f"not valid {self._compression} data at byte {at:,} (what follows a member there is no member)")
        self.stray = Stray(at, count, self._rest[:16])
        self._at, self._rest = at + count, b""
        return False

    def _fill(self, least: int) -> None:
        while len(self._rest) < least:
            block = self._file.read(max(_BLOCK, least))
            if not block:
                return
            self._rest += block

    def close(self) -> None:
        self._file.close()
        super().close()
