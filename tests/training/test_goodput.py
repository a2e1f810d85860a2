"""The time ledger: every second is counted once, and time of steps that were lost is counted as lost."""

import contextlib
import itertools
import random

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from baton.data_pipeline import file_io
from baton.training.errors import RunError
from baton.training.monitoring import time_ledger
from baton.training.monitoring.goodput import PARTS, compute_goodput, plot_goodput
from baton.training.monitoring.goodput_tensorboard import show_goodput
from baton.training.monitoring.metrics import MetricsLogger
from baton.training.monitoring.time_ledger import TimeLedger


def write(folder, *rows):
    for kind, time, values in rows:
        time_ledger.append_row(folder, kind, **{"time": time, **values})


HISTORY = [
    ("submitted", 100.0, {"by": "user"}),
    ("attempt", 130.0, {"attempt": 1, "layout": {}}),
    ("preflight", 140.0, {"attempt": 1}),
    ("start", 142.0, {"attempt": 1, "step": 0}),
    ("spans", 170.0, {"attempt": 1, "since": 142.0, "step": 10, "seconds": {"start-up": 8.0, "compute": 15.0, "save": 5.0}}),
    ("spans", 180.0, {"attempt": 1, "since": 170.0, "step": 14, "seconds": {"compute": 9.0, "data": 1.0}}),
    ("end", 200.0, {"attempt": 1, "status": 76}),
    ("excluded", 200.0, {"node": "n1"}),
    ("submitted", 201.0, {"by": "job"}),
    ("attempt", 231.0, {"attempt": 2, "layout": {"data": 4, "tensor": 2}}),
    ("start", 233.0, {"attempt": 2, "step": 10}),
    ("spans", 253.0, {"attempt": 2, "since": 233.0, "step": 20, "seconds": {"start-up": 6.0, "compute": 12.0, "exchange": 2.0}}),
    ("end", 254.0, {"attempt": 2, "status": 0}),
    ("stopped", 254.5, {"status": 0}),
]


def test_every_second_is_counted_once(tmp_path):
    write(tmp_path, *HISTORY)
    found = compute_goodput(tmp_path)
    assert found.wall == pytest.approx(154.5)
    assert sum(found.seconds.values()) == pytest.approx(found.wall)
    expected = {"queue": 60.0, "preflight": 10.0, "start-up": 18.0, "compute": 27.0, "save": 5.0, "lost": 10.0, "failing": 20.0,
                "exchange": 2.0, "other": 1.0, "idle": 1.5}  # fmt: skip
    assert {part: s for part, s in found.seconds.items() if s} == pytest.approx(expected)
    assert found.goodput == pytest.approx(29 / 154.5)
    assert found.goodput_in_job == pytest.approx(29 / (154.5 - 61.5))
    assert (found.failures, sorted(found.attempts)) == (1, [1, 2])
    assert found.attempts[1]["lost"] == 10.0, "steps 11 to 14 were done again"


def test_a_running_attempt_is_counted_up_to_now(tmp_path):
    write(tmp_path, *HISTORY[:5])
    found = compute_goodput(tmp_path, now=175.0)
    assert (found.wall, found.seconds["other"]) == pytest.approx((75.0, 5.0))


def test_any_history_adds_up(tmp_path):
    """Whatever order rows come in, clocks of nodes that differ included."""
    rng = random.Random(0)
    for number in range(200):
        folder = tmp_path / str(number)
        folder.mkdir()
        rows = [row for row in HISTORY[1:] if rng.random() < 0.8]
        shifted = [(kind, time + rng.choice([0.0, 0.0, -40.0, 40.0]), values) for kind, time, values in rows]
        write(folder, HISTORY[1], *shifted)
        found = compute_goodput(folder, now=300.0)
        assert sum(found.seconds.values()) == pytest.approx(found.wall), number
        assert all(seconds >= 0 for seconds in found.seconds.values())
        for (_, until, _), (since, _, _) in itertools.pairwise(found.intervals):
            assert since <= until + 1e-9


