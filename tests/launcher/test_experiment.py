"""`baton experiment`: a tiny one is interrupted, resumed and judged, and what a file says wrongly is refused in one line."""

import copy
import json
import re
import signal
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml
from support.consumed import write_corpus
from support.forks import NURSERY
from support.runs import DEADLINE_S, published

from baton.launcher.cli import main
from baton.launcher.errors import ConfigError
from baton.launcher.experiments import conduct, report, statement
from baton.launcher.experiments.cells import chosen, trials
from baton.launcher.experiments.config import ExperimentConfig, find, read_experiment, shipped
from baton.launcher.experiments.trainer import RESULT
from baton.launcher.load import load_model
from baton.training.monitoring.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[2]
STEPS = 40
TINY = {
    "title": "two of a kind",
    "run": {
        "model": {"d_model": 16, "n_layers": 1, "pattern": ["mamba"], "mixers": {"mamba": {"d_state": 4}}, "pad_vocab_to": 8},
        "data": {"kind": "induction", "length": 16, "vocab_size": 8, "cases": [{}, {"length": 8}]},
        "training": {
            "steps": STEPS,
            "sequence_length": 16,
            "global_batch_tokens": 64,
            "micro_batch_size": 4,
            "optimizer": {"lr": 1e-2},
            "schedule": {"kind": "constant"},
            "checkpoint": {"every": 5, "keep_last": 1},
            "evaluation": {"every": STEPS, "tokens": 160},
        },
    },
    "grid": {"state": {"small": None, "large": {"model.mixers.mamba.d_state": 8}}},
    "cases": {"16": "length-16", "8": "length-8"},
    "measure": "accuracy",
    "paper": {"where": "table 0", "figures": {"small/16": 100, "large/16": 50}},
    "statement": ["small >= 0", "large <= 100"],
}


def with_changes(**changes):
    """The tiny experiment with values at dotted places; None takes one out."""
    values = copy.deepcopy(TINY)
    for key, value in changes.items():
        *groups, last = key.split("__")
        place = values
        for group in groups:
            place = place[group]
        if value is None:
            del place[last]
        else:
            place[last] = value
    return values


@pytest.fixture
def begin(tmp_path):
    """A function that starts `baton experiment tiny.yaml` with words, and the command's output so far."""
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TINY, sort_keys=False))
    said = tmp_path / "said"

    def start(*words):
        said.write_text("")
        command = ["experiment", "tiny.yaml", "--on", "cpu", "--processes", "1", "--out", "pages", *words]
        return NURSERY.fork("command", command, where=tmp_path, out=str(said), err=str(said)), said

    return start


