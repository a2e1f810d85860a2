"""Text in, a dataset out: a folder of tar shards with indexes and one dataset.json.

The one thing to know: the inputs are dealt to *tasks* by a pure function of their names, sizes and the settings; a task writes its
own shards and then its record, so tasks run in any order, on any number of processes, and are not repeated after a kill. The shards
get their final names, and dataset.json appears, only when every task has its record.
"""

import hashlib
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from baton.data_pipeline.config import PrepareConfig, ShardsConfig
from baton.data_pipeline.dataset import Dataset
from baton.data_pipeline.errors import DataError
from baton.data_pipeline.files import fingerprint, read_json, write_atomically, write_json
from baton.data_pipeline.lanes import unit_starts
from baton.data_pipeline.lock import LockHeldError, exclusive
from baton.data_pipeline.progress import Progress, shown
from baton.data_pipeline.shards import (
    DATASET,
    FORMAT,
    PLAN,
    REJECTED,
    VERSION,
    Index,
    ShardSummary,
    ShardWriter,
    file_size,
    index_name,
)
from baton.data_pipeline.sources import Piece, Source, find_sources, split_source
from baton.data_pipeline.tasks import Task, TaskRecord, record_path, run_tasks
from baton.data_pipeline.tokenizer import Tokenizer
from baton.data_pipeline.units import UNITS, UnitTable

PARTS = ".parts"  # finished tasks, until all are


@dataclass(frozen=True)
class PrepareReport:
    """What `prepare` made. totals: {split: {"shards", "documents", "text_bytes", "tokens"}}; rejected: {reason: records}."""

    path: str
    content: str
    totals: dict[str, dict[str, int | None]]
    rejected: dict[str, int]
    examples: tuple[str, ...]
    sources: int
    tasks_kept: int
    seconds: float

    def __str__(self) -> str:
        lines = [f"{self.path}: {self.content} of {self.sources:,} input files, {self.seconds:.1f} s"]
        if self.tasks_kept:
            lines[0] += f" ({self.tasks_kept} finished parts were verified and kept)"
        lines += [f"  {split}: {describe_totals(total)}" for split, total in self.totals.items()]
        count = sum(self.rejected.values())
        if count:
            reasons = ", ".join(f"{number:,} {reason}" for reason, number in sorted(self.rejected.items()))
            lines.append(f"  rejected: {count:,} ({reasons}); all are listed in {Path(self.path, REJECTED)}")
            lines += [f"    {example}" for example in self.examples]
        else:
            lines.append("  rejected: none")
        return "\n".join(lines)


def describe_totals(total: dict[str, Any]) -> str:
    """One line about a split's totals."""
    tokens = "" if total["tokens"] is None else f", {total['tokens']:,} tokens"
    return f"{total['documents']:,} documents in {total['shards']:,} shards, {total['text_bytes'] / 1e6:,.1f} MB of text{tokens}"


def prepare(
    inputs: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    shard_bytes: int = PrepareConfig.model_fields["shard_bytes"].default,
    validation_fraction: float = PrepareConfig.model_fields["validation_fraction"].default,
    tokenizer: str | os.PathLike[str] | None = None,
    workers: int | None = None,
    text_field: str = PrepareConfig.model_fields["text_field"].default,
    include: Sequence[str] = PrepareConfig.model_fields["include"].default,
    exclude: Sequence[str] = PrepareConfig.model_fields["exclude"].default,
    progress: Progress | None = None,
) -> PrepareReport:
    """Turn text files, .jsonl(.gz/.zst) and .parquet into the dataset folder `out`; run again after a kill, it goes on where it
    was.

    inputs: files, or folders that are searched for `include` without `exclude` (see PrepareConfig, also for the other settings).
    tokenizer: path of a .model file: the shards then hold token ids instead of text.
    workers: processes (none: one per usable core; 1: this process). More than one needs the usual `if __name__ == "__main__"` in a
    script.
    progress: called with (input bytes done, input bytes in all); none shows it on stdout.
    Raises DataError: unusable inputs, no document at all, or an `out` that holds something else (what differs is named). Records
    that are no documents are counted in the report and listed in rejected.jsonl.
    """
    began = time.monotonic()
    try:
        settings = PrepareConfig(
            shard_bytes=shard_bytes,
            validation_fraction=validation_fraction,
            text_field=text_field,
            include=tuple(include),
            exclude=tuple(exclude),
            workers=workers,
        )
    except ValidationError as error:
        problem = error.errors()[0]
        raise DataError(f"{problem['loc'][0]} {problem['input']!r}: {problem['msg']}; correct it") from error
    vocabulary = Tokenizer(tokenizer).fingerprint if tokenizer is not None else None
    folder = Path(out)
    sources = find_sources(inputs, settings.include, settings.exclude, leave=folder)
    plan = _plan(settings, sources, vocabulary)
    tasks = [
        Task(number, tuple(pieces), settings, str(folder / PARTS), None if tokenizer is None else str(tokenizer))
        for number, pieces in enumerate(_deal(sources, settings))
    ]
    with _claimed(folder, plan):
        if (folder / DATASET).exists():
            return _finished_before(folder, len(sources), began)
        parts = folder / PARTS
        processes = settings.workers or len(os.sched_getaffinity(0))
        with shown(progress, f"preparing {folder}") as advance:
            records = run_tasks(tasks, _moved_already(folder, tasks), processes, advance)
        summaries = _publish(folder, parts, records, settings, "text" if tokenizer is None else "tokens")
        rejected = [entry for record in records for entry in record.rejected]
        lines = [json.dumps(entry) + "\n" for entry in rejected]
        write_atomically(folder / REJECTED, "".join(lines).encode())
        counts = dict(sorted(Counter(str(entry["reason"]) for entry in rejected).items()))
        units = unit_table(folder, summaries)
        write_atomically(folder / UNITS, units)
        dataset = _dataset(plan, summaries, counts, vocabulary)
        dataset["units"] = {"bytes": len(units), "sha256": hashlib.sha256(units).hexdigest()}
        if not any(summary.split == "train" for summary in summaries):
            raise DataError(
                f"no document for training in {len(sources)} input files (rejected: {counts or 'none'}); see {folder / REJECTED}"
            )
        write_json(folder / DATASET, dataset)
        examples = tuple(_describe_rejected(entry) for entry in rejected[:5])
        kept = sum(record.kept for record in records)
        return PrepareReport(
            str(folder), dataset["content"], dataset["totals"], counts, examples, len(sources), kept, time.monotonic() - began
        )


