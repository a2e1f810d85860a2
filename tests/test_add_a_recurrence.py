"""The tutorial docs/add-a-recurrence.md works: its files, copied to the places that it names, give a recurrence with split
invariance."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "add-a-recurrence.md"
BLOCK = re.compile(r"```python\n# (\S+\.py)\n(.*?)```", re.DOTALL)


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The packages and tests of this repository with the page's files added, imported as baton."""
    folder = tmp_path_factory.mktemp("reader")
    packages = folder / "packages" / "baton"
    for name in ("kernels", "models", "parallel", "configs", "data_pipeline", "training", "launcher"):
        shutil.copytree(ROOT / name, packages / name, ignore=shutil.ignore_patterns("__pycache__"))
    (packages / "__init__.py").touch()
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    files = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    assert {str(Path(name).parent) for name, _ in files} == {"kernels/leaky_average", "models/mixers"}
    assert sum(name.startswith("models/mixers") for name, _ in files) == 1
    for name, text in files:
        path = packages / name
        assert not path.exists(), f"{name} is no new file"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


def run(copy, *arguments):
    environment = {**os.environ, "PYTHONPATH": str(copy / "packages"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)


FILES = [
    "tests/kernels/test_law.py",
    "tests/models/test_mixers.py",
    "tests/training/test_equivalence.py",
    "tests/parallel/test_context_parallel.py",
]


def test_the_reader_gets_the_laws_tests(copy):
    """Of the recurrence, of the mixer (splitting, decoding), and over sequence ranks."""
    assert passed(copy, "-k", "leaky") >= 15


@pytest.mark.long
def test_the_reader_gets_the_long_forms(copy):
    """Those on tensor- and data-parallel layouts among them; but for the one that takes a minute."""
    assert passed(copy, "-k", "leaky and not many_examples", "-m", "not gpu") >= 30


def passed(copy, *words):
    """How many of the tests in FILES pass; none fails."""
    done = run(copy, *FILES, *words)
    assert done.returncode == 0, done.stdout[-4000:]
    return int(re.search(r"(\d+) passed", done.stdout)[1])


@pytest.mark.long
def test_a_wrong_recurrence_would_be_seen(copy):
    """One sign in the chunked form, and the same tests fail."""
    path = copy / "packages" / "baton" / "kernels" / "leaky_average" / "chunked.py"
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("sees_state_BL = (distance_LL >= 0) &", "sees_state_BL = (distance_LL > 0) &"), encoding="utf-8")
    assert path.read_text(encoding="utf-8") != text
    done = run(copy, "tests/kernels/test_law.py", "-k", "leaky and every_point", "-x")
    path.write_text(text, encoding="utf-8")
    assert done.returncode == 1
    assert "1 failed" in done.stdout


def test_the_pages_code_is_in_the_houses_style(copy):
    paths = [str(path) for path in (copy / "packages/baton/kernels/leaky_average").iterdir() if path.suffix == ".py"]
    paths.append(str(copy / "packages/baton/models/mixers/leaky.py"))
    ruff = [sys.executable, "-m", "ruff", "check", "--config", str(ROOT / "pyproject.toml")]
    done = subprocess.run([*ruff, *paths], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
