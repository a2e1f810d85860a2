"""A prepared dataset opened for reading: its dataset.json, its indexes, and any run of samples of any shard.

dataset.json is checked when the dataset is opened, indexes are read when first needed, and every payload is checked against the
index before any of it is returned, also a long one that is read in chunks (`LongPayloadReader`).
"""

import hashlib
import json
import os
import zlib
from array import array
from collections.abc import Iterator
from functools import cached_property
from itertools import groupby
from typing import Any

from baton.data_pipeline.errors import DataError, StorageError, is_transient, unreadable
from baton.data_pipeline.files import fingerprint
from baton.data_pipeline.lane_order import Int64
from baton.data_pipeline.remote import Cache
from baton.data_pipeline.shards import (
    BLOCK,
    DATASET,
    EXTENSIONS,
    FORMAT,
    PLAN,
    UNITS,
    VERSION,
    Index,
    ShardSummary,
    UnitIndex,
    file_size,
    index_name,
    is_header_of,
    padded,
    unit_starts,
)
from baton.data_pipeline.storage import Location, ShardStream, reason
from baton.data_pipeline.written_by import PACKAGE, known_fields, other_format

_REMEDY = "restore it from a copy, or prepare the dataset again"
_KEPT_DOCUMENTS = 1 << 22  # index entries in memory, 72 bytes each
_BATCH_BYTES = 1 << 25  # payload bytes that `samples` reads at a time

#: A payload of more bytes is long: streams read it in chunks and never hold it whole.
LONG_BYTES = 1 << 20
#: Bytes of a chunk: large enough to make calls cheap, small enough for hundreds of lanes.
CHUNK_BYTES = 1 << 17


