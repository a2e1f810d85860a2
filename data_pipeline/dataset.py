"""A prepared dataset, opened for reading: its dataset.json, its indexes, and any run of samples out of any shard.

The one thing to know: dataset.json is checked at once, indexes are read when first needed, and a shard is read through the
webdataset library's `gopen`, so that anything it opens (a folder, http, a pipe) is a dataset; every payload is checked against the
index.
"""

import contextlib
import hashlib
import json
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlparse
from urllib.request import url2pathname

from baton.data_pipeline.errors import DataError
from baton.data_pipeline.files import fingerprint
from baton.data_pipeline.shards import (
    BLOCK,
    DATASET,
    EXTENSIONS,
    FORMAT,
    PLAN,
    VERSION,
    Index,
    ShardSummary,
    file_size,
    index_name,
    is_header_of,
    padded,
)

_REMEDY = "restore it from a copy, or prepare the dataset again"
_SKIP_BYTES = 1 << 22


class Location:
    """A folder, or the URL of one. Of a URL, `{}` is replaced by the file's name; without `{}` the name is appended after a
    slash."""

    def __init__(self, place: str | os.PathLike[str]) -> None:
        self.text = os.fspath(place)
        parsed = urlparse(self.text)
        self.folder: Path | None = None
        if parsed.scheme == "file":
            self.folder = Path(url2pathname(parsed.path))
        elif parsed.scheme != "pipe" and "://" not in self.text:
            self.folder = Path(self.text).absolute()

    def url(self, name: str) -> str:
        """Where the file `name` is: what gopen is given."""
        if self.folder is not None:
            return str(self.folder / name)
        return self.text.replace("{}", name) if "{}" in self.text else f"{self.text.rstrip('/')}/{name}"

    def open(self, name: str) -> BinaryIO:
        """A binary stream of the file `name`. Raises OSError."""
        if self.folder is not None and not name.endswith(".tar"):
            return open(self.folder / name, "rb")  # small files need no library (webdataset imports torch)
        from webdataset.gopen import gopen

        stream: BinaryIO = gopen(self.url(name), "rb")
        return stream

    def read(self, name: str) -> bytes:
        """The whole file `name`. Raises OSError."""
        with self.open(name) as stream:
            return stream.read()


