"""The table of launch configurations: its contents, the precedence of rows, and the search that finds them."""

import dataclasses
import json

import pytest
import torch
from support.long_form import some

from baton.kernels.compile import launch_configs
from baton.kernels.compile.autotune import tune
from baton.kernels.compile.launch_configs import Entry, Request
from baton.kernels.delta_rule import triton_launch as delta_rule
from baton.kernels.diagonal_scan import triton_launch as diagonal_scan
from baton.kernels.eidetic_attention import triton_launch as eidetic_attention
from baton.kernels.errors import LaunchConfigError
from baton.kernels.gated_linear_attention import triton_launch as gated_linear_attention
from baton.kernels.lattice import triton_launch as lattice
from baton.kernels.lattice.variant import UpdateRule
from baton.kernels.short_conv import triton_launch as short_conv

KERNELS = (diagonal_scan, short_conv, gated_linear_attention, delta_rule, lattice, eidetic_attention)
LAUNCH_CONFIGS = {kernel.KERNEL: kernel.LaunchConfig for kernel in KERNELS}


def test_the_tables_rows_are_of_kernels_and_fields_that_there_are():
    for entry in launch_configs.table():
        assert entry.config.keys() <= {field.name for field in dataclasses.fields(LAUNCH_CONFIGS[entry.kernel])}, entry
        assert entry.why


def test_a_name_goes_before_an_architecture_and_a_later_row_before_an_earlier(tmp_path, monkeypatch):
    rows = (
        Entry("scan", "NVIDIA H200", {"d_state": 16}, {"block_t": 1}, "measured"),
        Entry("scan", "sm_90", {}, {"block_t": 2, "prefetch_t": 2}, "measured"),
        Entry("scan", "NVIDIA H200", {"d_state": 16, "warps": 8}, {"target_programs": 3}, "measured"),
        Entry("conv", "NVIDIA H200", {}, {"block_t": 4}, "measured"),
    )
    launch_configs.write(rows, tmp_path / "launch_configs.json")
    assert launch_configs.read(tmp_path / "launch_configs.json") == rows
    monkeypatch.setattr(launch_configs, "table", lambda: rows)
    names = ("sm_90", "NVIDIA H200")
    assert launch_configs.for_device_names("scan", names, {"d_state": 16, "warps": 8}) == {
        "block_t": 1,
        "prefetch_t": 2,
        "target_programs": 3,
    }
    assert launch_configs.for_device_names("scan", names, {"d_state": 16, "warps": 4}) == {"block_t": 1, "prefetch_t": 2}
    assert launch_configs.for_device_names("scan", names, {"d_state": 8}) == {"block_t": 2, "prefetch_t": 2}
    assert launch_configs.for_device_names("scan", ("sm_80",), {"d_state": 16}) == {}


def test_a_choice_is_made_once_for_each_table_and_shape(monkeypatch):
    table, default = (Entry("scan", "cpu", {"d_state": 16}, {"block_t": 1}, "measured"),), diagonal_scan.LaunchConfig()
    monkeypatch.setattr(launch_configs, "table", lambda: table)
    monkeypatch.setattr(launch_configs, "table_names", lambda device: (device.type,))

    def choose(d_state):
        return launch_configs.choose("scan", default, torch.device("cpu"), {"d_state": d_state}, {"tokens": 3})

    chosen = choose(16)
    assert chosen == dataclasses.replace(default, block_t=1)
    assert choose(16) is chosen
    assert choose(8) == default
    with launch_configs.record_requests() as asked:
        assert [choose(16), choose(16)] == [chosen, chosen]
    assert asked == [Request("scan", {"d_state": 16}, {"tokens": 3})]
    assert asked[0].times == 2
    table = ()
    assert choose(16) == default


def test_the_digest_covers_the_configurations_and_not_the_reasons(monkeypatch):
    def digest(block_t, why):
        monkeypatch.setattr(launch_configs, "table", lambda: (Entry("scan", "sm_90", {}, {"block_t": block_t}, why),))
        return launch_configs.digest()

    assert digest(4, "so") == digest(4, "or so") != digest(8, "so")


@pytest.mark.parametrize("text", ["", "{}x", '[{"kernel": "scan"}]'])
def test_what_is_no_table_is_refused(tmp_path, text):
    (tmp_path / "launch_configs.json").write_text(text)
    with pytest.raises(LaunchConfigError, match=r"launch_configs\.json: not a table of launch configurations .*`baton tune`"):
        launch_configs.read(tmp_path / "launch_configs.json")


def test_a_place_that_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(LaunchConfigError, match=r"cannot be written \(No such file or directory\); name another with --table"):
        launch_configs.write((), tmp_path / "nowhere" / "launch_configs.json")


