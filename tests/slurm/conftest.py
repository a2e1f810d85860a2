"""Fixtures: a real SLURM with several nodes on this machine, and a small run on it. Tests poll with a deadline and cancel their
jobs."""

import os
import shutil
import subprocess
import textwrap
from pathlib import Path

import pytest
import yaml
from support.consumed import due, write_corpus
from support.jobs import RUN, SHORT_STEPS, STEPS, Expected, Job, begin_undisturbed, sandbox

from baton.launcher.cluster import load_cluster
from baton.launcher.config import load


def _why_not() -> str | None:
    """Why no SLURM can be started here; None: it can."""
    if os.geteuid() != 0:
        return "a SLURM of several nodes on one machine needs root"
    made = subprocess.run(["unshare", "--uts", "--mount", "true"], capture_output=True, text=True)
    if made.returncode:
        return f"a SLURM of several nodes on one machine needs CAP_SYS_ADMIN ({made.stderr.strip()})"
    if shutil.which("slurmctld") is None and shutil.which("apt-get") is None:
        return "there is no SLURM here, and no apt-get to install Debian's with"
    return None


@pytest.fixture(scope="session")
def slurm():
    """Four nodes of two CPUs, n1 to n4; their environment is this process's until the session ends."""
    if (why := _why_not()) is not None:
        if os.environ.get("CI"):
            pytest.fail(f"{why}; in CI these tests always run")
        pytest.skip(why)
    made = sandbox("up", "4", "2")
    assert made.returncode == 0, made.stderr
    names = dict(line.removeprefix("export ").split("=", 1) for line in made.stdout.splitlines())
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    yield names
    sandbox("down")
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


@pytest.fixture(scope="session")
def slurm_with_gpus(slurm, tmp_path_factory):
    """The environment of another SLURM, whose two nodes pretend to have eight GPUs and a server's cores."""
    folder = tmp_path_factory.mktemp("gpus")
    made = sandbox("up", "2", "128", SLURM_SANDBOX_DIR=str(folder / "s"), SLURM_SANDBOX_GPUS="8", SLURM_SANDBOX_PREFIX="g")
    assert made.returncode == 0, made.stderr
    yield os.environ | dict(line.removeprefix("export ").split("=", 1) for line in made.stdout.splitlines())
    sandbox("down", SLURM_SANDBOX_DIR=str(folder / "s"))


@pytest.fixture
def slurm_with_accounts(slurm, tmp_path, monkeypatch):
    """Another SLURM, of two nodes, that keeps accounts in a database. Its environment is this process's for the test."""
    folder = {"SLURM_SANDBOX_DIR": str(tmp_path / "a")}
    made = sandbox("up", "2", "2", **folder, SLURM_SANDBOX_ACCT="1", SLURM_SANDBOX_PREFIX="a")
    assert made.returncode == 0, made.stderr
    for line in made.stdout.splitlines():
        monkeypatch.setenv(*line.removeprefix("export ").split("=", 1))
    yield
    sandbox("down", **folder)


@pytest.fixture(scope="session")
def shellcheck():
    """The program; installed where it is missing and may be."""
    if shutil.which("shellcheck") is None:
        if os.geteuid() != 0 or shutil.which("apt-get") is None:
            pytest.skip("shellcheck is not installed, and only root may install it")
        for words in (["update"], ["install", "-y", "--no-install-recommends", "shellcheck"]):
            subprocess.run(["apt-get", "-q", *words], check=True, capture_output=True, stdin=subprocess.DEVNULL)
    return "shellcheck"


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """The documents that runs are trained on."""
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def begin_expected(corpus, folder, steps):
    """What the small run of so many steps comes to. It is trained in peace beside the first test, once for all tests."""
    run = folder / "run.yaml"
    values = RUN | {"name": "undisturbed", "data": corpus.data, "training": RUN["training"] | {"steps": steps}}
    run.write_text(yaml.safe_dump(values))
    return Expected(begin_undisturbed(folder / "run", run), due(corpus, load(run, []), steps))


@pytest.fixture(scope="session")
def expected(corpus, tmp_path_factory):
    return begin_expected(corpus, tmp_path_factory.mktemp("undisturbed"), STEPS)


@pytest.fixture(scope="session")
def expected_of_fewer(corpus, tmp_path_factory):
    """Of SHORT_STEPS."""
    return begin_expected(corpus, tmp_path_factory.mktemp("undisturbed"), SHORT_STEPS)


@pytest.fixture
def cluster_file(tmp_path):
    """A function: the sandbox's cluster file with changes in its section slurm."""

    def write(**changes) -> Path:
        values = load_cluster("sandbox").model_dump(mode="json")
        values["slurm"] |= {"scratch": str(tmp_path / "scratch"), "preflight": {"enabled": False}, **changes}
        path = tmp_path / "cluster.yaml"
        path.write_text(yaml.safe_dump(values))
        return path

    return write


@pytest.fixture
def submit(slurm, corpus, tmp_path, cluster_file):
    """A function: submit the small run with key=value words, and changes in the cluster file; a Job. What is left is ended."""
    started: list[Job] = []
    subprocess.run(["scancel", "--me"], check=True)
    mended = sandbox("up")  # nodes that the test before lost, or drained, are back
    assert mended.returncode == 0, mended.stderr

    def start(*words, nodes=None, name="run", **changes) -> Job:
        run = tmp_path / "run.yaml"
        run.write_text(yaml.safe_dump(RUN | {"name": name, "data": corpus.data}))
        started.append(Job(tmp_path / "runs" / name, tmp_path))
        started[-1].submit(run, cluster_file(**changes), *words, nodes=nodes)
        return started[-1]

    start.where = tmp_path
    yield start
    for job in started:
        job.end()


@pytest.fixture
def patched(tmp_path, monkeypatch):
    """A function: lines of Python that every process of a job runs before it starts; one in which they fail ends at once."""

    def patch(text: str) -> None:
        (tmp_path / "site").mkdir()
        lines = "import os, traceback\ntry:\n" + textwrap.indent(text, "    ")
        lines += "\nexcept BaseException:\n    traceback.print_exc()\n    os._exit(1)\n"
        (tmp_path / "site" / "sitecustomize.py").write_text(lines)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))

    return patch
