"""Extending, changing and forking runs: completed steps are unchanged, and the run continues bit-exactly or is refused.

One trunk on a WSD schedule, which carries its lanes' States, is trained once, in the pool, whose imports are paid; each test has
forks of its own. One start of the real command shows what it hands to its ranks.
"""

import json
import os
import shutil
from pathlib import Path

import matplotlib.image
import pytest
import torch
import yaml
from support import checkpoints
from support.long_form import some
from support.pool_runs import train_attempt
from support.runs import flip, published

from baton.data_pipeline.lock import exclusive
from baton.launcher.changes import refusal
from baton.launcher.cli import main
from baton.launcher.config import RunConfig, load
from baton.launcher.errors import ConfigError
from baton.launcher.run_directory import changed_since_last_start, check_run, open_attempt, read_config
from baton.training.config import TrainingConfig
from baton.training.lr_schedule import equal_lr_steps, learning_rate
from baton.training.monitoring import time_ledger
from baton.training.monitoring.event_log import EventLog, read_events
from baton.training.monitoring.metrics import read_metrics

STEPS, DECAY = 12, 3
SETTINGS = {
    "steps": STEPS,
    "lanes": 8,
    "micro_batch_size": 2,
    "bptt": {"mode": "truncated", "segment": 16},
    "schedule": {"kind": "wsd", "warmup_steps": 2, "decay_steps": DECAY, "final_lr": 1e-4},
    "checkpoint": {"every": 2, "keep_last": 9, "async_save": False},
    "evaluation": {"every": 2, "tokens": 300, "sample_tokens": 0},
}


@pytest.fixture(scope="module")
def configured(inputs, tmp_path_factory):
    """A function that reads the run file, with words over it, for a directory."""
    path = tmp_path_factory.mktemp("configured") / "run.yaml"
    values = inputs.settings() | {"layout": {"data": 1}}
    values["training"] |= SETTINGS
    path.write_text(yaml.safe_dump(values))
    return lambda folder, *words: load(path, [*words, f"directory={folder}"])


def go_on(pool, config: RunConfig, *, change: bool = False) -> None:
    """What `baton train` does, with ranks that live on."""
    with open_attempt(config, change=change) as attempt:
        sizes = {name: size for name, size in config.layout.sizes().items() if size > 1}
        assert set(pool.run(train_attempt, str(attempt), **(sizes or {"data": 1}))) == {None}


def forked(run: Path, out: Path, *words: str) -> RunConfig:
    assert main(["fork", str(run), "--out", str(out), *words]) == 0
    return read_config(out / "config.yaml")


def refused(capsys, *words) -> str:
    capsys.readouterr()
    assert main([str(word) for word in words]) == 2
    err = capsys.readouterr().err
    assert err.startswith("baton: ")
    assert err.count("\n") == 1
    return err


def steps_of(folder: Path) -> dict[int, tuple[float, float, str]]:
    """Loss, gradient norm and checksum of what was read, by step."""
    rows = read_metrics(folder / "metrics.jsonl")
    return {row["step"]: (row["loss"], row["grad_norm"], row["consumed"]) for row in rows if row["kind"] == "train"}


def manifest(folder: Path, step: int) -> dict:
    return json.loads((folder / "checkpoints" / f"step-{step:08d}" / "manifest.json").read_text())["manifest"]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def trunk(pool, configured, tmp_path_factory) -> Path:
    """Trained from its first step to its last. Not to be changed."""
    folder = tmp_path_factory.mktemp("trunk") / "trunk"
    go_on(pool, configured(folder))
    return folder


@pytest.fixture
def copied(trunk, tmp_path) -> Path:
    """A copy of the trunk, to be changed."""
    return Path(shutil.copytree(trunk, tmp_path / "trunk"))


def until(folder: Path, step: int) -> Path:
    """As if the run had been killed after a checkpoint."""
    for later in published(folder):
        if later > step:
            shutil.rmtree(folder / "checkpoints" / f"step-{later:08d}")
    return folder


