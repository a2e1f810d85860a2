"""Waiting for data is a number of every step, and in the ledger: that of the rank which waited longest."""

import pytest
from support.runs import SAME_PLACES

from baton.training import ledger, stopping
from baton.training.monitor import read_metrics

SLOW_S = 0.3


def agree(mesh):
    return stopping.agreed(mesh, 0.25 * mesh.data_rank)


def test_the_slowest_reader_counts(pool):
    assert pool.run(agree, data=3) == [(False, 0.5)] * 3


def test_a_slow_source_is_seen_in_the_record_and_in_the_ledger(inputs, launch, tmp_path):
    """A pipe that takes its time over every file, read as it is needed."""
    place = f"data.path=pipe:sleep {SLOW_S}; cat {inputs.shards}/{{}}"
    words = (*SAME_PLACES, place, "training.steps=12", "training.schedule.warmup_steps=1", "training.evaluation.every=0")
    words += ("data.prefetch=1", "data.unit_documents=2")
    ended = launch(tmp_path / "run", str(inputs.run), *words, where=inputs.run.parent).end()
    assert (ended.status, ended.err) == (0, "")
    rows = [row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if row["kind"] == "train"]
    assert len(rows) == 12
    assert all(0 <= row["data_wait_s"] <= sum(row["seconds"].values()) + SLOW_S for row in rows)
    assert max(row["data_wait_s"] for row in rows) > SLOW_S / 2
    own, ledgered = sum(row["seconds"]["data"] for row in rows), waited(tmp_path / "run")
    assert ledgered == pytest.approx(own, abs=0.5)
    assert ledgered > SLOW_S / 2


def waited(folder):
    """Seconds that the ledger calls waiting for data."""
    return sum(row["seconds"].get("data", 0.0) for row in ledger.read(folder) if row["kind"] == "spans")