def test_it_is_interrupted_resumed_and_judged_and_nothing_is_run_twice(begin, tmp_path):
    process, said = begin()
    small, large = (tmp_path / "runs" / "experiments" / "tiny" / name for name in ("small", "large"))
    deadline = time.monotonic() + DEADLINE_S
    while not published(small) and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGTERM)
    assert process.wait(DEADLINE_S) == 128 + signal.SIGTERM, said.read_text()
    assert "left: 2 runs (small, large)" in said.read_text()
    (at,) = published(small)
    assert 0 < at < STEPS
    assert not large.exists()

    process, said = begin("--budget", "0.001s")
    assert process.wait(DEADLINE_S) == 75, said.read_text()
    assert "tiny: not decided" in said.read_text()
    assert "small/16: runs are missing or diverged" in said.read_text()
    assert not large.exists()

    process, said = begin()
    assert process.wait(DEADLINE_S) == 0, said.read_text()
    assert "tiny: shown" in said.read_text()
    assert f"step {at} of {STEPS}" in (small / "attempts" / "0002" / "rank-0.log").read_text()
    assert [row["step"] for row in read_metrics(small / "metrics.jsonl") if row["kind"] == "train"] == list(range(1, STEPS + 1))
    rows = {name: read_metrics(folder / "metrics.jsonl")[-1]["cases"] for name, folder in (("small", small), ("large", large))}
    found = json.loads((tmp_path / "pages" / "tiny.json").read_text())
    for cell in found["cells"]:
        of_case = rows[cell["cell"][0]][f"length-{cell['cell'][1]}"]
        assert cell["seeds"] == {"0": pytest.approx(100 * of_case["accuracy"], abs=1e-5)}
    accuracies = {name: 100 * cases["length-16"]["accuracy"] for name, cases in rows.items()}
    assert found["distance"] == pytest.approx(max(100 - accuracies["small"], abs(50 - accuracies["large"])), abs=1e-3)
    page = (tmp_path / "pages" / "tiny.md").read_text()
    assert f"| small | {accuracies['small']:.4g} (100) |" in page
    cost = r"2 of 2 runs, \d+ s on CPU, commit [0-9a-f]{7}, \d{4}-\d\d-\d\d\."
    assert re.search(rf"`baton experiment tiny.yaml --on cpu`: {cost}", page)
    assert (tmp_path / "pages" / "tiny.png").read_bytes().startswith(b"\x89PNG")
    assert "| [tiny](tiny.md): two of a kind | shown |" in (tmp_path / "pages" / "README.md").read_text()

    process, said = begin()
    assert process.wait(DEADLINE_S) == 0
    assert "2 runs, 2 finished before" in said.read_text()
    assert not (large / "attempts" / "0002").exists()

    process, said = begin("--seeds", "1", "--only", "small")
    assert process.wait(DEADLINE_S) == 0, said.read_text()
    assert "1 runs, 0 finished before" in said.read_text()
    other = read_metrics(small.with_name("small-seed1") / "metrics.jsonl")
    assert other[-1]["step"] == STEPS
    assert other[0]["loss"] != read_metrics(small / "metrics.jsonl")[0]["loss"]
    assert (tmp_path / "pages" / "tiny.json").read_text() == json.dumps(found, indent=1) + "\n"
    assert "tiny-seeds-1: not decided" in said.read_text()


def test_text_is_evaluated_in_windows_of_any_length(begin, tmp_path):
    """In those of training as during training, and in one for them all as `load_model` has the documents one by one."""
    corpus = write_corpus(tmp_path)
    training = TINY["run"]["training"] | {"steps": 5, "evaluation": {"every": 5, "tokens": 100_000, "sample_tokens": 0}}
    values = with_changes(run__training=training, run__data=corpus.data, grid__state={"small": None}, measure="loss")
    values |= {"cases": {"1x": "window-16", "64x": "window-1024"}, "paper": {"where": "figure 0"}, "statement": ["64x > 0"]}
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(values))
    process, said = begin()
    assert process.wait(DEADLINE_S) == 0, said.read_text()
    found = {cell["cell"][1]: cell["seeds"]["0"] for cell in json.loads((tmp_path / "pages" / "tiny.json").read_text())["cells"]}
    run = tmp_path / "runs" / "experiments" / "tiny" / "small"
    (row,) = (row for row in read_metrics(run / "metrics.jsonl") if row["kind"] == "evaluation")
    assert found["1x"] == pytest.approx(row["loss"], rel=1e-5)
    loaded, eod = load_model(run, device="cpu"), [corpus.eod_id]
    losses = [loaded.loss(eod + ids + eod) for ids in corpus.validation]
    assert found["64x"] == pytest.approx(sum(one.loss * one.tokens for one in losses) / sum(one.tokens for one in losses), rel=1e-5)
    assert abs(found["64x"] - found["1x"]) > 1e-4


AXES = {"model": ("a", "b"), "pairs": ("4", "8")}
CELLS = {("a", "4"): (9.0, 8.0), ("a", "8"): (7.0, 7.0), ("b", "4"): (5.0, 5.0), ("b", "8"): (6.0, 8.0)}