def test_three_branches_decay_each_for_itself_from_a_trunk_that_is_trained_once(trunk, pool, tmp_path):
    before, branches = contents(trunk), []
    for step, shape in ((4, "linear"), (6, "sqrt"), (8, "linear")):
        out = tmp_path / f"from-{step}"
        words = (f"training.steps={step + 4}", "training.schedule.decay_steps=4", f"training.schedule.decay_shape={shape}")
        config = forked(trunk, out, "--step", str(step), *words)
        linked = out / "checkpoints" / f"step-{step:08d}" / "rank-00000.safetensors"
        assert linked.stat().st_ino == (trunk / "checkpoints" / linked.parent.name / linked.name).stat().st_ino, "shared"
        go_on(pool, config)
        branches.append(out)
        ours, theirs = steps_of(out), steps_of(trunk)
        assert list(ours) == [step + 1, step + 2, step + 3, step + 4]
        assert ours[step + 1] == theirs[step + 1], "cursors, carried States and weights are the trunk's, to the bit"
        rates = [row["lr"] for row in read_metrics(out / "metrics.jsonl") if row["kind"] == "train"]
        assert rates[-1] == pytest.approx(1e-4)
        assert rates == sorted(rates, reverse=True)
        assert rates == [pytest.approx(learning_rate(each, config.training)) for each in range(step, step + 4)]
        evaluated = [row["step"] for row in read_metrics(out / "metrics.jsonl") if row["kind"] == "evaluation"]
        assert evaluated == [step + 2, step + 4]
        (fork,) = json.loads((out / "provenance.json").read_text())["forks"]
        of_trunk = json.loads((trunk / "checkpoints" / f"step-{step:08d}" / "manifest.json").read_text())
        assert (fork["run"], fork["step"], fork["manifest_sha256"]) == (str(trunk), step, of_trunk["sha256"])
        assert fork["changed"]["training.schedule.decay_steps"] == [DECAY, 4]
        assert config.name == out.name
    assert contents(trunk) == before
    picture = tmp_path / "compared.png"
    assert main(["plot", str(trunk), *map(str, branches), "--out", str(picture)]) == 0
    pixels = matplotlib.image.imread(picture)[..., :3]
    assert 0.5 < (pixels == 1).all(axis=2).mean() < 0.99
    for number in range(4):  # matplotlib's colours C0 to C3: each of the four curves is there
        colour = torch.tensor(matplotlib.colors.to_rgb(f"C{number}"))
        assert ((torch.from_numpy(pixels) - colour).abs().amax(dim=2) < 0.02).sum() > 100
    for command in ("status", "goodput"):
        assert main([command, str(branches[0])]) == 0


def test_a_fork_without_changes_of_what_is_learned_is_the_run_itself(trunk, pool, tmp_path):
    """A fork of a fork, too."""
    forked(trunk, tmp_path / "one", "--step", "4", "training.log_every=3")
    config = forked(tmp_path / "one", tmp_path / "two", "name=other")
    assert (config.name, config.training.log_every) == ("other", 3)
    forks = json.loads((tmp_path / "two" / "provenance.json").read_text())["forks"]
    assert [fork["run"] for fork in forks] == [str(trunk), str(tmp_path / "one")]
    go_on(pool, config)
    assert steps_of(tmp_path / "two") == {step: row for step, row in steps_of(trunk).items() if step > 4}
    ours, theirs = (checkpoints.tensors(run / "checkpoints" / f"step-{STEPS:08d}") for run in (tmp_path / "two", trunk))
    assert any(key.startswith("carried.") for key in ours)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


@pytest.mark.parametrize("layout", some([{"data": 2}, {"tensor": 2}], [{"tensor": 2}]), ids=str)
def test_a_fork_on_another_layout_agrees(trunk, pool, tmp_path, layout):
    words = [f"layout.{name}={size}" for name, size in layout.items()]
    go_on(pool, forked(trunk, tmp_path / "fork", "--step", "8", *words))
    ours, theirs = steps_of(tmp_path / "fork"), steps_of(trunk)
    assert list(ours) == list(range(9, STEPS + 1))
    for step, (loss, norm, consumed) in ours.items():
        assert loss == pytest.approx(theirs[step][0], rel=1e-5)
        assert norm == pytest.approx(theirs[step][1], rel=1e-4)
        assert consumed == theirs[step][2]


