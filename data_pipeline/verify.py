"""`verify` recomputes every checksum and count of a dataset, `inspect` summarises it and shows a few documents.

`verify` reads the tars with Python's tarfile, not with this package's reader.
"""

import hashlib
import io
import os
import tarfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from baton.data_pipeline.dataset import Dataset
from baton.data_pipeline.errors import DataError
from baton.data_pipeline.prepare import describe_totals
from baton.data_pipeline.progress import Progress, shown
from baton.data_pipeline.shards import BLOCK, Index, ShardSummary, tokens_of
from baton.data_pipeline.storage import reason
from baton.data_pipeline.tokenizer import load_tokenizer


@dataclass(frozen=True)
class VerifyReport:
    """What `verify` found whole: shards and documents checked, bytes of tar read."""

    path: str
    shards: int
    documents: int
    tar_bytes: int

    def __str__(self) -> str:
        read = f"{self.documents:,} documents in {self.shards:,} shards ({self.tar_bytes / 1e6:,.1f} MB)"
        return f"{self.path}: {read} verified, every checksum and count agrees"


def verify(
    path: str | os.PathLike[str], *, report: Callable[[str], None] = print, progress: Progress | None = None
) -> VerifyReport:
    """Check everything about a dataset: checksums of shards and indexes, that each tar can be read and holds what its index and
    dataset.json say, that texts are UTF-8, that no document id occurs twice and that the totals add up.

    report: called with one line per problem. progress: called with (tar bytes done, tar bytes in all); none shows it on stdout.
    Raises DataError when there is any problem.
    """
    dataset = Dataset.open(path, check_sizes=False)  # so that every missing file is reported, not only the first
    shards = [shard for split in dataset.shards.values() for shard in split]
    total = sum(shard.tar_bytes for shard in shards)
    problems: list[str] = []
    done = 0
    ids: list[Any] = []
    whole: list[ShardSummary] = []
    with shown(progress, f"verifying {path}") as advance:
        for shard in shards:
            try:
                index = dataset.index(shard)
                ids.append(index.ids)
                problems += _check_shard(dataset, shard, index)
                whole.append(shard)
            except DataError as error:
                problems.append(str(error))
            done += shard.tar_bytes
            advance(done, total)
    everything = np.concatenate(ids) if ids else np.zeros(0, "S32")
    repeated = len(everything) - len(np.unique(everything))
    if repeated and not dataset.foreign:  # sample names of others need not differ between shards
        problems.append(f"{path}: {repeated} document ids occur more than once; prepare the dataset again")
    problems += _check_units(dataset, whole)
    problems += _check_totals(dataset)
    for problem in problems:
        report(problem)
    if problems:
        raise DataError(
            f"{path} has {len(problems)} problem{'s' if len(problems) > 1 else ''}, the first: {problems[0].split('; ')[0]}; "
            "restore the named files from a copy, or prepare the dataset again"
        )
    return VerifyReport(str(path), len(shards), len(everything), total)


def _check_shard(dataset: Dataset, shard: ShardSummary, index: Index) -> list[str]:
    where = dataset.location.url(shard.name)
    try:
        content = dataset.location.read(shard.name)
    except OSError as error:
        return [f"{where} cannot be read ({reason(error)})"]
    found: list[str] = []
    if hashlib.sha256(content).hexdigest() != shard.tar_sha256:
        found.append(f"{where} is damaged (its checksum differs)")
    if int(index.text_bytes.sum()) != shard.text_bytes:
        found.append(f"{where}: the index counts {int(index.text_bytes.sum()):,} bytes of text, dataset.json {shard.text_bytes:,}")
    known = int(index.tokens.sum()) if (index.tokens >= 0).all() else None
    if known != shard.tokens:
        found.append(f"{where}: the index counts {known} tokens, dataset.json {shard.tokens}")
    number = 0
    try:
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as tar:
            for member in tar:
                if dataset.foreign and (number >= len(index) or member.name != _name(dataset, index, number)):
                    continue  # other members, and samples that are left out
                if number >= len(index):
                    return [*found, f"{where} holds more documents than the {len(index)} of its index"]
                handle = tar.extractfile(member)
                payload = handle.read() if handle is not None else b""
                problem = _check_sample(dataset, index, number, member, payload)
                if problem:
                    found.append(f"{where}, document {index.ids[number].decode()}: {problem}")
                number += 1
    except tarfile.TarError as error:
        return [*found, f"{where} is not a readable tar after {number} documents ({error})"]
    if number != len(index):
        found.append(f"{where} ends after {number} of {len(index)} documents")
    return found


