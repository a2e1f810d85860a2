"""Faults at any point of training: a run ends with the undisturbed run's bits or with a named error, and can be resumed without
deleting a file.

Each story is drawn from its number: disturbances one after the other, each in a start of its own, then a start that is left alone.
`make chaos` lives a hundred of them, the short form a few.
"""

import contextlib
import json
import os
import random
import shutil
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from support.checkpoints import tensors
from support.runs import SAME_PLACES, STEPS, flip, kill, published, wait_until

from baton.training.monitoring.metrics import read_metrics

SHORT, LONG = 1, 100
CLOCK = Path(__file__).resolve().parent.parent / "support" / "clock"


class Story:
    """A run and what happens to it. disk: a file system of its own for the run directory, or None where that needs root."""

    def __init__(self, number, inputs, launch, folder, disk):
        self.rng, self.folder, self.launch, self.inputs = random.Random(number), folder, launch, inputs
        self.disk, self.told = disk, []
        self.where = folder / "work"
        self.where.mkdir()
        self.shards = shutil.copytree(inputs.shards, self.where / "shards")
        shutil.copy(inputs.tokenizer, self.where / "tokenizer.model")
        self.run = (disk or folder) / "run"

    def start(self):
        # workers and asynchronous saves make more moments that something can happen in
        words = (*SAME_PLACES, f"data.workers={self.rng.choice((0, 0, 1, 2))}", "training.checkpoint.every=3")
        return self.launch(self.run, str(self.inputs.run), *words, where=self.where)

    def live(self):
        names = ["kill_all", "kill_one", "kill_launcher", "kill_in_save", "flip", "truncate", "missing_shard", "clock"]
        names += ["full_disk", "read_only"] if self.disk else []
        for name in self.rng.sample(names, self.rng.randint(1, 2)):
            self.told.append(name)
            getattr(self, name)()
        self.told.append("left alone")
        ended = self.start().end()
        assert (ended.status, ended.err) == (0, ""), self.told

    def at_a_random_moment(self, running):
        """In the start, or near a step that is drawn: in its passes, a save, an evaluation."""
        step, more_s = self.rng.choice((0, self.rng.randrange(STEPS))), self.rng.uniform(0.0, 0.1)
        wait_until(lambda: running.process.poll() is not None or running.last_step() >= step, f"step {step}")
        time.sleep(more_s if step else 10 * more_s)
        return running.ranks()

    def killed(self, running):
        status = running.end().status
        assert status in (0, 1, -9), (self.told, status)

    def kill_all(self):
        running = self.start()
        kill_those_alive(self.at_a_random_moment(running))
        self.killed(running)

    def kill_one(self):
        running = self.start()
        ranks = self.at_a_random_moment(running)
        kill_those_alive(self.rng.sample(ranks, min(1, len(ranks))))
        self.killed(running)

    def kill_launcher(self):
        running = self.start()
        self.at_a_random_moment(running)
        ranks = running.ranks()
        running.process.kill()
        running.end()
        wait_until(lambda: not any(map(psutil.Process.is_running, ranks)) or not ranks_alive(ranks), "the ranks to end")

    def kill_in_save(self):
        running = self.start()
        folder, which = self.run / "checkpoints", self.rng.randint(0, 3)
        seen = set()

        def saving():
            if running.process.poll() is not None:
                return True
            seen.update(path.name for path in folder.glob(".saving-*"))
            return len(seen) > which

        wait_until(saving, "a save")
        kill_those_alive(running.ranks())
        self.killed(running)

    def damage(self, hurt):
        """To the newest checkpoint, while the run stands still; with one alone the run cannot go on, and says so."""
        self.kill_all()
        steps = published(self.run)
        if not steps:
            return
        files = sorted((self.run / "checkpoints" / f"step-{steps[-1]:08d}").iterdir())
        kept = shutil.copytree(self.run / "checkpoints", self.folder / f"kept-{len(self.told)}") if len(steps) == 1 else None
        hurt(self.rng.choice(files))
        if kept is not None:
            ended = self.start().end()
            assert ended.status == 2, self.told
            assert "every checkpoint is damaged" in ended.err
            shutil.rmtree(self.run / "checkpoints")
            shutil.copytree(kept, self.run / "checkpoints")  # restored from a copy, as the error says

    def flip(self):
        self.damage(flip)

    def truncate(self):
        self.damage(lambda path: os.truncate(path, self.rng.randrange(path.stat().st_size)))

    def missing_shard(self):
        """Gone before the start: a named error; back again: as if nothing had been."""
        shard = self.rng.choice(sorted(self.shards.glob("train-*.tar")))
        shard.rename(self.where / "away")
        ended = self.start().end()
        (self.where / "away").rename(shard)
        assert ended.status == 2, self.told
        assert f"{shard.name} is missing" in ended.err
        assert ended.err.count("\n") == 1

    def clock(self):
        """A whole start under a clock that jumps, killed at some moment or not."""
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = str(CLOCK)
        try:
            running = self.start()
        finally:
            os.environ.pop("PYTHONPATH")
            if before is not None:
                os.environ["PYTHONPATH"] = before
        kill_those_alive(self.at_a_random_moment(running))
        self.killed(running)

    def full_disk(self):
        """Saves that find no room are said aloud; the run goes on to its end."""
        running = self.start()
        self.at_a_random_moment(running)
        ballast = self.disk / "ballast"
        with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as f:
            while True:
                f.write(b"x" * 65536)
        ended = running.end()
        ballast.unlink()
        assert ended.status == 0 or "No space left" in ended.err, (self.told, ended.status, ended.err)

    def read_only(self):
        """Between two starts: the next one says so, and changes nothing."""
        only_read = ["mount", "-o", "remount,ro", str(self.disk)]
        # busy while a process of a start that was killed, such as one that reads data, has a file open
        wait_until(
            lambda: subprocess.run(only_read, capture_output=True).returncode == 0, "the run's processes to close their files"
        )
        ended = self.start().end()
        subprocess.run(["mount", "-o", "remount,rw", str(self.disk)], check=True)
        assert ended.status == 2, self.told
        assert "Read-only file system" in ended.err, ended.err
        assert ended.err.count("\n") == 1