def test_a_fork_takes_other_settings_of_model_and_optimizer_that_keep_all_shapes(trunk, pool, tmp_path):
    """Parameters in other groups, too, which lie elsewhere in the optimizer's memory."""
    rates = "training.optimizer.lr_overrides={'*.A_log': 1e-3, '*.norm.weight': 2e-3}"
    optimizer = [rates, "training.optimizer.betas=[0.8, 0.9]", "training.optimizer.clip_norm=0"]
    go_on(pool, forked(trunk, tmp_path / "optimizer", "--step", "8", "training.steps=10", *optimizer))
    ours, theirs = steps_of(tmp_path / "optimizer"), steps_of(trunk)
    assert (ours[9][0], ours[9][2]) == (theirs[9][0], theirs[9][2])
    assert ours[9][1] == pytest.approx(theirs[9][1], rel=1e-6), "summed in the order of other groups"
    assert ours[10][0] != theirs[10][0]
    go_on(pool, forked(trunk, tmp_path / "model", "--step", "8", "training.steps=10", "model.norm_eps=1e-2"))
    ours = steps_of(tmp_path / "model")
    assert ours[9][0] == pytest.approx(theirs[9][0], rel=1e-1)
    assert ours[9][0] != theirs[9][0]
    assert ours[9][2] == theirs[9][2]


def test_data_that_is_begun_anew_keeps_weights_moments_and_steps(trunk, pool, tmp_path):
    """In other lanes and another order: all of them stand at their beginning, where States carry nothing."""
    words = ["--step", "6", "--restart-data", "training.lanes=4", "training.seed=5", "training.steps=8"]
    anew, stateless = tmp_path / "anew", tmp_path / "stateless"
    begun = forked(trunk, anew, *words)
    manifests = [manifest(run, 6) for run in (trunk, anew)]
    for key, tensor in manifests[0]["tensors"].items():
        assert manifests[1]["tensors"].get(key) == (None if key.startswith("carried.") else tensor)
    assert main(["checkpoint", "verify", str(anew)]) == 0
    go_on(pool, begun)
    go_on(pool, forked(trunk, stateless, *words, "training.bptt=null"))
    ours, theirs = steps_of(anew), steps_of(stateless)
    assert list(ours) == [7, 8]
    assert ours[7][2] != steps_of(trunk)[7][2]
    assert ours[7][0] == pytest.approx(theirs[7][0], rel=1e-6), "nothing is carried into the first step"
    assert ours[8][0] != pytest.approx(theirs[8][0], rel=1e-6), "and something into the second"
    saved = manifest(anew, 8)
    assert (saved["adam_steps"], saved["tokens"]) == (8, 8 * 128)
    assert set(saved["cursors"]) == {"0", "1", "2", "3"}


def test_a_damaged_checkpoint_is_fallen_back_from_but_not_when_it_is_asked_for(copied, tmp_path, capsys):
    flip(copied / "checkpoints" / f"step-{STEPS:08d}" / "rank-00000.safetensors")
    err = refused(capsys, "fork", copied, "--out", tmp_path / "fork", "--step", STEPS, "training.steps=20")
    assert "step-00000012 is damaged: rank-00000.safetensors does not match its checksum; give another --step" in err
    assert not (tmp_path / "fork").exists()
    forked(copied, tmp_path / "fork", "training.steps=20")
    assert "checkpoint step-00000012 is damaged: rank-00000.safetensors does not match" in capsys.readouterr().out
    assert published(tmp_path / "fork") == [10]
    for step in published(copied):
        (copied / "checkpoints" / f"step-{step:08d}" / "manifest.json").write_text("{}")
    err = refused(capsys, "fork", copied, "--out", tmp_path / "other", "training.steps=20")
    assert "no checkpoint is whole" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fork", "trunk"]


