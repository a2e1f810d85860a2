"""Whole runs of the real command: killed in several ways, they continue bit-identically; and the records that they write.

A launch costs seconds, nearly all of them imports, so each is made once and proves several properties.
"""

import json
import math
import re
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import yaml
from support.checkpoints import tensors
from support.runs import SAME_PLACES, STEPS, Ended, Launch, flip, gone, kill, published, wait_until
from tensorboard.backend.event_processing import event_accumulator, plugin_event_accumulator

from baton.training.monitoring.metrics import read_metrics


@dataclass
class Attempt:
    """One start of the interrupted run: its ranks, and how it ended."""

    ranks: list[psutil.Process]
    ended: Ended


@dataclass
class Interrupted:
    """The run that was killed four times. damaged: the step whose checkpoint was damaged before the last start."""

    folder: Path
    launcher_killed: Attempt
    killed_all: Attempt
    killed_one: Attempt
    stopped: Attempt
    completed: Attempt
    damaged: int

    @property
    def attempts(self) -> list[Attempt]:
        return [self.launcher_killed, self.killed_all, self.killed_one, self.stopped, self.completed]


@pytest.fixture(scope="module")
def interrupted(inputs, launch, tmp_path_factory) -> Interrupted:
    folder = tmp_path_factory.mktemp("interrupted") / "run"

    def start(forked: bool = True) -> Launch:
        return launch(folder, str(inputs.run), *SAME_PLACES, where=inputs.run.parent, forked=forked)

    # the earliest moment is the hardest: a rank that has just been started may not have asked for its parent's death yet
    running = start(forked=False)
    ranks = wait_until(lambda: len(found := running.ranks()) == 2 and found, "two ranks")
    running.process.kill()
    wait_until(lambda: all(gone(rank) for rank in ranks), "the ranks of a killed launcher to end")
    launcher_killed = Attempt(ranks, running.end())

    running = start()
    ranks = running.wait_for_steps(2, 6)
    running.freeze_between_checkpoints(ranks)
    kill(ranks)
    killed_all = Attempt(ranks, running.end())

    running = start()
    ranks = running.wait_for_steps(3, 2)
    kill(ranks[1:])
    killed_one = Attempt(ranks, running.end())

    running = start()
    ranks = running.wait_for_steps(4, 6)
    wait_until(lambda: len(running.checkpoints()) >= 2, "a checkpoint to fall back on")
    running.process.send_signal(signal.SIGTERM)
    stopped = Attempt(ranks, running.end())

    damaged = published(folder)[-1]
    flip(folder / "checkpoints" / f"step-{damaged:08d}" / "rank-00001.safetensors")
    completed = Attempt([], start().end())
    return Interrupted(folder, launcher_killed, killed_all, killed_one, stopped, completed, damaged)


def learned(rows):
    """What a run has learned, without how long it took: (kind, step) and every number that must be the same bits."""
    keys = ("loss", "grad_norm", "lr", "tokens", "step_tokens", "consumed", "bits_per_byte", "sample")
    return [(row["kind"], row["step"], {key: row[key] for key in keys if key in row}) for row in rows]


def test_the_undisturbed_record_is_whole(undisturbed):
    rows = read_metrics(undisturbed / "metrics.jsonl")
    assert [row["step"] for row in rows if row["kind"] == "train"] == list(range(1, STEPS + 1))
    assert [row["step"] for row in rows if row["kind"] == "evaluation"] == [10, 20, 30, 40]
    losses = [row["loss"] for row in rows if row["kind"] == "train"]
    assert losses[-1] < losses[0] - 1, "it learns"
    for row in rows:
        if row["kind"] == "train":
            assert row["tokens"] == row["step"] * 128
            assert set(row["seconds"]) == {"data", "forward", "backward", "optimizer"}
            assert all(seconds >= 0 for seconds in row["seconds"].values())
            assert row["seconds"]["forward"] > 0
            assert row["seconds"]["backward"] > 0
            # a batch that was read while the passes before it ran is not waited for; the first one is
            assert row["data_wait_s"] >= 0 if row["step"] > 1 else row["data_wait_s"] > 0
            assert row["tokens_per_s"] > 0
            assert row["memory_bytes"] > 2**20