def _describe_rejected(entry: dict[str, Any]) -> str:
    line = f"{entry['source']} record {entry['record']}: {entry['reason']} ({entry['detail']})"
    return line.encode("utf-8", "backslashreplace").decode()  # file names need not be Unicode


def _plan(settings: PrepareConfig, sources: list[Source], vocabulary: str | None) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "version": VERSION,
        "settings": {**settings.model_dump(mode="json", exclude={"workers"}), "tokenizer": vocabulary},
        "inputs": {source.name: [source.size, source.mtime_ns] for source in sources},
    }


def _deal(sources: list[Source], settings: PrepareConfig) -> Iterator[list[Piece]]:
    """Neighbouring pieces of about one shard's worth of input each."""
    pieces: list[Piece] = []
    size = 0
    for source in sources:
        for piece in split_source(source, settings.shard_bytes, settings.text_field):
            if pieces and size + piece.size > settings.shard_bytes:
                yield pieces
                pieces, size = [], 0
            pieces.append(piece)
            size += piece.size
    if pieces:
        yield pieces


@contextmanager
def _claimed(folder: Path, plan: dict[str, Any]) -> Iterator[None]:
    """Make the folder ours: new or of the same plan, and no other process in it. Its scratch folder goes when dataset.json is
    there."""
    if folder.exists() and not folder.is_dir():
        raise DataError(f"{folder} is a file; choose a folder for the dataset")
    if (folder / PLAN).exists():
        before = read_json(folder / PLAN, "delete the folder and prepare it again")
        differences = _differences(before, plan)
        if differences:
            more = f" and {len(differences) - 4} more" if len(differences) > 4 else ""
            what = "; ".join(differences[:4])
            raise DataError(f"{folder} was prepared differently ({what}{more}); choose another folder, or delete this one")
    elif folder.exists() and any(path.name != PARTS for path in folder.iterdir()):
        raise DataError(f"{folder} holds files that are not a dataset; choose an empty or new folder")
    parts = folder / PARTS
    with ExitStack() as held:
        try:
            parts.mkdir(parents=True, exist_ok=True)
            held.enter_context(exclusive(parts / "lock"))
        except OSError as error:
            raise DataError(f"cannot write to {folder}: {error.strerror}; choose another folder") from error
        except LockHeldError as error:
            raise DataError(f"{folder} is being prepared by {error.holder}; wait for it{error.remedy}") from None
        if not (folder / PLAN).exists():
            write_json(folder / PLAN, plan)
        try:
            yield
        except DataError:
            if not any(parts.glob("task-??????.json")):  # nothing to go on from: leave nothing that would refuse corrected settings
                (folder / PLAN).unlink()
                _remove_parts(parts, held)
            raise
        if (folder / DATASET).exists():
            _remove_parts(parts, held)


def _remove_parts(parts: Path, lock: ExitStack) -> None:
    """Remove the scratch folder and end the lock in it. NFS keeps the lock's file, under another name, until it is closed."""
    shutil.rmtree(parts, ignore_errors=True)
    lock.close()
    with suppress(OSError):  # another process has begun to prepare here, and so refuses or goes on by itself
        parts.rmdir()


