"""The data stream with and without workers, compared with raw SentencePiece; the shard reader, compared with reading plain tar
files and files; and a start in the middle of 100 GB.

The two sides of a comparison alternate in one run, with the same number of processes, on the source of Python's standard library,
which every machine has. Results are medians over `--repetitions`. The log has the machine's load.

    python benchmarks/data_stream.py
"""

import argparse
import hashlib
import itertools
import json
import multiprocessing
import os
import statistics
import sysconfig
import tarfile
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
from report import Report
from stream_stages import say_stages

from baton.data_pipeline.dataset import Dataset
from baton.data_pipeline.evaluation import documents
from baton.data_pipeline.lane_order import Cursor, LaneOrder, Units
from baton.data_pipeline.prepare import prepare, unit_index_bytes
from baton.data_pipeline.reader import CorpusSpec
from baton.data_pipeline.run_source import BatchStream
from baton.data_pipeline.shards import BLOCK, DATASET, UNITS, Index, ShardSummary, UnitIndex, index_name, member_header, padded
from baton.data_pipeline.steps import StepPlan
from baton.data_pipeline.tokenizer import load_tokenizer
from baton.data_pipeline.tokenizer_training import train_tokenizer

LANES, SEQUENCE_LENGTH, UNIT_DOCUMENTS, SEED = 8, 2048, 16, 0
UNITS_PER_LANE = 4  # of about 14 in an epoch: some 10 MB of text a repetition
VOCAB_SIZE = 8192
READ_BATCH = 64  # documents in a unit by default
LEAD = 12  # steps, more than a stream and its workers make ahead
HEADER = 128  # bytes before the ids in a list of them


def open_stream(folder: str, model: str, rank: int, size: int) -> BatchStream:
    plan = StepPlan.constant(
        sequence_length=SEQUENCE_LENGTH,
        lanes=LANES,
        lanes_per_step=LANES,
        micro_batch_size=LANES // size,
        data_rank=rank,
        data_size=size,
        start_step=0,
        prefetch=2,
    )
    return BatchStream(Dataset.open(folder), load_tokenizer(model), plan, seed=SEED, unit_documents=UNIT_DOCUMENTS)


def texts_of_rank(folder: str, rank: int, size: int) -> list[str]:
    """The documents that this rank's lanes begin with, lane by lane."""
    dataset = Dataset.open(folder)
    shards = dataset.require("train")
    starts = [dataset.unit_starts(shard, UNIT_DOCUMENTS, 32 << 20) for shard in shards]
    order = LaneOrder(Units(starts, [shard.documents for shard in shards]), SEED, LANES)
    found = []
    for lane in range(rank, LANES, size):
        for k in range(UNITS_PER_LANE):
            unit, samples = order.unit(lane, k)
            payloads = dataset.read(shards[unit.shard], unit.first, unit.count)
            found += [payloads[i].decode() for i in samples]
    return found


