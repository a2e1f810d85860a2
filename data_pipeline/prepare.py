"""Text to a dataset: a folder of tar shards with indexes and one dataset.json.

The inputs are divided into *tasks* by a pure function of the plan (prepare_plan.py). A task writes its own shards and then its
record, so tasks run in any order, on any number of processes, and are not repeated after a kill. The shards get their final names,
and dataset.json appears, only when every task has its record.
"""

import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from baton.data_pipeline.config import DEFAULT_IDS_INCLUDE, DEFAULT_INCLUDE, IdsConfig, PrepareConfig, ShardsConfig
from baton.data_pipeline.dataset import Dataset
from baton.data_pipeline.errors import DataError
from baton.data_pipeline.files import fingerprint, write_atomically, write_json
from baton.data_pipeline.input_files import InputFiles, find_input_files
from baton.data_pipeline.input_pieces import split_source
from baton.data_pipeline.prepare_plan import PARTS, claimed_folder, forget_finished, make_plan, make_tasks, unreadable
from baton.data_pipeline.prepare_workers import PrepareTask, TaskRecord, record_path, run_tasks
from baton.data_pipeline.progress import Progress, shown
from baton.data_pipeline.shards import (
    DATASET,
    FORMAT,
    REJECTED,
    UNITS,
    VERSION,
    Index,
    ShardSummary,
    ShardWriter,
    UnitIndex,
    file_size,
    index_name,
    unit_starts,
)
from baton.data_pipeline.token_files import without_separators
from baton.data_pipeline.tokenizer import Losses, load_tokenizer
from baton.data_pipeline.written_by import PACKAGE, own_version


