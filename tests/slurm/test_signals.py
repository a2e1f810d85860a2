"""SIGTERM and SIGUSR1 at any moment of training: nothing that was done is lost, no checkpoint is broken, no bit is different, no
document is read twice or left out. `make signals` tries 200 moments, the short form a few.

Two real ranks, made by forking a process that has paid for the imports; a run goes from signal to signal until it is done.
"""

import contextlib
import json
import os
import random
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import yaml
from support.consumed import consumed, due
from support.forks import NURSERY
from support.jobs import RUN
from support.runs import DEADLINE_S, published, wait_until

from baton.launcher.config import load
from baton.launcher.run_directory import last_step, new_attempt, open_run
from baton.training.checkpoint.manifest import Manifest, check_file
from baton.training.monitoring.metrics import read_metrics
from baton.training.preemption import SIGNALS

STEPS, EVERY = 30, 10


def _settings(folder: Path, name: str, data: dict) -> Path:
    training = RUN["training"] | {
        "steps": STEPS,
        "checkpoint": {"every": EVERY, "keep_last": 3},
        "evaluation": {"every": 15, "tokens": 600, "sample_tokens": 0},
    }
    values = RUN | {
        "name": name,
        "data": data,
        "training": training,
        "layout": {"data": 2, "timeout_s": 60},
        "directory": str(folder / name),
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def start_ranks(attempt: Path) -> tuple[list[int], Callable[[], list[int]]]:
    """Two ranks on an attempt: their process ids, and a function that waits for their exit statuses."""
    said = attempt / "said"
    said.touch()
    process = NURSERY.fork("ranks", [str(attempt), "2"], where=attempt, out=str(said), err=str(said))
    wait_until(lambda: "\n" in said.read_text(), "the ranks' start")
    pids = json.loads(said.read_text().splitlines()[0])

    def wait() -> list[int]:
        with contextlib.suppress(subprocess.TimeoutExpired):
            if process.wait(DEADLINE_S) == 0:
                return json.loads(said.read_text().splitlines()[1])
        raise AssertionError(f"not ended well: {[p.read_text()[-1500:] for p in (said, *attempt.glob('rank-*.log'))]}")

    return pids, wait


def check(folder: Path) -> None:
    """Every published checkpoint is whole."""
    for step in published(folder):
        path = folder / "checkpoints" / f"step-{step:08d}"
        for name, expected in Manifest.read(path).files.items():
            assert check_file(path, name, expected) is None


def alive(pid: int) -> bool:
    """Whether a process has not ended, collected or not."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


@pytest.mark.parametrize(
    "moments",
    [2, pytest.param(3, marks=pytest.mark.long), pytest.param(200, marks=[pytest.mark.long, pytest.mark.timeout(3600)])],
)
def test_signals_at_any_moment(corpus, tmp_path, moments):
    """A rank that stops waits for the others at a step boundary, so a signal to one of them ends all. Moments after a run's end do
    not count."""
    lasts = float("inf")
    for name in ("first", "calm"):  # the first one is slower than all others
        calm = load(_settings(tmp_path, name, corpus.data))
        open_run(calm)
        began = time.monotonic()
        assert start_ranks(new_attempt(calm))[1]() == [0, 0]
        lasts = time.monotonic() - began
    expected = [(row["kind"], row["step"], row["loss"]) for row in read_metrics(calm.folder / "metrics.jsonl")]
    assert consumed(calm.folder) == (documents := due(corpus, calm, STEPS))
    rng, runs, starts, stopped, sent = random.Random(moments), 0, 0, 0, 0
    while sent < moments:
        runs += 1
        config = load(_settings(tmp_path, f"run-{runs}", corpus.data))
        open_run(config)
        done = False
        while not done:
            attempt = new_attempt(config)
            before = max(published(config.folder), default=0)
            pids, wait = start_ranks(attempt)
            told = rng.sample(pids, rng.randint(1, 2))
            # also a second and third time, while it saves; when there were enough moments it is left alone
            for again in range(rng.randint(1, 3) if sent < moments else 0):
                time.sleep(rng.uniform(0, lasts / 20 if again else lasts))
                sent += any(map(alive, told))
                for pid in told:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, rng.choice(SIGNALS))
            statuses = wait()
            starts += 1
            said = [p.read_text()[-1500:] for p in attempt.glob("rank-*.log")]
            assert statuses in ([75, 75], [0, 0]), said
            check(config.folder)
            saved, recorded = max(published(config.folder), default=0), last_step(config.folder)
            assert saved >= before
            assert saved == recorded, "it was asked, not killed: what was done is saved"
            done = statuses == [0, 0]
            stopped += not done
        assert [(row["kind"], row["step"], row["loss"]) for row in read_metrics(config.folder / "metrics.jsonl")] == expected
        assert consumed(config.folder) == documents
    assert stopped > moments / 8, "signals came while it trained"
    print(f"{sent} moments in {starts} starts of {runs} runs; {stopped} starts were stopped; every run ended as if left alone")