def measure(folder: str, model: str, rank: int, size: int, barrier: Any, repetitions: int, results: Any) -> None:
    """In a process of its own: (tokens, seconds) of the stream and of both raw forms, taking turns."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    texts = texts_of_rank(folder, rank, size)
    raw = sentencepiece.SentencePieceProcessor(model_file=model)
    wanted = sum(len(raw.encode(text)) for text in texts)
    steps = -(-wanted // (SEQUENCE_LENGTH * LANES // size))
    times: dict[str, list[tuple[int, float]]] = {"stream": [], "numpy": [], "list": []}
    for _ in range(repetitions):
        with open_stream(folder, model, rank, size) as stream:
            next(stream)  # opens every lane
            barrier.wait()
            start = time.perf_counter()
            for _ in range(steps):
                next(stream)
            times["stream"].append((steps * SEQUENCE_LENGTH * LANES // size, time.perf_counter() - start))
        for name, kind in (("numpy", "numpy"), ("list", int)):
            barrier.wait()
            start = time.perf_counter()
            count = sum(len(raw.encode(text, return_type=kind)) for text in texts)
            times[name].append((count, time.perf_counter() - start))
    results.put(times)


def rates(folder: str, model: str, size: int, repetitions: int) -> dict[str, float]:
    """Median tokens/s over repetitions, of `size` processes together."""
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(size), context.Queue()
    arguments = [(folder, model, rank, size, barrier, repetitions, results) for rank in range(size)]
    processes = [context.Process(target=measure, args=each) for each in arguments]
    for process in processes:
        process.start()
    found = [results.get(timeout=600) for _ in processes]
    for process in processes:
        process.join()
    rate = {}
    for name in found[0]:
        together = [(sum(n for n, _ in each), max(s for _, s in each)) for each in zip(*(times[name] for times in found))]
        rate[name] = statistics.median(tokens / seconds for tokens, seconds in together)
    return rate


def raw_process(kind: str, what: list[Any], model: str, barrier: Any, results: Any) -> None:
    """In a process of its own, until told to end: (tokens, seconds) of its share of the raw work, once the others are ready."""
    raw = sentencepiece.SentencePieceProcessor(model_file=model)
    while barrier.wait() is not None:
        start, count = time.perf_counter(), 0
        if kind == "sentencepiece":
            count = sum(len(raw.encode(text, return_type="numpy")) for text in what)
        else:
            for path in what:
                with tarfile.open(path) as tar:
                    count += sum((len(tar.extractfile(member).read()) - HEADER) // 2 for member in tar)  # type: ignore[union-attr]
        results.put((count, time.perf_counter() - start))


def one_reader() -> StepPlan:
    shape = {
        "sequence_length": SEQUENCE_LENGTH,
        "lanes": LANES,
        "lanes_per_step": LANES,
        "micro_batch_size": LANES,
        "data_rank": 0,
        "data_size": 1,
    }
    return StepPlan.constant(**shape, start_step=0, prefetch=2)


def corpus() -> CorpusSpec:
    return CorpusSpec(split="train", seed=SEED, lanes=LANES, unit_documents=UNIT_DOCUMENTS, unit_bytes=32 << 20)


def with_workers(folder: Path, model: Path, content: str, workers: int, repetitions: int) -> tuple[float, float]:
    """Tokens/s of one reader with worker processes, after its start, and of as many processes that do the raw work alone, each with
    its share of it: SentencePiece on the same documents, or tarfile on the shards of the same token ids. In turns, medians."""
    plan = one_reader()
    dataset, tokenizer = Dataset.open(folder), load_tokenizer(model)
    if content == "text":
        kind, everything = "sentencepiece", texts_of_rank(str(folder), 0, 1)
        steps = sum(len(tokenizer.encode(text)) for text in everything) // (SEQUENCE_LENGTH * LANES)
    else:
        kind, everything = "tar", [str(folder / shard.name) for shard in dataset.require("train")]
        steps = 2 * (dataset.totals["train"]["tokens"] or 0) // (SEQUENCE_LENGTH * LANES)
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(workers + 1), context.Queue()
    arguments = [(kind, everything[n::workers], str(model), barrier, results) for n in range(workers)]
    processes = [context.Process(target=raw_process, args=each, daemon=True) for each in arguments]
    for process in processes:
        process.start()
    ours, theirs = [], []
    for _ in range(repetitions):
        with BatchStream(dataset, tokenizer, plan, seed=SEED, unit_documents=UNIT_DOCUMENTS, workers=workers) as stream:
            for _ in range(LEAD):  # what was made ahead while it started is not counted
                next(stream)
            start = time.perf_counter()
            for _ in range(steps):
                next(stream)
            ours.append(steps * SEQUENCE_LENGTH * LANES / (time.perf_counter() - start))
        barrier.wait()
        found = [results.get(timeout=600) for _ in processes]
        assert content == "text" or sum(n for n, _ in found) == dataset.totals["train"]["tokens"]
        theirs.append(sum(n for n, _ in found) / max(seconds for _, seconds in found))
    for process in processes:
        process.kill()
    return statistics.median(ours), statistics.median(theirs)


def seek(folder: Path, model: str, size: int, report: Report) -> None:
    """Start in the middle of an index of 100 GB of text: 400 shards of 256 MB with documents of `size` bytes each. The shards are
    sparse files with real documents at every place that is read. Once as prepared now, once as before there was a file of units."""
    folder.mkdir()
    shards, lanes = 400, 8
    documents = (256 << 20) // size
    text = (b"a document of this length. " * 1600)[:size]
    header = {"format": "baton-dataset", "version": 1, "content": "text", "tokenizer": None}
    manifest: dict[str, Any] = {**header, "settings": {}, "totals": {}, "rejected": {}}
    offsets = np.arange(documents, dtype=np.int64) * (BLOCK + padded(size))
    entries = []
    for number in range(shards):
        ids = np.array([b"%08d%024d" % (number, i) for i in range(documents)], "S32")
        same = {"sizes": size, "text_bytes": size, "tokens": -1}
        columns = {name: np.full(documents, value, np.int64) for name, value in same.items()}
        index = Index(ids=ids, offsets=offsets, crc32=np.full(documents, zlib.crc32(text), np.uint32), **columns)
        name = f"train-{number:06d}.tar"
        index.save(folder / index_name(name))
        content = (folder / index_name(name)).read_bytes()
        entries.append(
            ShardSummary(name, "train", documents, documents * size, None, index.end + 2 * BLOCK, "", len(content), sha256(content))
        )
        with open(folder / name, "wb") as f:
            f.truncate(index.end + 2 * BLOCK)
    manifest["shards"] = [entry.__dict__ for entry in entries]
    units = unit_index_bytes(folder, entries)
    (folder / UNITS).write_bytes(units)
    middle = {lane: Cursor(unit=shards * documents // 64 // 2 // lanes, document=3, offset=11) for lane in range(lanes)}
    table = UnitIndex.from_bytes(units, UNITS)
    starts = [table.starts(entry) for entry in entries]
    order = LaneOrder(Units(starts, [documents] * shards), SEED, lanes)
    for lane, cursor in middle.items():
        unit, _ = order.unit(lane, cursor.unit)
        with open(folder / f"train-{unit.shard:06d}.tar", "r+b") as f:
            for i in range(unit.first, unit.first + unit.count):
                f.seek(int(offsets[i]))
                f.write(member_header(f"{unit.shard:08d}{i:024d}.txt", size) + text)
    shape = {
        "sequence_length": 4096,
        "lanes": lanes,
        "lanes_per_step": lanes,
        "micro_batch_size": lanes,
        "data_rank": 0,
        "data_size": 1,
    }
    plan = StepPlan.constant(**shape, start_step=9, prefetch=1)
    taken: dict[bool, list[float]] = {True: [], False: []}
    first = []
    for _, prepared in itertools.product(range(5), taken):
        mentioned = {"units": {"bytes": len(units), "sha256": sha256(units)}} if prepared else {}
        (folder / DATASET).write_text(json.dumps({**manifest, **mentioned}))
        start = time.perf_counter()
        with BatchStream(Dataset.open(folder), load_tokenizer(model), plan, seed=SEED, cursors=middle) as stream:
            found = next(stream).micro_batches[0]
            taken[prepared].append(time.perf_counter() - start)
        first.append((found.pos[:, 0].tolist(), found.tokens.tobytes()))
    report.gate("seek", first == [([11] * lanes, first[0][1])] * 10, "the first inputs are those the cursors name, either way")
    case, times = f"seek, {shards * documents / 1e6:,.1f}M documents", {key: statistics.median(each) for key, each in taken.items()}
    for peer, seconds in (("the limit", 1.0), ("without the file of units", times[False])):
        report.row(case, "seconds", times[True], peer, seconds, gate="seek", higher_is_better=False)


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def stream_equals_raw(folder: str, model: str) -> bool:
    """The first inputs and labels of every lane, against the documents read by tarfile and encoded whole by SentencePiece."""
    raw = sentencepiece.SentencePieceProcessor(model_file=model)
    dataset, tokenizer = Dataset.open(folder), load_tokenizer(model)
    if any("\u2581" not in text and tokenizer.encode(text).tolist() != raw.encode(text) for text in documents(dataset, "train")):
        return False
    with open_stream(folder, model, 0, 1) as stream:
        steps = [next(stream).micro_batches[0] for _ in range(8)]
    inputs = np.concatenate([batch.tokens for batch in steps], axis=1)
    labels = np.concatenate([batch.labels for batch in steps], axis=1)
    for lane in range(LANES):
        expected: list[int] = []
        for text in texts_of_rank(folder, lane, LANES):
            expected += [tokenizer.eod_id, *tokenizer.encode(text).tolist()]
        expected = expected[: inputs.shape[1] + 1]
        n = min(len(expected) - 1, inputs.shape[1])
        if inputs[lane, :n].tolist() != expected[:n] or labels[lane, :n].tolist() != expected[1 : n + 1]:
            return False
    return True


def stream_of_ids_equals_text(folder: Path, tokens: Path, model: Path) -> bool:
    found = []
    for place in (folder, tokens):
        with open_stream(str(place), str(model), 0, 1) as stream:
            found.append([next(stream).micro_batches[0] for _ in range(8)])
    return all((a.tokens == b.tokens).all() and (a.labels == b.labels).all() for a, b in zip(*found))


def read_ours(folder: Path) -> list[bytes]:
    return [payload for _, _, payload in Dataset.open(folder).samples("train", READ_BATCH)]


def read_tarfile(folder: Path) -> list[bytes]:
    found = []
    for path in sorted(folder.glob("train-*.tar")):
        with tarfile.open(path) as tar:
            found += [tar.extractfile(member).read() for member in tar]  # type: ignore[union-attr]
    return found


def read_webdataset(folder: Path) -> list[bytes]:
    from webdataset.tariterators import tar_file_iterator

    found = []
    for path in sorted(folder.glob("train-*.tar")):
        with open(path, "rb") as stream:
            found += [sample["data"] for sample in tar_file_iterator(stream)]
    return found


def read_files(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted(folder.glob("train-*.tar"))]


def seconds(function: Callable[[Path], list[bytes]], folder: Path) -> float:
    start = time.perf_counter()
    function(folder)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5, help="of every measurement; the median is shown (default 5)")
    repetitions = parser.parse_args().repetitions
    report = Report("data_stream")
    report.say(f"load before: {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as scratch:
        folder, model = Path(scratch, "shards"), Path(scratch, "tokenizer.model")
        library = sysconfig.get_paths()["stdlib"]
        report.say(
            str(prepare([library], folder, include=["*.py"], exclude=["site-packages"], shard_bytes=8 << 20)).replace(scratch, ".")
        )
        report.say(
            str(train_tokenizer(documents(Dataset.open(folder), "train"), model, VOCAB_SIZE, max_bytes=8 << 20)).replace(
                scratch, "."
            )
        )
        report.gate(
            "stream",
            stream_equals_raw(str(folder), str(model)),
            "ids, inputs and labels equal SentencePiece's of the same documents",
        )
        tars = read_tarfile(folder)
        report.gate("read", read_ours(folder) == tars == read_webdataset(folder), "payloads equal those read by tarfile")

        for size in (1, 2):
            if size > len(os.sched_getaffinity(0)):
                report.say(f"{size} processes are not measured: this machine has fewer cores")
                continue
            rate = rates(str(folder), str(model), size, repetitions)
            label = f"{size} process{'es' if size > 1 else ''}"
            report.row(f"stream, {label}", "tokens/s", rate["stream"], "sentencepiece to numpy", rate["numpy"], gate="stream")
            report.row(f"stream, {label}", "tokens/s", rate["stream"], "sentencepiece to list", rate["list"], gate="stream")

        tokens = Path(scratch, "tokens")
        prepare([library], tokens, include=["*.py"], exclude=["site-packages"], shard_bytes=8 << 20, tokenizer=model)
        report.gate("tokens", stream_of_ids_equals_text(folder, tokens, model), "token shards give the inputs that text gives")
        for content, place, gate, peer in (
            ("text", folder, "stream", "sentencepiece in as many processes"),
            ("token ids", tokens, "tokens", "tarfile in as many processes"),
        ):
            for workers in (1, 2, 4):
                if workers > len(os.sched_getaffinity(0)):
                    report.say(f"{workers} workers share {len(os.sched_getaffinity(0))} cores here")
                ours, theirs = with_workers(place, model, content, workers, repetitions)
                case = f"{content}, {workers} worker{'s' if workers > 1 else ''}"
                report.row(case, "tokens/s", ours, peer, theirs, gate=gate)
        say_stages(tokens, model, one_reader(), corpus(), report)
        for size in (40_960, 4096):
            seek(Path(scratch, f"large-{size}"), str(model), size, report)

        peers = {"tarfile": read_tarfile, "webdataset tar iterator": read_webdataset, "plain file read": read_files}
        times: dict[str, list[float]] = {name: [] for name in ("ours", *peers)}
        for _ in range(4 * repetitions):  # short: take more
            times["ours"].append(seconds(read_ours, folder))
            for name, function in peers.items():
                times[name].append(seconds(function, folder))
        size = sum(path.stat().st_size for path in folder.glob("train-*.tar"))
        speed = {name: size / 1e6 / statistics.median(taken) for name, taken in times.items()}
        for name in peers:
            report.row("read shards, checked by crc32", "MB/s", speed["ours"], name, speed[name], gate="read")
    report.say(f"load after: {os.getloadavg()[0]:.1f}")
    report.save()


if __name__ == "__main__":
    main()
