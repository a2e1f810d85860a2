"""A rank hangs: all ranks end, and the last line names the rank, its last operation, and the operation in which others wait for
it."""

import signal

import pytest
import yaml
from support.hangs import LAYOUTS, RUN, SAID, befall
from support.runs import gone

TIMEOUT_S = 12
"""Seconds; more than a busy machine may keep a rank of a small model from its next operation."""


@pytest.fixture
def start(tmp_path, launch):
    """A function that starts the small run on two ranks of a layout."""

    def starting(layout, *words):
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(RUN | {"device": "cpu"}))
        words = [f"layout.{layout}=2", f"layout.timeout_s={TIMEOUT_S}", "training.compute_dtype=float32", *words]
        return launch(tmp_path / "run", str(tmp_path / "run.yaml"), *words, where=tmp_path)

    return starting


def said(running, ranks):
    """What the last line says of rank 1, with all the above."""
    ended = running.end()
    assert ended.status == 76, ended.err
    assert all(gone(rank) for rank in ranks)
    found = SAID.fullmatch(ended.err)
    assert found, ended.err
    # silence is counted in looks of two seconds at most, so this bound is no matter of the machine's speed
    assert TIMEOUT_S <= int(found["seconds"]) <= TIMEOUT_S + 2
    return found


@pytest.mark.parametrize(
    "layout", [layout if layout == "tensor" else pytest.param(layout, marks=pytest.mark.long) for layout in LAYOUTS]
)
def test_a_stopped_rank_is_named_with_the_collective_that_waits_for_it(start, layout):
    running = start(layout)
    ranks = running.wait_for_steps(1, 5)
    ranks[1].send_signal(signal.SIGSTOP)
    found = said(running, ranks)
    assert found["why"] == "stopped by a signal"
    assert "it was in step " in found["doing"]
    assert "rank 0 waits (in step " in found["doing"]
    assert "find out what stopped it" in found["doing"]
    stacks = running.folder / "attempts" / "0001" / "stacks"
    assert "stopped by a signal" in (stacks / "rank-1").read_text()
    assert "Thread 0x" in (stacks / "rank-0").read_text(), "where rank 0 waits"


BLOCKED = "blocked inside the kernel, by a disk or a driver"
SAVING = "in step 20, save, writing its file"


@pytest.mark.long
@pytest.mark.parametrize(
    ("fate", "place", "why", "doing"),
    [
        (
            "stop",
            "save",
            "stopped by a signal",
            f"it was {SAVING}; rank 0 waits (in step 20, save, publishing) for all_gather_object ",
        ),
        ("spin", "save", f"{SAVING}, waiting for no rank", "rank 0 waits (in step 20, save, publishing) for all_gather_object "),
        ("block", "save", BLOCKED, f"it was {SAVING}; "),
        ("spin", "step", "waiting for no rank", "read the stacks in "),
        ("block", "step", BLOCKED, "look at its disk and at the kernel's log (dmesg)"),
    ],
)
def test_whatever_a_rank_hangs_in_is_named(start, tmp_path, monkeypatch, fate, place, why, doing):
    befall(tmp_path, monkeypatch, fate, place, 2 if place == "save" else 40)
    running = start("data")
    ranks = running.wait_for_steps(1, 1)
    found = said(running, ranks)
    assert why in found["why"]
    assert doing in found["doing"]
    assert running.checkpoints()[-1:] == [10] or place == "step"


@pytest.mark.long
def test_an_interrupt_does_not_wait_for_a_rank_that_is_stopped(start):
    running = start("data")
    ranks = running.wait_for_steps(1, 3)
    ranks[1].send_signal(signal.SIGSTOP)
    running.process.send_signal(signal.SIGINT)
    assert said(running, ranks)["why"] == "stopped by a signal"


@pytest.mark.long
def test_a_first_step_that_takes_longer_than_any_silence_may_is_no_hang(start, tmp_path, monkeypatch):
    befall(tmp_path, monkeypatch, "sleep", "step", 1, seconds=3 * TIMEOUT_S)
    ended = start("data", "training.steps=12").end()
    assert (ended.status, ended.err) == (0, "")