class Dataset:
    """An opened dataset; make one with `Dataset.open`.

    Attributes: `content`, "text" or "tokens"; `fingerprint`, hex sha256 over the shards' names and checksums;
    `tokenizer_fingerprint`, of the tokenizer that made the token ids, None for text; `splits`, the names of the splits that hold
    documents; `totals`, {split: {"shards", "documents", "text_bytes", "tokens"}} (tokens None where unknown); `rejected`,
    {reason: records}; `shards`, {split: [ShardSummary]}.
    """

    def __init__(self, location: Location, manifest: dict[str, Any]) -> None:
        self.location = location
        self.content: str = manifest["content"]
        self.tokenizer_fingerprint: str | None = manifest["tokenizer"]
        self.settings: dict[str, Any] = manifest["settings"]
        self.totals: dict[str, dict[str, int | None]] = manifest["totals"]
        self.rejected: dict[str, int] = manifest["rejected"]
        self.shards: dict[str, list[ShardSummary]] = {}
        for entry in manifest["shards"]:
            summary = ShardSummary(**entry)
            self.shards.setdefault(summary.split, []).append(summary)
        self.splits = tuple(self.shards)
        checksums = [[shard.name, shard.tar_sha256, shard.index_sha256] for shards in self.shards.values() for shard in shards]
        self.fingerprint = fingerprint([self.content, self.tokenizer_fingerprint, checksums])
        self._indexes: dict[str, Index] = {}

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, check_sizes: bool = True) -> "Dataset":
        """Open the dataset in a folder or at a URL. In a folder, every shard's and index's presence and size are checked right
        away (unless `check_sizes` is off).

        Raises DataError: no dataset there, an unfinished or damaged one, or one of another format version.
        """
        location = Location(path)
        try:
            manifest = json.loads(location.read(DATASET))
        except OSError as error:
            if location.folder is not None and (location.folder / PLAN).exists():
                raise DataError(
                    f"the dataset {path} is unfinished; run the same preparation again, it goes on where it was"
                ) from error
            raise DataError(f"no dataset at {path} ({DATASET}: {reason(error)}); prepare one, or correct the path") from error
        except ValueError as error:
            raise DataError(f"{location.url(DATASET)} is damaged (not JSON: {error}); {_REMEDY}") from error
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            raise DataError(f"{location.url(DATASET)} does not describe a dataset; correct the path")
        if manifest.get("version") != VERSION:
            raise DataError(f"{path} has dataset format {manifest.get('version')}, this program reads {VERSION}; prepare it again")
        try:
            dataset = cls(location, manifest)
        except (KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{location.url(DATASET)} is damaged ({error!r} is missing or unknown); {_REMEDY}") from error
        if check_sizes:
            dataset._check_sizes()
        return dataset

    def _check_sizes(self) -> None:
        folder = self.location.folder
        if folder is None:
            return
        for shard in (shard for shards in self.shards.values() for shard in shards):
            for name, size in ((shard.name, shard.tar_bytes), (index_name(shard.name), shard.index_bytes)):
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

    def index(self, shard: ShardSummary) -> Index:
        """A shard's index, read once and kept. Raises DataError when it is missing or not as dataset.json says."""
        if shard.name not in self._indexes:
            name = index_name(shard.name)
            try:
                content = self.location.read(name)
            except OSError as error:
                raise DataError(f"cannot read {self.location.url(name)}: {reason(error)}; {_REMEDY}") from error
            if hashlib.sha256(content).hexdigest() != shard.index_sha256:
                raise DataError(f"the index {self.location.url(name)} is damaged (its checksum differs); {_REMEDY}")
            index = Index.from_bytes(content, self.location.url(name))
            if len(index) != shard.documents:
                raise DataError(f"the index {self.location.url(name)} lists {len(index)} of {shard.documents} documents; {_REMEDY}")
            self._indexes[shard.name] = index
        return self._indexes[shard.name]

    def read(self, shard: ShardSummary, first: int, count: int) -> list[bytes]:
        """Payloads (UTF-8 text, or .npy token ids) of samples `first` to `first + count - 1` of a shard, in the order of the tar.

        One sequential read; a stream that cannot seek is read from its start. Raises DataError naming the shard, the
        document and what to do when a sample is missing or damaged.
        """
        index = self.index(shard)
        url = self.location.url(shard.name)
        begin = int(index.offsets[first])
        last = first + count - 1
        end = int(index.offsets[last]) + BLOCK + padded(int(index.sizes[last]))
        try:
            with contextlib.ExitStack() as stack:
                stream = self.location.open(shard.name)
                stack.callback(_close, stream)
                block = _read_range(stream, begin, end - begin)
        except (OSError, ValueError) as error:
            document = index.ids[first].decode()
            raise DataError(
                f"cannot read document {document} of {url}: {reason(error)}; check that it can be reached, or {_REMEDY}"
            ) from error
        payloads: list[bytes] = []
        extension = EXTENSIONS[self.content]
        view = memoryview(block)
        for i in range(first, first + count):
            document, size = index.ids[i].decode(), int(index.sizes[i])
            at = int(index.offsets[i]) - begin
            if at + BLOCK + size > len(block):
                raise DataError(f"{url} ends before document {document} does; it is truncated: {_REMEDY}")
            payload = bytes(view[at + BLOCK : at + BLOCK + size])
            if not is_header_of(block[at : at + BLOCK], f"{document}.{extension}", size) or zlib.crc32(payload) != index.crc32[i]:
                raise DataError(f"document {document} of {url} is damaged (not what its index says); {_REMEDY}")
            payloads.append(payload)
        return payloads

    def samples(self, split: str, batch: int = 64) -> Iterator[tuple[ShardSummary, int, bytes]]:
        """(shard, sample number, payload) of every document of a split, in index order, `batch` read at a time. Raises
        DataError."""
        for shard in self.require(split):
            for first in range(0, shard.documents, batch):
                payloads = self.read(shard, first, min(batch, shard.documents - first))
                for i, payload in enumerate(payloads):
                    yield shard, first + i, payload


def _read_range(stream: BinaryIO, begin: int, count: int) -> bytes:
    """`count` bytes from `begin` on; fewer where the stream ends early. Raises OSError, also when what feeds a pipe has failed."""
    try:
        stream.seek(begin)
        left = 0
    except (AttributeError, OSError):  # a pipe: read up to there
        left = begin
    while left:
        block = stream.read(min(left, _SKIP_BYTES))
        if not block:
            break
        left -= len(block)
    blocks: list[bytes] = []
    while count and not left:
        block = stream.read(count)  # pipes may give less than asked for
        if not block:
            break
        blocks.append(block)
        count -= len(block)
    if count:
        stream.close()  # of a pipe, this waits for its command and raises when that failed
    return blocks[0] if len(blocks) == 1 else b"".join(blocks)


def reason(error: Exception) -> str:
    """What went wrong, without the whole command line that webdataset puts into its errors."""
    status = re.search(r": exit (\d+) \(read\)", str(error))
    if status:
        return f"its transfer failed with exit status {status[1]}"
    return getattr(error, "strerror", None) or str(error)


def _close(stream: BinaryIO) -> None:
    """Leaving a pipe early makes its command fail; what was read is checked against the index anyway."""
    with contextlib.suppress(OSError):
        stream.close()