class Dataset:
    """An opened dataset; make one with `Dataset.open`.

    Attributes: `content`, "text" or "tokens"; `fingerprint`, hex sha256 over the shards' names and checksums;
    `tokenizer_fingerprint`, of the tokenizer that made the token ids, None for text; `splits`, the names of the splits that hold
    documents; `totals`, {split: {"shards", "documents", "text_bytes", "tokens"}} (tokens None where unknown); `rejected`,
    {reason: records}; `losses`, the fields of `Losses`, {} of text and where nothing is lost; `shards`, {split: [ShardSummary]}.
    """

    def __init__(self, location: Location, manifest: dict[str, Any]) -> None:
        self.location = location
        self.content: str = manifest["content"]
        #: Extension of the members that hold the documents; "json" is of others' shards, whose text is a field of it.
        self.member: str = manifest.get("member", EXTENSIONS[self.content])
        #: Whether the tars are others' and indexed where they lie (`webdataset_index`).
        self.foreign: bool = "member" in manifest
        self.tokenizer_fingerprint: str | None = manifest["tokenizer"]
        self.settings: dict[str, Any] = manifest["settings"]
        self.totals: dict[str, dict[str, int | None]] = manifest["totals"]
        self.rejected: dict[str, int] = manifest["rejected"]
        self.losses: dict[str, int] = manifest.get("losses", {})
        self.shards: dict[str, list[ShardSummary]] = {}
        for entry in manifest["shards"]:
            summary = ShardSummary(**known_fields(ShardSummary, entry))
            self.shards.setdefault(summary.split, []).append(summary)
        self.splits = tuple(self.shards)
        every = [shard for shards in self.shards.values() for shard in shards]
        self.fingerprint = fingerprint([self.content, self.tokenizer_fingerprint, [_checksums(shard) for shard in every]])
        self._indexes: dict[str, Index] = {}
        #: Size in bytes and hex sha256 of UNITS; None: prepared before there was such a file, so units are computed.
        self._units_written: tuple[int, str] | None = None
        if "units" in manifest:
            self._units_written = int(manifest["units"]["bytes"]), str(manifest["units"]["sha256"])

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, check_sizes: bool = True, cache: Cache | None = None) -> "Dataset":
        """Open the dataset in a folder or at a URL. In a folder, presence and size of every shard and index are checked at once
        (unless `check_sizes` is off). cache: where shards from elsewhere are kept; None: nowhere.

        Raises DataError: no dataset there, an unfinished or damaged one, or one of another format version.
        """
        location = Location(path, cache)
        try:
            manifest = json.loads(location.read(DATASET))
        except OSError as error:
            if is_transient(error):
                raise unreadable(location.url(DATASET), error) from error
            if location.folder is not None and (location.folder / PLAN).exists():
                raise DataError(
                    f"the dataset {path} is unfinished; run the same preparation again, it goes on where it was"
                ) from error
            others = location.folder is not None and any(location.folder.glob("*.tar"))
            hint = "make one of its tars with `baton data index`" if others else "prepare one, or correct the path"
            raise DataError(f"no dataset at {path} ({DATASET}: {reason(error)}); {hint}") from error
        except ValueError as error:
            raise DataError(f"{location.url(DATASET)} is damaged (not JSON: {error}); {_REMEDY}") from error
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            raise DataError(f"{location.url(DATASET)} does not describe a dataset; correct the path")
        if manifest.get("version") != VERSION:
            said = other_format(location.url(DATASET), manifest.get("version"), VERSION, manifest.get(PACKAGE))
            raise DataError(f"{said}, or prepare the dataset again")
        try:
            dataset = cls(location, manifest)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"{location.url(DATASET)} is damaged ({error!r} is missing or unknown); {_REMEDY}") from error
        if check_sizes:
            dataset._check_sizes()
        return dataset

    def _check_sizes(self) -> None:
        folder = self.location.folder
        if folder is None:
            return
        sizes = {} if self._units_written is None else {UNITS: self._units_written[0]}
        for shard in (shard for shards in self.shards.values() for shard in shards):
            sizes |= {shard.name: shard.tar_bytes, index_name(shard.name): shard.index_bytes}
        for name, size in sizes.items():
            found = file_size(folder / name)
            if found is None:
                raise DataError(f"{folder / name} is missing; {_REMEDY}")
            if found != size:
                state = "truncated" if found < size else "longer than written"
                raise DataError(f"{folder / name} is {state} ({found:,} bytes, not {size:,}); {_REMEDY}")

    def require(self, split: str) -> list[ShardSummary]:
        """The shards of a split. Raises DataError when it has none."""
        if split not in self.shards:
            hint = "prepare with a larger validation_fraction" if split == "validation" else f"it has {', '.join(self.splits)}"
            raise DataError(f"the dataset {self.location.text} has no documents in its split {split!r}; {hint}")
        return self.shards[split]

    @property
    def place(self) -> str:
        """What `open` finds it by, from any working directory."""
        return self.location.text if self.location.folder is None else str(self.location.folder)

    def prefix_fingerprint(self, split: str, shards: int | None = None) -> str:
        """Hex sha256 of the content of a split's first shards (None: all), by their names and checksums."""
        chosen = self.require(split)[:shards]
        return fingerprint([self.content, self.tokenizer_fingerprint, [_checksums(shard) for shard in chosen]])

    def index(self, shard: ShardSummary) -> Index:
        """A shard's index; what was read lately is kept. Raises DataError when it is missing or not as dataset.json says."""
        index = self._indexes.pop(shard.name, None)
        if index is not None:
            self._indexes[shard.name] = index  # the last one used is the last one
            return index
        index = self._indexes[shard.name] = self._read_index(shard)
        while len(self._indexes) > 1 and sum(map(len, self._indexes.values())) > _KEPT_DOCUMENTS:
            del self._indexes[next(iter(self._indexes))]
        return index

    def _read_index(self, shard: ShardSummary) -> Index:
        name = index_name(shard.name)
        content = self._checked(name, shard.index_sha256, "the index ")
        index = Index.from_bytes(content, self.location.url(name))
        if len(index) != shard.documents:
            raise DataError(f"the index {self.location.url(name)} lists {len(index)} of {shard.documents} documents; {_REMEDY}")
        repeated = len(index) - len(set(index.ids.tolist()))
        if repeated:
            raise DataError(f"the index {self.location.url(name)} has {repeated} document ids twice; prepare the dataset again")
        if "units" in self.__dict__ and self.units is not None:  # what has been read of it may have been used
            self.units.check(shard, index.text_bytes)
        return index

    def _checked(self, name: str, sha256: str, what: str = "") -> bytes:
        """A whole small file. Raises DataError when it cannot be read or its checksum differs."""
        try:
            content = self.location.read(name)
        except OSError as error:
            if is_transient(error):
                raise unreadable(self.location.url(name), error) from error
            raise DataError(f"cannot read {self.location.url(name)}: {reason(error)}; {_REMEDY}") from error
        if hashlib.sha256(content).hexdigest() != sha256:
            raise DataError(f"{what}{self.location.url(name)} is damaged (its checksum differs); {_REMEDY}")
        return content

    @cached_property
    def units(self) -> UnitIndex | None:
        """Where units of the default settings begin; None for a dataset that was prepared before this file existed. Once it is
        read, every index read is compared with it. Raises DataError: missing or damaged."""
        if self._units_written is None:
            return None
        return UnitIndex.from_bytes(self._checked(UNITS, self._units_written[1]), self.location.url(UNITS))

    def unit_starts(self, shard: ShardSummary, unit_documents: int, unit_bytes: int) -> Int64:
        """First sample of each unit of a shard, int64[units]: from `units` where it has these settings and the shard, else computed
        from the index. Raises DataError."""
        known = None
        if self.units is not None and (self.units.unit_documents, self.units.unit_bytes) == (unit_documents, unit_bytes):
            known = self.units.starts(shard)
        return unit_starts(self.text_bytes(shard), unit_documents, unit_bytes) if known is None else known

    def text_bytes(self, shard: ShardSummary) -> Int64:
        """UTF-8 bytes of a shard's documents, int64[n]: all that the order of units needs. Of an index in a folder only this column
        is read, checked against its own checksum; the whole index is checked against dataset.json when a sample of the shard is
        read."""
        folder = self.location.folder
        if folder is None or shard.name in self._indexes:
            return self.index(shard).text_bytes
        sizes = Index.column(folder / index_name(shard.name), "text_bytes")
        if len(sizes) != shard.documents or int(sizes.sum()) != shard.text_bytes:
            raise DataError(f"the index {folder / index_name(shard.name)} is not what {DATASET} says; {_REMEDY}")
        return sizes

    def read(self, shard: ShardSummary, first: int, count: int) -> list[bytes]:
        """Payloads (UTF-8 text, or .npy token ids) of samples `first` to `first + count - 1` of a shard, in the order of the tar.

        One sequential read; a stream that cannot seek is read from its start. Raises DataError, naming the shard, the document and
        what to do, when a sample is missing or damaged.
        """
        with ShardStream(self.location, shard.name) as stream:
            return self._payloads(stream, shard, first, count)

    def read_short(self, shard: ShardSummary, first: int, count: int) -> list[bytes | None]:
        """As `read`, with None in place of long payloads (more than LONG_BYTES). See `LongPayloadReader`."""
        most = LONG_BYTES if self.member != "json" else 1 << 62  # a text inside JSON has no place of its own in the tar
        long = (self.index(shard).sizes[first : first + count] > most).tolist()
        payloads: list[bytes | None] = []
        with ShardStream(self.location, shard.name) as stream:
            for is_long, samples in groupby(long):
                run = len(list(samples))
                payloads += [None] * run if is_long else self._payloads(stream, shard, first + len(payloads), run)
        return payloads

    def _payloads(self, stream: ShardStream, shard: ShardSummary, first: int, count: int) -> list[bytes]:
        index, among, extension = self.index(shard), slice(first, first + count), f".{self.member}".encode()
        columns = (column[among].tolist() for column in (index.offsets, index.sizes, index.crc32, index.ids))
        offsets, sizes, crcs, ids = columns
        begin, end = offsets[0], offsets[-1] + BLOCK + padded(sizes[-1])
        try:
            block = stream.read(begin, end - begin)
        except (OSError, ValueError) as error:
            raise self.unreadable(shard, first, error) from error
        payloads: list[bytes] = []
        view = memoryview(block)
        for i, offset, size, crc, name in zip(range(first, first + count), offsets, sizes, crcs, ids):
            at = offset - begin
            if at + BLOCK + size > len(block):
                raise self.truncated(shard, i)
            payload = bytes(view[at + BLOCK : at + BLOCK + size])
            if not is_header_of(block, name + extension, size, at) or zlib.crc32(payload) != crc:
                raise self.damaged(shard, i)
            payloads.append(self.document(payload))
        return payloads

    def document(self, payload: bytes) -> bytes:
        """The document in a member: UTF-8 text or .npy token ids."""
        if self.member != "json":
            return payload
        text: str = json.loads(payload)[self.settings["text_field"]]
        return text.encode()

    def samples(self, split: str, batch: int = 64) -> Iterator[tuple[ShardSummary, int, bytes]]:
        """(shard, sample number, payload) of every document of a split, in index order, at most `batch` read at a time, fewer when
        they are large. Raises DataError."""
        for shard, first, count in self._batches(split, batch):
            for i, payload in enumerate(self.read(shard, first, count)):
                yield shard, first + i, payload

    def samples_short(self, split: str) -> Iterator[tuple[ShardSummary, int, bytes | None]]:
        """As `samples`, with None in place of long payloads."""
        for shard, first, count in self._batches(split, 64):
            for i, payload in enumerate(self.read_short(shard, first, count)):
                yield shard, first + i, payload

    def _batches(self, split: str, batch: int) -> Iterator[tuple[ShardSummary, int, int]]:
        for shard in self.require(split):
            firsts = unit_starts(self.index(shard).sizes, batch, _BATCH_BYTES).tolist()
            for first, end in zip(firsts, [*firsts[1:], shard.documents]):
                yield shard, first, end - first

    def named(self, shard: ShardSummary, sample: int) -> str:
        """A sample's name in error messages: "document ID of PATH"."""
        return f"document {self.index(shard).ids[sample].decode()} of {self.location.url(shard.name)}"

    def is_header(self, shard: ShardSummary, sample: int, block: bytes) -> bool:
        """Whether 512 bytes are the tar header of this sample."""
        index = self.index(shard)
        return is_header_of(block, f"{index.ids[sample].decode()}.{self.member}".encode(), int(index.sizes[sample]))

    def unreadable(self, shard: ShardSummary, sample: int, error: Exception) -> DataError | StorageError:
        """The error for a shard that cannot be read."""
        if is_transient(error):
            return unreadable(self.location.url(shard.name), error)
        return DataError(f"cannot read {self.named(shard, sample)}: {reason(error)}; check that it can be reached, or {_REMEDY}")

    def truncated(self, shard: ShardSummary, sample: int) -> DataError:
        """The error for a shard that ends before this sample does."""
        url, document = self.location.url(shard.name), self.index(shard).ids[sample].decode()
        return DataError(f"{url} ends before document {document} does; it is truncated: {_REMEDY}")

    def damaged(self, shard: ShardSummary, sample: int) -> DataError:
        """The error for a sample that differs from its index."""
        return DataError(f"{self.named(shard, sample)} is damaged (not what its index says); {_REMEDY}")