DAY = 86400.0
MACHINES = {"a": 500.0, "b": 70_000.0, "c": 3.0}
"""When each was started, on the clock that is right."""


def told(folder, skews, *starts):
    """A ledger of local starts: (machine, when it began, when it ended, step before, step after); skews: how far each start's clock
    is ahead. Every start computes all its time but for 2 s of start-up and 1 s until its end is noticed."""
    for number, (skew, (machine, began, ended, before, after)) in enumerate(zip(skews, starts, strict=True), start=1):
        up = MACHINES[machine] - 1e6

        def row(kind, true, skew=skew, up=up, number=number, machine=machine, **values):
            own = {"time": true + skew, "boot": machine, "up": true - up}
            time_ledger.append_row(folder, kind, **own, attempt=number, **values)

        row("attempt", began, layout={})
        row("start", began + 0.5, step=before)
        spans = {"start-up": 1.5, "compute": ended - began - 3}
        row("spans", ended - 1, since=began + 0.5 + skew, step=after, seconds=spans)
        row("end", ended, status=0)


CLOCKS = {
    "right": ([0.0, 0.0, 0.0], "aaa", 120.0),
    "set back before the second start": ([0.0, -600.0, -600.0], "aaa", 120.0),
    "a day ahead in the second start": ([0.0, DAY, 0.0], "aaa", 120.0),
    "a day ahead from the second start on": ([0.0, DAY, DAY], "aaa", 120.0),
    "the second machine is behind": ([0.0, -600.0, 0.0], "aba", 120.0),
    "the second machine is a day ahead": ([0.0, DAY, 0.0], "aba", 120.0),
    # nobody knows how long the run stood still between machines: at least nothing is counted twice
    "every machine has a clock of its own": ([0.0, -600.0, -1200.0], "abc", 100.0),
}


@pytest.mark.parametrize("case", CLOCKS.values(), ids=CLOCKS.keys())
def test_the_ledgers_order_decides_and_not_the_clocks_of_machines(tmp_path, case):
    skews, machines, wall = case
    spans = [(1000.0, 1030.0, 0, 10), (1040.0, 1070.0, 10, 20), (1080.0, 1120.0, 20, 30)]
    told(tmp_path, skews, *((machine, *span) for machine, span in zip(machines, spans, strict=True)))
    found = compute_goodput(tmp_path)
    assert found.wall == pytest.approx(wall)
    assert sum(found.seconds.values()) == pytest.approx(wall)
    expected = {"compute": 91.0, "start-up": 6.0, "other": 3.0, "idle": wall - 100.0}
    assert {part: s for part, s in found.seconds.items() if s > 1e-6} == pytest.approx({k: v for k, v in expected.items() if v})
    assert [sum(of.values()) for of in found.attempts.values()] == pytest.approx([30.0, 30.0, 40.0])
    assert all(since <= until for since, until, _ in found.intervals)


def test_a_clock_that_is_set_in_the_middle_of_a_start_changes_nothing(tmp_path, monkeypatch):
    kept = TimeLedger(tmp_path, 1, enabled=True, since=time_ledger.steady_time() - 2.0)
    kept.start(0)
    for clock in (0.0, 4e9):
        monkeypatch.setattr(time_ledger.time, "time", lambda clock=clock: clock)
        kept.charge("compute")
        kept.step_done(1, write=True)
    start, *spans = time_ledger.read_rows(tmp_path)
    assert [row["time"] - row["up"] for row in spans] == pytest.approx([start["time"] - start["up"]] * 2)
    assert 2.0 <= sum(row["seconds"]["compute"] for row in spans) < 60.0


def test_lines_say_it_all_and_the_picture_is_one(tmp_path):
    write(tmp_path, *HISTORY)
    found = compute_goodput(tmp_path)
    text = "\n".join(found.lines())
    assert "154.5 s in 2 attempts, 1 of which failed" in text
    for part, seconds in found.seconds.items():
        assert (f"{part:<12}" in text) == bool(seconds)
    assert "goodput 18.8% of all time, 31.2% of the time that nodes were held" in text
    assert set(found.seconds) == set(PARTS)
    assert plot_goodput(found, tmp_path / "goodput.png").read_bytes()[:4] == b"\x89PNG"


