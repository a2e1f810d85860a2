"""`baton settings`, and the pages generated from the settings classes and the commands' parsers."""

import argparse
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import yaml

from baton.launcher.cli import main, parser
from baton.launcher.config import RunConfig
from baton.launcher.settings_reference import groups
from baton.models.settings import kinds

ROOT = Path(__file__).resolve().parents[2]


def test_pages_are_current(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    for path, text in import_module("reference").pages().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.relative_to(ROOT)} is not what the classes say: make reference"


def test_every_setting_of_a_resolved_run_is_listed(inputs):
    """The keys of a run's config.yaml, which the classes write, each with a description."""
    listed = {setting.key: setting for group in groups() for setting in group.settings}
    named = {group.key for group in groups()}
    missing = []

    def walk(values, model, prefix):
        for key, value in values.items():
            path = f"{prefix}{key}"
            if isinstance(value, dict) and path in named:
                walk(value, model, f"{path}.")
            elif path not in listed:
                missing.append(path)

    values = RunConfig.model_validate(inputs.settings()).model_dump(mode="json")
    walk(values, RunConfig, "")
    assert missing == []
    assert [key for key, setting in listed.items() if not setting.description and not key.endswith((".kind", "data"))] == []


def test_every_kind_of_mixer_has_its_group_and_its_defaults_are_the_classes(capsys):
    for kind, cls in kinds().items():
        assert main(["settings", kind]) == 0
        out = capsys.readouterr().out
        for name, field in cls.model_fields.items():
            (line,) = [line for line in out.splitlines() if line.startswith(f"model.mixers.NAME.{name}: ")]
            default = line.rpartition("; ")[2]
            value = None if field.is_required() else field.get_default(call_default_factory=True)
            if field.is_required():
                assert default == "required"
            elif isinstance(value, int | float | str):
                assert yaml.safe_load(default.removeprefix("default ")) == pytest.approx(value)


@pytest.mark.parametrize(
    ("word", "keys"),
    [
        ("training.optimizer.lr", ["training.optimizer.lr"]),
        ("model.mixers.mamba.d_state", ["model.mixers.NAME.d_state"]),
        ("lattice.sparsity", ["model.mixers.NAME.sparsity"]),
        ("layout.tensor", ["layout.tensor"]),
    ],
)
def test_one_setting(capsys, word, keys):
    assert main(["settings", word]) == 0
    found = [line.partition(":")[0] for line in capsys.readouterr().out.splitlines() if line[:1] not in " #"]
    assert [key for key in found if key] == keys


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("training.optimiser", "training.optimizer"),
        ("learning_rate", "training.optimizer.lr"),
        ("training.batch_size", "training.global_batch_tokens and training.micro_batch_size"),
        ("mamba4", "mamba"),
    ],
)
def test_an_unknown_key_is_one_line_with_the_one_that_was_meant(capsys, word, meant):
    assert main(["settings", word]) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"baton: no setting is called {word}; did you mean {meant}?\n")


def test_settings_need_no_torch():
    code = "import sys; from baton.launcher.cli import main; main(['settings']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_every_command_is_on_the_page():
    text = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    (commands,) = [action for action in parser()._actions if isinstance(action, argparse._SubParsersAction)]
    for name in commands.choices:
        assert f"## baton {name}" in text