def _checksums(shard: ShardSummary) -> list[str]:
    return [shard.name, shard.tar_sha256, shard.index_sha256]


class LongPayloadReader:
    """Reads one payload of a shard in chunks of CHUNK_BYTES, so that memory does not grow with it.

    The payload is read twice: once to compare it with the index, so that nothing of a damaged document is returned, also when
    reading begins in its middle; then chunk by chunk, each compared with the checksum of the first reading. Files in a folder are
    sought in. A stream that cannot seek is transferred up to the document for each reading, then kept open (one stream for every
    lane inside a long document); a stream that breaks off, as a server may after hours, is opened again at the same place.

    head: the payload's first bytes. Raises DataError, naming the shard and the document, when it is missing or damaged.
    """

    def __init__(self, dataset: Dataset, shard: ShardSummary, sample: int) -> None:
        self._dataset, self._shard, self._sample = dataset, shard, sample
        index = dataset.index(shard)
        self._begin, self._size = int(index.offsets[sample]) + BLOCK, int(index.sizes[sample])
        self._checksums = array("I", [0])  # crc32 of the payload up to each piece
        self.head = b""
        with ShardStream(dataset.location, shard.name) as stream:
            header = self._read(stream, self._begin - BLOCK, BLOCK)
            for number in range(-(-self._size // CHUNK_BYTES)):
                block = self._chunk(stream, number)
                self.head = self.head or block[: 8 * BLOCK]
                self._checksums.append(zlib.crc32(block, self._checksums[-1]))
        if not dataset.is_header(shard, sample, header) or self._checksums[-1] != index.crc32[sample]:
            raise dataset.damaged(shard, sample)

    def chunks(self, begin: int = 0) -> Iterator[bytes]:
        """The payload from byte `begin` on. Raises DataError."""
        with ShardStream(self._dataset.location, self._shard.name) as stream:
            for number in range(begin // CHUNK_BYTES, len(self._checksums) - 1):
                block = self._chunk(stream, number)
                if zlib.crc32(block, self._checksums[number]) != self._checksums[number + 1]:
                    raise self._dataset.damaged(self._shard, self._sample)
                yield block[max(0, begin - number * CHUNK_BYTES) :]

    def _chunk(self, stream: ShardStream, number: int) -> bytes:
        start = number * CHUNK_BYTES
        return self._read(stream, self._begin + start, min(CHUNK_BYTES, self._size - start))

    def _read(self, stream: ShardStream, begin: int, size: int) -> bytes:
        try:
            block = stream.read(begin, size)
        except (OSError, ValueError) as error:
            raise self._dataset.unreadable(self._shard, self._sample, error) from error
        if len(block) < size:
            raise self._dataset.truncated(self._shard, self._sample)
        return block
