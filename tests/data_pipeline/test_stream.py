"""The stream has exactly the documents in lane order, for any reader, any sequence length and any point of resuming."""

import gc
import os
import shutil
import tarfile
import threading
from collections import defaultdict
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.data_pipeline.dataset import Dataset
from baton.data_pipeline.errors import DataError
from baton.data_pipeline.lane_order import Cursor, permutation
from baton.data_pipeline.run_source import BatchStream
from baton.data_pipeline.steps import StepPlan

SEED, LANES, UNIT_DOCUMENTS = 11, 12, 5


@pytest.fixture(scope="session")
def lane_streams(text_folder, tokenizer):
    """lane -> the first tokens of its stream as int[n, 3] of (input, label, pos), made as plainly as can be, without our reader."""
    shards = []
    for path in sorted(text_folder.glob("train-*.tar")):
        with tarfile.open(path) as tar:
            shards.append([tokenizer.encode(tar.extractfile(member).read().decode()).tolist() for member in tar])
    units = [(s, first) for s, shard in enumerate(shards) for first in range(0, len(shard), UNIT_DOCUMENTS)]
    doc = tokenizer.eod_id
    streams = {}
    for lane in range(LANES):
        rows = []
        k = 0
        while len(rows) < 6000:
            epoch, place = divmod(lane + k * LANES, len(units))
            number = permutation(len(units), "units", SEED, epoch)[place]
            shard, first = units[number]
            documents = shards[shard][first : first + UNIT_DOCUMENTS]
            for i in permutation(len(documents), "documents", SEED, epoch, number):
                rows += zip([doc, *documents[i]], [*documents[i], doc], range(len(documents[i]) + 1))
            k += 1
        streams[lane] = np.array(rows[:6000])
    return streams


def open_stream(dataset, tokenizer, **changes):
    about_order = {"seed": SEED, "unit_documents": UNIT_DOCUMENTS}
    for name in ("seed", "unit_documents", "unit_bytes", "split", "cursors"):
        about_order |= {name: changes.pop(name)} if name in changes else {}
    plan = {"sequence_length": 16, "lanes": LANES, "lanes_per_step": LANES, "micro_batch_size": 1, "data_rank": 0, "data_size": 1}
    return BatchStream(dataset, tokenizer, StepPlan.constant(**{**plan, "start_step": 0, "prefetch": 2, **changes}), **about_order)


def rows_of(step, into):
    """Append each lane's (input, label, pos) rows of a StepData to `into`."""
    for batch in step.micro_batches:
        assert (batch.tokens.dtype, batch.labels.dtype, batch.pos.dtype) == (np.int64, np.int64, np.int32)
        for row, lane in enumerate(batch.lanes):
            into[lane].append(np.stack([batch.tokens[row], batch.labels[row], batch.pos[row]], axis=1))


SEGMENTS = st.lists(
    st.tuples(st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 3, 16, 61, 200]), st.integers(0, 4), st.sampled_from([12, 24])),
    min_size=1,
    max_size=5,
)


@settings(max_examples=50)
@given(SEGMENTS, st.integers(1, 3))
def test_stopping_anywhere_and_changing_ranks_or_context_loses_and_repeats_nothing(
    dataset, tokenizer, lane_streams, segments, prefetch
):
    """Each segment is a life of the run: (data ranks, context, steps until it is killed, rows per step / half of it)."""
    got = defaultdict(list)
    cursors, step = None, 0
    for data_size, sequence_length, steps, rows in segments:
        after = {}
        for rank in range(data_size):
            arguments = {
                "data_rank": rank,
                "data_size": data_size,
                "sequence_length": sequence_length,
                "lanes_per_step": rows // 2 if data_size < 4 else 12,
            }
            with open_stream(dataset, tokenizer, start_step=step, cursors=cursors, prefetch=prefetch, **arguments) as stream:
                assert set(stream.cursors) == set(range(rank, LANES, data_size))
                for number, data in enumerate(islice(stream, steps)):
                    assert data.step == step + number
                    assert all(lane % data_size == rank for batch in data.micro_batches for lane in batch.lanes)
                    rows_of(data, got)
                after |= stream.cursors
        cursors, step = after, step + steps
    for lane, parts in got.items():
        joined = np.concatenate(parts)
        np.testing.assert_array_equal(joined, lane_streams[lane][: len(joined)])
    for lane, cursor in cursors.items():
        taken = sum(map(len, got[lane]))
        assert cursor.offset == lane_streams[lane][taken][2]


def test_a_wrong_cursor_is_noticed_by_the_same_comparison(dataset, tokenizer, lane_streams):
    with open_stream(dataset, tokenizer) as stream:
        cursors = next(stream).cursors
    wrong = {**cursors, 5: Cursor(cursors[5].unit, cursors[5].document, cursors[5].offset + 1)}
    for place, differs in ((cursors, False), (wrong, True)):
        got = defaultdict(list)
        with open_stream(dataset, tokenizer, start_step=1, cursors=place) as stream:
            rows_of(next(stream), got)
        assert np.array_equal(got[5][0], lane_streams[5][16:32]) is not differs


