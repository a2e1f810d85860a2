"""versions.py [oldest] [newest] [--keep] - run the core of the quick tests on the oldest and the newest versions of what is needed,
and write docs/versions.md. Which they are, pyproject.toml says.

Each set is installed into an empty environment .venvs/NAME, from the wheel of this checkout, which is built from its source
distribution. "oldest" is the lower bound of every direct dependency on the oldest Python that is found here; "newest" is what pip
chooses by itself on the newest one. Before any test dependency is installed, the installed package runs `baton doctor` and trains
for ten steps on two ranks. Needs about 6 GB of disk and of downloads for each set, as torch comes with CUDA's libraries.

--keep: use the environments as they are, with the wheel installed anew and the other packages as they were.
BATON_PYTHONS="/path/python3.11 /path/python3.13": where to look for interpreters, before PATH and pyenv.
"""

import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "versions.md"
BUILT = ROOT / "build" / "versions"
SETS = ("oldest", "newest")

CORE = (
    "tests/test_architecture.py",
    "tests/kernels/test_law.py",
    "tests/kernels/test_interpreter.py",
    "tests/kernels/test_bounds.py",
    "tests/kernels/test_triton_gla.py",
    "tests/kernels/test_compiled.py",
    "tests/parallel/test_zero.py",
    "tests/training/test_grid.py",
    "tests/training/test_checkpoint.py",
    "tests/launcher/test_startup.py",
    "tests/launcher/test_run.py",
)
"""The tests that are run on each set: imports and packaging, kernels in PyTorch, in Triton's interpreter and compiled for GPUs,
DeepSpeed against plain PyTorch, the equality grid, checkpoints, what a process imports, and runs that are killed and resumed."""

SHOWN = ("torch", "triton", "megatron-core", "deepspeed", "numpy", "pydantic", "pyarrow", "safetensors")
"""Packages whose versions docs/versions.md gives."""

RUN = """\
name: installed
device: cpu
model: {d_model: 16, n_layers: 2, pattern: [mamba], mixers: {mamba: {d_state: 4}}}
data: {kind: mqar, length: 16, pairs: 2}
layout: {data: 2, zero: 1}
training: {steps: 10, sequence_length: 32, global_batch_tokens: 256, micro_batch_size: 2, compute_dtype: float32,
  optimizer: {lr: 1.0e-2},
  schedule: {kind: constant}}
"""


def say(text: str) -> None:
    print(f"=== {text}", flush=True)


