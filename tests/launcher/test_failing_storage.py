"""Runs on a failing or read-only disk: a loss is never reported as success, and commands that only read a run need no write access.

The limit on a file's size (RLIMIT_FSIZE) stands for a quota: writing beyond it fails, and the small files of a run fit.
"""

import contextlib
import io
import json
import os
import resource
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from support.runs import published

from baton.data_pipeline import file_io
from baton.launcher.cli import main
from baton.launcher.config import load
from baton.launcher.processes import REFUSED, report
from baton.launcher.run_directory import end_attempt, open_attempt, read_config
from baton.training.errors import RunError
from baton.training.monitoring import time_ledger
from baton.training.monitoring.metrics import read_metrics

STEPS = 6
FITS = 1 << 15
"""Bytes that a file may have: a checkpoint has more."""

RUN = {
    "name": "recall",
    "device": "cpu",
    "model": {"d_model": 32, "n_layers": 2, "pattern": ["mamba"], "mixers": {"mamba": {"d_state": 4}}},
    "data": {"kind": "induction", "length": 16},
    "training": {
        "steps": STEPS,
        "sequence_length": 16,
        "global_batch_tokens": 64,
        "compute_dtype": "float32",
        "log_every": 1,
        "optimizer": {"lr": 1e-3},
        "schedule": {"kind": "constant"},
        "checkpoint": {"every": 2, "keep_last": 9},
        "evaluation": {"every": 3, "tokens": 64},
    },
}


class Said(io.StringIO):
    """The output of a rank; what it says once more than `bears` times ends the limit."""

    def __init__(self, bears):
        super().__init__()
        self.left = bears

    def write(self, text):
        self.left -= "could not be saved" in text
        if self.left == 0:
            limit(resource.RLIM_INFINITY)
        return super().write(text)


def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def start(mesh, attempt, size=resource.RLIM_INFINITY, bears=1 << 30):
    """A start as `baton.launcher.worker` makes it, without pauses between tries: (exit status, its sentence, what it said)."""
    import gc

    import torch

    from baton.data_pipeline.errors import StorageError
    from baton.training.callbacks import checkpoint
    from baton.training.loop import train
    from baton.training.run import RunSettings

    attempt, said = Path(attempt), Said(bears)
    config = read_config(attempt / "config.yaml")
    settings = RunSettings(config.folder, config.model, config.data, config.training, config.to_yaml(), int(attempt.name))
    time, checkpoint.time = checkpoint.time, SimpleNamespace(**vars(checkpoint.time) | {"sleep": lambda seconds: None})
    limit(size)
    try:
        with contextlib.redirect_stdout(said):
            train(settings, mesh)
        return 0, "", said.getvalue()
    except (RunError, StorageError) as error:
        return error.exit_status, str(error), said.getvalue()
    finally:
        limit(resource.RLIM_INFINITY)
        checkpoint.time = time
        torch.set_deterministic_debug_mode("default")  # the pool serves other tests
        gc.collect()


@pytest.fixture(scope="module")
def begin(pool, tmp_path_factory):
    """A function that starts a run in the pool, as `baton train` does: its folder, and what its ranks return."""
    where = tmp_path_factory.mktemp("runs")
    (where / "run.yaml").write_text(yaml.safe_dump(RUN))

    def run(name, *words, ranks=2, **how):
        config = load(where / "run.yaml", [f"directory={where / name}", f"layout.data={ranks}", *words])
        with open_attempt(config) as attempt:
            found = pool.run(start, str(attempt), data=ranks, **how)
            end_attempt(attempt, max(status for status, _, _ in found))
        return where / name, found

    return run


def last_end(folder):
    return [row for row in time_ledger.read_rows(folder) if row["kind"] == "end"][-1]["status"]


@pytest.fixture(scope="module")
def unsaved(begin):
    """A run none of whose saves found room; not to be changed."""
    return begin("unsaved", size=FITS)


@pytest.fixture(scope="module")
def whole(begin):
    """A run that was not disturbed; not to be changed."""
    folder, found = begin("whole")
    assert [status for status, _, _ in found] == [0, 0]
    return folder


