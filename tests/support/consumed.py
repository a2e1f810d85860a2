"""Documents for small runs, and the data that each of their steps must consume, computed plainly from the documents, the seed, the
number of lanes and the batch, without the data pipeline's code.

What a run records of a step (`consumed`) is the sum over its values, modulo 2^64, of value x multiplier of the lane x multiplier of
the kind (token, label, position) x multiplier of the column; training.checkpoint.digest says why that tells all mistakes apart.
"""

import json
import random
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import numpy as np

from baton.data_pipeline.lane_order import permutation
from baton.data_pipeline.shards import ShardWriter, token_payload
from baton.data_pipeline.tokenizer import load_tokenizer
from baton.data_pipeline.tokenizer_training import train_tokenizer
from baton.launcher.config import RunConfig
from baton.training.monitoring.metrics import read_metrics

UNIT_DOCUMENTS = 4
SHARDS = (31, 22)
"""Training documents in each: not multiples of a unit's."""

LONGEST = 90
"""Tokens of a document, at most: nearly three rows."""


@dataclass(frozen=True)
class Corpus:
    """shards: of each training shard its documents' ids. validation: the ids of those held out. eod_id: the token between them.
    data: a run's settings for them."""

    shards: list[list[list[int]]]
    validation: list[list[int]]
    eod_id: int
    data: dict[str, object]


def write_corpus(folder: Path) -> Corpus:
    """A tokenizer, and a dataset of random ids of it."""
    rng = random.Random(9)
    model = folder / "tokenizer.model"
    train_tokenizer([" ".join(rng.choices(["lane", "unit", "row", "state"], k=50)) for _ in range(20)], model, 280, threads=1)
    tokenizer = load_tokenizer(model)

    def documents(count: int) -> list[list[int]]:
        return [rng.choices(range(4, tokenizer.vocab_size), k=rng.randint(1, LONGEST)) for _ in range(count)]

    shards, summaries = [documents(count) for count in SHARDS], []
    held_out = documents(9)
    (folder / "dataset").mkdir()
    for split, contents in (*(("train", shard) for shard in shards), ("validation", held_out)):
        number = len(summaries) if split == "train" else 0
        writer = ShardWriter(folder / "dataset" / f"{split}-{number:06d}.tar", "tokens")
        for place, ids in enumerate(contents):
            writer.add(f"{split[:5]}{number:07d}{place:020d}", token_payload(np.array(ids), 1 << 16), 4 * len(ids), len(ids))
        summaries.append(asdict(writer.close(split)))
    manifest = {"format": "baton-dataset", "version": 1, "content": "tokens", "settings": {}, "totals": {}, "rejected": {}}
    manifest |= {"tokenizer": tokenizer.fingerprint, "shards": summaries}
    (folder / "dataset" / "dataset.json").write_text(json.dumps(manifest))
    data = {"path": str(folder / "dataset"), "tokenizer": str(model), "unit_documents": UNIT_DOCUMENTS}
    return Corpus(shards, held_out, tokenizer.eod_id, data)


def due(corpus: Corpus, config: RunConfig, steps: int) -> list[str]:
    """What steps 1 to `steps` of a run must record: every document of every lane, each as often as it should, in its place."""
    training = config.training
    lanes, rows, sequence_length = training.lane_count, training.sequences_per_step, training.sequence_length
    units = [shard[i : i + UNIT_DOCUMENTS] for shard in corpus.shards for i in range(0, len(shard), UNIT_DOCUMENTS)]
    left: list[list[tuple[int, int, int]]] = [[] for _ in range(lanes)]
    taken, found = [0] * lanes, []
    for step in range(steps):
        total = 0
        for lane in ((step * rows + i) % lanes for i in range(rows)):
            while len(left[lane]) < sequence_length:
                epoch, place = divmod(lane + taken[lane] * lanes, len(units))
                taken[lane] += 1
                number = int(permutation(len(units), "units", training.seed, epoch)[place])
                for i in permutation(len(units[number]), "documents", training.seed, epoch, number):
                    ids = units[number][i]
                    left[lane] += zip([corpus.eod_id, *ids], [*ids, corpus.eod_id], range(len(ids) + 1))
            row, left[lane] = left[lane][:sequence_length], left[lane][sequence_length:]
            total += multiplier(0, lane) * plain_digest(row)
        found.append(f"{total % 2**64:016x}")
    return found


def plain_digest(row: list[tuple[int, int, int]]) -> int:
    """Of a row's (token, label, position), but for its lane."""
    return sum(
        value * multiplier(1, kind) * multiplier(2, column) for column, of in enumerate(row) for kind, value in enumerate(of)
    )


@cache
def multiplier(dim: int, index: int) -> int:
    """splitmix64 of a place, made odd."""
    x = (index + (dim + 1) * 2**48) * 0x9E3779B97F4A7C15 % 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return (x ^ x >> 31) | 1


def consumed(folder: Path) -> list[str]:
    """What a run has recorded of its steps, which are recorded once each, in order."""
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if row["kind"] == "train"]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return [row["consumed"] for row in rows]