def call(*command: str | Path, **keywords: object) -> None:
    """Run a command, and end the program with its output's end if it fails."""
    done = subprocess.run(
        [str(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, **keywords
    )  # fmt: skip
    if done.returncode:
        sys.exit("\n".join(done.stdout.splitlines()[-25:]) + f"\nversions: {' '.join(map(str, command))}: status {done.returncode}")


def pythons() -> dict[tuple[int, int], str]:
    """Interpreters that pyproject.toml admits, by their version."""
    names = [f"python3.{minor}" for minor in range(11, 20)]
    candidates = [*os.environ.get("BATON_PYTHONS", "").split(), *filter(None, map(shutil.which, names))]
    candidates += [str(path) for name in names for path in sorted(Path.home().glob(f".pyenv/versions/*/bin/{name}"))]
    found: dict[tuple[int, int], str] = {}
    for candidate in candidates:
        # a shim may be on PATH for a version that is not chosen
        code = "import sys, venv, ensurepip; print(*sys.version_info[:2])"
        done = subprocess.run([candidate, "-c", code], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            major, minor = map(int, done.stdout.split())
            found.setdefault((major, minor), candidate)
    return {version: found[version] for version in sorted(found) if version >= (3, 11)}


def lower_bounds() -> list[str]:
    """Of every direct dependency, the oldest version that pyproject.toml admits, as a line of a constraints file."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = []
    for text in [*project["dependencies"], *project["optional-dependencies"]["test"]]:
        requirement = Requirement(text)
        bound = next(part.version for part in requirement.specifier if part.operator in ("==", ">="))
        lines.append(f"{requirement.name}=={bound}")
    return lines


def build() -> Path:
    """The wheel of this checkout, built from its source distribution in build/versions."""
    shutil.rmtree(BUILT, ignore_errors=True)
    BUILT.mkdir(parents=True)
    code = f"import setuptools.build_meta as backend; backend.build_sdist({str(BUILT)!r})"
    call(sys.executable, "-P", "-c", code, cwd=ROOT)
    (source,) = BUILT.glob("*.tar.gz")
    call(sys.executable, "-m", "pip", "wheel", "--disable-pip-version-check", "--no-deps", "-w", BUILT, source)
    (wheel,) = BUILT.glob("*.whl")
    return wheel


def install(name: str, wheel: Path, python: str, keep: bool) -> Path:
    """An environment that has the wheel and what it depends on, and nothing else. Returns its folder."""
    folder = ROOT / ".venvs" / name
    if not (keep and folder.exists()):
        shutil.rmtree(folder, ignore_errors=True)
        call(python, "-m", "venv", folder)
    elif shutil.which("baton", path=folder / "bin"):
        call(folder / "bin" / "python", "-m", "pip", "uninstall", "--yes", "baton-lm")
    pip_install(name, folder, str(wheel))
    return folder


def pip_install(name: str, folder: Path, *wanted: str) -> None:
    options = ["--disable-pip-version-check"]
    if name == "oldest":
        constraints = BUILT / "oldest.txt"
        constraints.write_text("\n".join(lower_bounds()) + "\n", encoding="utf-8")
        options += ["--constraint", str(constraints)]
    call(folder / "bin" / "python", "-m", "pip", "install", *options, *wanted)


def try_installed(folder: Path) -> None:
    """`baton doctor` and ten steps of training on two ranks, away from the checkout."""
    environment = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    for variable in ("PYTHONPATH", "VIRTUAL_ENV", "TRITON_INTERPRET"):
        environment.pop(variable, None)
    with tempfile.TemporaryDirectory() as elsewhere:
        call(folder / "bin" / "baton", "doctor", cwd=elsewhere, env=environment)
        (Path(elsewhere) / "run.yaml").write_text(RUN, encoding="utf-8")
        call(folder / "bin" / "baton", "train", "run.yaml", cwd=elsewhere, env=environment)
        rows = (Path(elsewhere) / "runs" / "installed" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        steps = [row["step"] for row in map(json.loads, rows) if "grad_norm" in row]
        if steps != list(range(1, 11)):
            sys.exit(f"versions: baton train in {folder} recorded the steps {steps}, not 1 to 10")


def test(folder: Path) -> dict[str, int]:
    """Outcomes of the core's tests in an environment: passed, failed, skipped."""
    report = BUILT / f"{folder.name}.xml"
    report.unlink(missing_ok=True)
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    subprocess.run(
        [folder / "bin" / "python", "-P", "-m", "pytest", "-q", f"--junitxml={report}", *CORE],
        cwd=ROOT,
        check=False,
        env=environment,
    )
    if not report.exists():
        sys.exit(f"versions: pytest in {folder} ended without a report")
    counts = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    for suite in ElementTree.parse(report).getroot().iter("testsuite"):
        for key in counts:
            counts[key] += int(suite.attrib[key])
    failed = counts["failures"] + counts["errors"]
    return {"passed": counts["tests"] - failed - counts["skipped"], "failed": failed, "skipped": counts["skipped"]}


def row(name: str, folder: Path, counts: dict[str, int]) -> str:
    """A line of the table."""
    code = (
        "import sys, platform; from importlib.metadata import version;"
        f"print(platform.python_version(), *map(version, {SHOWN!r}))"
    )  # fmt: skip
    done = subprocess.run([folder / "bin" / "python", "-c", code], capture_output=True, text=True, check=True)
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False)
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    columns = [name, *done.stdout.split(), *(str(counts[key]) for key in counts), today, commit.stdout.strip() or "?"]
    return "| " + " | ".join(columns) + " |"


def write(rows: dict[str, str]) -> None:
    """docs/versions.md with these rows in place of those of the same sets."""
    before = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    kept = {name: line for line in before.splitlines() for name in SETS if re.match(rf"\| {name} \|", line)}
    heads = ["set", "Python", *SHOWN, "passed", "failed", "skipped", "date", "commit"]
    table = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
    table += [line for name, line in (kept | rows).items()]
    files = "\n".join(f"- `{name}`" for name in CORE)
    PAGE.write_text(TEXT.format(table="\n".join(table), files=files), encoding="utf-8")


TEXT = """\
# Versions

pyproject.toml admits ranges of versions. `make test-versions` installs the oldest and the newest set of them, each into an
environment of its own in `.venvs`, and writes this page. "oldest" has the lower bound of every direct dependency; "newest" has what
pip chooses by itself.

{table}

In each environment, in this order:

1. The wheel, which is built from the source distribution, is installed with plain `pip install`; no other package is there.
2. `baton doctor` compares every recurrence with its definition, and `baton train` trains ten steps on two ranks.
3. The test dependencies are installed, and these tests run against the installed package:

{files}

Skipped tests need a GPU. The whole suite (`make test`) runs with the set that `constraints.txt` pins.

## What is excluded, and why

- megatron-core 0.17, 0.18 and 0.19.0 have not been tried. Releases after 0.16 need Python 3.12.
- The scan that sums over channels needs Triton before 3.7; with a newer Triton another form of the scan is taken.
- With Triton 3.8 threads of two kernels spill registers (longhorn's backward pass 24 bytes, eidetic attention's forward pass 8):
  they may be slower there than they need be, and `tests/kernels/test_compiled.py` fails. With the pinned Triton none does.
"""


def main(arguments: Sequence[str]) -> int:
    chosen = [name for name in SETS if name in arguments] or list(SETS)
    unknown = set(arguments) - {*SETS, "--keep"}
    if unknown:
        print(f"versions: {' '.join(sorted(unknown))}: not known; {' '.join(SETS)} and --keep are", file=sys.stderr)
        return 2
    available = pythons()
    if not available:
        print("versions: no Python 3.11 or newer with venv and ensurepip found; name some in BATON_PYTHONS", file=sys.stderr)
        return 2
    say("building a source distribution, and a wheel from it")
    wheel = build()
    rows, failed = {}, 0
    for name in chosen:
        python = available[min(available) if name == "oldest" else max(available)]
        say(f"{name}: installing {wheel.name} for {python}")
        folder = install(name, wheel, python, "--keep" in arguments)
        say(f"{name}: baton doctor, and ten steps of training")
        try_installed(folder)
        pip_install(name, folder, f"{wheel}[test]")
        say(f"{name}: tests")
        counts = test(folder)
        rows[name] = row(name, folder, counts)
        failed += counts["failed"]
    write(rows)
    print("\n".join(rows.values()))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