def test_a_run_killed_in_every_way_equals_the_undisturbed_one_bit_for_bit(undisturbed, interrupted):
    assert interrupted.completed.ended.status == 0, interrupted.completed.ended.err
    expected = learned(read_metrics(undisturbed / "metrics.jsonl"))
    assert learned(read_metrics(interrupted.folder / "metrics.jsonl")) == expected, "no row missing, twice or different"


def test_every_attempt_on_its_own_equals_the_undisturbed_run(undisturbed, interrupted):
    """Also the steps that a later attempt did again."""
    expected = learned(read_metrics(undisturbed / "metrics.jsonl"))
    for attempt in interrupted.attempts:
        found = learned(attempt.ended.rows)
        assert found == expected[: len(found)]


def manifest(folder: Path, step: int) -> dict:
    return json.loads((folder / "checkpoints" / f"step-{step:08d}" / "manifest.json").read_text())["manifest"]


def test_the_final_checkpoints_are_the_same_bytes(undisturbed, interrupted):
    ours, theirs = (tensors(folder / "checkpoints" / f"step-{STEPS:08d}") for folder in (interrupted.folder, undisturbed))
    assert ours.keys() == theirs.keys()
    assert {key.partition(".")[0] for key in ours} == {"master", "exp_avg", "exp_avg_sq"}
    for key in ours:
        assert ours[key].numpy().tobytes() == theirs[key].numpy().tobytes(), key
        assert ours[key].isfinite().all(), key
    names = ("cursors", "adam_steps", "tokens", "fingerprints")
    ours, theirs = (manifest(folder, STEPS) for folder in (interrupted.folder, undisturbed))
    assert {name: ours[name] for name in names} == {name: theirs[name] for name in names}


def test_the_kill_of_all_ranks_was_in_mid_training(interrupted):
    ended = interrupted.killed_all.ended
    assert ended.checkpoints[-1] < ended.rows[-1]["step"] < STEPS, "after a checkpoint, not on one"
    assert ended.status == 1
    # of two that die at once the one whose end is seen first is named
    assert ended.err.startswith(("baton: rank 0 was killed by SIGKILL; see ", "baton: rank 1 was killed by SIGKILL; see "))


def test_the_death_of_one_rank_ends_the_others_and_is_reported(interrupted):
    attempt = interrupted.killed_one
    assert attempt.ended.status == 1
    log = interrupted.folder / "attempts" / "0003" / "rank-1.log"
    assert attempt.ended.err == f"baton: rank 1 was killed by SIGKILL; see {log}; start the same command to resume\n"
    assert len(attempt.ranks) == 2
    assert all(gone(rank) for rank in attempt.ranks)


def test_sigterm_ends_the_ranks(interrupted):
    attempt = interrupted.stopped
    assert attempt.ended.status == 143
    assert attempt.ended.err == "baton: stopped by SIGTERM; start the same command to resume\n"
    assert len(attempt.ranks) == 2
    assert all(gone(rank) for rank in attempt.ranks)


def test_no_rank_survives_the_launcher(interrupted):
    attempt = interrupted.launcher_killed
    assert attempt.ended.status == -signal.SIGKILL
    assert attempt.ended.err == ""
    assert len(attempt.ranks) == 2
    assert all(gone(rank) for rank in attempt.ranks)
    for rank in range(2):
        log = interrupted.folder / "attempts" / "0001" / f"rank-{rank}.log"
        assert log.read_bytes() == b"", "it did not live to say anything, let alone to train to the end"


def test_every_start_resumes_from_the_newest_checkpoint(interrupted):
    assert "resuming" not in interrupted.killed_all.ended.out
    for before, after in zip(interrupted.attempts[1:], interrupted.attempts[2:-1]):
        assert f"resuming from step-{before.ended.checkpoints[-1]:08d} " in after.ended.out


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_taken(interrupted):
    before, said = interrupted.stopped.ended.checkpoints, interrupted.completed.ended.out
    assert before[-1] == interrupted.damaged
    assert f"step-{interrupted.damaged:08d} is damaged: rank-00001.safetensors does not match its checksum; falling back" in said
    assert f"resuming from step-{before[-2]:08d} " in said
    assert (interrupted.folder / "checkpoints" / f"step-{interrupted.damaged:08d}.damaged").is_dir()