def learned(folder):
    return [(row["kind"], row["step"], row["loss"]) for row in read_metrics(folder / "metrics.jsonl")]


def test_a_last_save_that_fails_is_no_success(unsaved, capsys):
    folder, found = unsaved
    for status, sentence, _ in found:
        assert status == 74, "on every rank"
        assert sentence.startswith(f"{folder / 'checkpoints'}: step {STEPS} could not be saved (OSError [Errno 27] File too large)")
        assert "no checkpoint is there; make room, then start again" in sentence
    said = found[0][2]
    assert said.count("trying again to save") == len(file_io.PAUSES_S)
    assert "done:" not in said
    assert published(folder) == []
    assert last_end(folder) == 74
    assert main(["status", str(folder)]) == 0
    assert "recall: ended: files could not be read or written" in capsys.readouterr().out.replace("unsaved", "recall")


def test_the_start_after_it_does_what_was_not_saved(unsaved, begin, whole):
    before = shutil.copytree(unsaved[0], unsaved[0].parent / "kept")
    folder, found = begin("unsaved")
    assert [status for status, _, _ in found] == [0, 0]
    assert published(folder) == [2, 4, STEPS]
    assert learned(folder) == learned(whole) == learned(before), "steps, each once"
    assert last_end(folder) == 0


@pytest.mark.long
def test_an_interrupt_whose_save_fails_says_so(launch, tmp_path):
    """The real command, whose ranks inherit the limit."""
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(RUN))
    words = ["training.steps=100000", "training.checkpoint.every=100000", "training.evaluation.every=0", "training.log_every=100"]
    limit(FITS)
    try:
        running = launch(tmp_path / "run", str(tmp_path / "run.yaml"), *words, where=tmp_path, forked=False)
    finally:
        limit(resource.RLIM_INFINITY)
    running.wait_for_steps(1, 1)
    running.process.terminate()
    ended = running.end()
    assert ended.status == 74
    assert ended.err.startswith(f"baton: stopped by SIGTERM; {tmp_path / 'run' / 'checkpoints'}: step ")
    assert "could not be saved" in ended.err
    assert ended.err.count("\n") == 1
    assert last_end(tmp_path / "run") == 74


def test_a_save_that_fails_in_the_middle_costs_only_itself(begin, whole):
    folder, found = begin("middle", ranks=1, size=FITS, bears=1)
    assert [status for status, _, _ in found] == [0]
    assert published(folder) == [4, STEPS], "the one of step 2 found no room"
    assert last_end(folder) == 0


def test_a_last_save_that_succeeds_at_a_later_try_is_a_success(begin):
    folder, ((status, _, said),) = begin("later", "training.checkpoint.every=100", ranks=1, size=FITS, bears=2)
    assert (status, published(folder)) == (0, [STEPS])
    assert said.count("trying again to save") == 2


def test_a_run_that_may_roll_back_needs_something_to_go_back_to(begin):
    folder, found = begin("rollback", "training.guard.policy=rollback", size=FITS)
    assert {status for status, _, _ in found} == {74}
    assert "step 0 could not be saved" in found[0][1]
    assert read_metrics(folder / "metrics.jsonl") == []