@pytest.mark.parametrize("data_size", [1, 2, 3])
def test_every_rank_gets_its_own_lanes_in_whole_micro_batches(dataset, tokenizer, data_size):
    for rank in range(data_size):
        with open_stream(
            dataset, tokenizer, lanes_per_step=6, micro_batch_size=6 // data_size, data_rank=rank, data_size=data_size
        ) as stream:
            for step in islice(stream, 4):
                (batch,) = step.micro_batches
                assert batch.lanes == tuple(
                    lane for lane in range(step.step % 2 * 6, step.step % 2 * 6 + 6) if lane % data_size == rank
                )
                assert batch.tokens.shape == batch.labels.shape == batch.pos.shape == (6 // data_size, 16)


def test_token_shards_give_the_same_stream_as_text(dataset, token_folder, tokenizer):
    tokens = Dataset.open(token_folder)
    assert tokens.tokenizer_fingerprint == tokenizer.fingerprint
    with open_stream(dataset, tokenizer, sequence_length=50) as a, open_stream(tokens, tokenizer, sequence_length=50) as b:
        for left, right in islice(zip(a, b), 12):
            assert left.cursors == right.cursors
            for x, y in zip(left.micro_batches, right.micro_batches, strict=True):
                np.testing.assert_array_equal(x.tokens, y.tokens)
                np.testing.assert_array_equal(x.labels, y.labels)


def test_units_are_bounded_in_bytes_too(dataset, tokenizer):
    with open_stream(dataset, tokenizer, unit_bytes=1, lanes=1, lanes_per_step=1) as stream:
        marks = sum(int((step.micro_batches[0].pos == 0).sum()) for step in islice(stream, 100))
        assert stream.cursors[0].unit == marks - (stream.cursors[0].offset > 0)


def test_cursors_tell_what_was_yielded_not_what_was_prefetched(dataset, tokenizer):
    with open_stream(dataset, tokenizer, prefetch=50) as ahead, open_stream(dataset, tokenizer, prefetch=1) as behind:
        assert ahead.cursors == {lane: Cursor() for lane in range(LANES)}
        for _ in range(3):
            next(ahead), next(behind)
            assert ahead.cursors == behind.cursors


def prefetchers():
    return [thread for thread in threading.enumerate() if thread.name == "data-prefetch"]


def test_closing_or_dropping_a_stream_ends_its_thread(dataset, tokenizer):
    before = len(prefetchers())
    stream = open_stream(dataset, tokenizer)
    next(stream)
    assert len(prefetchers()) == before + 1
    stream.close()
    stream.close()
    assert len(prefetchers()) == before
    with pytest.raises(DataError, match="closed"):
        next(stream)
    dropped = open_stream(dataset, tokenizer)
    next(dropped)
    del dropped
    gc.collect()
    assert len(prefetchers()) == before


def test_fingerprint_is_of_all_that_decides_the_order(dataset, token_folder, tokenizer, other_tokenizer):
    def fingerprint(data=dataset, model=tokenizer, **changes):
        with open_stream(data, model, **changes) as stream:
            return stream.fingerprint

    same = [fingerprint(), fingerprint(sequence_length=7, lanes_per_step=6, data_size=2, prefetch=1)]
    others = [
        fingerprint(seed=12),
        fingerprint(lanes=24),
        fingerprint(unit_documents=6),
        fingerprint(unit_bytes=1000),
        fingerprint(model=other_tokenizer),
        fingerprint(Dataset.open(token_folder)),
        fingerprint(split="validation"),
    ]
    assert same[0] == same[1]
    assert len({same[0], *others}) == 1 + len(others)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data_size": 5}, "use 1, 2, 3, 4, 6 or 12 data ranks"),
        ({"micro_batch_size": 5}, "does not divide the 12 rows"),
        ({"data_rank": 2, "data_size": 2}, "use 0 to 1"),
        ({"sequence_length": 0}, "at least 1"),
        ({"split": "test"}, "split 'test'; it has train, validation"),
        ({"start_step": 3}, "those saved after step 2"),
        ({"cursors": {0: Cursor()}}, r"no cursor for lane 1 \(of 11 missing\)"),
    ],
)
def test_impossible_arguments_are_refused_at_once(dataset, tokenizer, changes, message):
    with pytest.raises(DataError, match=message):
        open_stream(dataset, tokenizer, **changes)


@pytest.mark.parametrize("cursor", [Cursor(0, 5, 0), Cursor(0, 0, 10**6)])
def test_cursors_of_another_dataset_are_noticed(dataset, tokenizer, cursor):
    cursors = dict.fromkeys(range(LANES), cursor)
    with open_stream(dataset, tokenizer, cursors=cursors) as stream, pytest.raises(DataError, match="belongs to another"):
        next(stream)


def test_token_shards_of_another_tokenizer_are_refused(token_folder, other_tokenizer):
    with pytest.raises(DataError, match="use that tokenizer, or prepare the dataset with this one"):
        open_stream(Dataset.open(token_folder), other_tokenizer)


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_a_damaged_shard_surfaces_from_the_thread_naming_shard_and_document(text_folder, tokenizer, tmp_path, damage):
    folder = shutil.copytree(text_folder, tmp_path / "dataset")
    opened = Dataset.open(folder)
    victim = opened.shards["train"][1]
    path = folder / victim.name
    if damage == "flip":
        content = bytearray(path.read_bytes())
        content[512] ^= 1  # the first byte of the first document
        path.write_bytes(content)
    elif damage == "truncate":
        os.truncate(path, 1000)
    else:
        path.unlink()
    named = rf"document [0-9a-f]{{32}}.*{victim.name}|{victim.name}.*document [0-9a-f]{{32}}"
    with open_stream(opened, tokenizer, sequence_length=400) as stream:
        with pytest.raises(DataError, match=named) as caught:
            list(islice(stream, 300))
        assert "\n" not in str(caught.value)
        with pytest.raises(DataError):  # and again: a failed stream stays failed
            next(stream)