def ranks_alive(ranks):
    return [r for r in ranks if r.is_running() and r.status() != psutil.STATUS_ZOMBIE]


def kill_those_alive(ranks):
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            kill([rank])


def learned(folder):
    keys = ("loss", "grad_norm", "update_norm", "lr", "tokens", "step_tokens", "bits_per_byte", "sample")
    rows = read_metrics(folder / "metrics.jsonl")
    return [(row["kind"], row["step"], {key: row[key] for key in keys if key in row}) for row in rows]


@pytest.fixture
def disk(tmp_path):
    """A file system of 16 MiB of its own; None where mounting one is not allowed."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)]).returncode:
        yield None
        return
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def check(number, inputs, launch, undisturbed, folder, disk):
    story = Story(number, inputs, launch, folder, disk)
    story.live()
    assert learned(story.run) == learned(undisturbed), story.told
    ours, theirs = (tensors(run / "checkpoints" / f"step-{STEPS:08d}") for run in (story.run, undisturbed))
    assert ours.keys() == theirs.keys()
    for key in ours:
        assert ours[key].numpy().tobytes() == theirs[key].numpy().tobytes(), (story.told, key)
    manifests = [
        json.loads((run / "checkpoints" / f"step-{STEPS:08d}" / "manifest.json").read_text())["manifest"]
        for run in (story.run, undisturbed)
    ]
    assert manifests[0]["cursors"] == manifests[1]["cursors"], story.told
    assert not list((story.run / "checkpoints").glob(".saving-*")), story.told


@pytest.mark.parametrize("number", range(SHORT))
def test_a_few_stories_end_as_if_nothing_had_been(inputs, launch, undisturbed, tmp_path, disk, number):
    check(number, inputs, launch, undisturbed, tmp_path, disk)


@pytest.mark.long
@pytest.mark.parametrize("number", range(SHORT, LONG))
def test_many_stories_end_as_if_nothing_had_been(inputs, launch, undisturbed, tmp_path, disk, number):
    check(number, inputs, launch, undisturbed, tmp_path, disk)