def test_a_folder_without_a_ledger_is_refused(tmp_path):
    with pytest.raises(RunError, match="no attempt is recorded"):
        compute_goodput(tmp_path)


def test_lines_that_were_cut_short_are_left_out(tmp_path):
    write(tmp_path, *HISTORY)
    with (tmp_path / time_ledger.NAME).open("a") as f:
        f.write('{"kind": "end", "ti')
    assert len(time_ledger.read_rows(tmp_path)) == len(HISTORY)


def test_the_main_ranks_time_has_no_gaps(tmp_path, monkeypatch):
    clock = iter(range(1000, 2000))
    monkeypatch.setattr(time_ledger, "steady_time", lambda: float(next(clock)))
    kept = TimeLedger(tmp_path, 1, enabled=True, since=990.0)
    kept.start(5)
    for step in range(6, 12):
        kept.charge("data")
        kept.charge("compute")
        kept.reassign("compute", "exchange", 0.25)
        kept.step_done(step, write=step % 3 == 0)
    kept.flush()
    start, *spans = time_ledger.read_rows(tmp_path)
    assert (start["up"], start["step"]) == (990.0, 5)
    assert [row["step"] for row in spans] == [6, 9, 11]
    for row, before in zip(spans, [start, *spans]):
        assert row["since"] == pytest.approx(before["time"])
        assert sum(row["seconds"].values()) == pytest.approx(row["time"] - row["since"])
    assert sum(row["seconds"]["exchange"] for row in spans) == 1.5


def test_a_full_disk_keeps_rows_waiting(small_disk, capsys):
    kept = TimeLedger(small_disk, 1, enabled=True, since=0.0)
    filler = small_disk / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as f:
        while f.write(bytes(4096)):
            pass
    kept.start(0)
    assert "ledger.jsonl is behind" in capsys.readouterr().out
    filler.unlink()
    kept.charge("compute")
    kept.step_done(1, write=True)
    assert [row["kind"] for row in time_ledger.read_rows(small_disk)] == ["start", "spans"]


def test_a_row_is_tried_again_where_nothing_else_has_to_be_done(tmp_path, monkeypatch):
    path = tmp_path / time_ledger.NAME
    write(tmp_path, *HISTORY[:2])
    kept = path.rename(tmp_path / "kept")
    path.symlink_to("/dev/full")
    monkeypatch.setattr(file_io.time, "sleep", lambda seconds: kept.exists() and kept.replace(path))
    time_ledger.append_row(tmp_path, "end", attempt=1, status=0)
    assert [row["kind"] for row in time_ledger.read_rows(tmp_path)] == ["submitted", "attempt", "end"]
    path.unlink()
    path.symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device"):
        time_ledger.append_row(tmp_path, "end", attempt=1, status=0)


def test_tensorboard_shows_the_account_at_every_save(tmp_path):
    write(tmp_path, *HISTORY)
    metrics = MetricsLogger(tmp_path, step=0, total_steps=20, log_every=10, config_text="name: test")
    show_goodput(tmp_path, metrics, 10)
    show_goodput(tmp_path, metrics, 20)
    metrics.close()
    assert not (tmp_path / "metrics.jsonl").read_text(), "its record is the ledger"
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    expected = compute_goodput(tmp_path)
    shown = found.Scalars("goodput/of_all_time")
    assert [e.step for e in shown] == [10, 20]
    assert shown[1].value == pytest.approx(expected.goodput)
    assert found.Scalars("ledger_share/queue")[0].value == pytest.approx(expected.seconds["queue"] / expected.wall)
    assert {tag.split("/")[0] for tag in found.Tags()["scalars"]} == {"goodput", "ledger_share", "layout"}
    assert [found.Scalars(f"layout/{name}")[1].value for name in ("data", "tensor")] == [4, 2]
