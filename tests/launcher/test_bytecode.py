"""Processes keep Python's bytecode in a separate folder if PyTorch is installed without bytecode."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import subprocess, sys
from baton.launcher import bytecode
bytecode.keep()
import torch
print(torch.__cached__)
subprocess.run([sys.executable, "-P", "-c", "import torch.nn; print(torch.nn.__cached__)"], check=True)
"""


@pytest.fixture
def start(tmp_path):
    """Start a process that imports a package `torch` without bytecode, and return where it and its child keep it."""
    packages = tmp_path / "packages"
    (packages / "torch").mkdir(parents=True)
    for name in ("__init__", "nn"):
        (packages / "torch" / f"{name}.py").touch()
    # where nothing else makes Python keep bytecode or not
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment |= {"PYTHONPATH": str(packages), "PYTHONDONTWRITEBYTECODE": "1", "XDG_CACHE_HOME": str(tmp_path / "cache")}

    def start(**variables):
        done = subprocess.run([sys.executable, "-u", "-P", "-c", CODE], env=environment | variables, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        return [Path(line) for line in done.stdout.splitlines()]

    return start


def test_a_process_and_its_children_keep_bytecode(start, tmp_path):
    kept = start()
    assert all(path.is_file() and path.is_relative_to(tmp_path / "cache" / "baton") for path in kept)
    assert kept == start()
    assert not list((tmp_path / "packages").rglob("__pycache__")), "nothing is written beside the sources"


def test_other_versions_have_another_folder(start, tmp_path):
    """Python takes bytecode for that of a file with the same path, time and size, which two images can have."""
    before = start()
    (tmp_path / "packages" / "torch-2.11.0.dist-info").mkdir()
    assert not set(before) & set(start())


def test_bytecode_that_is_there_is_used(start, tmp_path):
    own = start(PYTHONDONTWRITEBYTECODE="", PYTHONPYCACHEPREFIX=str(tmp_path / "own"))
    assert all(path.is_relative_to(tmp_path / "own") for path in own), "whoever sets a folder has set it"
    folder = tmp_path / "packages" / "torch" / "__pycache__"
    folder.mkdir()
    (folder / f"__init__.{sys.implementation.cache_tag}.pyc").touch()
    assert all(path.parent == folder for path in start())


def test_a_folder_that_cannot_be_written_stops_nothing(start, tmp_path):
    (tmp_path / "cache").touch()
    assert not any(path.exists() for path in start())
