"""The ledger: whatever happens to a run, it consumes exactly the tokens that it should, each as often as it should.

Every token of the corpus says which source, document and place it is, so what was consumed can be counted. A schedule is a run's
whole life: kills at any step, other numbers of data ranks and workers, other contexts, rows and weights after each. What it should
have consumed is worked out by `Expected`, which knows nothing of our readers, cursors or steps.
"""

import hashlib
import random
import threading
from collections import Counter
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from baton.data_pipeline.dataset import Dataset
from baton.data_pipeline.errors import DataError
from baton.data_pipeline.lane_order import Cursor, permutation
from baton.data_pipeline.run_source import BatchStream
from baton.data_pipeline.shards import token_payload
from baton.data_pipeline.steps import PhaseSpec, StepPlan

UNIT_DOCUMENTS = 3
SOURCES = {"books": (23, 9), "code": (14, 15), "web": (31, 4)}
"""Documents of each, and the most tokens that one has."""


@pytest.fixture(scope="module")
def corpus(tokenizer, write_dataset, tmp_path_factory):
    """{source: (dataset, its documents' ids)}; no token occurs twice."""
    rng, found, following = random.Random(3), {}, 1000
    for name, (count, longest) in SOURCES.items():
        documents = []
        for _ in range(count):
            length = rng.randint(1, longest)
            documents.append(list(range(following, following + length)))
            following += length
        contents = [(token_payload(np.array(ids), 1 << 16), rng.randint(1, 40), len(ids)) for ids in documents]
        folder = tmp_path_factory.mktemp(name) / "dataset"
        folder.mkdir()
        write_dataset(folder, contents, "tokens", tokenizer)
        found[name] = Dataset.open(folder), documents, [size for _, size, _ in contents]
    return found


class Expected:
    """The rows of every lane, one after the other, worked out plainly."""

    def __init__(self, corpus, seed, lanes, doc):
        self.seed, self.lanes, self.eod_id = seed, lanes, doc
        self.sources = [(name, documents) for name, (_, documents, _) in corpus.items()]
        # all documents of a shard, UNIT_DOCUMENTS at a time, are the units
        self.units = [[docs[i : i + UNIT_DOCUMENTS] for i in range(0, len(docs), UNIT_DOCUMENTS)] for _, docs in self.sources]
        self.means = [sum(sizes) / len(units) for (_, _, sizes), units in zip(corpus.values(), self.units)]
        self.left = {lane: [] for lane in range(lanes)}
        self.taken = {lane: [0] * len(self.sources) for lane in range(lanes)}

    def rows(self, lane, tokens, weights):
        """The next (input, label, pos) of a lane, while these weights hold."""
        left = self.left[lane]
        while len(left) < tokens:
            left += self.unit(lane, weights)
        self.left[lane] = left[tokens:]
        return left[:tokens]

    def unit(self, lane, weights):
        taken = self.taken[lane]
        source = 0
        if len(self.sources) > 1:
            digest = hashlib.blake2b(f"source\n{self.seed}\n{lane}\n{sum(taken)}".encode(), digest_size=8).digest()
            rates = [weights[name] / mean for (name, _), mean in zip(self.sources, self.means)]
            drawn = int.from_bytes(digest, "little") / 2**64 * sum(rates)
            while drawn >= rates[source]:
                drawn -= rates[source]
                source += 1
        units = self.units[source]
        epoch, place = divmod(lane + taken[source] * self.lanes, len(units))
        taken[source] += 1
        seed = f"{self.seed}\n{self.sources[source][0]}" if len(self.sources) > 1 else self.seed
        number = int(permutation(len(units), "units", seed, epoch)[place])
        rows = []
        for i in permutation(len(units[number]), "documents", seed, epoch, number):
            ids = units[number][i]
            rows += zip([self.eod_id, *ids], [*ids, self.eod_id], range(len(ids) + 1))
        return rows


def in_thread(serve, arguments, ours):
    """A worker without a process: the same code and the same pipe; it ends when the other end is closed."""
    thread = threading.Thread(target=serve, args=arguments, daemon=True)
    thread.terminate = ours.close
    thread.start()
    return thread


