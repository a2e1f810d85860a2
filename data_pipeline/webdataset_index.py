"""WebDataset shards that others have written, read where they lie: `index_shards` makes a sidecar index beside each tar, once.

A sample's document is its member .txt, the text field of its member .json, or the token ids of its member .npy; the first sample
decides which. Its payload stays in the tar: the index has its place, length and checksum, and dataset.json what it is. Samples that
have no such document are left out and listed in rejected.jsonl.
"""

import fnmatch
import hashlib
import json
import os
import tarfile
import zlib
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from baton.data_pipeline.archive import open_tar
from baton.data_pipeline.compressed import DamagedError
from baton.data_pipeline.errors import DataError, InputError, error_reason, is_transient, unreadable
from baton.data_pipeline.files import write_atomically, write_json
from baton.data_pipeline.input_files import Rejected
from baton.data_pipeline.prepare import describe_totals, unit_index_bytes
from baton.data_pipeline.progress import Progress, shown
from baton.data_pipeline.records import accept, parse
from baton.data_pipeline.shards import (
    BLOCK,
    DATASET,
    FORMAT,
    REJECTED,
    UNITS,
    VERSION,
    Index,
    ShardSummary,
    index_name,
    is_header_of,
    tokens_of,
)
from baton.data_pipeline.tokenizer import Tokenizer, load_tokenizer
from baton.data_pipeline.written_by import PACKAGE, own_version

MEMBERS = ("txt", "json", "npy")


@dataclass(frozen=True)
class IndexReport:
    """What `index_shards` made. totals: as in `PrepareReport`; rejected: {reason: samples}."""

    path: str
    member: str
    totals: dict[str, dict[str, int | None]]
    rejected: dict[str, int]

    def __str__(self) -> str:
        lines = [f"{self.path}: members .{self.member} of WebDataset shards, read where they lie"]
        lines += [f"  {split}: {describe_totals(total)}" for split, total in self.totals.items()]
        reasons = ", ".join(f"{number:,} {reason}" for reason, number in self.rejected.items())
        lines.append(f"  rejected: {reasons}; all are listed in {Path(self.path, REJECTED)}" if reasons else "  rejected: none")
        return "\n".join(lines)