def events(folder: Path, accumulator=event_accumulator):
    found = accumulator.EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    found.Reload()
    return found


def test_tensorboard_is_continuous(undisturbed, interrupted):
    for folder in (undisturbed, interrupted.folder):
        board = events(folder)
        rows = read_metrics(folder / "metrics.jsonl")
        train = [row for row in rows if row["kind"] == "train"]
        evaluations = [row for row in rows if row["kind"] == "evaluation"]
        shown = {
            "train/loss": [(row["step"], row["loss"]) for row in train],
            "train/perplexity": [(row["step"], math.exp(row["loss"])) for row in train],
            "train/update_norm": [(row["step"], row["update_norm"]) for row in train if "update_norm" in row],
            "train/lr": [(row["step"], row["lr"]) for row in train],
            "train/grad_norm": [(row["step"], row["grad_norm"]) for row in train],
            "speed/tokens_per_s": [(row["step"], row["tokens_per_s"]) for row in train],
            "memory/GiB": [(row["step"], row["memory_bytes"] / 2**30) for row in train],
            "validation/loss": [(row["step"], row["loss"]) for row in evaluations],
            "validation/perplexity": [(row["step"], math.exp(row["loss"])) for row in evaluations],
            "validation/bits_per_byte": [(row["step"], row["bits_per_byte"]) for row in evaluations],
        }
        for part in ("data", "forward", "backward", "optimizer"):
            shown[f"time/{part}_s"] = [(row["step"], row["seconds"][part]) for row in train]
        shown["time/data_wait_share"] = [(row["step"], row["data_wait_s"] / sum(row["seconds"].values())) for row in train]
        own = {tag for tag in board.Tags()["scalars"] if tag.split("/")[0] not in ("goodput", "ledger_share", "layout")}
        assert own == set(shown)
        for tag, expected in shown.items():
            assert [(e.step, e.value) for e in board.Scalars(tag)] == [(step, float(np.float32(v))) for step, v in expected], tag


def test_tensorboard_shows_the_configuration_and_what_the_model_writes(undisturbed, interrupted):
    for folder in (undisturbed, interrupted.folder):
        board = events(folder, plugin_event_accumulator)  # TensorBoard's own: the other one does not restart texts
        texts = {
            tag: [(e.step, e.tensor_proto.string_val[0].decode()) for e in board.Tensors(f"{tag}/text_summary")]
            for tag in ("config", "sample")
        }
        assert [step for step, _ in texts["config"]] == [0], "once, whatever the number of starts"
        assert (folder / "attempts" / "0001" / "config.yaml").read_text() in texts["config"][0][1]
        samples = {row["step"]: row["sample"] for row in read_metrics(folder / "metrics.jsonl") if "sample" in row}
        assert list(samples) == [10, 20, 30, 40]
        assert texts["sample"] == [(step, f"```\n{text}\n```") for step, text in samples.items()]


