"""Time per stage of reading a stream of token ids, and processor time of the reading processes.

The stages are those of one process that writes rows to shared memory, as a data worker does. Each stage is timed in its own run, so
that timers do not affect other stages. Processor time is the operating system's count and does not depend on the machine's load.
"""

import tarfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import psutil
from report import Report

from baton.data_pipeline import reader
from baton.data_pipeline.dataset import Dataset
from baton.data_pipeline.lane_order import Cursor
from baton.data_pipeline.packing import PackedDocs
from baton.data_pipeline.reader import CorpusSpec, DocReader, LaneReader
from baton.data_pipeline.run_source import BatchStream
from baton.data_pipeline.steps import StepPlan
from baton.data_pipeline.storage import ShardStream
from baton.data_pipeline.tokenizer import load_tokenizer
from baton.data_pipeline.workers import SharedBlocks

STAGES: dict[str, tuple[Any, str]] = {
    "opening units: files, order, and": (DocReader, "open"),
    "  reading bytes": (ShardStream, "read"),
    "  crc32": (zlib, "crc32"),
    "joining documents' ids": (reader, "packed_docs"),
    "writing rows": (PackedDocs, "fill"),
}
WARM, STEPS, REPETITIONS, BLOCKS = 300, 3000, 3, 9


def say_stages(folder: Path, model: Path, plan: StepPlan, corpus: CorpusSpec, report: Report) -> None:
    """Microseconds of each stage a step, and of each process, into the log. folder: of token ids."""
    opened, tokenizer, shape = Dataset.open(folder), load_tokenizer(model), plan.phases[0]
    blocks = SharedBlocks(BLOCKS, plan, 0)
    read = LaneReader(DocReader(corpus, [opened], tokenizer), dict.fromkeys(range(plan.lanes), Cursor()))

    def ours(step: int) -> None:
        lanes, block = plan.rows(step), step % BLOCKS
        after = read(step, [blocks.rows(block, lanes, shape.sequence_length)])
        blocks.write_cursors(block, (len(lanes), shape.sequence_length), ((row, after[lane]) for row, lane in enumerate(lanes)))

    ids, places = np.arange(1 << 22, dtype=np.uint16), np.arange(1 << 16, dtype=np.int32)
    lanes = plan.rows(0)

    def bare(step: int) -> None:
        batch = blocks.rows(step % BLOCKS, lanes, shape.sequence_length)
        for row in range(len(lanes)):
            at = (step * len(lanes) + row) * shape.sequence_length % (len(ids) - shape.sequence_length)
            batch.labels[row] = ids[at : at + shape.sequence_length]
            batch.tokens[row, 1:] = batch.labels[row, :-1]
            batch.pos[row] = places[: shape.sequence_length]

    report.say(f"token ids, microseconds of a reader for a step of {len(lanes)} rows of {shape.sequence_length}:")
    for name, (owner, attribute) in STAGES.items():
        report.say(f"  {name:<40} {timed(ours, owner, attribute):6.1f}")
    report.say(f"  {'all, with cursors':<40} {timed(ours):6.1f}")
    report.say(f"  {'numpy alone writing such rows':<40} {timed(bare):6.1f}")

    tokens = len(lanes) * shape.sequence_length
    report.say(f"token ids, microseconds of processor time for as many tokens ({tokens:,}):")
    me, paths = psutil.Process(), sorted(folder.glob("train-*.tar"))
    start, rounds = processor_time([me]), 20
    for path in paths * rounds:
        with tarfile.open(path) as tar:
            for member in tar:
                tar.extractfile(member).read()  # type: ignore[union-attr]
    total = rounds * sum(int(opened.index(shard).tokens.sum()) for shard in opened.require("train"))
    report.say(f"  {'tarfile':<40} {(processor_time([me]) - start) / total * tokens * 1e6:6.1f}")
    for workers in (1, 2, 4):
        about = {"seed": corpus.seed, "unit_documents": corpus.unit_documents, "workers": workers}
        with BatchStream(opened, tokenizer, plan, **about) as stream:
            for _ in range(WARM):
                next(stream)
            groups = [me], me.children(recursive=True)
            before = [processor_time(group) for group in groups]
            for _ in range(2 * STEPS):
                next(stream)
            spent = [(processor_time(group) - b) / (2 * STEPS) * 1e6 for group, b in zip(groups, before)]
        name = f"{workers} worker{'s' if workers > 1 else ''}: whom they read for, they"
        report.say(f"  {name:<40} {spent[0]:6.1f} {spent[1]:6.1f}")


def timed(work: Callable[[int], None], owner: Any = None, attribute: str = "") -> float:
    """Microseconds that a step takes, or one function in it; the best of some repetitions."""
    spent = 0.0

    def timing(*arguments: Any, **named: Any) -> Any:
        nonlocal spent
        start = time.perf_counter()
        try:
            return function(*arguments, **named)
        finally:
            spent += time.perf_counter() - start

    if owner is not None:
        function = getattr(owner, attribute)
        with patch.object(owner, attribute, timing):
            return best(work, lambda: spent)
    return best(work, time.perf_counter)


def best(work: Callable[[int], None], clock: Callable[[], float]) -> float:
    for step in range(WARM):
        work(step)
    found = []
    for _ in range(REPETITIONS):
        start = clock()
        for step in range(STEPS):
            work(step)
        found.append((clock() - start) / STEPS * 1e6)
    return min(found)


def processor_time(processes: list[Any]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)