REFUSALS = {
    # words -> what the line must say
    "no such step": (["--step", "5"], ["no checkpoint of step 5", "2, 4, 6, 8, 10, 12"]),
    "nothing left to do": ([], ["training.steps=12", "12 steps done", "set training.steps to more"]),
    "shape": (["--step", "4", "model.d_model=24"], ["model.d_model: 16 -> 24", "has shape", "a fork keeps all shapes"]),
    "fewer layers": (["--step", "4", "model.n_layers=1"], ["model.n_layers: 2 -> 1", "has a tensor master.layers.1"]),
    "vocabulary": (["--step", "4", "model.vocab_size=381"], ["model.vocab_size=381", "has 380 tokens"]),
    "seed": (["--step", "4", "training.seed=3"], ["training.seed: 0 -> 3", "--restart-data"]),
    "batch ramp": (["--step", "4", "training.batch_size_warmup=[{steps: 4, global_batch_tokens: 64}]"],
                   ["training.batch_size_warmup", "--restart-data"]),
    "length warm-up": (["--step", "4", "training.sequence_length_warmup=[{steps: 6, sequence_length: 32}]"],
                       ["training.sequence_length_warmup", "--restart-data"]),
    "batch": (["--step", "4", "training.global_batch_tokens=256"], ["training.global_batch_tokens: 128 -> 256", "--restart-data"]),
    "other weights": (["--step", "4", "training.initial_weights=some.safetensors"], ["training.initial_weights", "leave it out"]),
    "directory": (["--step", "4", "directory=elsewhere"], ["directory=... is what --out says"]),
    "misspelt": (["--step", "4", "training.stepz=3"], ["unknown key training.stepz", "did you mean training.steps?"]),
}  # fmt: skip


@pytest.mark.parametrize(("words", "needles"), REFUSALS.values(), ids=REFUSALS)
def test_forks_that_cannot_be(trunk, tmp_path, capsys, words, needles):
    err = refused(capsys, "fork", trunk, "--out", tmp_path / "fork", *words)
    for needle in needles:
        assert needle in err
    assert [*tmp_path.iterdir()] == []


def test_a_fork_has_a_place_of_its_own(trunk, tmp_path, capsys):
    before = contents(trunk)
    assert "is the run itself" in refused(capsys, "fork", trunk, "--out", trunk)
    assert "is inside the run" in refused(capsys, "fork", trunk, "--out", trunk / "checkpoints" / "fork")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "note").write_text("mine")
    for name in ("full", "full/note"):
        assert "exists already" in refused(capsys, "fork", trunk, "--out", tmp_path / name, "--step", 4)
    assert contents(trunk) == before
    assert contents(tmp_path / "full") == {"note": b"mine"}
    assert "is this a run directory?" in refused(capsys, "fork", tmp_path / "full", "--out", tmp_path / "fork")
    # what a call that was killed left behind is no run, and in nobody's way
    (tmp_path / ".fork.fork" / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / ".fork.fork" / "run" / "config.yaml").write_text("half")
    with exclusive(tmp_path / ".fork.fork" / ".lock"):
        assert main(["fork", str(trunk), "--out", str(tmp_path / "fork"), "--step", "4"]) == 75, "as every folder that is busy"
        assert "is being made by process" in capsys.readouterr().err
    forked(trunk, tmp_path / "fork", "--step", "4")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fork", "full"]
    assert main(["status", str(tmp_path / "fork")]) == 0
    assert f"step 4 of {STEPS} (33.3%)  512 tokens" in capsys.readouterr().out, "before its first start"
    shutil.rmtree(tmp_path / "fork" / "checkpoints")
    with pytest.raises(ConfigError, match=r"began as a fork of .* at step 4 and has no checkpoint any more"):
        check_run(read_config(tmp_path / "fork" / "config.yaml"))


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")], ids=["interrupt", "full disk"])
def test_an_interrupted_fork_leaves_nothing(trunk, tmp_path, monkeypatch, capsys, error):
    def fail(*_):
        raise error

    monkeypatch.setattr(os, "link", fail)
    monkeypatch.setattr(shutil, "copyfile", fail)
    assert main(["fork", str(trunk), "--out", str(tmp_path / "fork"), "--step", "4"]) == (130 if not error.args else 74)
    assert "Traceback" not in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == []


def test_files_are_copied_where_they_cannot_be_linked(trunk, tmp_path, monkeypatch):
    def refuse(source, target):
        raise OSError(18, "Invalid cross-device link", source, None, target)

    monkeypatch.setattr(os, "link", refuse)
    forked(trunk, tmp_path / "fork", "--step", "4")
    ours, theirs = (run / "checkpoints" / "step-00000004" / "rank-00000.safetensors" for run in (tmp_path / "fork", trunk))
    assert ours.stat().st_ino != theirs.stat().st_ino
    assert ours.read_bytes() == theirs.read_bytes()