@pytest.mark.parametrize(
    ("text", "verdict", "reason"),
    [
        ("a/4 >= b/4", "shown", ""),
        ("a >= 7", "shown", "in all 2 comparisons"),
        ("a >= b - 2", "shown", "in all 2 comparisons"),
        ("a/4 > b", "not decided", "a/4 and b/8: 8.5 against 7, the seeds disagree"),
        ("b > a", "not shown", "b/4 and a/4: 5 against 8.5"),
        ("b/4 > a/4 - 1", "not shown", "b/4 and a/4: 5 against 8.5 - 1"),
        ("a/pairs=8 <= 7 < a/4", "shown", "in all 2 comparisons"),
        ("pairs=4 >= pairs=8 - 4", "shown", "in all 2 comparisons"),
        ("distance <= 3", "shown", ""),
        ("distance < 2.5", "not shown", "distance: 2.5 against 2.5"),
    ],
)
def test_an_inequality_is_shown_not_shown_or_not_decided(text, verdict, reason):
    values = {cell: dict(enumerate(of_seeds)) for cell, of_seeds in CELLS.items()}
    found = statement.judge(text, AXES, values, (0, 1), 2.5, "here")
    assert (found.verdict, found.reason) == (verdict, reason)


def test_what_is_missing_is_not_decided_unless_something_else_is_wrong():
    values = {cell: dict(enumerate(of_seeds)) for cell, of_seeds in CELLS.items()} | {("a", "8"): {0: 7.0}}
    outcomes = [statement.judge(text, AXES, values, (0, 1), None, "") for text in ("a > 0", "distance < 1", "b < 9", "b/4 > 5")]
    assert [one.verdict for one in outcomes] == ["not decided", "not decided", "shown", "not shown"]
    assert statement.verdict_of(outcomes) == "not shown"
    assert statement.verdict_of(outcomes[:3]) == "not decided"
    assert statement.verdict_of(outcomes[2:3]) == "shown"


def test_the_rate_with_the_lowest_loss_is_shown_and_diverged_runs_are_never(monkeypatch):
    values = with_changes(learning_rates=[0.1, 0.2, 0.3], seeds=[0, 1], cases=None, paper__figures={})
    experiment = ExperimentConfig.model_validate(values)
    losses = {0.1: (1.0, 2.0), 0.2: (0.5, 1.5), 0.3: (0.0, None)}

    def result(trial):
        loss = losses[trial.rate][trial.seed]
        row = None if loss is None else {"loss": loss, "accuracy": loss / 10}
        return report.Result(STEPS, row, None, 1.0, "CPU", None, "2026-01-01")

    monkeypatch.setattr(report, "read_result", result)
    made = trials("tiny", experiment, "cpu")
    assert [trial.name for trial in made][:3] == ["small-lr0.1-seed0", "large-lr0.1-seed0", "small-lr0.2-seed0"]
    assert {trial.cell for trial in chosen(made, experiment, "small")} == {("small",)}
    found = report.collect("tiny", experiment, made, "")
    assert [(cell["cell"], cell["rate"], cell["seeds"]) for cell in found["cells"]] == [
        (["small"], 0.2, {"0": 5.0, "1": 15.0}),
        (["large"], 0.2, {"0": 5.0, "1": 15.0}),
    ]