def random_schedule(rng):
    """Sources, lanes, seed, and lives: (data ranks, workers, context, rows per step, steps until it is killed, weights)."""
    names = rng.sample(sorted(SOURCES), rng.choice((1, 1, 2, 3)))
    lanes = rng.choice((12, 24))
    lives = []
    for _ in range(rng.randint(1, 4)):
        cut = sorted(rng.random() for _ in names[1:])
        shares = [b - a for a, b in zip([0.0, *cut], [*cut, 1.0])]
        rows = rng.choice((12, lanes))
        workers = rng.choice((0, 0, 0, 0, 1, 2, 3, 4))  # starting some takes most of a schedule's time
        life = rng.choice((1, 2, 3, 4)), workers, rng.choice((1, 5, 8, 32)), rows
        lives.append((*life, rng.randint(0, 4), dict(zip(names, shares))))
    return names, lanes, rng.randrange(1 << 40), lives


def consume(corpus, tokenizer, schedule, start=in_thread, spoil=lambda cursors: cursors):
    """Live a schedule; raises AssertionError when what was consumed is not what should have been. spoil: done to what is saved.
    Returns how many tokens were consumed."""
    names, lanes, seed, lives = schedule
    chosen = {name: corpus[name] for name in names}
    expected = Expected(chosen, seed, lanes, tokenizer.eod_id)
    datasets = {name: dataset for name, (dataset, _, _) in chosen.items()}
    sources = datasets if len(names) > 1 else datasets[names[0]]
    got, due, cursors, step, mixture, rows_before = Counter(), Counter(), None, 0, [], 0
    for data_size, workers, sequence_length, rows, steps, weights in lives:
        mixture = [(first, w) for first, w in mixture if first < step] + [(step, weights)]
        plan = {"lanes": lanes, "micro_batch_size": 1, "prefetch": 2, "data_size": data_size, "start_step": step}
        after = {}
        for rank in range(data_size):
            phases = StepPlan.constant(sequence_length=sequence_length, lanes_per_step=rows, data_rank=rank, **plan)
            phases = replace(phases, phases=shapes(lives, step, sequence_length, rows))
            about = {"seed": seed, "unit_documents": UNIT_DOCUMENTS, "cursors": cursors, "workers": workers, "start": start}
            mixed = {"mixture": tuple(mixture)} if len(names) > 1 else {}
            with BatchStream(sources, tokenizer, phases, **about, **mixed) as stream:
                for data in islice(stream, steps):
                    for batch in data.micro_batches:
                        got.update(
                            zip(batch.tokens.flat, batch.labels.flat, batch.pos.flat, np.repeat(batch.lanes, sequence_length))
                        )
                after |= stream.cursors
        for _ in range(steps):
            for i in range(rows):
                lane = (rows_before + i) % lanes
                due.update((*row, lane) for row in expected.rows(lane, sequence_length, weights))
            rows_before += rows
        step += steps
        cursors = spoil({lane: Cursor.from_json(cursor.to_json()) for lane, cursor in after.items()})
    assert got == due
    return sum(got.values())


def shapes(lives, step, sequence_length, rows):
    """Of the plan: rows of steps before count towards which lanes come next."""
    found, first = [], 0
    for _, _, at, g, steps, _ in lives:
        if first >= step:
            break
        if steps:
            found.append(PhaseSpec(first, at, g, 1))
        first += steps
    return (*found, PhaseSpec(step, sequence_length, rows, 1))


def test_short_ledger(corpus, tokenizer):
    consumed = sum(consume(corpus, tokenizer, random_schedule(random.Random(number))) for number in range(30))
    assert consumed > 18_000


@pytest.mark.long
def test_long_ledger(corpus, tokenizer):
    consumed = sum(consume(corpus, tokenizer, random_schedule(random.Random(number))) for number in range(30, 2580))
    assert consumed > 2_000_000


def test_ledger_of_worker_processes(corpus, tokenizer):
    weights = [{"books": 0.3, "web": 0.7}, {"books": 0.9, "web": 0.1}, {"books": 1.0, "web": 0.0}]
    lives = [
        (1, 4, 8, 12, 3, weights[0]),
        (2, 1, 5, 24, 2, weights[1]),
        (1, 3, 32, 12, 3, weights[1]),
        (1, 0, 8, 12, 2, weights[2]),
    ]
    assert consume(corpus, tokenizer, (["books", "web"], 24, 5, lives), start=None) == 12 * 24 + 24 * 10 + 12 * 96 + 12 * 16


def moved(**changes):
    """What a wrong cursor is: of lane 3, something else than it was."""

    def spoil(cursors):
        return {**cursors, 3: replace(cursors[3], **{name: change(cursors[3]) for name, change in changes.items()})}

    return spoil