def _differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    found = [f"{key} was {before.get(key)}, is {now[key]}" for key in ("format", "version") if before.get(key) != now[key]]
    old, new = before.get("settings", {}), now["settings"]
    found += [f"{key} was {old.get(key)}, is {new.get(key)}" for key in sorted(old.keys() | new) if old.get(key) != new.get(key)]
    old, new = before.get("inputs", {}), now["inputs"]
    for name in sorted(old.keys() | new):
        if old.get(name) != new.get(name):
            found.append(f"input {name} " + ("is new" if name not in old else "is gone" if name not in new else "has changed"))
    return found


def _final_names(records: Sequence[TaskRecord]) -> dict[str, str]:
    """Of each task's training shards: the name in the parts folder -> the name in the dataset."""
    names = [shard.name for record in records for shard in record.shards if shard.split == "train"]
    return {name: f"train-{number:06d}.tar" for number, name in enumerate(names)}


def _moved_already(folder: Path, tasks: list[Task]) -> dict[str, str]:
    """Where shards may be that a kill caught between renaming and dataset.json: only possible when every task has its record."""
    paths = [record_path(task) for task in tasks]
    if not all(path.exists() for path in paths):
        return {}
    names = _final_names([TaskRecord.load(path) for path in paths])
    return {name: str(folder / final) for name, final in names.items()}


def _publish(folder: Path, parts: Path, records: Sequence[TaskRecord], settings: PrepareConfig, content: str) -> list[ShardSummary]:
    """Rename training shards into place and join the tasks' small validation shards."""
    shards = {shard.name: shard for record in records for shard in record.shards}
    summaries: list[ShardSummary] = []
    for name, final in _final_names(records).items():
        for old, new in ((name, final), (index_name(name), index_name(final))):
            if file_size(parts / old) is not None:  # else it was renamed before a kill, and has been verified there
                os.replace(parts / old, folder / new)
        summaries.append(ShardSummary(**{**asdict(shards[name]), "name": final}))
    writer: ShardWriter | None = None
    number = 0
    try:
        for shard in (shard for shard in shards.values() if shard.split == "validation"):
            if writer is not None and writer.text_bytes + shard.text_bytes > settings.shard_bytes:
                summaries.append(writer.close("validation"))
                writer = None
            if writer is None:
                writer = ShardWriter(folder / f"validation-{number:06d}.tar", content)
                number += 1
            index = parts / index_name(shard.name)
            writer.append(parts / shard.name, Index.from_bytes(index.read_bytes(), str(index)))
        if writer is not None:
            summaries.append(writer.close("validation"))
    finally:
        if writer is not None:
            writer.discard()
    return summaries


def unit_table(folder: Path, summaries: Sequence[ShardSummary]) -> bytes:
    """What a run with the default units needs to know of all indexes when it starts."""
    documents, size = (ShardsConfig.model_fields[name].default for name in ("unit_documents", "unit_bytes"))
    sizes = (Index.column(folder / index_name(shard.name), "text_bytes") for shard in summaries)
    found = [(shard.name, shard.index_sha256, unit_starts(each, documents, size)) for shard, each in zip(summaries, sizes)]
    return UnitTable.of(documents, size, found).to_bytes()


def _dataset(
    plan: dict[str, Any], summaries: list[ShardSummary], rejected: dict[str, int], vocabulary: str | None
) -> dict[str, Any]:
    totals: dict[str, dict[str, int | None]] = {}
    for split in ("train", "validation"):
        chosen = [summary for summary in summaries if summary.split == split]
        tokens = [summary.tokens for summary in chosen]
        totals[split] = {
            "shards": len(chosen),
            "documents": sum(summary.documents for summary in chosen),
            "text_bytes": sum(summary.text_bytes for summary in chosen),
            "tokens": None if vocabulary is None else sum(count or 0 for count in tokens),
        }
    inputs = {name: size for name, (size, _) in plan["inputs"].items()}
    return {
        "format": FORMAT,
        "version": VERSION,
        "content": "text" if vocabulary is None else "tokens",
        "tokenizer": vocabulary,
        "settings": plan["settings"],
        "settings_fingerprint": fingerprint([plan["settings"], inputs]),
        "shards": [asdict(summary) for summary in summaries],
        "totals": totals,
        "rejected": rejected,
    }


def _finished_before(folder: Path, sources: int, began: float) -> PrepareReport:
    """A second run on a finished folder changes nothing; it only makes sure that the shards are still there and whole in size."""
    dataset = Dataset.open(folder)
    with open(folder / REJECTED, encoding="utf-8") as lines:
        entries = [json.loads(line) for _, line in zip(range(5), lines)]
    examples = tuple(_describe_rejected(entry) for entry in entries)
    return PrepareReport(
        str(folder),
        dataset.content,
        dataset.totals,
        dataset.rejected,
        examples,
        sources,
        sum(total["shards"] or 0 for total in dataset.totals.values()),
        time.monotonic() - began,
    )