@dataclass(frozen=True)
class PrepareReport:
    """What `prepare` made. totals: {split: {"shards", "documents", "text_bytes", "tokens"}}; rejected: {reason: records and files};
    remarks: lines about the choice of files."""

    path: str
    content: str
    totals: dict[str, dict[str, int | None]]
    rejected: dict[str, int]
    examples: tuple[str, ...]
    sources: int
    remarks: tuple[str, ...]
    tasks_kept: int
    seconds: float

    def __str__(self) -> str:
        lines = [f"{self.path}: {self.content} of {self.sources:,} input files, {self.seconds:.1f} s"]
        if self.tasks_kept:
            lines[0] += f" ({self.tasks_kept} finished parts were verified and kept)"
        lines += [f"  {split}: {describe_totals(total)}" for split, total in self.totals.items()]
        count = sum(self.rejected.values())
        if count:
            lines.append(f"  rejected: {count:,} ({_reasons(self.rejected)}); all are listed in {Path(self.path, REJECTED)}")
            lines += [f"    {example}" for example in self.examples]
        else:
            lines.append("  rejected: none")
        lines += [f"  {remark}" for remark in self.remarks]
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
    eod_token: str | None = None,
    ids: bool = False,
    ids_dtype: Literal["uint16", "uint32"] = "uint16",
    ids_field: str = IdsConfig.model_fields["field"].default,
    separator_id: int | None = None,
    workers: int | None = None,
    text_field: str = PrepareConfig.model_fields["text_field"].default,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] = PrepareConfig.model_fields["exclude"].default,
    progress: Progress | None = None,
) -> PrepareReport:
    """Turn text files, JSON lines and arrays, Parquet, Arrow and WebDataset tars (each but Parquet and Arrow also compressed) into
    the dataset folder `out`; run again after a kill, it goes on where it was.

    inputs: files, or folders that are searched for `include` without `exclude` (see PrepareConfig, also for the other settings).
    tokenizer, eod_token: see `load_tokenizer`: the shards then hold token ids instead of text.
    ids: the inputs hold token ids that `tokenizer` made: Megatron's .bin with .idx, flat .bin (of `ids_dtype`) and .npy with
    `separator_id` (none: the tokenizer's EOD token) between documents, lists in the column `ids_field` of Parquet and Arrow,
    .npy members of tars. Bytes of text are then those of the decoded ids.
    workers: processes (none: one per usable core; 1: this process). More than one needs the usual `if __name__ == "__main__"` in a
    script.
    progress: called with (input bytes done, input bytes in all); none shows it on stdout.
    Raises DataError: unusable inputs, no document at all, or an `out` that holds something else (what differs is named). An input
    that cannot be read does not keep the others from being done: the error comes after them, and what is finished stays for a run
    with that file restored or excluded. Raises StorageError: files cannot be read or written at present. Records that are no
    documents, and links and files that are not read, are counted in the report and listed in rejected.jsonl.
    """
    began = time.monotonic()
    loaded = load_tokenizer(tokenizer, eod_token) if tokenizer is not None else None
    if ids and loaded is None:
        raise DataError("token ids mean nothing without the tokenizer that made them; name it with --tokenizer")
    try:
        of_ids = None
        if ids and loaded is not None:
            separator = loaded.eod_id if separator_id is None else separator_id
            of_ids = IdsConfig(dtype=ids_dtype, separator_id=separator, field=ids_field, vocab_size=loaded.vocab_size)
            if separator >= loaded.vocab_size:
                raise DataError(f"separator_id {separator}: the tokenizer has 0 <= id < {loaded.vocab_size}; correct it")
        if include is None:
            include = DEFAULT_IDS_INCLUDE if ids else DEFAULT_INCLUDE
        settings = PrepareConfig(
            ids=of_ids,
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
    vocabulary = loaded.fingerprint if loaded is not None else None
    folder = Path(out)
    found = find_input_files(inputs, settings.include, settings.exclude, leave=folder)
    sources = found.sources
    pieces = [piece for source in sources for piece in split_source(source, settings.shard_bytes, settings.text_field, of_ids)]
    separators = () if of_ids is None else without_separators(sources, of_ids)
    with claimed_folder(folder, make_plan(settings, sources, vocabulary), pieces) as plan:
        if (folder / DATASET).exists():
            return _finished_before(folder, found, began)
        parts = folder / PARTS
        tasks = make_tasks(pieces, plan, settings, folder, None if loaded is None else loaded.source)
        processes = settings.workers or len(os.sched_getaffinity(0))
        with shown(progress, f"preparing {folder}") as advance:
            records, failures = run_tasks(tasks, _moved_already(folder, tasks), processes, advance)
        if failures:
            raise unreadable(folder, failures, tasks)
        rejected = [asdict(entry) for entry in found.left] + [entry for record in records for entry in record.rejected]
        counts = dict(sorted(Counter(str(entry["reason"]) for entry in rejected).items()))
        if not any(shard.split == "train" for record in records for shard in record.shards):
            forget_finished(parts)  # so that the folder does not refuse corrected settings
            raise DataError(_no_document(len(sources), counts, rejected, settings.validation_fraction))
        summaries = _publish(folder, parts, records, settings, "text" if loaded is None else "tokens")
        lines = [json.dumps(entry) + "\n" for entry in rejected]
        write_atomically(folder / REJECTED, "".join(lines).encode())
        units = unit_index_bytes(folder, summaries)
        write_atomically(folder / UNITS, units)
        dataset = _dataset(plan, summaries, counts, vocabulary)
        remarks = found.remarks() + separators
        if loaded is not None and loaded.lossy and ids:
            why = "the ids' own text is not known, and bytes of text are those of the decoded ids"
            remarks += (f"the tokenizer is lossy ({', '.join(loaded.lossy)}): {why}",)
        elif loaded is not None and loaded.lossy:
            losses = sum((record.losses for record in records), Losses())
            dataset["losses"] = asdict(losses)
            remarks += (losses.describe(loaded.lossy),)
        dataset["units"] = {"bytes": len(units), "sha256": hashlib.sha256(units).hexdigest()}
        write_json(folder / DATASET, dataset)
        examples = tuple(_describe_rejected(entry) for entry in rejected[:5])
        kept = sum(record.kept for record in records)
        return PrepareReport(
            str(folder),
            dataset["content"],
            dataset["totals"],
            counts,
            examples,
            len(sources),
            remarks,
            kept,
            time.monotonic() - began,
        )


def _reasons(counts: dict[str, int]) -> str:
    return ", ".join(f"{number:,} {reason}" for reason, number in sorted(counts.items()))


def _no_document(sources: int, counts: dict[str, int], rejected: Sequence[dict[str, Any]], fraction: float) -> str:
    """What to say when nothing is left to train on. fraction: of documents that are held out."""
    if rejected:
        why = f"rejected: {_reasons(counts)}, such as {_describe_rejected(rejected[0])}"
    else:
        why = (
            f"they are empty, or their documents are all among the {fraction:g} that are held out" if fraction else "they are empty"
        )
    return f"no document for training in {sources:,} input files ({why}); correct the inputs or the settings"


def _describe_rejected(entry: dict[str, Any]) -> str:
    line = f"{entry['source']} record {entry['record']}: {entry['reason']} ({entry['detail']})"
    return line.encode("utf-8", "backslashreplace").decode()  # file names need not be Unicode


def _final_names(records: Sequence[TaskRecord]) -> dict[str, str]:
    """Of each task's training shards: the name in the parts folder -> the name in the dataset."""
    names = [shard.name for record in records for shard in record.shards if shard.split == "train"]
    return {name: f"train-{number:06d}.tar" for number, name in enumerate(names)}


def _moved_already(folder: Path, tasks: list[PrepareTask]) -> dict[str, str]:
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


def unit_index_bytes(folder: Path, summaries: Sequence[ShardSummary]) -> bytes:
    """What a run with the default units needs to know of all indexes when it starts."""
    documents, size = (ShardsConfig.model_fields[name].default for name in ("unit_documents", "unit_bytes"))
    sizes = (Index.column(folder / index_name(shard.name), "text_bytes") for shard in summaries)
    found = [(shard.name, shard.index_sha256, unit_starts(each, documents, size)) for shard, each in zip(summaries, sizes)]
    return UnitIndex.of(documents, size, found).to_bytes()


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
    inputs = {name: identity[0] for name, identity in plan["inputs"].items()}
    return {
        "format": FORMAT,
        "version": VERSION,
        PACKAGE: own_version(),
        "content": "text" if vocabulary is None else "tokens",
        "tokenizer": vocabulary,
        "settings": plan["settings"],
        "settings_fingerprint": fingerprint([plan["settings"], inputs]),
        "shards": [asdict(summary) for summary in summaries],
        "totals": totals,
        "rejected": rejected,
    }


def _finished_before(folder: Path, found: InputFiles, began: float) -> PrepareReport:
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
        len(found.sources),
        found.remarks(),
        sum(total["shards"] or 0 for total in dataset.totals.values()),
        time.monotonic() - began,
    )
