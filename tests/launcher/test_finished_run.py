"""Finished runs: starting them again with the same or other settings, and reading them with the commands.

Every test has a copy of its own; the commands run side by side, as each of them keeps one core busy.
"""

import json
import math
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.forks import NURSERY
from support.runs import DEADLINE_S, SAME_PLACES, STEPS, Ended, Launch, flip, published

from baton.data_pipeline.dataset import Dataset
from baton.data_pipeline.lane_order import LaneOrder, Units
from baton.training.monitoring.event_log import read_events
from baton.training.monitoring.metrics import read_metrics


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


def tree(folder: Path) -> dict[str, bytes]:
    """Everything in a folder: files with their contents, folders."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


@dataclass
class Restarted:
    """complete: nothing left to do. changed: on two sequence ranks from step 30, with other free settings. others: other inputs."""

    complete: Ended
    changed: Ended
    other_tokenizer: Ended
    other_dataset: Ended


@pytest.fixture(scope="module")
def restarted(inputs, launch, runs, undisturbed, reading) -> Restarted:
    def start(name: str, *words: str, shards: Path = inputs.shards, tokenizer: Path = inputs.tokenizer) -> Launch:
        where = runs / name
        shutil.copytree(undisturbed, where / "run")
        os.symlink(shards, where / "shards")
        os.symlink(tokenizer, where / "tokenizer.model")
        if words:
            for step in published(where / "run")[1:]:
                shutil.rmtree(where / "run" / "checkpoints" / f"step-{step:08d}")
        return launch(where / "run", str(inputs.run), *SAME_PLACES, "layout.data=1", *words, where=where)

    free = (
        "training.log_every=4",
        "training.checkpoint.every=3",
        "training.micro_batch_size=4",
        "data.prefetch=1",
        "layout.context=2",
    )
    running = [start("complete"), start("changed", *free)]
    complete, changed = (one.end() for one in running)
    running = [start("other-tokenizer", tokenizer=inputs.other), start("other-dataset", shards=inputs.elsewhere)]
    return Restarted(complete, changed, *(one.end() for one in running))


def test_a_complete_run_says_so_and_is_left_as_it_is(undisturbed, runs, restarted):
    assert (restarted.complete.status, restarted.complete.err) == (0, "")
    assert f"already complete: {STEPS} steps" in restarted.complete.out
    before, after = tree(undisturbed), tree(runs / "complete" / "run")
    # every start is put down there
    assert after.pop("ledger.jsonl").startswith(before.pop("ledger.jsonl"))
    assert before.items() <= after.items()
    assert all(name.startswith("attempts/0002") for name in after.keys() - before.keys())


def test_free_settings_and_the_number_of_ranks_may_change(undisturbed, restarted):
    assert (restarted.changed.status, restarted.changed.err) == (0, "")
    assert "resuming from step-00000030 " in restarted.changed.out
    assert "2 rank(s) on cpu (context 2, zero 1)" in restarted.changed.out
    assert restarted.changed.checkpoints == [36, 39, 40]
    both = (restarted.changed.rows, read_metrics(undisturbed / "metrics.jsonl"))
    train, expected = ([row for row in rows if row["kind"] == "train"] for rows in both)
    assert [row["step"] for row in train] == list(range(1, STEPS + 1))
    assert [row["lr"] for row in train] == [row["lr"] for row in expected]
    assert train[30]["loss"] == pytest.approx(expected[30]["loss"], rel=1e-5), "the first step on the other layout"
    for ours, theirs in zip(train, expected):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-3)


REFUSALS = {
    "other_tokenizer": (
        "checkpoints: the checkpoint of step 40 was made with another",
        "tokenizer or data differ",
        "another run dir",
    ),
    "other_dataset": ("shards: its first", "shards are not those that the run has read", "restore them, or begin another run"),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_other_contents_in_the_same_places_are_refused(undisturbed, restarted, what):
    ended = getattr(restarted, what)
    assert ended.status == 2
    assert ended.err.startswith("baton: ")
    assert ended.err.count("\n") == 1
    assert all(part in ended.err for part in REFUSALS[what]), ended.err
    assert ended.rows == read_metrics(undisturbed / "metrics.jsonl")
    assert ended.checkpoints == published(undisturbed)


def test_a_refusal_of_one_rank_is_the_commands_refusal(inputs, launch, runs):
    """A shard behind a pipe has no size to check beforehand; its end is missing, and only lane 1, so rank 1, reads there."""
    dataset = Dataset.open(inputs.shards)
    shards = dataset.shards["train"]
    units = Units([dataset.unit_starts(shard, 4, 2**20) for shard in shards], [shard.documents for shard in shards])
    for seed in range(100):
        unit, _ = LaneOrder(units, seed, 4).unit(1, 0)
        if unit.first + unit.count == shards[unit.shard].documents:
            break
    where = runs / "one-rank"
    shutil.copytree(inputs.shards, where / "shards")
    shard = where / "shards" / shards[unit.shard].name
    os.truncate(shard, int(dataset.index(shards[unit.shard]).offsets[unit.first]) + 600)
    words = [f"data.path=pipe:cat {where}/shards/{{}}", f"data.tokenizer={inputs.tokenizer}", f"training.seed={seed}"]
    ended = launch(where / "run", str(inputs.run), *words, where=where).end()
    assert ended.status == 2, (ended.out, ended.err)
    assert ended.err.startswith("baton: ")
    assert ended.err.count("\n") == 1
    assert "Traceback" not in ended.out
    for needle in (shard.name, "truncated", "prepare the dataset again"):
        assert needle in ended.err
    assert "baton: " not in (where / "run" / "attempts" / "0001" / "rank-0.log").read_text()
    assert ended.rows == []
    assert ended.checkpoints == []


@pytest.fixture(scope="module")
def reading(inputs, runs, undisturbed):
    """Commands that read a run, under way one after the other in one process: (their names, the process, its output, what the runs
    were before)."""
    run = runs / "read"
    shutil.copytree(undisturbed, run)
    (run / "checkpoints" / ".saving-step-00000041").mkdir()  # the run itself is at it
    (run / "checkpoints" / ".saving-step-00000041" / "rank-00000.safetensors").write_bytes(b"half")
    young = runs / "young"
    (young / "checkpoints").mkdir(parents=True)
    shutil.copy(run / "config.yaml", young)
    damaged = runs / "damaged"
    shutil.copytree(undisturbed, damaged)
    flip(damaged / "checkpoints" / f"step-{STEPS:08d}" / "rank-00000.safetensors")
    generate = ["generate", str(run), "--prompt", "def main(", "--tokens", "12"]
    commands = {
        "drawn": [*generate, "--seed", "3"],
        "drawn again": [*generate, "--seed", "3"],
        "drawn otherwise": [*generate, "--seed", "4"],
        "likeliest": [*generate, "--temperature", "0", "--seed", "1"],
        "likeliest again": [*generate, "--temperature", "0", "--seed", "2"],
        "one candidate": [*generate, "--top-k", "1"],
        "no prompt": ["generate", str(run), "--tokens", "3"],
        "no checkpoint": ["generate", str(young)],
        "damaged": ["generate", str(damaged), "--tokens", "3"],
        "plot": ["plot", str(run)],
        "plot elsewhere": ["plot", str(run), "--out", str(runs / "picture.png")],
        "plot nowhere": ["plot", str(run), "--out", str(runs / "nowhere" / "picture.png")],
    }
    before = tree(run), tree(damaged)
    said = [runs / name for name in ("said", "complained")]
    for path in said:
        path.touch()
    words, (out, err) = [json.dumps(words) for words in commands.values()], map(str, said)
    process = NURSERY.fork("commands", words, where=inputs.run.parent, out=out, err=err)
    return list(commands), process, said, before


@pytest.fixture(scope="module")
def readers(runs, reading):
    """Name to (status, stdout, stderr) of those commands."""
    names, process, said, before = reading
    assert process.wait(DEADLINE_S) == 0, said[1].read_text()
    results = [json.loads(line) for line in said[0].read_text().splitlines() if line.startswith("[")]
    run, damaged = runs / "read", runs / "damaged"
    (run / "curves.png").rename(runs / "curves.png")
    assert (tree(run), tree(damaged)) == before, "a reader changes nothing in a run"
    return dict(zip(names, results, strict=True))


def test_generation_is_a_function_of_the_seed(readers):
    status, text, _ = readers["drawn"]
    assert status == 0
    assert text.startswith("def main(")
    assert len(text) > len("def main(") + 1
    assert readers["drawn again"] == readers["drawn"]
    assert readers["drawn otherwise"][1] != text
    assert readers["no prompt"][0] == 0


def test_temperature_zero_takes_the_likeliest_whatever_the_seed(readers):
    assert readers["likeliest"][0] == 0
    assert readers["likeliest again"] == readers["likeliest"]
    assert readers["one candidate"][1] == readers["likeliest"][1]


def test_generation_without_a_checkpoint_is_refused(readers):
    status, out, err = readers["no checkpoint"]
    assert (status, out) == (2, "")
    assert err.endswith("no checkpoint yet; train first with `baton train`\n")


def test_generation_falls_back_from_a_damaged_checkpoint(readers):
    status, out, err = readers["damaged"]
    assert status == 0
    assert f"step-{STEPS:08d} is damaged" in err
    assert "damaged" not in out, "stdout is the text alone"


def test_the_plot_is_a_picture(readers, runs):
    assert readers["plot"][0] == readers["plot elsewhere"][0] == 0
    assert readers["plot elsewhere"][1] == f"{runs / 'picture.png'}\n"
    import matplotlib.image

    for name in ("curves.png", "picture.png"):
        assert (runs / name).read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
        pixels = matplotlib.image.imread(runs / name)
        assert pixels.shape[0] > 400
        assert pixels.shape[1] > 600
        assert 0.5 < (pixels == 1).all(axis=2).mean() < 0.99, "neither an empty canvas nor noise"


def test_a_plot_that_cannot_be_written_is_refused(readers, runs):
    status, out, err = readers["plot nowhere"]
    assert (status, out) == (2, "")
    assert err.startswith(f"baton: {runs / 'nowhere' / 'picture.png'}")
    assert err.count("\n") == 1


def test_a_model_that_an_update_has_ruined_is_evaluated_without_a_sample_and_left_to_the_guard(inputs, launch, tmp_path):
    words = ("training.steps=4", "training.optimizer.lr=1e30", "training.schedule.kind=constant", "training.evaluation.every=1",
             "training.guard={policy: rollback, max_interventions: 1}")  # fmt: skip
    ended = launch(tmp_path / "run", str(inputs.run), *SAME_PLACES, *words, where=inputs.run.parent).end()
    assert ended.status == 2
    assert "step 2: the loss or a gradient is not finite" in ended.err
    assert "this was tried 1 times" in ended.err
    assert [event["kind"] for event in read_events(tmp_path / "run")] == ["rollback", "stop"]
    train, evaluation = ended.rows
    assert (train["kind"], evaluation["kind"], train["step"], evaluation["step"]) == ("train", "evaluation", 1, 1)
    assert math.isnan(evaluation["loss"])
    assert "sample" not in evaluation
