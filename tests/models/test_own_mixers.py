"""Mixers outside the repository, from `imports` or an entry point: trained, planned and checked like Baton's.

The mixer is the one of docs/add-a-recurrence.md, moved into a package of its own.
"""

import json

import pytest
import torch
import yaml
from support.operators import Counted
from support.own_mixer import IMPORTS, PAGE, on_the_path, write_package
from support.runs import Launch

from baton.data_pipeline.prepare import prepare
from baton.data_pipeline.tokenizer_training import train_tokenizer
from baton.launcher.cli import main
from baton.launcher.config import RunConfig, load
from baton.launcher.errors import ConfigError
from baton.launcher.inputs import with_known_vocabulary
from baton.launcher.planner.memory import Arithmetic
from baton.launcher.run_directory import read_config
from baton.models import settings as kinds_of
from baton.models.library import mixer
from baton.training import loop
from baton.training.build import build_model
from baton.training.monitoring.metrics import read_metrics
from baton.training.run import RunSettings

RUN = {
    "name": "own",
    "device": "cpu",
    "imports": IMPORTS,
    "model": {"d_model": 16, "n_layers": 2, "pattern": ["leaky"], "pad_vocab_to": 8},
    "data": {"kind": "mqar", "length": 16, "pairs": 2, "vocab_size": 36},
    "training": {
        "steps": 3,
        "sequence_length": 32,
        "global_batch_tokens": 128,
        "micro_batch_size": 2,
        "optimizer": {"lr": 1e-2},
        "evaluation": {"every": 0},
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Has the package leaky_package; to be put on the path."""
    found = tmp_path_factory.mktemp("own")
    write_package(found)
    return found


@pytest.fixture
def package(folder, monkeypatch):
    """The package, importable in this process and in those that it starts; forgotten afterwards."""
    with on_the_path(folder, monkeypatch) as found:
        yield found


def run_file(where, **changes):
    path = where / "run.yaml"
    path.write_text(yaml.safe_dump(RUN | changes))
    return path


def losses(folder):
    return [row["loss"] for row in read_metrics(folder / "metrics.jsonl") if row["kind"] == "train"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Settings of data: documents of text, with a tokenizer."""
    found = tmp_path_factory.mktemp("text")
    pieces = PAGE.read_text(encoding="utf-8").split("\n\n")
    (found / "page.jsonl").write_text("".join(json.dumps({"text": piece}) + "\n" for piece in pieces))
    prepare([found / "page.jsonl"], found / "shards", validation_fraction=0.1, workers=1, progress=lambda *_: None)
    train_tokenizer(iter(pieces), found / "tokenizer.model", 400)
    return {"path": str(found / "shards"), "tokenizer": str(found / "tokenizer.model")}


def test_a_run_on_eight_ranks_is_that_on_one_and_writes_text(package, text, single_mesh, tmp_path, monkeypatch, capfd):
    """Over tensor, pipeline and context ranks; and where the package is no more, the run is not gone on with."""
    path = run_file(tmp_path, data=text)
    ended = Launch(tmp_path / "many", str(path), "layout={tensor: 2, pipeline: 2, context: 2}", where=tmp_path, forked=True).end()
    assert ended.status == 0, ended.err
    config = with_known_vocabulary(load(path))
    (tmp_path / "one").mkdir()
    loop.train(RunSettings(tmp_path / "one", config.model, config.data, config.training, config.to_yaml()), single_mesh)
    assert losses(tmp_path / "many") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    assert len(losses(tmp_path / "many")) == 3
    written = read_config(tmp_path / "many" / "config.yaml")
    assert (written.imports, written.model.mixers["leaky"].expand) == (("leaky_package.leaky",), 2)
    assert RunConfig.model_validate(yaml.safe_load(written.to_yaml())) == written
    capfd.readouterr()
    assert main(["generate", str(tmp_path / "many"), "--prompt", "A recurrence", "--tokens", "8", "--temperature", "0"]) == 0
    out, _ = capfd.readouterr()
    assert out.startswith("A recurrence")
    assert len(out.strip()) > len("A recurrence")
    monkeypatch.delenv("PYTHONPATH")
    ended = Launch(tmp_path / "many", str(path), where=tmp_path, forked=True).end()
    assert (ended.status, ended.err.count("\n")) == (2, 1)
    assert "leaky_package.leaky cannot be imported" in ended.err


@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
def test_its_costs_are_what_autograd_saves(package, tmp_path, compute_dtype):
    """Of two layers, on a CPU, beside what a model without layers saves."""
    counted, saved = [], []
    for layers in (1, 3):
        path = run_file(tmp_path, model=RUN["model"] | {"n_layers": layers, "vocab_size": 36})
        config = load(
            path, [f"training.compute_dtype={compute_dtype}", "training.sequence_length=128", "training.micro_batch_size=1"]
        )
        counted.append(Arithmetic(config).activations(full_recompute=False))
        model, found = build_model(config.model, config.training, torch.device("cpu")), {}
        known = {p.untyped_storage().data_ptr() for p in model.parameters()}
        tokens, pos = torch.zeros(1, 128, dtype=torch.int64), torch.arange(128, dtype=torch.int32)[None]

        def pack(x, found=found, known=known):
            if x.untyped_storage().data_ptr() not in known:
                found[x.untyped_storage().data_ptr()] = x.untyped_storage()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            kept = model(tokens, pos)
        casts = sum(2 * p.numel() for p in model.parameters() if p.dim() == 2) if compute_dtype == "bfloat16" else 0
        saved.append(sum(storage.nbytes() for storage in found.values()) - casts)
        del kept
    assert counted[1] - counted[0] == pytest.approx(saved[1] - saved[0], rel=0.05)


def test_operators_without_a_kernel_are_those_counted(package):
    kinds_of.import_kinds(["leaky_package.leaky"])
    from leaky_package.recurrence import LeakyAverage

    def counted(length):
        (v, log_decay), state = LeakyAverage().example(torch.Generator().manual_seed(0), 1, length, torch.float32, wide=True)
        inputs = v.requires_grad_(), log_decay.requires_grad_()
        with Counted() as ahead:
            y, _ = LeakyAverage().run(inputs, torch.arange(length, dtype=torch.int32)[None], {"h": state["h"].requires_grad_()})
        with Counted() as back:
            y.sum().backward()
        return ahead.launches, back.launches, ahead.moved / v.shape[2], back.moved / v.shape[2]

    each = [(long - short) / 64 for short, long in zip(counted(64), counted(128), strict=True)]
    eager = kinds_of.settings_class("leaky")(expand=1).activation_costs(1).recurrences[0].eager
    assert (*eager.launches, *eager.moved) == pytest.approx(each, rel=0.15)


def test_a_plan_counts_it_and_pipeline_stages_are_cut_by_it(package, tmp_path, capsys):
    path = run_file(tmp_path, device="auto")
    assert main(["plan", str(path), "layout.pipeline=2", "--cluster", "h100"]) == 0
    out = capsys.readouterr().out
    assert "slow: leaky (2 layers) has no kernel for a GPU: it has a form in PyTorch alone" in out
    assert "4,848 parameters" in out


def test_it_is_a_layer_of_its_own(package):
    kinds_of.import_kinds(["leaky_package.leaky"])
    layer = mixer("leaky", d_model=8, expand=1)
    y, state = layer(torch.randn(1, 5, 8), torch.arange(5, dtype=torch.int32)[None], None)
    assert (y.shape, list(state)) == ((1, 5, 8), ["h"])


def test_an_installed_package_names_it_by_an_entry_point(package, tmp_path, monkeypatch):
    site = tmp_path / "site"
    (site / "leaky-1.0.dist-info").mkdir(parents=True)
    (site / "leaky-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: leaky\nVersion: 1.0\n")
    (site / "leaky-1.0.dist-info" / "entry_points.txt").write_text(
        "[baton.mixers]\nleaky = leaky_package.leaky\nother = leaky_package.leaky\n"
    )
    monkeypatch.syspath_prepend(str(site))
    config = load(run_file(tmp_path, imports=[]))
    assert type(config.model.mixers["leaky"]).__module__ == "leaky_package.leaky"
    with pytest.raises(ConfigError, match=r"the entry point baton\.mixers: other = leaky_package\.leaky defines no MixerConfig"):
        load(run_file(tmp_path, imports=[], model=RUN["model"] | {"pattern": ["other"]}))


CLASH = '''
from typing import Literal
from baton.models.settings import MixerConfig
class Mine(MixerConfig):
    """A mixer."""
    kind: Literal["mamba"] = "mamba"
'''


@pytest.mark.parametrize(
    ("changes", "needle"),
    [
        ({"imports": ["no_such_package.leaky"]}, "no_such_package.leaky cannot be imported (ModuleNotFoundError: No module named"),
        ({"imports": ["leaky_package.broken"]}, "leaky_package.broken cannot be imported (ZeroDivisionError: division by zero)"),
        (
            {"imports": ["leaky_package.clash"]},
            "leaky_package.clash defines the kind 'mamba', which baton.models.settings",
        ),
        ({"imports": []}, "model.mixers.leaky.kind=leaky: no such kind"),
        (
            {"model": RUN["model"] | {"mixers": {"leaky": {"expnd": 3}}}},
            "model.mixers.leaky: unknown key expnd; known: kind, expand",
        ),
        ({"model": RUN["model"] | {"mixers": {"leaky": {"expand": 0}}}}, "model.mixers.leaky: expand=0: Input should be greater"),
    ],
    ids=["absent", "broken", "clash", "not imported", "unknown key", "bad value"],
)
def test_refusals_are_one_line(package, tmp_path, capsys, changes, needle):
    (package / "leaky_package" / "clash.py").write_text(CLASH)
    (package / "leaky_package" / "broken.py").write_text("1 / 0\n")
    path = run_file(tmp_path, **changes)
    assert main(["train", str(path), f"directory={tmp_path / 'run'}"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert needle in err
    assert not (tmp_path / "run").exists()
    assert kinds_of.settings_class("mamba").__module__ == "baton.models.settings.mamba"


def test_a_module_without_the_mixer_is_refused(package):
    (package / "leaky_package" / "alone.py").write_text(CLASH.replace("mamba", "alone"))
    kinds_of.import_kinds(["leaky_package.alone"])
    with pytest.raises(ValueError, match=r"leaky_package\.alone defines no Mixer with settings=Mine"):
        mixer("alone", d_model=8)
