"""`baton tune`: the shapes of a run's kernels, the table, and its errors."""

import pytest
import torch

from baton.kernels.compile import launch_configs
from baton.kernels.compile.aot import META, Target, launching_nothing
from baton.kernels.compile.autotune import _SETUPS, STEPS
from baton.kernels.errors import LaunchConfigError
from baton.kernels.gated_linear_attention import triton_launch
from baton.launcher import cli
from baton.models.config import ModelConfig
from baton.models.settings import kinds
from baton.parallel.config import LayoutConfig
from baton.training.config import TrainingConfig
from baton.training.kernel_tools.autotune import launch_requests, select_requests, tune_run_kernels


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_tuned(tmp_path, capsys):
    before = launch_configs.PATH.read_text()
    words = ["configs/runs/demo.yaml", "model.vocab_size=512", "data.tokenizer=nowhere.model"]
    assert cli.main(["tune", *words, "--table", str(tmp_path / "launch_configs.json")]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "baton: there is no GPU here: kernels are tuned on a GPU of the kind that will run them"
    ]
    assert not (tmp_path / "launch_configs.json").exists()
    assert launch_configs.PATH.read_text() == before


def settings(*pattern):
    model = ModelConfig(d_model=2048 if pattern else 128, n_layers=4, pattern=pattern or ("mamba", "longhorn"), vocab_size=64)
    training = TrainingConfig(
        sequence_length=64, global_batch_tokens=128, micro_batch_size=2, steps=1, compute_dtype="bfloat16", optimizer={"lr": 1e-3}
    )
    return model, training, LayoutConfig(tensor=2)


def test_a_runs_shapes_are_those_of_a_rank():
    found = {(r.kernel, r.shape.get("kind")): r for r in launch_requests(*settings(), Target(90))}
    assert found.keys() == {("short_conv", None), ("diagonal_scan", "mamba"), ("diagonal_scan", "longhorn")}
    for request in found.values():
        assert {**request.sizes, "activate": True, "gated": True} == {
            "batch": 2, "tokens": 64, "channels": 128, "activate": True, "gated": True,
        }  # fmt: skip
    assert found["diagonal_scan", "mamba"].shape == {"kind": "mamba", "d_state": 16, "warps": 8}


@pytest.mark.parametrize("kind", sorted(set(kinds()) - {"swiglu"}))
def test_each_mixer_asks_for_what_can_be_tuned(kind):
    """And of half the heads or channels on each of two tensor ranks, but for channel_mix, whose token shift every rank computes."""
    model, training, layout = settings(kind)
    whole, half = (launch_requests(model, training, one, Target(90)) for one in (LayoutConfig(), layout))
    assert whole
    assert [request.kernel for request in whole] == [request.kernel for request in half]
    assert {request.kernel for request in whole} <= STEPS.keys()
    with launching_nothing(Target(90)):
        for request in whole:
            call, _, used = _SETUPS[request.kernel](request, META, torch.bfloat16)
            call(used)
    pairs = [(name, size, b.sizes[name]) for a, b in zip(whole, half, strict=True) for name, size in a.sizes.items()]
    divided = {name for name, size, of_rank in pairs if size != of_rank}
    assert bool(divided) == (kind != "channel_mix")
    assert divided <= {"channels", "heads", "query_heads", "key_heads", "groups"}
    assert all(size in (of_rank, 2 * of_rank) for _, size, of_rank in pairs)


def test_queries_and_keys_that_all_heads_share_are_tuned_as_such(monkeypatch):
    """With the kernels that sum their gradients over heads."""
    (request,) = select_requests(launch_requests(*settings("mamba2"), Target(90)), ["gated_linear_attention"])
    summed, sum_over_heads = [], triton_launch.launch_shared_dqk
    monkeypatch.setattr(triton_launch, "launch_shared_dqk", lambda *a, **k: (summed.append(a), sum_over_heads(*a, **k))[1])
    with launching_nothing(Target(90)):
        call, _, used = _SETUPS[request.kernel](request, META, torch.bfloat16)
        call(used)
    assert len(summed) == 1


def test_a_process_that_has_seen_the_meta_device_can_use_its_gpu():
    """Triton's driver asks torch.cuda for the device, which a world on another device answers for."""
    before = torch.cuda.current_device, torch.cuda.synchronize
    launch_requests(*settings(), Target(90))
    assert (torch.cuda.current_device, torch.cuda.synchronize) == before


def test_some_kernels_alone():
    requests = launch_requests(*settings(), Target(90))
    assert {request.kernel for request in select_requests(requests, ["short_conv"])} == {"short_conv"}
    assert select_requests(requests, []) == requests
    with pytest.raises(LaunchConfigError, match="the run has no kernel called 'delta_rule'; it has diagonal_scan, short_conv"):
        select_requests(requests, ["short_conv", "delta_rule"])


@pytest.mark.gpu
def test_what_was_tuned_is_in_the_table(tmp_path, monkeypatch):
    few = {"diagonal_scan": ({"prefetch_t": (4, 8)},), "short_conv": ({"block_t": (4, 8)},)}
    monkeypatch.setattr("baton.kernels.compile.autotune.STEPS", few)
    device, path = torch.device("cuda", 0), tmp_path / "launch_configs.json"
    launch_configs.write(launch_configs.table(), path)
    found = list(tune_run_kernels(*settings("mamba"), device, path))
    rows = {
        (row.kernel, *sorted(row.shape.items())): row
        for row in launch_configs.read(path)
        if row.device == launch_configs.table_names(device)[-1]
    }
    for tuned in found:
        assert rows[(tuned.request.kernel, *sorted(tuned.request.shape.items()))].config == tuned.config


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["bmojo", "delta_net", "gla", "gsa", "lattice"])
def test_every_kernel_is_tuned(kind, tmp_path, monkeypatch):
    """That of small shapes the configuration in use are measured at all, and another choice beside them."""
    few = {
        name: tuple({key: values[:2] for key, values in list(step.items())[:1]} for step in steps[:1])
        for name, steps in STEPS.items()
    }
    monkeypatch.setattr("baton.kernels.compile.autotune.STEPS", few)
    model, training, _ = settings(kind)
    device, path = torch.device("cuda", 0), tmp_path / "launch_configs.json"
    launch_configs.write(launch_configs.table(), path)
    found = list(tune_run_kernels(model, training, LayoutConfig(), device, path))
    assert found
    assert all(0 < tuned.after_ms <= tuned.before_ms < 1000 for tuned in found)