@pytest.mark.parametrize("kind", ["constant", "wsd", "cosine"])
@pytest.mark.parametrize("decay", [0, 3])
@pytest.mark.parametrize("warmup", [0, 2])
@pytest.mark.parametrize("shape", ["linear", "sqrt"])
def test_the_steps_that_keep_their_learning_rates_are_counted(kind, decay, warmup, shape):
    def rates(steps: int) -> list[float]:
        schedule = {"kind": kind, "decay_steps": decay, "decay_shape": shape, "warmup_steps": warmup, "final_lr": 0.1}
        values = {"sequence_length": 1, "global_batch_tokens": 1, "optimizer": {"lr": 1.0}, "schedule": schedule}
        training = TrainingConfig(steps=steps, **values)
        return [learning_rate(step, training) for step in range(min(8, steps))]

    for steps in (6, 7, 8, 9, 20):
        values = {"sequence_length": 1, "global_batch_tokens": 1, "optimizer": {"lr": 1.0}}
        schedule = {"kind": kind, "decay_steps": decay, "decay_shape": shape, "warmup_steps": warmup, "final_lr": 0.1}
        alike = equal_lr_steps(TrainingConfig(steps=8, schedule=schedule, **values), steps)
        both = list(zip(rates(8), rates(steps)))
        first = next((step for step, (a, b) in enumerate(both) if a != b), len(both))
        assert min(alike, len(both)) == first


def test_documents_that_the_run_left_out_behind_the_checkpoint_are_left_out_of_the_fork(copied, tmp_path):
    log = EventLog(copied, enabled=True)
    log.write("rollback", 8, places=[[0, 0, 0, 1]], stream="s")
    log.write("rollback", 9, places=[[1, 0, 0, 2]], stream="s", documents=["one"])
    log.write("change", 10, settings={})
    out = tmp_path / "fork"
    forked(copied, out, "--step", "8")
    (event,) = read_events(out)
    assert (event["kind"], event["step"], event["places"], event["stream"]) == ("rollback", 9, [[1, 0, 0, 2]], "s")
    assert event["run"] == str(copied)
    forked(out, tmp_path / "again")  # a fork of a fork
    assert [(event["step"], event["run"]) for event in read_events(tmp_path / "again")] == [(9, str(out))]
    forked(copied, tmp_path / "newest", "training.steps=20")
    assert read_events(tmp_path / "newest") == []


def test_steps_may_grow_in_place_until_the_decay_begins(copied, configured, pool):
    until(copied, STEPS - DECAY - 1)  # killed after step 8, and the decay begins with step 10
    config = configured(copied, "training.steps=14")
    go_on(pool, config)
    events = read_events(copied)
    assert [(event["kind"], event["step"], event["settings"]) for event in events] == [
        ("change", 8, {"training.steps": [STEPS, 14]}),
    ]
    assert read_config(copied / "config.yaml").training.steps == 14
    assert read_config(copied / "attempts" / "0001" / "config.yaml").training.steps == STEPS
    rates = {row["step"]: row["lr"] for row in read_metrics(copied / "metrics.jsonl") if row["kind"] == "train"}
    assert rates == {step: pytest.approx(learning_rate(step - 1, config.training)) for step in range(1, 15)}
    assert rates[10] == rates[11] == 1e-2, "as if it had been a run of 14 steps from the beginning"


