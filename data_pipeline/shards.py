"""The format of a dataset on disk: tar shards that webdataset reads, an index beside each that lets a reader seek to any sample,
and one index of the units of all shards.

Member `<id>.txt` of a tar holds a document's UTF-8 text, or member `<id>.tokens.npy` its token ids. The index has the byte offset
of each member's header. The files do not depend on when, where or by whom they were written.

The unit index (`UnitIndex`, units.npz) lets a start skip reading every shard's index. It holds nothing that the indexes do not: it
is made with the default unit settings, used by runs that have them, and compared with every index that is read.
"""

import hashlib
import io
import os
import re
import tarfile
import zipfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from baton.data_pipeline.errors import DataError, is_transient, unreadable
from baton.data_pipeline.file_io import retry_transient
from baton.data_pipeline.files import AtomicFile, write_atomically
from baton.data_pipeline.npz import read_columns

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
    """The samples of a shard, one entry each in the order of the tar.

    ids S32[n], or wider; offsets int64[n], bytes from the shard's start to the sample's tar header; sizes int64[n], payload bytes;
    text_bytes int64[n], UTF-8 bytes of the document's text; tokens int64[n], -1 where unknown; crc32 uint32[n] of the payload.
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
        """Read what `save` wrote. where: names the index in the DataError that is raised when it is damaged."""
        try:
            columns = read_columns(io.BytesIO(content), _DTYPES)
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise DataError(f"the index {where} is damaged ({error}); restore it, or prepare the dataset again") from error
        widths = {**_DTYPES, "ids": f"S{max(32, columns['ids'].dtype.itemsize)}"}  # longer ones are of others' shards
        if any(columns[name].dtype != dtype or columns[name].shape != columns["ids"].shape for name, dtype in widths.items()):
            raise DataError(f"the index {where} has columns of unexpected types; restore it, or prepare the dataset again")
        return cls(**columns)

    @staticmethod
    def column(path: Path, name: str) -> Int64:
        """One int64 column of a file that `save` wrote, with its CRC32 checked. Raises DataError."""

        def read() -> Int64:
            return read_columns(path, [name])[name]

        try:
            found: Int64 = retry_transient(read)
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            if is_transient(error):
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
    """A shard's entry in dataset.json. tokens: None when unknown; sha256 in hex; sizes in bytes."""

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
    """Writes one shard and its index. Both appear under their names only in `close`, the index last.

    path: the .tar to write; content: "text" or "tokens". After an error, `discard` removes what was written.
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
    """The 512 bytes before a member's content, without time, owner or environment."""
    header = tarfile.TarInfo(name)
    header.size = size
    return header.tobuf(tarfile.USTAR_FORMAT)


def is_header_of(block: bytes, name: bytes, size: int, at: int = 0) -> bool:
    """Whether a member of this name and size begins at byte `at` (cheaper than comparing with a new header)."""
    return block.startswith(name + b"\0", at) and block.startswith(b"%011o\0" % size, at + 124)


def token_payload(ids: npt.NDArray[np.integer], vocab_size: int) -> bytes:
    """Token ids as a .npy of uint16, or of uint32 for a vocabulary beyond 65,536."""
    buffer = io.BytesIO()
    np.save(buffer, ids.astype(np.uint16 if vocab_size <= 1 << 16 else np.uint32), allow_pickle=False)
    return buffer.getvalue()


# stream's time. Other headers go to numpy.
_PLAIN_HEADER = re.compile(
    rb"\x93NUMPY\x01\x00(..)\{'descr': '(<u[24])', 'fortran_order': False, 'shape': \((\d+),\), \} *\n", re.DOTALL
)
_TOKEN_TYPES: dict[bytes, np.dtype[Any]] = {b"<u2": np.dtype(np.uint16), b"<u4": np.dtype(np.uint32)}


def token_layout(head: bytes, size: int) -> tuple[np.dtype[Any], int, int]:
    """Dtype, number and first byte of the ids in a `.tokens.npy` payload of `size` bytes that begins with `head`. Raises ValueError
    for anything else."""
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
    """int32[n] ids of a `.tokens.npy` payload. Raises ValueError for anything else."""
    dtype, count, begin = token_layout(payload, len(payload))
    return np.frombuffer(payload, dtype, count, begin).astype(np.int32)


def file_size(path: Path) -> int | None:
    """Bytes of a file, None when it does not exist."""
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return None


_REMEDY = "restore it from a copy, or prepare the dataset again"
UNITS = "units.npz"
_UNIT_DTYPES = {"units": "<i8", "names": "S", "indexes": "S64", "counts": "<i8", "starts": "<i8"}