def test_a_start_with_nothing_to_do_says_so(whole, begin, capsys):
    shutil.copytree(whole, whole.parent / "complete")
    (whole.parent / "complete" / "config.yaml").write_text(
        (whole / "config.yaml").read_text().replace(str(whole), str(whole.parent / "complete"))
    )
    folder, ((status, _, said), _) = begin("complete")
    assert status == 0
    assert f"already complete: {STEPS} steps" in said
    assert main(["status", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"from step 0 to {STEPS}  status 0" in lines[-2]
    assert f"from step {STEPS}, no new step  status 0" in lines[-1]


@pytest.fixture
def read_only(whole, tmp_path):
    """A copy of the run on a file system that is mounted read-only."""
    if os.geteuid() != 0:
        pytest.skip("mounting a folder read-only needs root")
    folder = shutil.copytree(whole, tmp_path / "run")
    (folder / "config.yaml").write_text((folder / "config.yaml").read_text().replace(str(whole), str(folder)))
    subprocess.run(["mount", "--bind", folder, folder], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", folder], check=True)
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


REFUSALS = {
    "eval": "evaluations.jsonl: cannot be written (Read-only file system); choose another file with --out",
    "plot": "curves.png: cannot be written (Read-only file system); choose another place with --out",
    "goodput": "goodput.png: cannot be written (Read-only file system); choose another place with --out",
    "checkpoint prune": "checkpoints/step-00000002: cannot be deleted (Read-only file system)",
}


def test_a_read_only_run_can_be_looked_at(read_only, tmp_path, capsys):
    before = {path: path.stat().st_mtime_ns for path in read_only.rglob("*")}

    def ask(words, *more):
        status = main([*words.split(), str(read_only), *map(str, more)])
        return status, *capsys.readouterr()

    for words in ("status", "logs", "checkpoint list", "checkpoint verify"):
        assert ask(words)[::2] == (0, ""), words
    assert ask("checkpoint export", tmp_path / "w.safetensors")[::2] == (0, "")
    for words, sentence in REFUSALS.items():
        status, _, err = ask(words)
        assert (status, err) == (2, f"baton: {read_only}/{sentence}\n"), words
    for words in ("plot", "goodput"):
        assert ask(words, "--out", tmp_path / "picture.png")[::2] == (0, "")
    status, out, err = ask("eval", "--out", tmp_path / "found.jsonl")
    assert (status, err) == (0, "")
    found = json.loads((tmp_path / "found.jsonl").read_text())
    assert json.loads(out) == found
    assert found["step"] == STEPS, "without --step, the newest"
    expected = [row for row in read_metrics(read_only / "metrics.jsonl") if row["kind"] == "evaluation"][-1]
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    run = tmp_path / "run.yaml"
    run.write_text(yaml.safe_dump(RUN))
    assert main(["train", str(run), f"directory={read_only}", "layout.data=2"]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"baton: {read_only}: cannot be written (Read-only file system)")
    assert err.count("\n") == 1
    assert {path: path.stat().st_mtime_ns for path in read_only.rglob("*")} == before


def test_what_cannot_be_read_at_present_is_named_where_it_is(whole, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(file_io, "PAUSES_S", ())
    folder = shutil.copytree(whole, tmp_path / "run")
    file = folder / "checkpoints" / f"step-{STEPS:08d}" / "rank-00000.safetensors"
    for path, commands in ((file, ("eval",)), (folder / "config.yaml", ("eval", "status", "generate"))):
        path.unlink()
        path.symlink_to("/proc/self/mem")  # reading its first byte fails with EIO
        for command in commands:
            assert main([command, str(folder)]) == 74
            assert capsys.readouterr().err.startswith(f"baton: {path}: cannot be read at present (Input/output error)")


def test_the_end_that_could_not_be_recorded_is_no_success(whole, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(file_io, "PAUSES_S", ())
    attempt = tmp_path / "run" / "attempts" / "0001"
    attempt.mkdir(parents=True)
    (tmp_path / "run" / "ledger.jsonl").symlink_to("/dev/full")
    assert [end_attempt(attempt, status) for status in (0, 1, 75)] == [74, 1, 75]
    text = f"baton: {tmp_path / 'run' / 'ledger.jsonl'}: the end could not be recorded (No space left on device); make room"
    assert capsys.readouterr().err.splitlines() == [text] * 3


def test_the_rank_whose_files_fail_is_the_cause_and_not_those_that_miss_it(tmp_path):
    (tmp_path / "rank-0.log").write_text("baton: rank 0: a message from rank 1 did not come from it\n")
    (tmp_path / "rank-1.log").write_text("Traceback ...\nbaton: shard: cannot be read at present (Stale file handle)\n")
    assert report({0: 1, 1: 74}, tmp_path, range(2)) == (74, "shard: cannot be read at present (Stale file handle)")
    assert REFUSED == (2, 74)