SAYS = {
    # words, whether --change is given -> what the line must say; None: allowed
    "into the decay": (["training.steps=14"], False,
                       ["12 -> 14", "wsd", "baton fork", "--step N", "N = 9 steps or less", "--change"]),
    "into the decay, on purpose": (["training.steps=14"], True, None),
    "less than is done": (["training.steps=10"], True, ["training.steps=10 is less than the 12 steps", "--step N"]),
    "rate": (["training.optimizer.lr=2e-3"], False, ["optimizer.lr: 0.01 -> 0.002", "--change", "baton fork"]),
    "rate, on purpose": (["training.optimizer.lr=2e-3"], True, None),
    "rates of some": (["training.optimizer.lr_overrides={'*.A_log': 1e-3}"], False,
                      ["--change", "'training.optimizer.lr_overrides={"]),
    "another decay": (["training.schedule.decay_shape=sqrt"], False,
                      ["decay_shape: 'linear' -> 'sqrt'", "--change", "baton fork", "training.schedule.decay_shape=sqrt"]),
    "another decay, on purpose": (["training.schedule.decay_shape=sqrt"], True, None),
    "schedule, on purpose": (["training.schedule.kind=constant", "training.optimizer.betas=[0.8, 0.9]"], True, None),
    "seed": (["training.seed=1"], True, ["training.seed: 0 -> 1", "--restart-data"]),
    "batch": (["training.global_batch_tokens=256", "training.optimizer.lr=1"], True, ["global_batch_tokens", "--restart-data"]),
    "shape": (["model.d_model=24"], True, ["model.d_model: 16 -> 24", "Use another name", "if all shapes stay the same"]),
    "States": (["training.bptt=null"], False, ["baton fork", "training.bptt=null"]),
    "compute_dtype": (["training.compute_dtype=bfloat16"], True, ["baton fork", "training.compute_dtype=bfloat16"]),
}  # fmt: skip


@pytest.mark.parametrize(("words", "change", "needles"), SAYS.values(), ids=SAYS)
def test_a_run_says_which_changes_it_takes_and_where_the_others_go(trunk, configured, words, change, needles):
    old, new = configured(trunk), configured(trunk, *words)
    said = refusal(trunk, old, new, STEPS, change=change)
    if needles is None:
        assert said is None
        return
    assert said is not None
    assert "\n" not in said
    for needle in needles:
        assert needle in said


def test_a_change_is_recorded_by_the_first_start_that_has_steps_to_do(configured, tmp_path):
    """A start of a finished run with another rate does no step with it, and records nothing."""
    folder, rate = tmp_path / "run", "training.optimizer.lr=5e-3"
    first, other, longer = (configured(folder, *words) for words in ([], [rate], [rate, "training.steps=20"]))
    changed = []
    for number, (config, step) in enumerate([(first, 0), (other, STEPS), (longer, STEPS), (longer, STEPS)], start=1):
        with open_attempt(config, change=True) as attempt:
            changed.append(changed_since_last_start(attempt, config))
            time_ledger.append_row(folder, "start", attempt=number, step=step)
    of_rate = {"training.optimizer.lr": (0.01, 0.005)}
    assert changed == [{}, of_rate, of_rate | {"training.steps": (STEPS, 20)}, {}]


def test_a_submission_takes_the_same_changes(trunk, capsys):
    before = contents(trunk)
    words = ["submit", trunk / "config.yaml", "layout.data=2", "training.optimizer.lr=2e-3", "--cluster", "sandbox", "--dry-run"]
    assert "training.optimizer.lr: 0.01 -> 0.002. Add --change" in refused(capsys, *words)
    assert main([*map(str, words), "--change"]) == 0
    assert contents(trunk) == before


def test_the_command_goes_on_in_a_fork_and_records_a_change(trunk, launch, tmp_path, monkeypatch):
    """`baton train` and its ranks: a fork, begun, stopped at its last step, and changed."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as the pool's ranks have: on some processors the bits depend on it
    out = tmp_path / "fork"
    forked(trunk, out, "--step", "10")
    shutil.copytree(trunk / "attempts" / "0001", out / "attempts" / "0001")  # as if it had been started once
    (out / "ledger.jsonl").write_text(json.dumps({"kind": "start", "time": 1.0, "attempt": 1, "step": 10}) + "\n")
    done = launch(out, str(out / "config.yaml"), "training.optimizer.lr=5e-3", "--change", where=tmp_path).end()
    assert (done.status, done.err) == (0, "")
    assert "from here on with other settings: training.optimizer.lr: 0.01 -> 0.005" in done.out
    (event,) = read_events(out)
    assert (event["kind"], event["step"], event["settings"]) == ("change", 10, {"training.optimizer.lr": [0.01, 0.005]})
    assert steps_of(out)[11] == steps_of(trunk)[11]
    assert read_config(out / "config.yaml").training.optimizer.lr == 5e-3