def test_other_seeds_have_runs_and_a_page_of_their_own_and_a_place_on_the_experiments(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    experiment = ExperimentConfig.model_validate(with_changes(statement=["small < large"], learning_rates=[0.1]))
    accuracies = {"small": {0: 0.25, 1: 0.5, 4: 0.25}, "large": {0: 0.5, 1: 0.75, 4: 0.125}}

    def finish(made):
        for trial in made:
            cases = {case: {"accuracy": accuracies[trial.cell[0]][trial.seed]} for case in ("length-16", "length-8")}
            result = report.Result(STEPS, {"loss": 1.0, "cases": cases}, None, 60.0, "CPU", None, "2026-01-01")
            trial.config.folder.mkdir(parents=True)
            (trial.config.folder / RESULT).write_text(json.dumps(asdict(result)))

    page, pages = tmp_path / "pages" / "tiny.md", tmp_path / "pages"
    own, others = trials("tiny", experiment, "cpu"), trials("tiny", experiment, "cpu", (1, 4))
    assert [trial.name for trial in own] == ["small", "large"]
    assert [trial.name for trial in others] == ["small-seed1", "large-seed1", "small-seed4", "large-seed4"]
    finish(own)
    report.write("tiny", experiment, own, "baton experiment tiny", pages)
    assert "`baton experiment tiny --seeds 1`" in page.read_text()
    assert "Learning rates chosen by validation loss: small 0.1, large 0.1." in page.read_text()
    before = page.read_text()
    finish(others)
    report.write("tiny", experiment, others, "baton experiment tiny", pages)
    after = page.read_text()
    assert "**Shown.** With seeds 1 and 4: **[not decided](tiny-seeds-1-4.md).** The paper" in after
    assert after.splitlines()[4:][: len(before.splitlines()) - 4] == before.splitlines()[4:]
    assert "With seeds 1 and 4: [not decided](tiny-seeds-1-4.md), another than with seed 0 (shown)." in after
    assert "`baton experiment tiny --seeds 1,4`: 4 of 4 runs, 4 min on CPU, 2026-01-01." in after
    assert "- `small < large`: not decided (small/16 and large/16: 37.5 against 43.75, the seeds disagree" in after
    assert "| small/16 | 25 | 37.5 ± 12 |" in after
    overview = (pages / "README.md").read_text()
    assert "| [tiny](tiny.md): two of a kind | shown | [not decided](tiny-seeds-1-4.md) |" in overview
    assert overview.count("two of a kind") == 1
    assert "[tiny](tiny.md) with other seeds." in (pages / "tiny-seeds-1-4.md").read_text()

    (own[0].config.folder / RESULT).unlink()  # as in a checkout where it has not been repeated
    assert "is kept: it is of 2 runs, and here are 1" in report.write("tiny", experiment, own, "baton experiment tiny", pages)[-1]
    assert page.read_text() == after


REFUSALS = {
    "unknown key": (with_changes(seed=1), ["unknown key seed", "did you mean seeds?"]),
    "no statement": (with_changes(statement=[]), ["statement"]),
    "unknown setting": (
        with_changes(grid__state={"small": None, "large": {"model.d_mode": 8}}),
        ["cell large", "model.d_mode", "model.d_model?"],
    ),
    "refused setting": (with_changes(run__training__sequence_length=24), ["cell small", "sequence_length=24"]),
    "directory": (with_changes(run__name="x"), ["run.name", "leave it out"]),
    "ranks": (with_changes(run__layout={"data": 2}), ["cell small", "2 ranks"]),
    "no evaluation": (with_changes(run__training__evaluation={"every": 0}), ["training.evaluation.every=0"]),
    "unknown case": (
        with_changes(cases={"8": "length-9"}, paper__figures={}),
        ["cases.8", "'length-9'", "known: length-16, length-8"],
    ),
    "case of text": (
        with_changes(run__data={}, measure="loss", cases={"8x": "length-128"}, paper__figures={}, statement=["small >= 0"]),
        ["cases.8x", "'length-128' is no case of text", "window-1024"],
    ),
    "axis called case": (with_changes(grid__case={"x": None}), ["grid.case"]),
    "accuracy of text": (
        with_changes(run__data={}, run__training__evaluation={}, cases=None, paper__figures={}),
        ["measure=accuracy is of synthetic tasks", "measure=loss"],
    ),
    "seeds of what is computed": (with_changes(measure="parameters"), ["measure=parameters is computed", "cases"]),
    "unknown cell": (with_changes(statement=["smal >= 0"]), ["statement.0", "no cell is called 'smal'", "small, large, 16, 8"]),
    "unknown axis": (with_changes(statement=["size=8 >= 0"]), ["'size=8' names no cell", "axes: state, case"]),
    "two labels": (with_changes(statement=["small/large >= 0"]), ["two labels of state"]),
    "no inequality": (with_changes(statement=["small"]), ["is no inequality"]),
    "only numbers": (with_changes(statement=["1 > 0"]), ["names no cell"]),
    "half a sum": (with_changes(statement=["small + x > 0"]), ["expected + or - and a number behind small"]),
    "no distance": (with_changes(statement=["distance < 1"], paper__figures={}), ["no distance without paper.figures"]),
    "figure of many cells": (with_changes(paper__figures={"small": 1}), ["'small' has no label of case"]),
}


@pytest.mark.parametrize(("values", "needles"), REFUSALS.values(), ids=REFUSALS)
def test_files_that_cannot_be(values, needles, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    assert main(["experiment", "tiny.yaml", "--on", "cpu"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("baton: ")
    assert err.count("\n") == 1
    for needle in needles:
        assert needle in err
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.yaml"]


def test_words_that_cannot_be(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(yaml.safe_dump(TINY, sort_keys=False))
    for words, needle in (
        (["mamba-inductoin"], "did you mean mamba-induction?"),
        (["nothing.yaml"], "nothing.yaml: no such file"),
        (["tiny.yaml", "--on", "cpu", "--only", "huge"], "--only: no cell is called 'huge'"),
        (["tiny.yaml", "--on", "gpu"], "--on gpu: no GPU"),
        (["gsa-state", "--seeds", "1"], "--seeds: gsa-state is computed"),
    ):
        monkeypatch.setattr("baton.launcher.experiments.conduct.kind_here", lambda wanted: "cpu")
        assert main(["experiment", *words]) == 2
        err = capsys.readouterr().err
        assert needle in err
        assert err.count("\n") == 1
    for words, needle in (
        (["--budget", "soon"], "soon is no time; write it as 90s, 20m or 2h"),
        (["--seeds", "1,1"], "1,1 names no seeds; write different whole numbers, as 2,3"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(["experiment", "tiny.yaml", *words])
        assert needle in capsys.readouterr().err


@pytest.mark.parametrize("name", shipped())
def test_every_shipped_experiment_can_be_run(name):
    experiment = find(name)[1]
    made = trials(name, experiment, "cpu")
    assert len({trial.config.folder for trial in made}) == len(made)


def test_the_pages_are_made_of_the_results_and_of_shipped_experiments():
    folder = ROOT / "docs" / "reproduced"
    for path, text in report.pages(folder).items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run `baton experiment {path.stem}`"
    for path in folder.glob("*.json"):
        found = json.loads(path.read_text(encoding="utf-8"))
        experiment = find(found.get("rerun_of", path.stem))[1]
        assert found["axes"] == {axis: list(labels) for axis, labels in experiment.axes.items()}
        assert [one["text"] for one in found["statement"]] == list(experiment.statement)
        if experiment.is_computed:
            computed = report.collect(path.stem, experiment, trials(path.stem, experiment, "cpu"), found["command"])
            assert computed == found, "what is computed is the same today"


def test_a_file_is_read_strictly():
    with pytest.raises(ConfigError, match="grid"):
        read_experiment(with_changes(grid={}), "here")


@pytest.mark.parametrize(("gib", "count"), [(4, 2), (23, 4), (79, 16)])
def test_small_runs_share_gpus_as_memory_allows(monkeypatch, gib, count):
    """On two GPUs, each of so many GiB."""
    monkeypatch.setattr(conduct, "gpu_memory", lambda: (2, gib << 30))
    monkeypatch.setattr(conduct.os, "sched_getaffinity", lambda pid: set(range(32)))
    runs = trials("tiny", ExperimentConfig(**TINY), "cuda")
    assert conduct.process_count(runs, "cuda") == count
    assert conduct.process_count(runs, "cpu") == 32
