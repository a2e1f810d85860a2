"""Files of a run, a dataset and an export that a later version of Baton wrote: what it added is passed over, and what it means
otherwise is refused in a line that says which version wrote it."""

import json
import os
import shutil

import pytest
import yaml
from support.checkpoints import add_unknown_keys, make_newer, rewrite
from support.runs import SAME_PLACES, published

from baton.data_pipeline.dataset import Dataset
from baton.data_pipeline.errors import DataError
from baton.data_pipeline.written_by import own_version
from baton.launcher.changes import changes
from baton.launcher.cli import main
from baton.launcher.config import load
from baton.launcher.errors import ConfigError
from baton.launcher.interchange import read_model
from baton.launcher.run_directory import (
    OUT_OF_MEMORY,
    changed_since_last_start,
    forks_of,
    last_step,
    needs_less_memory,
    open_attempt,
    read_config,
)
from baton.models.interchange.remote.export import BatonFamily
from baton.models.settings import kinds
from baton.training.monitoring.event_log import read_events
from baton.training.monitoring.goodput import compute_goodput
from baton.training.monitoring.metrics import read_metrics, truncate_metrics
from baton.training.monitoring.time_ledger import read_rows


@pytest.fixture
def run(undisturbed, inputs, tmp_path):
    """A copy of the undisturbed run, where the paths of its files hold."""
    os.symlink(inputs.shards, tmp_path / "shards")
    os.symlink(inputs.tokenizer, tmp_path / "tokenizer.model")
    return shutil.copytree(undisturbed, tmp_path / "run")


def newest(run):
    return run / "checkpoints" / f"step-{published(run)[-1]:08d}"


def append(path, *values):
    with path.open("a") as file:
        file.writelines(f"{value if isinstance(value, str) else json.dumps(value)}\n" for value in values)


def test_a_run_goes_on_from_a_checkpoint_with_what_a_later_version_added(run, inputs, launch, undisturbed, tmp_path):
    last = published(run)[-1]
    shutil.rmtree(newest(run))
    before = published(run)[-1]
    rewrite(newest(run), add_unknown_keys)
    append(run / "events.jsonl", {"kind": "weather", "step": 3, "time": 1.0}, {"kind": 3, "step": "x"})
    append(run / "ledger.jsonl", {"kind": "weather", "time": 1.0}, {"kind": "start", "time": 2.0, "node": "n1"})
    ended = launch(run, str(inputs.run), *SAME_PLACES, where=tmp_path).end()
    assert (ended.status, ended.checkpoints[-1]) == (0, last), ended.err
    assert f"resuming from step-{before:08d}" in ended.out
    assert "since step-" in ended.out
    assert "baton-lm 9.8.7 -> " in ended.out

    def losses(rows):
        return {row["step"]: row["loss"] for row in rows if row["kind"] == "train"}

    assert losses(ended.rows) == losses(read_metrics(undisturbed / "metrics.jsonl"))


@pytest.mark.parametrize("what", ["format", "cursor", "data"])
def test_a_run_does_not_go_on_from_a_checkpoint_that_means_something_else(run, inputs, launch, tmp_path, what):
    def add_to_cursor(body):
        body["versions"]["baton-lm"] = "9.8.7"
        body["cursors"]["0"]["halfway"] = 1

    def add_to_data(body):
        body["data"] = {name: [[*epoch, "weather"] for epoch in epochs] for name, epochs in body["data"].items()}

    step = published(run)[-1]
    shutil.rmtree(newest(run))
    rewrite(newest(run), {"format": make_newer, "cursor": add_to_cursor, "data": add_to_data}[what])
    ended = launch(run, str(inputs.run), *SAME_PLACES, where=tmp_path).end()
    assert ended.status == 2
    assert ended.err.count("\n") == 1
    said = {
        "format": ("format 3, which Baton 9.8.7 wrote; this is Baton ", own_version()),
        "cursor": ("which Baton 9.8.7 wrote: a lane cursor has halfway, which this version does not know; this is Baton ",),
        "data": ("the checkpoint's shards of source '' are not in a form that this version of Baton knows",),
    }
    assert all(words in ended.err for words in said[what]), ended.err
    assert "damaged" not in ended.err + ended.out
    assert published(run)[-1] < step
    assert not [path for path in (run / "checkpoints").iterdir() if path.name.endswith(".damaged")]