class UnitIndex:
    """First sample of each unit in some shards.

    Attributes: `unit_documents` and `unit_bytes`, the settings for which it holds (see ShardsConfig).
    """

    def __init__(self, unit_documents: int, unit_bytes: int, shards: dict[str, tuple[str, Int64]], where: str) -> None:
        """shards: {name: (hex sha256 of its index, first sample of each unit int64[units])}; where: as errors name the table."""
        self.unit_documents, self.unit_bytes = unit_documents, unit_bytes
        self._shards, self._where = shards, where

    @classmethod
    def of(cls, unit_documents: int, unit_bytes: int, shards: Iterable[tuple[str, str, Int64]], where: str = UNITS) -> Self:
        """shards: (name, hex sha256 of its index, first sample of each unit int64[units])."""
        return cls(unit_documents, unit_bytes, {name: (index, starts) for name, index, starts in shards}, where)

    def to_bytes(self) -> bytes:
        """An uncompressed .npz without pickles; equal tables are equal bytes."""
        indexes, starts = zip(*self._shards.values()) if self._shards else ((), ())
        columns = {
            "units": np.array([self.unit_documents, self.unit_bytes], np.int64),
            "names": np.array([name.encode() for name in self._shards], "S"),
            "indexes": np.array([index.encode() for index in indexes], "S64"),
            "counts": np.array([len(each) for each in starts], np.int64),
            "starts": np.concatenate([np.zeros(0, np.int64), *starts]),
        }
        buffer = io.BytesIO()
        np.savez(buffer, **columns)
        return buffer.getvalue()

    @classmethod
    def from_bytes(cls, content: bytes, where: str) -> Self:
        """What `to_bytes` made. Raises DataError when it is damaged."""
        try:
            columns = read_columns(io.BytesIO(content), _UNIT_DTYPES)
        except (OSError, ValueError, KeyError, EOFError, TypeError, zipfile.BadZipFile, zlib.error) as error:
            raise DataError(f"{where} is damaged ({error}); {_REMEDY}") from error
        units, names, indexes, counts, starts = columns.values()
        kinds = all(
            columns[name].ndim == 1 and np.dtype(dtype).kind == columns[name].dtype.kind for name, dtype in _UNIT_DTYPES.items()
        )
        if not kinds or len(units) != 2 or not len(names) == len(indexes) == len(counts) or counts.sum() != len(starts):
            raise DataError(f"{where} has columns of unexpected types or lengths; {_REMEDY}")
        parts = np.split(starts, np.cumsum(counts)[:-1]) if len(counts) else []
        return cls.of(int(units[0]), int(units[1]), zip(map(bytes.decode, names), map(bytes.decode, indexes), parts), where)

    def starts(self, shard: ShardSummary) -> Int64 | None:
        """First sample of each unit of a shard, int64[units]; None: the index does not have it (a shard that was added). Raises
        DataError: it is of another shard of that name, or impossible."""
        if shard.name not in self._shards:
            return None
        index, starts = self._shards[shard.name]
        if index != shard.index_sha256:
            raise DataError(f"{self._where} is of another {shard.name} (its index has another checksum); {_REMEDY}")
        counts = np.diff(starts, append=shard.documents)
        if starts[:1].tolist() != [0] * min(1, shard.documents) or (counts < 1).any() or (counts > self.unit_documents).any():
            raise DataError(f"{self._where} names impossible units of {shard.name}; {_REMEDY}")
        return starts

    def check(self, shard: ShardSummary, text_bytes: Int64) -> None:
        """Compare with a shard's index. text_bytes: int64[n], its column. Raises DataError where they differ."""
        known = self.starts(shard)
        if known is not None and not np.array_equal(known, unit_starts(text_bytes, self.unit_documents, self.unit_bytes)):
            raise DataError(f"{self._where} disagrees with the index of {shard.name} about its units; {_REMEDY}")


def unit_starts(sizes: Int64, unit_documents: int, unit_bytes: int) -> Int64:
    """First sample of each unit: as many neighbours as fit in `unit_documents` and `unit_bytes`, at least one. int64[units].

    sizes: int64[n], UTF-8 bytes of the documents' text (so text and token shards have the same units).
    """
    regular = np.arange(0, len(sizes), unit_documents)
    if len(sizes) == 0 or np.add.reduceat(sizes, regular).max() <= unit_bytes:
        return regular
    total = np.concatenate([[0], np.cumsum(sizes)])
    each = np.arange(len(sizes))
    fitting = np.searchsorted(total, total[:-1] + unit_bytes, side="right") - 1
    end = np.maximum(each + 1, np.minimum(each + unit_documents, fitting)).tolist()  # of a unit that begins with each sample
    starts = [0]
    while (following := end[starts[-1]]) < len(sizes):
        starts.append(following)
    return np.array(starts, dtype=np.int64)
