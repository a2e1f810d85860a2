"""Bad input: exit status 2, one line that says what, where and what to do; nothing is half-written, and no process is started."""

import errno
import fcntl
import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from support.runs import DEADLINE_S

from baton.launcher.cli import main
from baton.launcher.config import RunConfig, load
from baton.launcher.errors import BusyError
from baton.launcher.run_directory import open_attempt
from baton.launcher.validation import OTHER_NAMES, SEVERAL, _all_settings


@pytest.fixture
def train(tmp_path, capsys):
    """A function: `baton train` on a run file with words, in this process; returns its one-line refusal."""

    def refused(run, *words, directory=tmp_path / "run", status=2) -> str:
        before = sorted(tmp_path.rglob("*"))
        assert main(["train", str(run), f"directory={directory}", *words]) == status
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("baton: ")
        assert err.endswith("\n")
        assert err.count("\n") == 1, f"more than one line: {err}"
        assert sorted(tmp_path.rglob("*")) == before, "something was written"
        return err

    return refused


def check(text, *needles):
    for needle in needles:
        assert needle in text, f"{needle!r} is not in {text!r}"


SETTINGS = {
    # words -> what the line must say
    "unknown key": (["flavour=3"], ["unknown key flavour", "known here: name, directory"]),
    "misspelt key of another group": (["stepz=3"], ["unknown key stepz", "did you mean training.steps?"]),
    "another codebase's key": (["training.learning_rate=3"], ["did you mean training.optimizer.lr?"]),
    "a key for which two stand": (["training.batch_size=3"], ["mean training.global_batch_tokens and training.micro_batch_size?"]),
    "a key one group too high": (["training.warmup_steps=3"], ["did you mean training.schedule.warmup_steps?"]),
    "a value for a group": (["training.bptt=truncated"], ["training.bptt='truncated'", "mean training.bptt.mode=truncated?"]),
    "a number for a group": (["training.bptt=5"], ["training.bptt=5: expected a group of settings", "training.bptt.mode=VALUE"]),
    "a number for a list": (["training.sequence_length_warmup=5"], ["training.sequence_length_warmup=5: expected a list"]),
    "a number for a group in a list": (
        ["training.batch_size_warmup=[5]"],
        ["training.batch_size_warmup.0=5: expected a group of settings"],
    ),
    "a key twice in a word": (["layout={data: 2, data: 1}"], ["'layout={data: 2, data: 1}'", "not valid YAML"]),
    "misspelt key": (["trainning.steps=3"], ["unknown key trainning", "did you mean training?"]),
    "misspelt nested key": (["training.global_batch_token=64"], ["did you mean training.global_batch_tokens?"]),
    "misspelt deeper key": (["training.optimizer.weigth_decay=0"], ["did you mean training.optimizer.weight_decay?"]),
    "misspelt key of the mixer": (["model.mixers.mamba.dstate=4"], ["did you mean model.mixers.mamba.d_state?"]),
    "unknown scaling": (
        ["model.pattern=[attention]", "model.mixers={attention: {rope_scaling: {kind: yarm, factor: 2}}}"],
        ["model.mixers.attention.rope_scaling.kind=yarm: no such kind", "did you mean yarn?"],
    ),
    "a key of another scaling": (
        ["model.pattern=[attention]", "model.mixers={attention: {rope_scaling: {kind: linear, factor: 2, beta_fast: 3}}}"],
        ["unknown key model.mixers.attention.rope_scaling.beta_fast", "known here: kind, factor"],
    ),
    "unknown mixer": (["model.pattern=[mmaba]", "model.mixers={}"], ["model.mixers.mmaba.kind=mmaba", "did you mean mamba?"]),
    "a name without a kind": (["model.pattern=[a]", "model.mixers={a: {d_state: 4}}"], ["model.mixers.a.kind", "known: "]),
    "key of another mixer": (
        ["model.pattern=[longhorn]", "model.mixers={longhorn: {dt_min: 0.1}}"],
        ["unknown key model.mixers.longhorn.dt_min"],
    ),
    "settings of a mixer that is not there": (["model.pattern=[longhorn]"], ["mixers.mamba is not in pattern"]),
    "not a pattern": (["model.pattern=['mamba*']"], ["'mamba*' is not NAME, NAME*COUNT, NAME+NAME or NAME|NAME"]),
    "a name twice in a layer": (["model.pattern=[mamba|mamba]"], ["has a name twice"]),
    "wrong type": (["training.steps=ten"], ["training.steps='ten'", "valid integer"]),
    "wrong type of a group": (["training=5"], ["training=5"]),
    "a group where a value belongs": (["training.steps.more=1"], ["'training.steps.more=1'", "steps is not a group of settings"]),
    "not a number": (["training.optimizer.lr=.nan"], ["training.optimizer.lr"]),
    "out of range": (["training.optimizer.betas=[0.9, 1.5]"], ["training.optimizer.betas.1=1.5"]),
    "not one of the choices": (["device=gpu"], ["device='gpu'", "'auto', 'cpu' or 'cuda'"]),
    "a name that is no name": (["name=../up"], ["name='../up'"]),
    "word without =": (["training.steps"], ["'training.steps' is not key=value", "for example training.steps=100"]),
    "word without key": (["=3"], ["'=3' is not key=value"]),
    "word that is no YAML": (["training.steps=[1"], ["'training.steps=[1'", "not valid YAML"]),
    "unknown model": (["model=mamba-140m"], ["no model is called 'mamba-140m'", "did you mean mamba-130m?"]),
    "unlike any model": (["model=gpt"], ["no model is called 'gpt'", "known: bmojo-1.4b, bmojo-130m"]),
    "missing model file": (["model=nowhere.yaml"], ["nowhere.yaml: no such file"]),
    "data does not divide": (["layout.data=3"], ["layout.data=3 does not divide the 4 sequences", "[1, 2, 4]"]),
    "tensor does not divide": (["layout.tensor=3"], ["layout.tensor=3 does not divide", "[1, 2, 4, 8, 16, 32]"]),
    "more stages than layers": (
        ["layout.pipeline=3"],
        ["layout.pipeline=3 is more stages than model.n_layers=2", "set layout.pipeline to 2 or less"],
    ),
    "segments do not divide": (
        ["training.bptt={mode: exact, segment: 24}"],
        ["training.bptt.segment=24 does not divide training.sequence_length=32", "nearest that do: [16, 32]"],
    ),
    "an exact gradient that is cut": (
        ["training.bptt={mode: exact, segment: 8, gradient_segments: 2}"],
        ["training.bptt.gradient_segments=2 with mode=exact", "set it to null, or training.bptt.mode=truncated"],
    ),
    "segments of a gradient do not divide": (
        ["training.bptt={mode: truncated, segment: 8, gradient_segments: 3}"],
        ["training.bptt.gradient_segments=3 does not divide the 4 segments", "no gradient goes from step to step", "[1, 2, 4]"],
    ),
    "a segment shorter than a tail": (
        ["training.bptt={mode: truncated, segment: 2}"],
        ["training.bptt.segment=2 is shorter than the last 3 tokens", "set training.bptt.segment=4"],
    ),
    "ranks do not divide a segment": (
        ["training.bptt={mode: exact, segment: 8}", "layout={context: 3}"],
        ["layout.context=3 does not divide training.bptt.segment=8; those that do: [1, 2, 4, 8]"],
    ),
    "a span of a segment shorter than a tail": (
        ["training.bptt={mode: exact, segment: 8}", "layout={context: 4}"],
        ["leaves 2 of training.bptt.segment=8 tokens to a rank", "training.bptt.segment=16"],
    ),
    "a context shorter than a tail": (
        ["training.bptt={mode: truncated, segment: 2}", "training.sequence_length=2", "training.global_batch_tokens=8"],
        [
            "training.bptt.segment=2 is shorter than the last 3",
            "training.bptt=null: training.sequence_length=2 has no longer segment",
        ],
    ),
    "full attention whose keys would never end": (
        ["training.bptt={mode: truncated, segment: 8}", "model.pattern=[attention]", "model.mixers={attention: {head_dim: 8}}"],
        ["training.bptt.mode=truncated: model.mixers.attention attends", "mode=exact, or model.mixers.attention.window"],
    ),
    "a shorter length that does not divide": (
        ["training.sequence_length_warmup=[{steps: 2, sequence_length: 12}]"],
        [
            "training.sequence_length_warmup.0.sequence_length=12 does not divide training.sequence_length=32",
            "[1, 2, 4, 8, 16, 32]",
        ],
    ),
    "a shorter length whose sequences do not fit": (
        ["training.sequence_length_warmup=[{steps: 2, sequence_length: 8}]", "training.lanes=6"],
        ["training.sequence_length_warmup.0: training.lanes=6 is less than the 16 sequences of a step"],
    ),
    "shorter lengths to the end": (
        ["training.sequence_length_warmup=[{steps: 39, sequence_length: 8}, {steps: 1, sequence_length: 16}]"],
        ["training.sequence_length_warmup takes 40 steps, all of training.steps=40"],
    ),
    "a shorter length that leaves too few tokens to a rank": (
        ["training.sequence_length_warmup=[{steps: 2, sequence_length: 4}]", "layout={context: 2}"],
        ["layout.context=2 leaves 2 of training.sequence_length_warmup.0.sequence_length=4 tokens to a rank"],
    ),
    "no mode": (["training.bptt={segment: 8}"], ["training.bptt.mode is missing"]),
    "ZeRO-2 with stages": (
        ["layout.pipeline=2", "layout.zero=2"],
        ["layout.zero=2 with layout.pipeline=2", "set layout.zero=1, or layout.pipeline=1"],
    ),
    "heads do not divide": (
        ["layout.tensor=4", "model.pattern=[gsa]", "model.mixers={gsa: {head_dim: 8, slots: 4}}"],
        ["layout.tensor=4 does not divide model.mixers.gsa.heads=2", "[1, 2]"],
    ),
    "sequence does not divide": (
        ["layout.context=3"],
        ["layout.context=3 does not divide training.sequence_length=32", "[1, 2, 4"],
    ),
    "a rank's tokens are fewer than a convolution's tail": (
        ["layout.context=16"],
        [
            "layout.context=16 leaves 2 of training.sequence_length=32 tokens to a rank",
            "model.mixers.mamba passes on its last 3",
            "layout.context that leaves enough: [1, 2, 4, 8]; or with 16 ranks training.sequence_length=48 or more",
        ],
    ),
    "a rank's tokens are fewer than a window": (
        ["layout.context=4", "model.pattern=[attention]", "model.mixers={attention: {head_dim: 4, window: 18}}"],
        ["leaves 8 of", "model.mixers.attention passes on its last 17", "[1]; or with 4 ranks training.sequence_length=68 or more"],
    ),
    "a rank's tokens are fewer than B'MOJO's fading tokens": (
        ["layout.context=4", "model.pattern=[bmojo]", "model.mixers={bmojo: {head_dim: 4, window: 5, fading: sliding}}"],
        ["leaves 8 of", "model.mixers.bmojo passes on its last 9", "[1, 2]; or with 4 ranks training.sequence_length=36 or more"],
    ),
    "ZeRO stage": (["layout.zero=3"], ["layout.zero=3", "should be 0, 1 or 2"]),
    "batch is no multiple": (["training.global_batch_tokens=100"], ["not a multiple of training.sequence_length=32", "96 and 128"]),
    "lanes do not divide": (["training.lanes=5"], ["training.lanes=5 is not a multiple of layout.data=2", "6"]),
    "too few lanes": (["training.lanes=2"], ["training.lanes=2", "4 sequences of a step"]),
    "a residual stream less precise than what is added": (
        ["training.compute_dtype=float32", "training.residual_dtype=bfloat16"],
        ["training.residual_dtype=bfloat16 does not go with training.compute_dtype=float32", "set training.residual_dtype=float32"],
    ),
    "schedule longer than the run": (
        ["training.schedule={kind: wsd, warmup_steps: 10, decay_steps: 31}"],
        ["warmup_steps=10 and decay_steps=31 together exceed training.steps=40"],
    ),
    "initial step sizes": (["model.mixers.mamba.dt_min=0.5"], ["model.mixers.mamba", "dt_min"]),
    "missing dataset": (["data.path=/nowhere/shards"], ["no dataset at /nowhere/shards", "prepare one"]),
    "missing tokenizer": (["data.tokenizer=/nowhere/t.model"], ["/nowhere/t.model", "no such file", "baton tokenizer train"]),
    "vocabulary of another size": (["model.vocab_size=512"], ["model.vocab_size=512", "380 tokens", "set model.vocab_size=380"]),
    "vocabulary does not divide": (
        ["model.pad_vocab_to=5", "layout.tensor=8"],
        ["layout.tensor=8 does not divide the padded vocabulary=380", "[1, 2, 4, 5"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("words", "needles"), SETTINGS.values(), ids=SETTINGS)
def test_settings_that_cannot_be(train, inputs, words, needles):
    check(train(inputs.run, *words), *needles)


@pytest.mark.parametrize(
    "key", ["name", "model", "model.d_model", "training", "training.steps", "training.optimizer", "training.optimizer.lr"]
)
def test_a_missing_key_is_named(train, inputs, tmp_path, key):
    values = inputs.settings()
    *groups, leaf = key.split(".")
    at = values
    for group in groups:
        at = at[group]
    del at[leaf]
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    check(train(tmp_path / "run.yaml"), str(tmp_path / "run.yaml"), f"{key} is missing", f"{key}=VALUE")


@pytest.mark.parametrize("key", ["name", "model", "model.n_layers", "training.steps", "training.optimizer.lr"])
def test_a_misspelt_key_is_named_also_where_the_right_one_is_then_missing(train, inputs, tmp_path, key):
    values = inputs.settings()
    *groups, leaf = key.split(".")
    at = values
    for group in groups:
        at = at[group]
    at[f"{leaf}s" if leaf != "steps" else "step"] = at.pop(leaf)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    check(train(tmp_path / "run.yaml"), "unknown key", f"did you mean {key}?", "(and 1 more)")


FILES = {
    "not YAML": ("training: [1, 2", ["not valid YAML"]),
    "not a mapping": ("- name: small", ["expected keys and values"]),
    "not text": (b"\xff\xfe\x00", ["cannot be read"]),
    "a key twice": (
        "name: small\ntraining:\n  steps: 3\n  sequence_length: 8\n  steps: 4\n",
        ["'steps' is there twice (line 3 and line 5)"],
    ),
    "a group twice": ("name: small\ntraining: {steps: 3}\nlayout: {data: 2}\ntraining: {seed: 1}\n", ["(line 2 and line 4)"]),
    "key that is no word": ("1: 2\nname: small", ["1=1", "Keys should be strings"]),
}


@pytest.mark.parametrize(("content", "needles"), FILES.values(), ids=FILES)
def test_a_run_file_that_cannot_be_read(train, tmp_path, content, needles):
    path = tmp_path / "run.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    check(train(path), str(path), *needles)


def test_a_run_file_that_is_not_there(train, tmp_path):
    check(train(tmp_path / "run.yaml"), f"{tmp_path / 'run.yaml'}: no such file")
    check(train(tmp_path), f"{tmp_path}: cannot be read")


def test_a_tokenizer_that_is_none(train, inputs, tmp_path):
    (tmp_path / "t.model").write_text("not a model")
    check(train(inputs.run, f"data.tokenizer={tmp_path / 't.model'}"), str(tmp_path / "t.model"), "not a SentencePiece model")


def test_token_shards_of_another_tokenizer(train, inputs):
    text = train(inputs.run, f"data.path={inputs.tokens}")
    check(text, str(inputs.tokens), str(inputs.tokenizer), "use that tokenizer, or prepare the dataset with this one")


def shard_of(dataset: Path) -> Path:
    return sorted(dataset.glob("train-*.tar"))[3]


def test_a_missing_shard(train, inputs, copy_of):
    dataset = copy_of(inputs.shards)
    shard_of(dataset).unlink()
    check(train(inputs.run, f"data.path={dataset}"), f"{shard_of(inputs.shards).name} is missing", "restore it")


def test_a_truncated_shard(train, inputs, copy_of):
    dataset = copy_of(inputs.shards)
    shard = shard_of(dataset)
    shard.write_bytes(shard.read_bytes()[:-5000])
    check(train(inputs.run, f"data.path={dataset}"), f"{shard} is truncated", "restore it")


def test_a_dataset_without_the_held_out_documents_that_evaluation_needs(train, inputs, copy_of):
    """Found before the first step, not at the first evaluation."""
    dataset = copy_of(inputs.shards)
    manifest = json.loads((dataset / "dataset.json").read_text())
    manifest["shards"] = [shard for shard in manifest["shards"] if shard["split"] == "train"]
    (dataset / "dataset.json").write_text(json.dumps(manifest))
    check(train(inputs.run, f"data.path={dataset}"), "no documents in its split 'validation'", "training.evaluation.every=0")


def test_wandb_that_is_asked_for_and_not_installed_is_refused(train, inputs, monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    line = train(inputs.run, "training.monitoring.wandb={project: p}")
    check(line, "training.monitoring.wandb is set, and the package wandb is not installed", "pip install wandb")


def test_a_directory_that_is_no_run(train, inputs, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("work of years")
    check(train(inputs.run, directory=tmp_path / "mine"), str(tmp_path / "mine"), "is not a run", "use another directory=")


def test_a_directory_that_cannot_be_written(train, inputs, tmp_path):
    (tmp_path / "file").touch()
    for directory in (tmp_path / "file", tmp_path / "file" / "below"):
        check(train(inputs.run, directory=directory), str(directory), "another directory=")


def test_a_run_directory_that_is_being_trained(train, inputs, tmp_path):
    config = load(inputs.run, [f"directory={tmp_path / 'run'}"])
    with open_attempt(config):
        # not bad input: the same command works later
        text = train(inputs.run, status=75)
        check(
            text,
            str(tmp_path / "run"),
            f"is being trained by process {os.getpid()} on {os.uname().nodename} since 2",
            "wait for it",
        )
    with open_attempt(config) as attempt:
        assert attempt.name == "0002"


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
@pytest.mark.parametrize("missing", [("flock",), ("flock", "lockf")])
def test_a_run_directory_is_held_where_the_file_system_has_no_flock(inputs, tmp_path, monkeypatch, missing, number):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    for call in missing:
        monkeypatch.setattr(fcntl, call, refuse)
    config = load(inputs.run, [f"directory={tmp_path / 'run'}"])
    busy = pytest.raises(BusyError, match=f"is being trained by process {os.getpid()} on")
    with open_attempt(config), busy, open_attempt(config):
        pass
    with open_attempt(config) as attempt:
        assert attempt.name == "0002"


def test_a_run_directory_of_another_configuration(train, inputs, tmp_path):
    with open_attempt(load(inputs.run, [f"directory={tmp_path / 'run'}"])):
        pass
    text = train(inputs.run, "training.seed=1", "model.d_model=32", "layout.data=1")
    check(text, "belongs to another configuration", "model.d_model: 16 -> 32; training.seed: 0 -> 1.", "name=", "directory=")
    assert "layout" not in text


def test_a_run_directory_whose_configuration_is_damaged(train, inputs, tmp_path):
    with open_attempt(load(inputs.run, [f"directory={tmp_path / 'run'}"])):
        pass
    (tmp_path / "run" / "config.yaml").write_text("name: [")
    check(train(inputs.run), str(tmp_path / "run" / "config.yaml"), "not a resolved run configuration")


def test_a_start_that_was_cut_short_does_not_block_the_next(inputs, tmp_path):
    """Whatever a kill while the directory is made leaves behind, the same command goes on."""
    config = load(inputs.run, [f"directory={tmp_path / 'run'}"])
    (tmp_path / "run").mkdir()
    with open_attempt(config) as attempt:
        assert attempt.name == "0001"
    (tmp_path / "run" / "config.yaml").rename(tmp_path / "run" / ".config.yaml.new")
    for path in (tmp_path / "run" / "provenance.json", tmp_path / "run" / "attempts" / "0001" / "config.yaml"):
        path.unlink()
    with open_attempt(config) as attempt:
        assert attempt.name == "0002"
    assert (tmp_path / "run" / "provenance.json").exists()


def test_other_commands_on_a_folder_that_is_no_run(tmp_path, capsys):
    (tmp_path / "file").touch()
    for command in ("generate", "plot"):
        for folder in (tmp_path, tmp_path / "file", tmp_path / "nowhere"):
            assert main([command, str(folder)]) == 2
            out, err = capsys.readouterr()
            assert out == ""
            assert err.count("\n") == 1
            check(err, f"baton: {folder}", "run directory")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    "words", [["--temperature", "-1"], ["--temperature", "nan"], ["--top-k", "-3"], ["--tokens", "0"]], ids=" ".join
)
def test_an_impossible_draw_is_refused(tmp_path, capsys, words):
    with pytest.raises(SystemExit, match="2"):
        main(["generate", str(tmp_path), *words])
    check(capsys.readouterr().err, f"argument {words[0]}", words[1])


@pytest.mark.parametrize(
    ("words", "usage", "hint"),
    [
        (["generate", "RUN", "--temprature", "0.5"], "baton generate", "--temprature 0.5 (did you mean --temperature?)"),
        (["generate", "RUN", "more"], "baton generate", "more"),
        (["checkpoint", "prune", "RUN", "--keep-lats=3"], "baton checkpoint prune", "(did you mean --keep-last?)"),
        (["train", "run.yaml", "--steps", "3"], "baton train", "key=value, as training.steps=100)"),
    ],
)
def test_words_that_a_command_does_not_know_are_answered_with_its_own_usage(capsys, words, usage, hint):
    with pytest.raises(SystemExit, match="2"):
        main(words)
    err = capsys.readouterr().err
    assert err.startswith(f"usage: {usage} [-h]")
    assert err.rstrip().endswith(hint)


@pytest.mark.parametrize(
    ("prompt", "needles"),
    [
        (b"caf\xe9".decode("utf-8", "surrogateescape"), ["byte 0xe9 at byte 3"]),
        (b"\xc3\xa9 \xff".decode("utf-8", "surrogateescape"), ["byte 0xff at byte 3"]),
        ("a\ud800", ["the lone surrogate U+D800 at byte 1"]),
    ],
)
def test_a_prompt_that_is_not_utf8_is_refused_by_its_byte(tmp_path, capsys, prompt, needles):
    assert main(["generate", str(tmp_path), "--prompt", prompt]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    check(err, "baton: --prompt: ", "is not UTF-8", *needles)


def test_other_codebases_names_lead_to_settings_that_exist():
    """And none of them is a setting of ours at the place that it leads away from."""
    known = _all_settings(RunConfig)
    assert set(OTHER_NAMES) <= set(known)
    assert {key for keys in SEVERAL.values() for key in keys} <= set(known)
    others = [name for names in OTHER_NAMES.values() for name in names] + list(SEVERAL)
    assert len(others) == len(set(others)), "a name leads to two settings"


HEAVY = {"torch", "numpy", "pydantic", "yaml", "sentencepiece", "webdataset", "pyarrow", "rich", "psutil", "matplotlib"}
HEAVY |= {"deepspeed", "megatron", "tensorboard"}

HELP = """
import argparse, sys
from baton.launcher import cli

def commands(parser, words):
    yield words
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                yield from commands(child, [*words, name])

found = list(commands(cli.parser(), []))
for words in found:
    try:
        cli.main([*words, "--help"])
    except SystemExit as stop:
        assert stop.code == 0, words
print(len(found), *sys.modules, file=sys.stderr)
"""


def test_help_is_light():
    """Every command's help, without importing anything that takes time."""
    done = subprocess.run([sys.executable, "-P", "-c", HELP], capture_output=True, text=True, check=True)
    count, *modules = done.stderr.split()
    assert int(count) >= 10
    assert done.stdout.count("usage: baton") == int(count)
    assert {name.split(".")[0] for name in modules} & HEAVY == set()
    own = {name for name in modules if name.startswith("baton.")}
    assert {name for name in own if not name.startswith("baton.launcher.cli")} == {"baton.launcher", "baton.launcher.bytecode"}


def test_a_layout_of_another_number_of_ranks_than_were_started(inputs, tmp_path):
    """A worker that something else than `baton train` starts, as on a cluster, says so at once and before torch is there."""
    code = "import sys; from baton.launcher import worker; status = worker.main(); print('torch' in sys.modules); sys.exit(status)"

    def started(ranks: int, **layout: int) -> str:
        config = load(inputs.run, [f"directory={tmp_path / 'run'}", *(f"layout.{name}={n}" for name, n in layout.items())])
        path = tmp_path / "config.yaml"
        path.write_text(config.to_yaml())
        environment = {**os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        words = [sys.executable, "-P", "-c", code, path]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False, timeout=DEADLINE_S)
        assert (done.returncode, done.stderr) == (2, "")
        line, torch = done.stdout.splitlines()
        assert torch == "False"
        return line

    assert started(4, tensor=2, pipeline=2, data=2) == (
        "baton: the layout is tensor x pipeline x context x data = 2 x 2 x 1 x 2 = 8 ranks, but 4 were started; start 8, "
        "or set layout.data=1"
    )
    # 3 copies would not divide the 4 sequences of a step, and 5 ranks are no copies of 2
    assert started(6, tensor=2, data=2).endswith("6 were started; start 4, or set a layout whose sizes multiply to 6")
    assert started(5, tensor=2, data=2).endswith("5 were started; start 4, or set a layout whose sizes multiply to 5")
    assert started(1, context=2, data=1).endswith("1 was started; start 2, or set a layout whose sizes multiply to 1")


REFUSE = """
import json, sys
from baton.launcher.cli import main
for words in json.loads(sys.argv[1]):
    assert main(["train", *words]) == 2, words
print(*sys.modules)
"""


def test_refusals_need_no_torch(inputs, tmp_path):
    """On a login node, at once: settings, data, tokenizer and run directory are checked without it."""
    with open_attempt(load(inputs.run, [f"directory={tmp_path / 'run'}"])):
        pass
    bad = ["training.seed=1", "data.path=/nowhere", f"data.path={inputs.tokens}", "layout.tensor=3", "model.vocab_size=9"]
    bad += ["layout.pipeline=3", "layout={zero: 2, pipeline: 2}", "layout.context=16"]
    words = [[str(inputs.run), f"directory={tmp_path / 'run'}", word] for word in bad]
    done = subprocess.run([sys.executable, "-P", "-c", REFUSE, json.dumps(words)], capture_output=True, text=True, check=True)
    assert len(done.stderr.splitlines()) == len(words)
    assert all(line.startswith("baton: ") for line in done.stderr.splitlines())
    assert {name.split(".")[0] for name in done.stdout.split()} & {"torch", "deepspeed", "megatron", "webdataset"} == set()
