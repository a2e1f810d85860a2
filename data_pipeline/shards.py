"""A shard on disk: a tar of samples that webdataset reads, and beside it an index that lets a reader seek to any sample.

The one thing to know: member `<id>.txt` holds a document's UTF-8 text, or member `<id>.tokens.npy` its token ids, and the index
gives the byte offset of each member's header. Nothing in either file depends on when, where or by whom it was written.
"""

import hashlib
import io
import os
import re
import tarfile
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from baton.data_pipeline.errors import DataError
from baton.data_pipeline.file_io import may_pass, patiently, unreadable
from baton.data_pipeline.files import AtomicFile, write_atomically

# A dataset's folder: this format, described by DATASET (written last), with what was asked for in PLAN and what was refused in
# REJECTED.
FORMAT = "baton-dataset"
VERSION = 1
DATASET = "dataset.json"
PLAN = "prepare.json"  # what was asked for: tells a resumed preparation from a different one
REJECTED = "rejected.jsonl"

BLOCK = 512  # tar's unit of everything
EXTENSIONS = {"text": "txt", "tokens": "tokens.npy"}

Int64 = npt.NDArray[np.int64]


def padded(size: int) -> int:
    """Bytes a member's content takes in a tar."""
    return -(-size // BLOCK) * BLOCK


@dataclass(frozen=True)
class Index:
    """What a shard holds, one entry per sample in the order of the tar.

    ids S32[n]; offsets int64[n], bytes from the shard's start to the sample's tar header; sizes int64[n], payload bytes; text_bytes
    int64[n], UTF-8 bytes of the document's text; tokens int64[n], -1 where unknown; crc32 uint32[n] of the payload.
    """

    ids: npt.NDArray[np.bytes_]
    offsets: Int64
    sizes: Int64
    text_bytes: Int64
    tokens: Int64
    crc32: npt.NDArray[np.uint32]

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def end(self) -> int:
        """Byte offset just after the last sample."""
        return int(self.offsets[-1] + BLOCK + padded(int(self.sizes[-1]))) if len(self) else 0

    def save(self, path: Path) -> None:
        """Write an uncompressed .npz without pickles; equal indexes are equal bytes. Raises DataError."""
        buffer = io.BytesIO()
        np.savez(buffer, **{name: getattr(self, name) for name in _DTYPES})
        write_atomically(path, buffer.getvalue())

    @classmethod
    def from_bytes(cls, content: bytes, where: str) -> "Index":
        """Read what `save` wrote; `where` is named in the DataError raised when it is damaged."""
        try:
            with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
                columns = {name: arrays[name] for name in _DTYPES}
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise DataError(f"the index {where} is damaged ({error}); restore it, or prepare the dataset again") from error
        if any(columns[name].dtype != dtype or columns[name].shape != columns["ids"].shape for name, dtype in _DTYPES.items()):
            raise DataError(f"the index {where} has columns of unexpected types; restore it, or prepare the dataset again")
        return cls(**columns)

    @staticmethod
    def column(path: Path, name: str) -> Int64:
        """One of its int64 columns, from a file that `save` wrote, with its CRC32 checked. Raises DataError."""

        def read() -> Int64:
            with np.load(path, allow_pickle=False) as arrays:
                column: Int64 = arrays[name]
                return column

        try:
            found: Int64 = patiently(read)
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            if may_pass(error):
                raise unreadable(path, error) from error
            raise DataError(f"the index {path} is damaged ({error}); restore it, or prepare the dataset again") from error
        if found.dtype != np.int64 or found.ndim != 1:
            raise DataError(f"the index {path} has columns of unexpected types; restore it, or prepare the dataset again")
        return found


_DTYPES = {"ids": "S32", "offsets": "<i8", "sizes": "<i8", "text_bytes": "<i8", "tokens": "<i8", "crc32": "<u4"}


def index_name(shard: str) -> str:
    """`train-000000.tar` -> `train-000000.index.npz`."""
    return shard.removesuffix(".tar") + ".index.npz"


@dataclass(frozen=True)
class ShardSummary:
    """What dataset.json says of one shard. tokens: None when unknown; sha256 in hex; sizes in bytes."""

    name: str
    split: str
    documents: int
    text_bytes: int
    tokens: int | None
    tar_bytes: int
    tar_sha256: str
    index_bytes: int
    index_sha256: str


class ShardWriter:
    """Writes one shard and its index; both appear under their names only in `close`, the index last.

    path: the .tar to write; content: "text" or "tokens". After an error, `discard` leaves nothing behind.
    """

    def __init__(self, path: Path, content: str) -> None:
        self.path = path
        self.text_bytes = 0
        self._extension = EXTENSIONS[content]
        self._file = AtomicFile(path)
        self._digest = hashlib.sha256()
        self._position = 0
        self._rows: list[tuple[bytes, int, int, int, int, int]] = []

    def add(self, document: str, payload: bytes, text_bytes: int, tokens: int) -> None:
        """Append a sample: its id, its content, and the counts for the index (tokens -1: unknown)."""
        self._rows.append((document.encode(), self._position, len(payload), text_bytes, tokens, zlib.crc32(payload)))
        self.text_bytes += text_bytes
        self._write(member_header(f"{document}.{self._extension}", len(payload)))
        self._write(payload)
        self._write(b"\0" * (padded(len(payload)) - len(payload)))

    def append(self, tar: Path, index: Index) -> None:
        """Append all samples of another shard, byte for byte."""
        moved = zip(index.ids, index.offsets, index.sizes, index.text_bytes, index.tokens, index.crc32)
        self._rows += [(id_, int(o) + self._position, int(s), int(b), int(t), int(c)) for id_, o, s, b, t, c in moved]
        self.text_bytes += int(index.text_bytes.sum())
        left = index.end
        with open(tar, "rb") as source:
            while left:
                block = source.read(min(left, 1 << 22))
                if not block:
                    raise DataError(f"{tar} is shorter than its index says; delete it and prepare again")
                self._write(block)
                left -= len(block)

    def _write(self, block: bytes) -> None:
        self._file.write(block)
        self._digest.update(block)
        self._position += len(block)

    def close(self, split: str) -> ShardSummary:
        """End the tar, write the index, give both their names. Raises DataError."""
        self._write(b"\0" * (2 * BLOCK))
        self._file.commit()
        columns = zip(*self._rows)
        index = Index(**{name: np.array(column, dtype=dtype) for (name, dtype), column in zip(_DTYPES.items(), columns)})
        place = self.path.with_name(index_name(self.path.name))
        index.save(place)
        content = place.read_bytes()
        return ShardSummary(
            name=self.path.name,
            split=split,
            documents=len(index),
            text_bytes=self.text_bytes,
            tokens=int(index.tokens.sum()) if (index.tokens >= 0).all() else None,
            tar_bytes=self._position,
            tar_sha256=self._digest.hexdigest(),
            index_bytes=len(content),
            index_sha256=hashlib.sha256(content).hexdigest(),
        )

    def discard(self) -> None:
        """Delete what was written so far; does nothing after `close`."""
        self._file.discard()


def member_header(name: str, size: int) -> bytes:
    """The 512 bytes before a member's content: no time, no owner, no environment."""
    header = tarfile.TarInfo(name)
    header.size = size
    return header.tobuf(tarfile.USTAR_FORMAT)


def is_header_of(block: bytes, name: bytes, size: int, at: int = 0) -> bool:
    """Whether a member of this name and size begins at byte `at` (cheaper than to compare with a header made anew)."""
    return block.startswith(name + b"\0", at) and block.startswith(b"%011o\0" % size, at + 124)


def token_payload(ids: npt.NDArray[np.integer], vocab_size: int) -> bytes:
    """Token ids as a .npy of uint16, or of uint32 for a vocabulary beyond 65,536."""
    buffer = io.BytesIO()
    np.save(buffer, ids.astype(np.uint16 if vocab_size <= 1 << 16 else np.uint32), allow_pickle=False)
    return buffer.getvalue()


# What numpy writes of such a list, read here because numpy's own reader compiles it as Python, in a third of a stream's time. What
# looks otherwise goes there.
_PLAIN_HEADER = re.compile(
    rb"\x93NUMPY\x01\x00(..)\{'descr': '(<u[24])', 'fortran_order': False, 'shape': \((\d+),\), \} *\n", re.DOTALL
)
_TOKEN_TYPES: dict[bytes, np.dtype[Any]] = {b"<u2": np.dtype(np.uint16), b"<u4": np.dtype(np.uint32)}


def token_layout(head: bytes, size: int) -> tuple[np.dtype[Any], int, int]:
    """Type, number, and first byte of the ids in a `.tokens.npy` payload of `size` bytes that begins with `head`. Raises ValueError
    when it is not one."""
    plain = _PLAIN_HEADER.match(head)
    if plain is not None and plain.end() == 10 + int.from_bytes(plain[1], "little"):
        dtype, count, begin = _TOKEN_TYPES[plain[2]], int(plain[3]), plain.end()
    else:
        stream = io.BytesIO(head)
        version = np.lib.format.read_magic(stream)
        if version != (1, 0):
            raise ValueError(f"an array of format {version[0]}.{version[1]}")
        shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
        if len(shape) != 1 or dtype not in (np.uint16, np.uint32):
            raise ValueError(f"token ids of shape {shape} and type {dtype}")
        count, begin = int(shape[0]), stream.tell()
    if begin % dtype.itemsize or begin + count * dtype.itemsize != size:
        raise ValueError(f"{count} token ids of type {dtype} in {size} bytes")
    return dtype, count, begin


def tokens_of(payload: bytes) -> npt.NDArray[np.int32]:
    """int32[n] ids of a `.tokens.npy` payload. Raises ValueError when it is not one."""
    dtype, count, begin = token_layout(payload, len(payload))
    return np.frombuffer(payload, dtype, count, begin).astype(np.int32)


def file_size(path: Path) -> int | None:
    """Bytes of a file, None when it does not exist."""
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return None
