"""`baton compile`: what a run launches is in the cache before it starts, for GPUs that are not here; and what is refused."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch
from support.models import micro_batches

from baton.launcher import cli

RUN = {
    "name": "small",
    "model": {"d_model": 64, "n_layers": 2, "pattern": ["gla+swiglu"], "vocab_size": 64},
    "data": {"path": "nowhere", "tokenizer": "nowhere.model"},
    "training": {
        "steps": 2,
        "context": 64,
        "global_batch_tokens": 128,
        "micro_batch": 2,
        "precision": "bfloat16",
        "optimizer": {"lr": 1e-3},
    },
}


@pytest.fixture
def run_file(tmp_path):
    (tmp_path / "run.yaml").write_text(json.dumps(RUN))
    return tmp_path / "run.yaml"


def compiled(run_file, *words):
    """How many kernels, how many of them compiled, and how many were there, as the command says."""
    settings = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    settings["TRITON_CACHE_DIR"] = str(run_file.parent / "cache")
    done = subprocess.run(
        [sys.executable, "-P", "-m", "baton.launcher.cli", "compile", str(run_file), "--capability", "9.0", *words],
        capture_output=True,
        text=True,
        check=False,
        env=settings,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = re.fullmatch(r"(\d+) kernels for sm_90: (\d+) compiled, (\d+) were there, in \d+ s; (.+)", done.stdout.strip())
    assert said[4] == settings["TRITON_CACHE_DIR"]
    return tuple(int(n) for n in said.groups()[:3])


def test_kernels_are_compiled_once_for_each_kind_of_call(run_file):
    kernels, new, there = compiled(run_file)
    assert (new, there) == (kernels, 0)
    binaries = {path.stem for path in (run_file.parent / "cache").glob("*/*.cubin")}
    # of the norm, the gate of the MLP, the matrix states both ways and the loss
    for name in ("forward_kernel", "backward_kernel", "prepare_kernel", "gated_kernel", "states_kernel", "sums_kernel"):
        assert name in binaries, f"{name} is not among {sorted(binaries)}"
    assert compiled(run_file) == (kernels, 0, kernels)
    split, new, there = compiled(run_file, "layout.tensor=2", "layout.sequence=2")
    assert new > 0, "a rank's share has other sizes, and a sequence rank other phases"
    assert there > 0, "norms are whole on every rank"
    assert split > kernels


def test_what_cannot_be_compiled_is_said(run_file, capsys, monkeypatch):
    if not torch.cuda.is_available():
        assert cli.main(["compile", str(run_file)]) == 2
        said = "baton: there is no GPU here: say which to compile for, e.g. --capability 9.0"
        assert capsys.readouterr().err.splitlines() == [said]
    monkeypatch.setattr("triton.knobs.runtime.interpret", True)
    assert cli.main(["compile", str(run_file), "--capability", "9.0"]) == 2
    assert capsys.readouterr().err.splitlines() == ["baton: TRITON_INTERPRET is set, so that nothing is compiled: unset it"]
    with pytest.raises(SystemExit) as ended:
        cli.main(["compile", str(run_file), "--capability", "hopper"])
    assert ended.value.code == 2
    assert "argument --capability: invalid" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("mixer", ["mamba", "longhorn", "gsa", "gla", "mamba2", "delta_net", "gated_delta_net", "lattice", "bmojo"])
def test_a_step_on_a_gpu_compiles_nothing_more(mixer, tmp_path, monkeypatch):
    """Nor does the check before it."""
    from triton import knobs

    from baton.kernels.ahead import Target
    from baton.models.config import ModelConfig
    from baton.models.settings import SMALL_WIDTH, kinds
    from baton.parallel import mesh as meshes
    from baton.parallel.config import LayoutConfig
    from baton.training.build import build
    from baton.training.compile import compile_for
    from baton.training.config import TrainingConfig
    from baton.training.doctor import check_kernels
    from baton.training.executor import StepExecutor
    from baton.training.passes import TokenBatch

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    mixers = {mixer: kinds()[mixer].small()}
    model = ModelConfig(d_model=SMALL_WIDTH, n_layers=2, vocab_size=61, pad_vocab_to=4, pattern=[mixer], mixers=mixers)
    training = TrainingConfig(**{**RUN["training"], "context": 24, "global_batch_tokens": 192})
    compile_for(model, training, LayoutConfig(), Target.here())
    missed = []

    def note(*, src, cache_hit, **_):
        missed.extend([] if cache_hit else [src.name])

    monkeypatch.setattr(knobs.compilation, "listener", note)
    mesh = meshes.initialize(LayoutConfig(), device=torch.device("cuda", 0), rank=0, store=torch.distributed.HashStore())
    try:
        built = build(model, training, mesh)
        check_kernels(built, training)
        batches = [
            TokenBatch(b.tokens.to(mesh.device), b.labels.to(mesh.device), b.pos.to(mesh.device)) for b in micro_batches(0, 0, 1, 2)
        ]
        StepExecutor(built.model, built.engine, mesh).step(batches, 1e-3)
    finally:
        meshes.shutdown()
    assert missed == []
