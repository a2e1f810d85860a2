"""The checksum of consumed data in a step's row: equal for all layouts, different for every mistake, and equal to a plain
computation."""

import random

import numpy as np
import pytest
import yaml
from support.consumed import consumed, due, multiplier, plain_digest, write_corpus
from support.jobs import RUN
from support.pool_runs import train_run

from baton.data_pipeline.packing import Batch
from baton.launcher.config import load
from baton.training.step.batch_distribution import batch_checksum

SEQUENCE_LENGTH, LANES = 7, 12


def step_of(seed=0):
    """A row of every lane: (tokens, labels, positions)."""
    rng = np.random.default_rng(seed)
    return {lane: rng.integers(-1, 300, (3, SEQUENCE_LENGTH)) for lane in range(LANES)}


def batches(rows, micro_batch_size, data_size):
    """The step's batches on each data rank."""
    for rank in range(data_size):
        own = [lane for lane in rows if lane % data_size == rank]
        chosen = [own[i : i + micro_batch_size] for i in range(0, len(own), micro_batch_size)]
        kinds = [[np.stack([rows[lane][kind] for lane in lanes]) for kind in range(3)] for lanes in chosen]
        yield [Batch(t, labels, pos.astype(np.int32), tuple(lanes)) for (t, labels, pos), lanes in zip(kinds, chosen)]


def total(rows, micro_batch_size=1, data_size=1):
    return sum(batch_checksum(of_rank) for of_rank in batches(rows, micro_batch_size, data_size)) % 2**64


@pytest.mark.parametrize(("micro_batch_size", "data_size"), [(12, 1), (5, 1), (2, 2), (3, 4), (1, 12)])
def test_it_is_the_same_however_rows_are_divided(micro_batch_size, data_size):
    rows = step_of()
    assert total(rows, micro_batch_size, data_size) == total(rows)
    plain = sum(multiplier(0, lane) * plain_digest(list(zip(*row.tolist()))) for lane, row in rows.items())
    assert total(rows) == plain % 2**64
    assert all(-(2**63) <= batch_checksum(of_rank) < 2**63 for of_rank in batches(rows, micro_batch_size, data_size)), "an int64"
    assert batch_checksum([]) == 0, "of a rank that does not read"


def test_every_mistake_shows():
    rows, rng, seen = step_of(), random.Random(1), set()
    seen.add(total(rows))
    for _ in range(200):
        wrong = {lane: row.copy() for lane, row in rows.items()}
        one, other = rng.sample(range(LANES), 2)
        mistake = rng.choice(("value", "shift", "swap", "twice"))
        if mistake == "value":
            wrong[one][rng.randrange(3), rng.randrange(SEQUENCE_LENGTH)] += rng.choice((-1, 1, 256))
        elif mistake == "shift":
            wrong[one] = np.roll(wrong[one], rng.randrange(1, SEQUENCE_LENGTH), axis=1)
        elif mistake == "swap":
            wrong[one], wrong[other] = wrong[other], wrong[one]
        else:
            wrong[one] = wrong[other].copy()
        assert (total(wrong) == total(rows)) == all((wrong[lane] == rows[lane]).all() for lane in rows), mistake
        seen.add(total(wrong))
    assert len(seen) > 100


def test_a_run_records_what_a_plain_reading_of_its_documents_expects(pool, tmp_path):
    """More ranks than one, several epochs, documents longer and shorter than a row."""
    corpus = write_corpus(tmp_path)
    run = tmp_path / "run.yaml"
    training = RUN["training"] | {"steps": 60, "evaluation": {"every": 0}, "checkpoint": {"every": 60}}
    run.write_text(yaml.safe_dump(RUN | {"name": "small", "data": corpus.data, "layout": {"data": 2}, "training": training}))
    pool.run(train_run, str(tmp_path / "run"), str(run), data=2)
    found = consumed(tmp_path / "run")
    assert found == due(corpus, load(run, []), 60)
    other = load(run, ["training.seed=1"])
    assert not set(found) & set(due(corpus, other, 60)), "another order of documents"
