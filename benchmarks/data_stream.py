"""The data stream against raw SentencePiece, and our shard reader against plain tar and file reading.

The one thing to know: each pair is measured in turns within one run, on processes bound to one core each, on the text every machine
has: the source of the running Python's own standard library. Medians over `--repetitions`.

    python benchmarks/data_stream.py
"""

import argparse
import multiprocessing
import os
import statistics
import sysconfig
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
from report import Report

from baton.data_pipeline.dataset import Dataset
from baton.data_pipeline.lanes import LaneOrder, Units
from baton.data_pipeline.prepare import prepare
from baton.data_pipeline.steps import StepPlan
from baton.data_pipeline.stream import BatchStream, documents
from baton.data_pipeline.tokenizer import Tokenizer, train_tokenizer

LANES, CONTEXT, UNIT_DOCUMENTS, SEED = 8, 2048, 16, 0
UNITS_PER_LANE = 4  # of about 14 in an epoch: some 10 MB of text a repetition
VOCAB_SIZE = 8192
READ_BATCH = 64  # documents in a unit by default


def open_stream(folder: str, model: str, rank: int, size: int) -> BatchStream:
    plan = StepPlan.constant(
        context=CONTEXT,
        lanes=LANES,
        lanes_per_step=LANES,
        micro_batch=LANES // size,
        data_rank=rank,
        data_size=size,
        start_step=0,
        prefetch=2,
    )
    return BatchStream(Dataset.open(folder), Tokenizer(model), plan, seed=SEED, unit_documents=UNIT_DOCUMENTS)


def texts_of_rank(folder: str, rank: int, size: int) -> list[str]:
    """The documents that this rank's lanes begin with, lane by lane."""
    dataset = Dataset.open(folder)
    shards = dataset.require("train")
    order = LaneOrder(Units([dataset.index(shard).text_bytes for shard in shards], UNIT_DOCUMENTS, 32 << 20), SEED, LANES)
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
    steps = -(-wanted // (CONTEXT * LANES // size))
    times: dict[str, list[tuple[int, float]]] = {"stream": [], "numpy": [], "list": []}
    for _ in range(repetitions):
        with open_stream(folder, model, rank, size) as stream:
            next(stream)  # opens every lane
            barrier.wait()
            start = time.perf_counter()
            for _ in range(steps):
                next(stream)
            times["stream"].append((steps * CONTEXT * LANES // size, time.perf_counter() - start))
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


def stream_equals_raw(folder: str, model: str) -> bool:
    """The first inputs and labels of every lane, against the documents read by tarfile and encoded whole by SentencePiece."""
    raw = sentencepiece.SentencePieceProcessor(model_file=model)
    dataset, tokenizer = Dataset.open(folder), Tokenizer(model)
    if any("\u2581" not in text and tokenizer.encode(text).tolist() != raw.encode(text) for text in documents(dataset, "train")):
        return False
    with open_stream(folder, model, 0, 1) as stream:
        steps = [next(stream).micro_batches[0] for _ in range(8)]
    inputs = np.concatenate([batch.tokens for batch in steps], axis=1)
    labels = np.concatenate([batch.labels for batch in steps], axis=1)
    for lane in range(LANES):
        expected: list[int] = []
        for text in texts_of_rank(folder, lane, LANES):
            expected += [tokenizer.doc, *tokenizer.encode(text).tolist()]
        expected = expected[: inputs.shape[1] + 1]
        n = min(len(expected) - 1, inputs.shape[1])
        if inputs[lane, :n].tolist() != expected[:n] or labels[lane, :n].tolist() != expected[1 : n + 1]:
            return False
    return True


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
    report.save()


if __name__ == "__main__":
    main()