MUTATIONS = {
    "a token repeated": moved(offset=lambda c: max(0, c.offset - 1), document=lambda c: c.document),
    "a token lost": moved(offset=lambda c: c.offset + 1),
    "a document lost": moved(document=lambda c: c.document + 1, offset=lambda c: 0),
    "a unit lost": moved(unit=lambda c: c.unit + 1, taken=lambda c: tuple(n + 1 for n in c.taken), document=lambda c: 0),
    "the open unit's source forgotten": moved(source=lambda c: None if c.source is None else (c.source + 1) % len(c.taken)),
    "another lane's cursor": lambda cursors: {**cursors, 3: cursors[4], 4: cursors[3]},
    "all lanes at the beginning": lambda cursors: dict.fromkeys(cursors, Cursor()),
}


@pytest.mark.parametrize("mutation", MUTATIONS.values(), ids=MUTATIONS.keys())
def test_a_broken_cursor_is_noticed(corpus, tokenizer, mutation):
    """The same comparison on the same kind of schedule, with what is saved spoiled on purpose."""
    lives = [(2, 1, 8, 12, 3, {"books": 0.5, "code": 0.5}), (3, 2, 5, 12, 3, {"books": 0.2, "code": 0.8})]
    schedule = ["books", "code"], 12, 17, lives
    assert consume(corpus, tokenizer, schedule) == 12 * 3 * (8 + 5)
    with pytest.raises((AssertionError, DataError)):
        consume(corpus, tokenizer, schedule, spoil=mutation)


def test_skipped_documents_are_left_out_and_nothing_else(corpus, tokenizer):
    """Of a lane in the middle of a document: that one's rest, and another one's whole."""
    dataset, _, _ = corpus["books"]
    plan = StepPlan.constant(
        sequence_length=7, lanes=1, lanes_per_step=1, micro_batch_size=1, data_rank=0, data_size=1, start_step=0, prefetch=1
    )

    def rows(start, cursors, count):
        at = replace(plan, start_step=start)
        with BatchStream(dataset, tokenizer, at, seed=5, unit_documents=UNIT_DOCUMENTS, cursors=cursors) as stream:
            steps = list(islice(stream, count))
            batches = [step.micro_batches[0] for step in steps]
            found = [row for b in batches for row in zip(b.tokens[0].tolist(), b.labels[0].tolist(), b.pos[0].tolist())]
            return found, stream.cursors[0], stream.documents_between(0, (cursors or {0: Cursor()})[0], stream.cursors[0], start)

    whole, _, places = rows(0, None, 40)
    first, cursor, _ = rows(0, None, 2)
    assert cursor.offset, "the lane stopped in the middle of a document"
    open_at = next(i for i, p in enumerate(places) if (p.unit, p.document) == (cursor.unit, cursor.document))
    skip = [places[open_at], places[open_at + 2]]
    starts = [i for i, row in enumerate(whole) if row[2] == 0]
    left_out = set(range(len(first), starts[open_at + 1])) | set(range(starts[open_at + 2], starts[open_at + 3]))
    want = [row for i, row in enumerate(whole) if i >= len(first) and i not in left_out]
    skipped = replace(cursor, skipped=tuple((p.source, p.unit, p.document) for p in skip))
    after, _, touched = rows(2, {0: Cursor.from_json(skipped.to_json())}, 10)
    assert after == want[: len(after)]
    assert not {p.name for p in skip} & {p.name for p in touched}
    assert [p.name for p in touched] == [p.name for p in places if p not in skip][open_at : open_at + len(touched)]


def test_worker_failures_are_the_streams(corpus, tokenizer, tmp_path):
    """A damaged shard that only a worker meets is named like any other; a worker that is killed is missed at once."""
    import shutil

    dataset, _, _ = corpus["books"]
    plan = StepPlan.constant(
        sequence_length=64, lanes=2, lanes_per_step=2, micro_batch_size=1, data_rank=0, data_size=1, start_step=0, prefetch=1
    )
    folder = shutil.copytree(dataset.location.folder, tmp_path / "d")
    shard = folder / "train-000000.tar"
    content = bytearray(shard.read_bytes())
    content[700:] = bytes(len(content) - 700)
    shard.write_bytes(content)
    damaged = BatchStream(Dataset.open(folder), tokenizer, plan, seed=0, workers=2)
    with damaged as stream, pytest.raises(DataError, match=r"document trai.* of .*train-000000.tar"):
        next(stream)
    with BatchStream(dataset, tokenizer, plan, seed=0, workers=1) as stream:
        next(stream)
        stream._steps._stop()
        with pytest.raises(DataError, match="data worker 0 ended by itself"):
            list(islice(stream, 5000))