# two kernels in the default run: one of three settings that depend on each other, and one of heads
@pytest.mark.parametrize("kernel", some(LAUNCH_CONFIGS, (diagonal_scan.KERNEL, gated_linear_attention.KERNEL)))
def test_tuning_returns_a_configuration_that_computes_the_same(kernel, monkeypatch):
    """With interpreted kernels: times are meaningless there, but results must be equal."""
    monkeypatch.setattr("baton.kernels.compile.autotune.REPETITIONS", 2)
    monkeypatch.setattr("baton.kernels.compile.autotune.STEPS", {
        diagonal_scan.KERNEL: ({"min_programs": (1, 2048)}, {"block_t": (8, 7), "prefetch_t": (1,)}),
        short_conv.KERNEL: ({"block_t": (4, 8)},),
        gated_linear_attention.KERNEL: ({"chunk": (16,)},), delta_rule.KERNEL: ({"chunk": (16,)},),
        lattice.KERNEL: ({"slots": (4,)},), eidetic_attention.KERNEL: ({"keys": (16,)},),
    })  # fmt: skip
    if kernel == diagonal_scan.KERNEL:
        sizes = {"batch": 1, "tokens": 20, "channels": 5, "activate": True, "gated": True}
        request = Request(kernel, diagonal_scan.shape_of("mamba", 3, 1, 5), sizes)
    elif kernel == gated_linear_attention.KERNEL:
        sizes = {"batch": 1, "tokens": 20, "heads": 1, "query_heads": 2, "key_heads": 1, "d_key": 8, "d_value": 8}
        request = Request(kernel, gated_linear_attention.shape_of("key", 8, 8), sizes)
    elif kernel == lattice.KERNEL:
        sizes = {"batch": 1, "tokens": 5, "heads": 1, "d": 6, "m": 6}
        request = Request(kernel, lattice.shape_of(UpdateRule("enc", True), 6, 6), sizes)
    elif kernel == eidetic_attention.KERNEL:
        sizes = {"batch": 1, "tokens": 9, "heads": 2, "groups": 1, "dim": 8, "window": 4}
        request = Request(kernel, eidetic_attention.shape_of(8), sizes)
    elif kernel == delta_rule.KERNEL:
        request = Request(
            kernel, delta_rule.shape_of("scalar", 8, 8), {"batch": 1, "tokens": 20, "heads": 1, "d_key": 8, "d_value": 8}
        )
    else:
        request = Request(kernel, short_conv.shape_of(4, 4), {"batch": 1, "tokens": 20, "channels": 5})
    (found,) = tune([request], torch.device("cpu"), torch.float32)
    assert found.after_ms <= found.before_ms
    assert found.config.keys() <= {field.name for field in dataclasses.fields(LAUNCH_CONFIGS[kernel])}
    assert found.config.get("block_t") != 7  # does not divide checkpoint_interval
    assert "->" in str(found)


def test_a_configuration_that_computes_something_else_is_not_taken(monkeypatch):
    """Even if they are faster."""
    request = Request(short_conv.KERNEL, short_conv.shape_of(4, 4), {"batch": 1, "tokens": 20, "channels": 5})
    run, quick = short_conv.short_conv_triton, iter((2.0, 1.0, 1.0, 1.0))
    monkeypatch.setattr("baton.kernels.compile.autotune._milliseconds", lambda *_: next(quick))
    monkeypatch.setattr("baton.kernels.compile.autotune.STEPS", {short_conv.KERNEL: ({"block_t": (4,)},)})

    def wrong(*args, config, **options):
        y, tail = run(*args, config=config, **options)
        return (y + 1e-3 if config.block_t == 4 else y), tail

    assert next(tune([request], torch.device("cpu"), torch.float32)).config == {"block_t": 4}
    monkeypatch.setattr(short_conv, "short_conv_triton", wrong)
    quick = iter((2.0, 1.0))
    assert next(tune([request], torch.device("cpu"), torch.float32)).config == {}


def test_a_candidate_that_the_gpu_fails_on_is_named(monkeypatch):
    """The CUDA context is unusable after it, so no other candidate can be timed."""
    request = Request(short_conv.KERNEL, short_conv.shape_of(4, 4), {"batch": 1, "tokens": 20, "channels": 5})
    run = short_conv.short_conv_triton
    monkeypatch.setattr("baton.kernels.compile.autotune._milliseconds", lambda *_: 1.0)
    monkeypatch.setattr("baton.kernels.compile.autotune.STEPS", {short_conv.KERNEL: ({"block_t": (8, 16)},)})

    def fails(*args, config, **options):
        if config.block_t == 16:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with ...")
        return run(*args, config=config, **options)

    monkeypatch.setattr(short_conv, "short_conv_triton", fails)
    with pytest.raises(LaunchConfigError) as refused:
        list(tune([request], torch.device("cpu"), torch.float32))
    said = str(refused.value)
    assert said.startswith("short_conv (")
    assert "with block_t 16: CUDA error: an illegal memory access was encountered; " in said
    assert "\n" not in said


def test_the_packages_table_is_what_a_run_uses():
    assert json.loads(launch_configs.PATH.read_text()) == [dataclasses.asdict(entry) for entry in launch_configs.table()]
