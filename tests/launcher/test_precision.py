"""training.compute_dtype=null: a run takes the default of the device on which it starts, records it, and keeps it."""

import json

import pytest
import yaml

from baton.launcher.cli import main
from baton.launcher.cli.fork import _new_config
from baton.launcher.cluster import load_cluster
from baton.launcher.config import load
from baton.launcher.devices import kind_here
from baton.launcher.errors import ConfigError
from baton.launcher.planner.parameters import DTYPE_BYTES
from baton.launcher.run_directory import open_attempt, read_config
from baton.parallel.mesh import local_device
from baton.slurm.submit import prepare
from baton.training.errors import RunError

USUAL = {"cpu": "float32", "cuda": "bfloat16"}
RUN = {
    "name": "left-open",
    "model": {"d_model": 16, "n_layers": 1, "mixers": {"mamba": {"d_state": 4}}, "pad_vocab_to": 8},
    "data": {"kind": "mqar", "length": 16, "pairs": 2, "vocab_size": 36},
    "training": {
        "steps": 2,
        "sequence_length": 32,
        "global_batch_tokens": 64,
        "optimizer": {"lr": 1e-2},
        "recompute": "none",
        "cuda_graphs": False,
    },
}


@pytest.fixture
def configured(tmp_path):
    """A function: the configuration with words over it."""
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(RUN | {"directory": str(tmp_path / "run")}))
    return lambda *words: load(path, list(words))


def started(config):
    """The precision that ranks would find, and the one that the run records."""
    with open_attempt(config) as attempt:
        return tuple(read_config(folder / "config.yaml").training.compute_dtype for folder in (attempt, config.folder))


def test_the_device_is_the_one_that_torch_would_take():
    assert kind_here("auto") == local_device(0, 1, "auto").type


def test_no_gpu_is_seen_where_cuda_may_use_none(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert kind_here("auto") == "cpu"


@pytest.mark.parametrize(("first", "then"), [("cpu", "cuda"), ("cuda", "cpu")])
def test_a_run_keeps_the_precision_of_the_device_it_began_on(configured, capsys, first, then):
    assert started(configured(f"device={first}")) == (USUAL[first],) * 2
    assert started(configured(f"device={first}")) == (USUAL[first],) * 2
    assert capsys.readouterr().err == "", "nothing is unusual yet"
    assert started(configured(f"device={then}")) == (USUAL[first],) * 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(
        f"goes on with training.compute_dtype={USUAL[first]}, as it began; a new run on a "
        f"{'GPU' if then == 'cuda' else 'CPU'} would have {USUAL[then]}"
    )
    with pytest.raises(ConfigError, match=f"training.compute_dtype: '{USUAL[first]}' -> '{USUAL[then]}'"):
        started(configured(f"training.compute_dtype={USUAL[then]}"))
    assert started(configured(f"device={then}", f"training.compute_dtype={USUAL[first]}")) == (USUAL[first],) * 2


def test_a_precision_that_is_given_is_taken_on_any_device(configured):
    assert started(configured("device=cpu", "training.compute_dtype=bfloat16")) == ("bfloat16",) * 2


def test_a_fork_keeps_it_too(configured, tmp_path):
    started(configured("device=cuda"))
    for words in ((), ("training.compute_dtype=null",), ("device=cpu", "training.compute_dtype=null")):
        assert _new_config(tmp_path / "run", tmp_path / "fork", words).training.compute_dtype == "bfloat16"
    assert _new_config(tmp_path / "run", tmp_path / "fork", ["training.compute_dtype=float32"]).training.compute_dtype == "float32"


def test_plans_and_jobs_have_the_precision_of_what_they_are_for(configured, capsys, tmp_path):
    run = str(tmp_path / "run.yaml")

    def planned(*words):
        assert main(["plan", run, "--json", *words]) == 0
        return json.loads(capsys.readouterr().out)["memory"]

    configured()
    given = {compute_dtype: planned(f"training.compute_dtype={compute_dtype}") for compute_dtype in DTYPE_BYTES}
    assert given["float32"] != given["bfloat16"]
    assert planned() == given["bfloat16"], "a GPU's memory"
    assert planned("device=cpu") == planned("device=cpu", "training.compute_dtype=float32")
    jobs = [prepare(configured(*words), load_cluster(name), "1").config.training.compute_dtype for name, words in (
        ("h100", ("layout.data=2", "training.global_batch_tokens=64")),
        ("sandbox", ("layout.data=2",)),
        ("h100", ("device=cpu", "layout.data=2")),
    )]  # fmt: skip
    assert jobs == ["bfloat16", "float32", "float32"]


def test_a_run_that_began_plans_and_submits_what_it_has(configured, capsys, tmp_path):
    started(configured("device=cpu"))
    assert prepare(configured("layout.data=2"), load_cluster("h100"), "1").config.training.compute_dtype == "float32"
    assert "goes on with training.compute_dtype=float32" in capsys.readouterr().err


def test_a_residual_stream_that_the_devices_precision_does_not_go_with_is_refused(configured):
    with pytest.raises(RunError, match=r"does not go with training\.compute_dtype=float32"):
        started(configured("device=cpu", "training.residual_dtype=bfloat16"))
    assert started(configured("device=cuda", "training.residual_dtype=bfloat16")) == ("bfloat16",) * 2