def index_shards(
    folder: str | os.PathLike[str],
    *,
    validation_shards: str | None = None,
    text_field: str = "text",
    tokenizer: str | os.PathLike[str] | None = None,
    eod_token: str | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> IndexReport:
    """Make a folder of WebDataset tars a dataset without copying it: an index beside each tar, units.npz and dataset.json.

    validation_shards: pattern of the names of tars that are held out (none: no tar is). text_field: of .json members. tokenizer,
    eod_token: see `load_tokenizer`; the one that made the ids of .npy members, which are uint16 or uint32 without an EOD token at
    their end. workers: processes (none: the usable cores). Raises DataError: no tars, a damaged one, a folder that is a dataset
    already, ids that need `prepare(ids=True)`.
    """
    folder = Path(folder)
    if (folder / DATASET).exists():
        raise DataError(f"{folder} is a dataset already; delete its {DATASET} to index its tars anew")
    tars = sorted(folder.glob("*.tar"))
    if not tars:
        raise DataError(f"{folder} has no .tar; name the folder of WebDataset shards, decompressed")
    loaded = load_tokenizer(tokenizer, eod_token) if tokenizer is not None else None
    member = _member(tars[0], text_field)
    if (member == "npy") != (loaded is not None):
        need = "token ids in .npy members need the tokenizer that made them: --tokenizer"
        raise DataError(f"{tars[0]}: {need if loaded is None else f'its samples have .{member}, not .npy: leave out --tokenizer'}")
    work = partial(_index, member=member, text_field=text_field, tokenizer=None if loaded is None else loaded.source)
    sizes, done = [path.stat().st_size for path in tars], 0
    found: list[tuple[ShardSummary, Index, list[Rejected]]] = []
    processes = min(workers or len(os.sched_getaffinity(0)), len(tars))
    with shown(progress, f"indexing {folder}") as advance:
        if processes == 1:
            for path, size in zip(tars, sizes):
                found.append(work(path))
                done += size
                advance(done, sum(sizes))
        else:
            with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
                for each, size in zip(pool.map(work, tars), sizes):
                    found.append(each)
                    done += size
                    advance(done, sum(sizes))
    return _write(folder, found, member, text_field, validation_shards, loaded)


def _write(
    folder: Path,
    found: list[tuple[ShardSummary, Index, list[Rejected]]],
    member: str,
    text_field: str,
    validation_shards: str | None,
    tokenizer: Tokenizer | None,
) -> IndexReport:
    rejected = [asdict(entry) for _, _, entries in found for entry in entries]
    counts = dict(sorted(Counter(str(entry["reason"]) for entry in rejected).items()))
    shards: list[dict[str, Any]] = []
    summaries: list[ShardSummary] = []
    kept = [(summary, index) for summary, index, _ in found if len(index)]
    held = {s.name for s, _ in kept if validation_shards is not None and fnmatch.fnmatchcase(s.name, validation_shards)}
    if len(held) == len(kept):
        raise DataError(f"no document for training in the tars of {folder} (rejected: {counts or 'none'}); see --validation-shards")
    for summary, index in kept:
        path = folder / index_name(summary.name)
        index.save(path)
        content = path.read_bytes()
        about = {"index_bytes": len(content), "index_sha256": hashlib.sha256(content).hexdigest()}
        shards.append({**asdict(summary), **about, "split": "validation" if summary.name in held else "train"})
        summaries.append(ShardSummary(**shards[-1]))
    totals: dict[str, dict[str, int | None]] = {}
    for split in ("train", "validation"):
        chosen = [summary for summary in summaries if summary.split == split]
        totals[split] = {
            "shards": len(chosen),
            "documents": sum(summary.documents for summary in chosen),
            "text_bytes": sum(summary.text_bytes for summary in chosen),
            "tokens": None if tokenizer is None else sum(summary.tokens or 0 for summary in chosen),
        }
    write_atomically(folder / REJECTED, "".join(json.dumps(entry) + "\n" for entry in rejected).encode())
    units = unit_index_bytes(folder, summaries)
    write_atomically(folder / UNITS, units)
    dataset = {
        "format": FORMAT,
        "version": VERSION,
        PACKAGE: own_version(),
        "content": "text" if tokenizer is None else "tokens",
        "member": member,
        "tokenizer": None if tokenizer is None else tokenizer.fingerprint,
        "settings": {"text_field": text_field, "validation_shards": validation_shards},
        "shards": shards,
        "totals": totals,
        "rejected": counts,
        "units": {"bytes": len(units), "sha256": hashlib.sha256(units).hexdigest()},
    }
    write_json(folder / DATASET, dataset)
    return IndexReport(str(folder), member, totals, counts)


def _member(path: Path, text_field: str) -> str:
    """Which member holds the documents: what the first sample of a tar has."""
    with open(path, "rb") as file:
        try:
            key = None
            extensions: set[str] = set()
            with open_tar(file, "r:") as archive:
                for member in archive:
                    stem, extension = _split(member.name)
                    if member.isfile() and key is not None and stem != key:
                        break
                    if member.isfile():
                        key = stem
                        extensions.add(extension)
        except (tarfile.TarError, DamagedError) as error:
            raise _damaged(path, error) from error
    chosen = next((each for each in MEMBERS if each in extensions), None)
    if chosen is None:
        has = ", ".join(f".{each}" for each in sorted(extensions)) or "no member"
        raise DataError(
            f"the first sample of {path} has no .txt, .json or .npy but {has}; `baton data prepare` reads other formats"
        )
    return chosen


def _split(name: str) -> tuple[str, str]:
    """A member's sample and extension: the name up to the first dot of its last part, and what follows."""
    folder, slash, last = name.rpartition("/")
    stem, _, extension = last.partition(".")
    return folder + slash + stem, extension


def _damaged(path: Path, error: Exception) -> InputError:
    return InputError(path.name, str(path), f"it is no sound tar ({error})")


def _index(
    path: Path, *, member: str, text_field: str, tokenizer: tuple[str, str | None] | None
) -> tuple[ShardSummary, Index, list[Rejected]]:
    """The summary (without its index's size and checksum), index and rejected samples of a tar."""
    loaded = None if tokenizer is None else load_tokenizer(*tokenizer)
    rows: list[tuple[bytes, int, int, int, int, int]] = []
    rejected: list[Rejected] = []
    try:
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            with open_tar(file, "r:") as archive:
                for entry in archive:
                    archive.members = []  # type: ignore[attr-defined]  # it would keep every header of a long archive
                    stem, extension = _split(entry.name)
                    if not entry.isfile() or extension != member:
                        continue
                    reader = archive.extractfile(entry)
                    assert reader is not None
                    payload = reader.read()
                    found = _document(path, entry, payload, member, text_field, loaded)
                    if isinstance(found, Rejected):
                        rejected.append(found)
                        continue
                    header = entry.offset_data - BLOCK
                    if not _is_plain(file, header, f"{stem}.{member}".encode(), len(payload)):
                        raise DataError(
                            f"{path}: the member {entry.name!r} has a name or size that an index cannot hold; `baton data prepare` "
                            f"copies it"
                        )
                    rows.append((stem.encode(), header, len(payload), *found, zlib.crc32(payload)))
    except (tarfile.TarError, DamagedError) as error:
        raise _damaged(path, error) from error
    except OSError as error:
        if is_transient(error):
            raise unreadable(path, error) from error
        raise DataError(f"cannot read {path}: {error_reason(error)}; make it readable") from error
    width = max([32, *(len(row[0]) for row in rows)])
    kinds = {"ids": f"S{width}", "offsets": "<i8", "sizes": "<i8", "text_bytes": "<i8", "tokens": "<i8", "crc32": "<u4"}
    columns = zip(*rows) if rows else [()] * len(kinds)
    index = Index(**{name: np.array(column, kind) for (name, kind), column in zip(kinds.items(), columns)})
    tokens = int(index.tokens.sum()) if loaded is not None else None
    text_bytes = int(index.text_bytes.sum())
    return ShardSummary(path.name, "train", len(index), text_bytes, tokens, size, digest, 0, ""), index, rejected


def _is_plain(file: BinaryIO, at: int, name: bytes, size: int) -> bool:
    before = file.tell()
    file.seek(at)
    block = file.read(BLOCK)
    file.seek(before)
    return is_header_of(block, name, size)


def _document(
    path: Path, entry: tarfile.TarInfo, payload: bytes, member: str, text_field: str, tokenizer: Tokenizer | None
) -> tuple[int, int] | Rejected:
    """The bytes of a sample's text and its tokens (-1: not known), or why it is no document."""
    if tokenizer is None:
        made = accept(path.name, entry.offset, payload) if member == "txt" else parse(path.name, entry.offset, payload, text_field)
        return made if isinstance(made, Rejected) else (len(made.text), -1)
    try:
        ids = tokens_of(payload)
    except ValueError as error:
        raise DataError(
            f"{path}: {entry.name} holds no uint16 or uint32 ids ({error}); `baton data prepare --ids` reads and copies other types"
        ) from error
    if not len(ids):
        return Rejected(path.name, entry.offset, "empty", "no token")
    if not 0 <= int(ids.min()) <= int(ids.max()) < tokenizer.vocab_size:
        raise DataError(
            f"{path}: {entry.name} has the id {ids.max()}, and the tokenizer has 0 <= id < {tokenizer.vocab_size}; name the one "
            f"that made the ids"
        )
    if ids[-1] == tokenizer.eod_id:
        raise DataError(
            f"{path}: {entry.name} ends with the EOD token, which would stand there twice; `baton data prepare --ids` drops it"
        )
    return len(tokenizer.decode(ids, errors="replace").encode()), len(ids)
