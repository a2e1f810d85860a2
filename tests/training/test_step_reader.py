"""Steps that are read ahead, while a GPU computes, are those that are read when they are needed."""

import time

import numpy as np
import pytest
from support.runs import DEADLINE_S

from baton.data_pipeline.config import MOST_WORKERS, ShardsConfig
from baton.data_pipeline.errors import DataError, StorageError
from baton.data_pipeline.packing import empty_batch
from baton.data_pipeline.steps import StepPlan, StepStream
from baton.training.config import TrainingConfig
from baton.training.step.batch_distribution import StepReader

TRAINING = TrainingConfig(steps=20, sequence_length=8, global_batch_tokens=32, micro_batch_size=2, optimizer={"lr": 1.0})
PLAN = StepPlan.constant(
    sequence_length=8, lanes=4, lanes_per_step=4, micro_batch_size=2, data_rank=0, data_size=1, start_step=0, prefetch=1
)


def numbered(step, batches):
    """Rows that say which step they are of."""
    for batch in batches:
        batch.tokens[:] = step * 100 + np.array(batch.lanes)[:, None]
        batch.labels[:], batch.pos[:] = batch.tokens + 1, np.arange(8)
    return dict.fromkeys(range(4), step)


def contents(data):
    return [batch.tokens.tolist() for batch in data.batches], data.cursors, data.checksum, data.schedule


def wait_until(ready):
    deadline = time.monotonic() + DEADLINE_S
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_prepared_steps_are_the_same(single_mesh):
    """Prepared or not, in turns; and twice in a row."""
    with StepStream(PLAN, {}, numbered) as plain, StepStream(PLAN, {}, numbered) as stream:
        expected, reader = StepReader(plain, single_mesh, TRAINING), StepReader(stream, single_mesh, TRAINING)
        for step in range(6):
            for _ in range(step % 3):
                wait_until(stream.is_ready)
                reader.prepare()
            data = next(reader)
            assert contents(data) == contents(next(expected))
            assert data.batches[1].tokens[1, 0] == step * 100 + 3
            assert data.reader_batches is not None


def test_preparing_does_not_wait(single_mesh):
    """Rows that are not made are waited for by `next`, and the wait is counted."""
    begun = []

    def slow(step, batches):
        begun.append(step)
        time.sleep(0.3)
        return numbered(step, batches)

    with StepStream(PLAN, {}, slow) as stream:
        reader = StepReader(stream, single_mesh, TRAINING)
        assert not stream.is_ready()
        reader.prepare()
        data = next(reader)
        assert data.batches[0].tokens[0, 0] == 0
        assert data.wait_s > 0
        assert next(reader).batches[0].tokens[0, 0] == 100
    assert begun[:2] == [0, 1]


@pytest.mark.parametrize("kind", [DataError, StorageError, ValueError])
def test_an_error_is_raised_when_its_step_is_needed(kind, single_mesh):
    """Not before: what is computed meanwhile is of the step before, which has nothing to do with it."""

    def fill(step, batches):
        if step == 2:
            raise kind("damaged")
        return numbered(step, batches)

    with StepStream(PLAN, {}, fill) as stream:
        reader = StepReader(stream, single_mesh, TRAINING)
        for step in range(2):
            assert next(reader).batches[0].tokens[0, 0] == step * 100
            wait_until(stream.is_ready)
            reader.prepare()
        for _ in range(2):
            with pytest.raises(kind, match="damaged"):
                next(reader)


def test_ranks_that_do_not_read_prepare_nothing(single_mesh):
    reader = StepReader(None, single_mesh, TRAINING)
    reader.prepare()
    batch = empty_batch(2, 8, (0, 1))
    assert next(reader).batches[0].tokens.shape == batch.tokens.shape
    assert next(reader).reader_batches is None


@pytest.mark.parametrize(
    ("workers", "cores", "count"), [("auto", 0, 0), ("auto", 1, 0), ("auto", 6, 3), ("auto", 64, MOST_WORKERS)]
)
def test_auto_workers_are_half_of_the_cores(workers, cores, count):
    """0 cores: a CPU's, which computes on them."""
    config = ShardsConfig(path="shards", tokenizer="t.model", workers=workers)
    assert config.worker_count(cores) == count
    assert ShardsConfig(path="shards", tokenizer="t.model", workers=7).worker_count(cores) == 7
    assert ShardsConfig(path="shards", tokenizer="t.model").workers == "auto"
