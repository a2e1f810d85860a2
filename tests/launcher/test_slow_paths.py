"""Recurrences without a GPU kernel are reported before the first step and counted in plans; all others have kernels."""

import pytest
import torch
from support.long_form import alternating
from support.measured_costs import VARIANTS, run_of
from support.operators import Counted

from baton.kernels.compile.aot import Target, launching_nothing
from baton.kernels.lattice.recurrence import Lattice
from baton.kernels.registry import recurrences
from baton.launcher.cluster import load_cluster
from baton.launcher.config import RunConfig
from baton.launcher.planner.plan import make_plan
from baton.launcher.planner.slow_paths import slow_paths
from baton.models.mixer import recurrences_of
from baton.models.settings import MixerConfig
from baton.models.settings.lattice import LatticeConfig
from baton.training.build import build_model

SPARSE = [{"variant": variant, "project": project} for variant in ("dec", "enc", "sim") for project in (True, False)]


def run_with(mixer, *, device="cuda", **training):
    """A run of three layers, two of which have the mixer."""
    model = {"d_model": 128, "n_layers": 3, "vocab_size": 64, "pattern": ["own", "mamba", "own"], "mixers": {"own": mixer}}
    settings = {"steps": 1, "sequence_length": 256, "global_batch_tokens": 2048, "micro_batch_size": 2, "optimizer": {"lr": 1e-3}}
    return RunConfig.model_validate({"name": "small", "device": device, "model": model, "training": settings | training})


@pytest.mark.parametrize("recurrence", recurrences(), ids=str)
def test_a_recurrence_launches_kernels_on_a_gpu_or_says_why_not(recurrence, monkeypatch):
    from triton.runtime.jit import KernelInterface

    inputs, _ = recurrence.example(torch.Generator().manual_seed(0), 2, 40, torch.float32, wide=True)
    meta, launched = tuple(x.to("meta") for x in inputs), []

    def noted(kernel, _grid):
        launched.append(kernel)
        return lambda *args, **options: None

    with launching_nothing(Target(90)):
        monkeypatch.setattr(KernelInterface, "__getitem__", noted)
        pos = torch.zeros(2, 40, dtype=torch.int32, device="meta") if recurrence.needs_pos else None
        recurrence.run(meta, pos, None)
        monkeypatch.undo()
    assert bool(launched) is (recurrence.no_kernel is None)


@pytest.mark.parametrize("variant", VARIANTS)
def test_settings_say_what_their_recurrences_say(variant, single_mesh):
    config = run_of(variant)
    model = build_model(config.model, config.training, torch.device("cpu"), single_mesh)
    carried = {recurrence.no_kernel for recurrence in recurrences_of(model, config.model.d_model, torch.float32)}
    said = {path.eager.why for path in slow_paths(config, "cuda")}
    assert said == carried - {None}


@pytest.mark.parametrize(("settings", "forget"), alternating(SPARSE, [False, True]), ids=str)
def test_operators_and_memory_traffic_of_a_token_are_those_counted(settings, forget):
    recurrence = Lattice(**settings, forget=forget, sparse=True)

    def counted(length):
        inputs, state = recurrence.example(torch.Generator().manual_seed(0), 1, length, torch.float32, wide=True)
        inputs = tuple(x.requires_grad_() for x in inputs)
        with Counted() as ahead:
            y, _ = recurrence.run(inputs, None, {"S": state["S"].requires_grad_()})
        with Counted() as back:
            y.sum().backward()
        return [
            n / state["S"].numel() ** p for p, x in ((0, "launches"), (1, "moved")) for n in (getattr(ahead, x), getattr(back, x))
        ]

    each = [(long - short) / 32 for short, long in zip(counted(32), counted(64), strict=True)]
    eager = LatticeConfig(**settings, forget=forget, sparsity=0.1, heads=1)._eager(1)
    for found, said in zip(each, (*eager.launches, *eager.moved), strict=True):
        assert said == pytest.approx(found, rel=0.15)


