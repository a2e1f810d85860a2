"""The time that a step waits for data is recorded in metrics.jsonl and in the time ledger, as that of the rank with the longest
wait."""

import time

from support.runs import SAME_PLACES, wait_until

from baton.training import preemption
from baton.training.monitoring import time_ledger
from baton.training.monitoring.heartbeat import read_beat
from baton.training.monitoring.metrics import read_metrics

HELD_S = 2.0
"""How long the source gives nothing once it is waited for."""

STEPS = 4


def agree(mesh):
    return preemption.sync_stop_request(mesh, 0.25 * mesh.data_rank)


def test_the_slowest_reader_counts(pool):
    assert pool.run(agree, data=3) == [(False, 0.5)] * 3


def test_a_source_that_is_waited_for_is_seen_in_the_record_and_in_the_ledger(inputs, launch, tmp_path, monkeypatch):
    """A pipe that gives no document before a file is there, which appears HELD_S after rank 0 began to wait."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # the signs of life are there
    gate = tmp_path / "gate"
    closed = f"case {{}} in train-*.tar) while [ ! -e {gate} ]; do sleep 0.2; done;; esac"
    words = (*SAME_PLACES, f"data.path=pipe:{closed}; cat {inputs.shards}/{{}}", f"training.steps={STEPS}")
    words += ("training.schedule.warmup_steps=1", "training.evaluation.every=0", "data.prefetch=1", "data.unit_documents=2")
    running = launch(tmp_path / "run", str(inputs.run), *words, where=inputs.run.parent)

    def waits_for_data():
        assert running.process.poll() is None, running.read()
        found = [read_beat(folder, 0) for folder in tmp_path.glob("baton-beats-*")]
        return any(beat is not None and (beat.step, beat.doing) == (1, "data") for beat in found)

    wait_until(waits_for_data, "rank 0 to wait for its first step's data")
    time.sleep(HELD_S)
    gate.touch()
    ended = running.end()
    assert (ended.status, ended.err) == (0, "")
    rows = [row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if row["kind"] == "train"]
    assert len(rows) == STEPS
    # rank 0 may have been kept from reading the clock for a moment after its sign of life
    assert rows[0]["data_wait_s"] > HELD_S / 2
    assert rows[0]["seconds"]["data"] > HELD_S / 2
    spans = [row["seconds"] for row in time_ledger.read_rows(tmp_path / "run") if row["kind"] == "spans"]
    own, ledgered = sum(row["seconds"]["data"] for row in rows), sum(seconds.get("data", 0.0) for seconds in spans)
    # the ledger's times have no gaps, so they begin a little before the step's own
    assert own - 1e-3 <= ledgered <= sum(sum(seconds.values()) for seconds in spans)