def test_the_run_directory_keeps_its_contract(inputs, interrupted):
    folder = interrupted.folder
    names = {"attempts", "checkpoints", "tensorboard", "config.yaml", "provenance.json", "metrics.jsonl", "ledger.jsonl"}
    assert {path.name for path in folder.iterdir()} == names
    assert published(folder) == [STEPS - 10, STEPS - 5, STEPS], "keep_last"
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["training"]["optimizer"]["weight_decay"] == 0.1, "defaults are resolved"
    assert config["directory"] == str(folder)

    made = json.loads((folder / "provenance.json").read_text())
    assert made["command"][1:] == ["train", str(inputs.run), *SAME_PLACES, f"directory={folder}"]
    source = Path(__file__).resolve().parents[2]
    head = subprocess.run(["git", "-C", source, "rev-parse", "HEAD"], capture_output=True, text=True)
    assert made["commit"] == (head.stdout.strip() if head.returncode == 0 else None)
    assert made["packages"]["torch"] == torch.__version__.partition("+")[0] or made["packages"]["torch"] == torch.__version__
    assert {"baton-lm", "deepspeed", "megatron-core", "webdataset"} <= set(made["packages"])
    assert made["machine"]["cores"] >= 1

    # of a start on a CPU
    chosen = config | {"training": config["training"] | {"recompute": "none", "cuda_graphs": False, "offload_kv": False}}
    assert (config["training"]["recompute"], config["training"]["cuda_graphs"]) == ("auto", "auto")
    lock, *attempts = sorted((folder / "attempts").iterdir())
    assert lock.name == ".lock"
    assert [path.name for path in attempts] == ["0001", "0002", "0003", "0004", "0005"]
    for path, attempt in zip(attempts, interrupted.attempts):
        assert {p.name for p in path.iterdir()} == {"config.yaml", "rank-0.log", "rank-1.log", "stacks"}
        assert yaml.safe_load((path / "config.yaml").read_text()) == chosen
        if attempt is interrupted.launcher_killed:
            continue  # before it could say anything
        log = (path / "rank-0.log").read_text()
        assert "2 rank(s) on cpu (data 2, zero 1)" in log, "no later start has truncated it"
        first = next(line for line in log.splitlines() if line.startswith("step "))
        assert first in attempt.ended.out, "what rank 0 says is shown"


FATE = """
import os, signal, time

if "BATON_START" in os.environ:
    from baton.parallel.p2p import Channel

    sends = []
    send = Channel.send

    def fateful(channel, message, to, what):
        sends.append(what)
        if os.environ["RANK"] == "1" and len(sends) == 37:
            FATE
        send(channel, message, to, what)

    Channel.send = fateful
else:
    from baton.launcher import processes

    processes.LAST_WORDS_S = 60.0  # rank 0 says what it misses however busy the machine is
"""
"""A sitecustomize that befalls rank 1 in the third step's backward pass, as it hands a cotangent to rank 0."""

MISSED = r"the gradient of the State of \S+ in layers\.1\.mamba did not come from rank 1 [^\n]*"


@pytest.mark.parametrize(
    ("fate", "report"),
    [
        (
            "os.kill(os.getpid(), signal.SIGKILL)",
            rf"baton: rank 1 was killed by SIGKILL \(rank 0: {MISSED}\); see \S+/rank-1\.log; ",
        ),
        pytest.param(
            "time.sleep(1000)",
            r"baton: rank 1 \(in step 3, [^)]*, waiting for no rank\) gave no sign of life for 2[012] s; "
            r"rank 0 waits \(in step 3, [^)]*\) for the gradient of the State of \S+ in layers\.1\.mamba, from rank 1; "
            r"read the stacks in [^\n]*; ",
            marks=pytest.mark.long,
        ),
        ("raise RuntimeError('it is broken')", rf"baton: rank 1 failed with status 1 \(rank 0: {MISSED}\); see \S+/rank-1\.log; "),
    ],
    ids=["killed", "hangs", "fails"],
)
def test_a_rank_that_goes_silent_is_named_with_the_message_that_is_missed(inputs, launch, tmp_path, monkeypatch, fate, report):
    """Ranks of a sequence: the report names who was the cause, and the layer and message that another rank was left waiting for."""
    (tmp_path / "sitecustomize.py").write_text(FATE.replace("FATE", fate))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    words = ["layout.data=1", "layout.context=2", "layout.timeout_s=20", "training.evaluation.every=0"]
    running = launch(tmp_path / "run", str(inputs.run), *SAME_PLACES, *words, where=inputs.run.parent)
    ranks = wait_until(lambda: len(found := running.ranks()) == 2 and found, "two ranks")
    ended = running.end()
    assert ended.status == (76 if "no sign of life" in report else 1)
    assert re.fullmatch(report + "start the same command to resume\n", ended.err), ended.err
    assert [row["step"] for row in ended.rows] == [1, 2]
    assert all(gone(rank) for rank in ranks)
