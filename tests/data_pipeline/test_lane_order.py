"""The order of the data is a pure function, covers every unit once an epoch, and impossible layouts are refused with legal ones."""

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.data_pipeline.errors import DataError
from baton.data_pipeline.lane_order import Cursor, LaneOrder, Units, check_layout, next_lanes, permutation
from baton.data_pipeline.shards import unit_starts

SIZES = st.lists(st.integers(1, 50), min_size=1, max_size=60)


@given(SIZES, st.integers(1, 9), st.integers(1, 120))
def test_units_are_as_large_as_allowed_and_no_larger(sizes, unit_documents, unit_bytes):
    starts = unit_starts(np.array(sizes), unit_documents, unit_bytes)
    assert starts[0] == 0
    ends = [*starts[1:].tolist(), len(sizes)]
    for start, end in zip(starts.tolist(), ends):
        count, total = end - start, sum(sizes[start:end])
        assert 1 <= count <= unit_documents
        assert total <= unit_bytes or count == 1
        if end < len(sizes):
            assert count == unit_documents or total + sizes[end] > unit_bytes


@given(st.lists(SIZES, min_size=1, max_size=4), st.integers(1, 9), st.integers(1, 13), st.integers(0, 2**70))
def test_lanes_together_read_every_document_once_per_epoch(shards, unit_documents, lanes, seed):
    units = Units([unit_starts(np.array(sizes), unit_documents, 10**6) for sizes in shards], [len(sizes) for sizes in shards])
    order = LaneOrder(units, seed, lanes)
    epochs = 3
    seen = []
    for slot in range(epochs * len(units)):
        unit, samples = order.unit(slot % lanes, slot // lanes)
        assert sorted(samples.tolist()) == list(range(unit.count))
        seen += [(unit.shard, unit.first + i) for i in samples.tolist()]
    documents = [(shard, i) for shard, sizes in enumerate(shards) for i in range(len(sizes))]
    for epoch in range(epochs):
        assert sorted(seen[epoch * len(documents) : (epoch + 1) * len(documents)]) == documents
    again = LaneOrder(units, seed, lanes)
    far, near = again.unit(0, 40), order.unit(0, 40)
    assert far[0] == near[0]
    np.testing.assert_array_equal(far[1], near[1])


def test_permutations_are_fixed_for_ever():
    # recorded once: a change of these values would silently reorder the data of every run under way
    assert permutation(10, "units", 1234, 0).tolist() == [1, 4, 8, 6, 5, 3, 7, 0, 2, 9]
    assert permutation(6, "documents", 7, 3, 11).tolist() == [2, 3, 1, 0, 5, 4]


def test_permutations_differ_by_key_and_are_uniform():
    counts = Counter(tuple(permutation(3, "units", seed, 0).tolist()) for seed in range(3000))
    assert len(counts) == 6
    assert max(counts.values()) < 600
    assert permutation(20, 1).tolist() != permutation(20, 2).tolist()


@given(st.integers(1, 40), st.lists(st.integers(1, 40), max_size=8))
def test_steps_advance_lanes_in_turn(lanes, rows_of_steps):
    taken = []
    for rows in rows_of_steps:
        taken += next_lanes(len(taken), lanes, rows)
    assert taken == [i % lanes for i in range(sum(rows_of_steps))]


def test_impossible_layouts_name_legal_ones():
    check_layout(lanes=12, lanes_per_step=6, micro_batch_size=1, data_size=3)
    with pytest.raises(DataError, match=r"use 1, 2, 3 or 6 data ranks"):
        check_layout(lanes=12, lanes_per_step=6, micro_batch_size=1, data_size=4)
    with pytest.raises(DataError, match=r"use 1 or 3"):
        check_layout(lanes=12, lanes_per_step=6, micro_batch_size=2, data_size=2)
    with pytest.raises(DataError, match="lanes_per_step 6 exceeds lanes 4"):
        check_layout(lanes=4, lanes_per_step=6, micro_batch_size=1, data_size=1)
    with pytest.raises(DataError, match="at least 1"):
        check_layout(lanes=4, lanes_per_step=4, micro_batch_size=0, data_size=1)


@given(st.builds(Cursor, st.integers(0), st.integers(0), st.integers(0)))
def test_cursors_survive_json(cursor):
    assert Cursor.from_json(json.loads(json.dumps(cursor.to_json()))) == cursor


@pytest.mark.parametrize(
    "value",
    [None, {}, {"unit": 1, "document": 2}, {"unit": -1, "document": 0, "offset": 0}, {"unit": 1.0, "document": 0, "offset": 0}],
)
def test_damaged_cursors_are_refused(value):
    with pytest.raises(DataError, match="not a lane cursor"):
        Cursor.from_json(value)


def test_an_empty_dataset_has_no_order():
    with pytest.raises(DataError, match="no unit"):
        LaneOrder(Units([], []), 0, 2)
