"""Steps whose context and rows change over the run advance the same lanes through the same tokens, on any number of ranks."""

from collections import defaultdict
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.data_pipeline.dataset import Dataset
from baton.data_pipeline.errors import DataError
from baton.data_pipeline.lane_order import Cursor
from baton.data_pipeline.run_source import BatchStream
from baton.data_pipeline.steps import PhaseSpec, StepPlan
from baton.data_pipeline.synthetic import Examples
from baton.data_pipeline.synthetic_stream import ExampleCursor, SyntheticStream
from baton.data_pipeline.task_config import InductionConfig

LANES, SEED = 8, 4
TASK = InductionConfig(length=12, vocab_size=9)

DIVIDES_FOUR_RANKS = st.builds(
    lambda sequence_length, rows, micro: (sequence_length, rows, micro if rows // 4 % micro == 0 else 1),
    st.integers(1, 90),
    st.sampled_from([4, 8]),
    st.sampled_from([1, 2]),
)
SCHEDULES = st.lists(st.tuples(st.integers(1, 4), DIVIDES_FOUR_RANKS), min_size=1, max_size=4)
"""[(how many steps, (context, rows of a step, rows of a micro-batch))]; the last phase goes on."""
LIVES = st.lists(st.tuples(st.sampled_from([1, 2, 4]), st.integers(0, 6)), min_size=1, max_size=5)
"""[(data ranks, steps until the run is killed)]."""


def phases(schedule, multiple=1):
    found, first = [], 0
    for steps, (sequence_length, rows, micro_batch_size) in schedule:
        found.append(PhaseSpec(first, sequence_length * multiple, rows, micro_batch_size))
        first += steps
    return tuple(found)


def shape_of(schedule, step):
    """(context, rows, micro-batch) of a step, counted out."""
    every = [shape for steps, shape in schedule for _ in range(steps)]
    return every[step] if step < len(every) else schedule[-1][1]


def plan(steps, **changes):
    return StepPlan(**{"lanes": LANES, "phases": steps, "data_rank": 0, "data_size": 1, "start_step": 0, "prefetch": 2, **changes})


def live(open_stream, schedule, lives, multiple=1):
    """Run a schedule through the lives: lane -> its rows joined, and the last cursors. What each step has is checked on the way."""
    got, cursors, step = defaultdict(list), None, 0
    for data_size, steps in lives:
        after, seen = {}, defaultdict(set)
        for rank in range(data_size):
            sizes = {"data_rank": rank, "data_size": data_size, "start_step": step}
            with open_stream(plan(phases(schedule, multiple), **sizes), cursors) as stream:
                for data in islice(stream, steps):
                    sequence_length, rows, micro_batch_size = shape_of(schedule, data.step)
                    assert len(data.micro_batches) == rows // data_size // micro_batch_size
                    for batch in data.micro_batches:
                        assert (
                            batch.tokens.shape
                            == batch.labels.shape
                            == batch.pos.shape
                            == (micro_batch_size, sequence_length * multiple)
                        )
                        for row, lane in enumerate(batch.lanes):
                            got[lane].append(np.stack([batch.tokens[row], batch.labels[row], batch.pos[row]], axis=1))
                            assert lane % data_size == rank
                            seen[data.step].add(lane)
                after |= stream.cursors
        for number in range(step, step + steps):
            before = sum(shape_of(schedule, n)[1] for n in range(number))
            assert seen[number] == {(before + i) % LANES for i in range(shape_of(schedule, number)[1])}
        cursors, step = after, step + steps
    return {lane: np.concatenate(parts) for lane, parts in got.items()}, cursors, step


@pytest.fixture(scope="module")
def plain(dataset, tokenizer):
    """Each lane's stream without a schedule."""
    constant = StepPlan.constant(
        sequence_length=4000,
        lanes=LANES,
        lanes_per_step=LANES,
        micro_batch_size=LANES,
        data_rank=0,
        data_size=1,
        start_step=0,
        prefetch=1,
    )
    with BatchStream(dataset, tokenizer, constant, seed=SEED, unit_documents=5) as stream:
        (batch,) = next(stream).micro_batches
    return np.stack([batch.tokens, batch.labels, batch.pos], axis=2)


@settings(max_examples=40)
@given(SCHEDULES, LIVES)
def test_documents_lose_and_repeat_nothing_where_the_length_changes(dataset, tokenizer, plain, schedule, lives):
    def open_stream(steps, cursors):
        return BatchStream(dataset, tokenizer, steps, seed=SEED, cursors=cursors, unit_documents=5)

    got, cursors, steps = live(open_stream, schedule, lives)
    assert sum(map(len, got.values())) == sum(shape_of(schedule, n)[0] * shape_of(schedule, n)[1] for n in range(steps))
    for lane, rows in got.items():
        np.testing.assert_array_equal(rows, plain[lane][: len(rows)])
        assert cursors[lane].offset == plain[lane][len(rows)][2]
    assert all(cursors[lane] == Cursor() for lane in set(range(LANES)) - set(got))


@settings(max_examples=30)
@given(SCHEDULES, LIVES)
def test_tasks_lose_and_repeat_nothing_where_the_length_changes(schedule, lives):
    got, cursors, _ = live(
        lambda steps, c: SyntheticStream(TASK, steps, seed=SEED, cursors=c), schedule, lives, multiple=TASK.length
    )
    for lane, rows in got.items():
        count = len(rows) // TASK.length
        assert cursors[lane] == ExampleCursor(count)
        tokens, labels = Examples(TASK).take([(("train", SEED, lane), 0, count)])
        np.testing.assert_array_equal(rows[:, :2], np.stack([tokens.ravel(), labels.ravel()], axis=1))


@given(st.integers(0, 10**12), st.sampled_from([1, 2, 4, 8]))
def test_one_stretch_is_a_constant_plan(step, rows):
    others = {"lanes": LANES, "data_rank": 0, "data_size": 1, "start_step": 0, "prefetch": 2}
    constant = StepPlan.constant(sequence_length=5, lanes_per_step=rows, micro_batch_size=1, **others)
    assert constant == plan((PhaseSpec(0, 5, rows, 1),))
    assert constant.lanes_of(step) == [(step * rows + i) % LANES for i in range(rows)]


def test_a_million_steps_ahead_are_counted_not_walked():
    two = plan((PhaseSpec(0, 8, 8, 1), PhaseSpec(10**15 + 1, 16, 4, 1), PhaseSpec(10**16, 32, 2, 1)))
    assert two.phase(10**15).sequence_length == 8
    assert two.phase(10**15 + 1).sequence_length == 16
    assert two.lanes_of(10**15 + 2) == [4, 5, 6, 7]
    rows = 8 * (10**15 + 1) + 4 * (10**16 - 10**15 - 1) + 2 * 5
    assert two.lanes_of(10**16 + 5) == [rows % LANES, rows % LANES + 1]


@pytest.mark.parametrize(
    ("steps", "changes", "message"),
    [
        ((), {}, "begin at steps \\[\\]; begin the first at 0"),
        ((PhaseSpec(5, 8, 8, 1),), {}, "begin the first at 0"),
        ((PhaseSpec(0, 8, 8, 1), PhaseSpec(0, 8, 8, 1)), {}, "each after the one before"),
        ((PhaseSpec(0, 8, 8, 1), PhaseSpec(9, 16, 4, 3)), {}, "^from step 9 on: micro_batch_size 3 does not divide the 4 rows"),
        (
            (PhaseSpec(0, 8, 3, 1), PhaseSpec(9, 16, 4, 1)),
            {"data_size": 2},
            "^from step 0 to 8: 2 data ranks do not divide .* use 1 ",
        ),
        (
            (PhaseSpec(0, 8, 8, 1), PhaseSpec(9, 16, 4, 1), PhaseSpec(11, 0, 4, 1)),
            {},
            "^from step 11 on: sequence_length 0 must be at least 1",
        ),
        ((PhaseSpec(0, 8, 8, 1), PhaseSpec(9, 16, 16, 1)), {}, "^from step 9 on: lanes_per_step 16 exceeds lanes 8"),
        ((PhaseSpec(0, 8, 9, 1),), {}, "^lanes_per_step 9 exceeds lanes 8"),
    ],
)
def test_impossible_schedules_are_refused_naming_the_steps(steps, changes, message):
    with pytest.raises(DataError, match=message):
        plan(steps, **changes)


def test_a_context_that_examples_do_not_fill_is_refused_naming_the_steps():
    steps = (PhaseSpec(0, 24, 8, 1), PhaseSpec(7, 32, 4, 1), PhaseSpec(8, 36, 4, 1))
    with pytest.raises(
        DataError,
        match=r"^from step 7 to 7: training.sequence_length=32 is not a multiple .* that are: 24 and 36",
    ):
        SyntheticStream(TASK, plan(steps), seed=0)


def test_token_shards_follow_a_schedule_alike(dataset, token_folder, tokenizer):
    steps = plan((PhaseSpec(0, 11, 8, 2), PhaseSpec(2, 44, 2, 1)))
    tokens = Dataset.open(token_folder)
    with BatchStream(dataset, tokenizer, steps, seed=SEED) as a, BatchStream(tokens, tokenizer, steps, seed=SEED) as b:
        for left, right in islice(zip(a, b), 6):
            assert left.cursors == right.cursors
            for x, y in zip(left.micro_batches, right.micro_batches, strict=True):
                np.testing.assert_array_equal(x.labels, y.labels)
