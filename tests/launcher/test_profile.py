"""`profile=true`: writes a trace and a table of a few steps whose times add up to the steps' times, and does not change results."""

import gzip
import json

import pytest
import yaml

from baton.launcher.changes import changes
from baton.launcher.cli import main
from baton.launcher.config import load
from baton.training.monitoring.metrics import read_metrics

RUN = {
    "name": "recall",
    "device": "cpu",
    "model": {"d_model": 32, "n_layers": 2, "pattern": ["mamba", "gsa"], "pad_vocab_to": 8}
    | {"mixers": {"mamba": {"d_state": 4}, "gsa": {"heads": 2, "head_dim": 16, "slots": 4}}},
    "data": {"kind": "mqar", "length": 32, "pairs": 4, "vocab_size": 64},
    "training": {
        "steps": 6,
        "sequence_length": 64,
        "global_batch_tokens": 512,
        "micro_batch_size": 2,
        "compute_dtype": "float32",
        "optimizer": {"lr": 1e-2},
        "evaluation": {"every": 0},
    },
}


@pytest.fixture(scope="module")
def run_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("profile") / "run.yaml"
    path.write_text(yaml.safe_dump(RUN))
    return path


@pytest.fixture(scope="module")
def runs(run_file, launch):
    """The run without and with a look at it, on two ranks; not to be changed."""
    plain, profiled = (run_file.parent / name for name in ("plain", "profiled"))
    words = ["layout.data=2", "training.log_every=1"]
    assert launch(plain, str(run_file), *words, where=run_file.parent).end().status == 0
    words += ["profile.skip_steps=3", "profile.steps=2", "profile.ranks=all", "profile.peak_tflops=0.05"]
    assert launch(profiled, str(run_file), *words, where=run_file.parent).end().status == 0
    return plain, profiled


def test_a_look_changes_nothing_that_is_computed(runs):
    plain, profiled = ([(row["loss"], row["grad_norm"]) for row in read_metrics(run / "metrics.jsonl")] for run in runs)
    assert len(plain) == 6
    assert plain == profiled
    assert not (runs[0] / "profile").exists()


@pytest.mark.parametrize("rank", [0, 1])
def test_the_categories_add_up_to_the_steps(runs, rank):
    found = json.loads((runs[1] / "profile" / f"step-00000004-rank-{rank}.json").read_text())
    table = found["profiled"]
    assert [step["step"] for step in table["steps"]] == [4, 5]
    for step in table["steps"]:
        assert sum(step["categories"].values()) == pytest.approx(step["ms"], rel=1e-6)
    assert sum(of["ms"] for of in table["categories"].values()) == pytest.approx(table["ms"], rel=1e-6)
    for name in ("matmul", "scan", "convolution", "norm", "loss", "optimizer", "exchange", "data", "elementwise", "idle"):
        assert table["categories"][name]["ms"] > 0, name
    assert table["categories"]["unclassified"]["ms"] == 0, table["categories"]["unclassified"]["largest"]
    # and PyTorch's own account of the same steps, in microseconds
    with gzip.open(runs[1] / "profile" / f"step-00000004-rank-{rank}.trace.json.gz", "rt") as trace:
        events = [event for event in json.load(trace)["traceEvents"] if event.get("ph") == "X"]
    for step in table["steps"]:
        (own,) = [event["dur"] for event in events if event["name"] == f"ProfilerStep#{step['step']}"]
        assert step["ms"] == pytest.approx(own / 1000, rel=1e-3)
    used = found["utilisation"]
    assert used["mfu_6n"] == pytest.approx(6 * used["parameters"] * used["tokens_per_s"] / (2 * 0.05e12))
    assert used["mfu_model"] > 0
    assert used["tokens_per_s"] == pytest.approx(512 / (found["unprofiled_ms"] / 1000))


def test_the_table_is_text_too_and_the_trace_one_that_viewers_open(runs):
    text = (runs[1] / "profile" / "step-00000004-rank-0.txt").read_text()
    assert text in (runs[1] / "attempts" / "0001" / "rank-0.log").read_text()
    assert text.startswith("profile of profiled, steps 4 to 5, their mean, rank 0 of 2 (CPU")
    assert "of 0.05 TFLOP/s (profile.peak_tflops)" in text
    with gzip.open(runs[1] / "profile" / "step-00000004-rank-0.trace.json.gz", "rt") as trace:
        names = {event["name"] for event in json.load(trace)["traceEvents"]}
    assert {"ProfilerStep#4", "ProfilerStep#5", "mark: data", "mark: optimizer"} <= names
    assert any(name.startswith("recurrence: ") for name in names)
    assert sorted(path.suffix for path in (runs[1] / "profile").iterdir()) == [".gz", ".gz", ".json", ".json", ".txt", ".txt"]


def test_it_is_switched_on_as_a_whole_or_by_a_setting_and_may_change(run_file, tmp_path):
    off, on = load(run_file), load(run_file, ["training.steps=8", "profile=true"])
    assert off.profile is None
    assert (on.profile.skip_steps, on.profile.steps, on.profile.ranks) == (5, 3, "first")
    assert load(run_file, ["profile=false"]).profile is None
    settings = load(run_file, ["profile=true", "profile.steps=1"])
    assert settings.profile.steps == 1
    assert changes(off, settings) == []


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("profile=5", "profile=5: expected true, false or settings, as profile.steps=3"),
        ("profile=yesterday", "profile='yesterday': expected true, false or settings"),
        ("profile.step=1", "unknown key profile.step; did you mean profile.steps?"),
        ("profile.steps=0", "profile.steps=0: Input should be greater than or equal to 1"),
        ("profile.ranks=some", "profile.ranks='some': Input should be 'first' or 'all'"),
        ("profile=true", "set training.steps=8 or more, or profile.skip_steps or profile.steps to less"),
    ],
)
def test_bad_values_are_refused_in_one_line(run_file, tmp_path, capsys, word, said):
    assert main(["train", str(run_file), f"directory={tmp_path / 'run'}", word]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()