def _name(dataset: Dataset, index: Index, i: int) -> str:
    return f"{index.ids[i].decode()}.{dataset.member}"


def _check_sample(dataset: Dataset, index: Index, i: int, member: tarfile.TarInfo, payload: bytes) -> str:
    if member.name != _name(dataset, index, i):
        return f"the tar has {member.name} in its place"
    plain = dataset.foreign or member.offset_data == member.offset + BLOCK
    if member.offset_data - BLOCK != index.offsets[i] or len(payload) != index.sizes[i] or not plain:
        return "it is not where, or not as long as, the index says"
    if zlib.crc32(payload) != index.crc32[i]:
        return "its content is damaged (crc32 differs)"
    try:
        if dataset.content == "text":
            payload = dataset.document(payload)
            payload.decode()
            return "" if len(payload) == index.text_bytes[i] else "the index gives another number of text bytes"
        return "" if len(tokens_of(payload)) == index.tokens[i] else "the index gives another number of tokens"
    except UnicodeDecodeError as error:
        return f"it is not UTF-8 ({error.reason} at byte {error.start})"
    except ValueError as error:
        return f"it holds no token ids ({error})"


def _check_units(dataset: Dataset, shards: list[ShardSummary]) -> list[str]:
    found = []
    try:
        units = dataset.units
    except DataError as error:
        return [str(error)]
    if units is None:
        return []
    for shard in shards:
        try:
            units.check(shard, dataset.text_bytes(shard))
        except DataError as error:
            found.append(str(error))
    return found


def _check_totals(dataset: Dataset) -> list[str]:
    found = []
    for split, total in dataset.totals.items():
        shards = dataset.shards.get(split, [])
        sums = {
            "shards": len(shards),
            "documents": sum(shard.documents for shard in shards),
            "text_bytes": sum(shard.text_bytes for shard in shards),
            "tokens": None if dataset.content == "text" else sum(shard.tokens or 0 for shard in shards),
        }
        found += [
            f"{dataset.location.text}: total {key} of {split} is given as {total.get(key)}, the shards have {value}"
            for key, value in sums.items()
            if total.get(key) != value
        ]
    return found


@dataclass(frozen=True)
class InspectReport:
    """summary: what dataset.json says (content, fingerprints, totals, rejected); documents: (id, text or ids, UTF-8 bytes) of the
    first few."""

    path: str
    summary: dict[str, Any]
    documents: tuple[tuple[str, str, int], ...]

    def __str__(self) -> str:
        rejected = ", ".join(f"{number:,} {reason}" for reason, number in self.summary["rejected"].items()) or "none"
        lines = [f"{self.path}: {self.summary['content']}, fingerprint {self.summary['fingerprint'][:16]}"]
        if self.summary["tokenizer"]:
            lines.append(f"  tokenizer: {self.summary['tokenizer'][:16]}")
        lines += [f"  {split}: {describe_totals(total)}" for split, total in self.summary["totals"].items()]
        lines.append(f"  rejected: {rejected}")
        for document, text, size in self.documents:
            lines += [f"  {document} ({size:,} bytes)", *(f"    | {line}" for line in text.splitlines())]
        return "\n".join(lines)


def inspect(
    path: str | os.PathLike[str],
    *,
    count: int = 3,
    characters: int = 240,
    tokenizer: str | Path | None = None,
    eod_token: str | None = None,
) -> InspectReport:
    """Summarise a dataset and show the first `characters` of the first `count` training documents.

    tokenizer, eod_token: see `load_tokenizer`; the one that made a token dataset, to show text instead of ids. Raises DataError.
    """
    dataset = Dataset.open(path)
    model = load_tokenizer(tokenizer, eod_token) if tokenizer is not None else None
    summary = {
        "content": dataset.content,
        "fingerprint": dataset.fingerprint,
        "tokenizer": dataset.tokenizer_fingerprint,
        "settings": dataset.settings,
        "totals": dataset.totals,
        "rejected": dataset.rejected,
    }
    first = []
    split = dataset.splits[0]
    for (shard, sample, payload), _ in zip(dataset.samples(split, max(1, min(count, 64))), range(count)):
        index = dataset.index(shard)
        if dataset.content == "text":
            text = payload.decode()
        elif model is not None:
            text = model.decode(tokens_of(payload))
        else:
            text = " ".join(map(str, tokens_of(payload)[:characters]))
        text = text if len(text) <= characters else text[:characters] + " ..."
        first.append((index.ids[sample].decode(), text, int(index.text_bytes[sample])))
    return InspectReport(str(path), summary, tuple(first))