def test_a_gpu_without_a_kernel_is_said_in_one_line_with_its_cost_and_a_cpu_says_nothing():
    sparse = {"kind": "lattice", "sparsity": 0.01}
    (path,) = slow_paths(run_with(sparse), "cuda")
    line = str(path)
    assert "\n" not in line
    assert line.startswith("slow: own (2 layers) has no kernel for a GPU: thresholds of slots (L1, sparsity > 0)")
    # 4 passes of 256 tokens in 2 layers, 73 operators of 8 us for each token
    assert path.seconds == pytest.approx(4 * 256 * 2 * 73 * 8e-6)
    assert "73 operators a token, about 1.2 s of each step; sparsity=0 has kernels" in line
    assert slow_paths(run_with(sparse), "cpu") == ()
    assert slow_paths(run_with({"kind": "lattice", "project": False}), "cuda") == ()


def test_a_model_with_a_mixer_that_cannot_be_counted_is_not_kept_from_training():
    class Uncounted(MixerConfig):
        kind: str = "uncounted"

    config = run_with({"kind": "lattice", "sparsity": 0.01})
    model = config.model.model_copy(update={"mixers": {**config.model.mixers, "mamba": Uncounted()}})
    (path,) = slow_paths(config.model_copy(update={"model": model}), "cuda")
    assert path.seconds is None
    assert str(path).endswith("PyTorch computes it with 73 operators a token; sparsity=0 has kernels")


def test_what_is_run_again_or_surveyed_or_in_large_batches_takes_longer():
    sparse = {"kind": "lattice", "sparsity": 0.01}
    (plain,) = slow_paths(run_with(sparse), "cuda")
    (again,) = slow_paths(run_with(sparse, recompute="full"), "cuda")
    assert again.seconds == pytest.approx(plain.seconds * (23 + 73) / 73)
    cut = {"bptt": {"mode": "exact", "segment": 64}}
    (surveyed,) = slow_paths(run_with(sparse, **cut), "cuda")
    assert surveyed.seconds == pytest.approx(plain.seconds * (0.75 * 23 + 73) / 73)
    (narrow,) = slow_paths(run_with(sparse), "cuda", memory_bandwidth_tb_s=1e-3)
    assert narrow.seconds == pytest.approx(4 * 256 * 2 * 4 * (43 + 82) * 2 * 64 * 128 / 1e9)
    staged = run_with(sparse).model_copy(update={"layout": run_with(sparse).layout.model_copy(update={"pipeline": 3})})
    (stage,) = slow_paths(staged, "cuda")
    assert stage.seconds == pytest.approx(plain.seconds / 2)


def test_plans_count_it_and_say_it():
    h100 = load_cluster("h100")
    sparse, dense = ({"kind": "lattice", "sparsity": x} for x in (0.01, 0.0))
    slow, fast = (make_plan(run_with(mixer), h100) for mixer in (sparse, dense))
    (path,) = slow_paths(run_with(sparse), "cuda", h100.memory_bandwidth_tb_s)
    assert slow.speed.eager == pytest.approx(path.seconds)
    assert slow.speed.step == pytest.approx(fast.speed.step + path.seconds, rel=1e-3)
    assert slow.to_json()["seconds"]["eager"] == slow.speed.eager
    assert str(path) in list(slow.lines())
    assert sum("PyTorch's operators where no kernel is" in line for line in slow.lines()) == 1
    assert fast.speed.eager == 0
    assert not any("PyTorch's operators" in line or line.startswith("slow:") for line in fast.lines())
    without_cluster = make_plan(run_with(sparse))
    assert any(line.startswith("slow: own") for line in without_cluster.notes)
    assert make_plan(run_with(sparse, device="cpu"), h100).speed.eager == 0
    assert not any(line.startswith("slow:") for line in make_plan(run_with(sparse, device="cpu")).lines())
