"""Executes the examples in README.md and docs/. Those that open a run: tests/launcher/test_load.py."""

import re
import shlex
from importlib.resources import files

import pytest
import yaml
from support.snippets import PAGES, blocks, needs_a_run


@pytest.mark.parametrize(
    "code", [block for block in blocks("python") if "add-a-recurrence" not in block.id and not needs_a_run(block.values[0])]
)
def test_python_examples_run(code):
    """Those of add-a-recurrence.md are files that tests/test_add_a_recurrence.py puts together."""
    exec(compile(code, "example", "exec"), {})


@pytest.mark.parametrize("text", list(blocks("yaml")))
def test_yaml_examples_are_settings_that_exist(text, tmp_path):
    """A whole run file loads; a part of a run's or a cluster's file has keys that these have."""
    from baton.launcher.cluster import Cluster
    from baton.launcher.config import RunConfig, load

    values = yaml.safe_load(text)
    assert isinstance(values, dict)
    if {"name", "model", "data", "training"} <= values.keys():
        (tmp_path / "run.yaml").write_text(text, encoding="utf-8")
        assert load(tmp_path / "run.yaml").name == values["name"]
    unknown = values.keys() - RunConfig.model_fields.keys() - Cluster.model_fields.keys()
    assert unknown == set(), f"no such settings: {sorted(unknown)}"


def test_commands_in_examples_exist(capsys):
    from baton.launcher.cli import main

    lines = [line for block in blocks("sh") for line in block.values[0].splitlines() if line.startswith("baton ")]
    commands = {shlex.split(line, comments=True)[1] for line in lines}
    assert len(commands) > 5
    for command in sorted(commands):
        with pytest.raises(SystemExit) as ended:
            main([command, "--help"])
        assert ended.value.code == 0, command


def test_models_and_run_files_in_examples_exist():
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    shipped = files("baton.configs")
    for kind, name in set(re.findall(r"configs/(models|runs)/([\w./-]+)\.yaml", text)):
        assert (shipped / kind / f"{name}.yaml").is_file(), f"configs/{kind}/{name}.yaml"