def test_commands_on_a_run_refuse_a_later_format(run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rewrite(newest(run), make_newer)
    out = tmp_path / "out"
    for words in (
        ["fork", run, "--out", out, "training.optimizer.lr=1e-3"],
        ["eval", run, "--device", "cpu"],
        ["export", run, "--out", out],
        ["generate", run, "--prompt", "a", "--device", "cpu"],
    ):
        status = main([*map(str, words)])
        said = capsys.readouterr()
        assert status == 2, (words, said)
        assert said.err.splitlines()[-1].startswith(f"baton: {newest(run)}/manifest.json: format 3, which Baton 9.8.7 wrote; "), (
            words
        )
        assert "damaged" not in said.out + said.err
        assert not out.exists()


def test_a_configuration_says_which_version_resolved_it(run, capsys):
    """An unknown setting may change anything, so it is refused."""
    path = run / "config.yaml"
    text = path.read_text()
    assert text.startswith(f"# resolved by baton-lm {own_version()}\n")
    path.write_text(text + "weather: fine\n")
    with pytest.raises(ConfigError) as caught:
        read_config(path)
    assert "wrote it" not in str(caught.value)
    path.write_text(f"# resolved by baton-lm 9.8.7\n{text.partition(chr(10))[2]}weather: fine\n")
    with pytest.raises(ConfigError) as caught:
        read_config(path)
    assert str(caught.value).endswith(f"; Baton 9.8.7 wrote it, and this is Baton {own_version()}: use the version that wrote it")
    assert "\n" not in str(caught.value)
    assert main(["train", str(path)]) == 2


def test_what_an_earlier_version_did_not_know_means_what_its_models_meant(run):
    """Also where that is not the default now: B'MOJO's fading_norm."""
    now = load(run / "config.yaml", ["model.pattern=[bmojo]", "model.mixers={bmojo: {head_dim: 8}}"])
    assert now.model.mixers["bmojo"].fading_norm
    values = yaml.safe_load(now.to_yaml())
    (run / "config.yaml").write_text(yaml.safe_dump(values))
    assert read_config(run / "config.yaml") == now
    del values["model"]["mixers"]["bmojo"]["fading_norm"]
    (run / "config.yaml").write_text(yaml.safe_dump(values))
    then = read_config(run / "config.yaml")
    assert [str(change) for change in changes(then, now)] == ["model.mixers.bmojo.fading_norm: False -> True"]
    assert load(run / "config.yaml", resolved=True) == then
    (run / "config.yaml").write_text(f"# resolved by baton-lm 0.0.1\n{yaml.safe_dump(values)}")
    assert load(run / "config.yaml") == then
    section = run / "section.yaml"
    for first, meant in (("# bf, read from a folder by `baton import`", False), ("# mine", True)):
        section.write_text(f"{first}\n{yaml.safe_dump(values['model'])}")
        assert load(run / "config.yaml", [f"model={section}"]).model.mixers["bmojo"].fading_norm is meant
    exported = BatonFamily().config(now.model)
    del exported["baton"]["mixers"]["bmojo"]["fading_norm"]
    assert not BatonFamily().model(exported)["mixers"]["bmojo"]["fading_norm"]


@pytest.mark.parametrize("kind", [["bmojo"], {"bmojo": 1}, None], ids=str)
def test_a_kind_that_is_no_name_is_refused(run, kind):
    values = yaml.safe_load((run / "config.yaml").read_text())
    next(iter(values["model"]["mixers"].values()))["kind"] = kind
    (run / "config.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(ConfigError, match=r"not a resolved run configuration: .*kind"):
        read_config(run / "config.yaml")


def test_a_fork_is_of_what_the_run_meant(run, tmp_path, monkeypatch, capsys):
    """Also where the configuration does not say which version wrote it."""
    monkeypatch.chdir(tmp_path)
    values, out = yaml.safe_load((run / "config.yaml").read_text()), tmp_path / "fork"
    assert values["model"]["mixers"]["mamba"].pop("discretization") == "euler"
    (run / "config.yaml").write_text(yaml.safe_dump(values))
    monkeypatch.setattr(kinds()["mamba"], "once", {"discretization": "zoh"})
    assert main(["fork", str(run), "--out", str(out), "training.steps=1000"]) == 0
    assert "discretization" not in capsys.readouterr().out
    assert read_config(out / "config.yaml").model.mixers["mamba"].discretization == "zoh"


def test_records_of_a_later_version_are_passed_over(run):
    rows, events, goodput, step = read_rows(run), read_events(run), compute_goodput(run), last_step(run)
    strange = [
        {"kind": "weather", "time": rows[-1]["time"]},
        *({"kind": kind, "time": rows[-1]["time"]} for kind in ("attempt", "start", "spans", "end", "excluded", "readmitted")),
        {"kind": ["end"], "time": 1.0},
        {"kind": "end", "time": "now", "attempt": 1, "status": 0},
        [1],
        3,
        "{",
    ]
    append(run / "ledger.jsonl", *strange)
    assert read_rows(run) == [*rows, strange[0]]
    assert compute_goodput(run).seconds == pytest.approx(goodput.seconds)
    append(run / "events.jsonl", {"kind": "weather", "step": 1}, {"step": 1}, {"kind": "skip", "step": None}, [1], "{")
    assert read_events(run) == [*events, {"kind": "weather", "step": 1}]
    metrics = read_metrics(run / "metrics.jsonl")
    append(run / "metrics.jsonl", {"kind": "weather", "step": None}, {"kind": "train", "step": "7"}, {"kind": "weather"}, [1], "{")
    assert read_metrics(run / "metrics.jsonl") == metrics
    assert last_step(run) == step
    truncate_metrics(run / "metrics.jsonl", step)
    about = json.loads((run / "provenance.json").read_text())
    for forks in ("x", [3, {"of": "x"}], {"run": "x"}):
        (run / "provenance.json").write_text(json.dumps(about | {"forks": forks}))
        assert forks_of(run) == []
    assert changed_since_last_start(run / "attempts" / "0002", read_config(run / "config.yaml")) == {}


@pytest.mark.parametrize("content", ["{}", "[]", "3", "{", '{"memory": null}'])
def test_what_ran_out_of_memory_in_another_version_is_passed_over(inputs, tmp_path, content):
    config = load(inputs.run, [f"directory={tmp_path / 'run'}"])
    with open_attempt(config) as attempt:
        (attempt / OUT_OF_MEMORY).write_text(content)
    needs_less_memory(config, attempt)
    with open_attempt(config) as attempt:
        assert attempt.name == "0002"


def test_a_dataset_with_what_a_later_version_added_is_read(inputs, copy_of):
    folder, before = copy_of(inputs.tokens), Dataset.open(inputs.tokens)
    about = json.loads((folder / "dataset.json").read_text())
    assert about["baton-lm"] == own_version()
    about |= {"baton-lm": "9.8.7", "weather": "fine", "losses": {**about.get("losses", {}), "weather": 1}}
    for shard in about["shards"]:
        shard["weather"] = [1]
    (folder / "dataset.json").write_text(json.dumps(about))
    found = Dataset.open(folder)
    assert (found.fingerprint, found.shards) == (before.fingerprint, before.shards)
    about["version"] = 2
    (folder / "dataset.json").write_text(json.dumps(about))
    with pytest.raises(DataError) as caught:
        Dataset.open(folder)
    of_formats = f"format 2, which Baton 9.8.7 wrote; this is Baton {own_version()}, which reads format 1"
    remedy = "use the version that wrote it, or prepare the dataset again"
    assert str(caught.value) == f"{folder / 'dataset.json'}: {of_formats}; {remedy}"


def test_an_export_in_batons_own_format_says_which_version_wrote_it(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["model"]["mixers"].keys() == {"mamba"}
    out = tmp_path / "out"
    assert main(["export", str(run), "--out", str(out)]) == 0
    values = json.loads((out / "config.json").read_text())
    assert values.get("baton_version") in (None, own_version())
    shutil.rmtree(out / "x", ignore_errors=True)
    values = {"model_type": "baton", "architectures": ["BatonForCausalLM"], "baton_version": "9.8.7"}
    values["baton"] = config["model"] | {"vocab_size": 380, "weather": 1}
    (out / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError) as caught:
        read_model(out)
    assert "weather" in str(caught.value)
    assert str(caught.value).endswith(f"; Baton 9.8.7 wrote it, and this is Baton {own_version()}: use the version that wrote it")
