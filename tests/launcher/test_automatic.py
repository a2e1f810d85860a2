"""training.recompute=auto and training.cuda_graphs=auto: the choice, compared with the plans of explicit settings."""

from importlib.resources import files
from itertools import product
from pathlib import Path

import pytest
import yaml

from baton.launcher.cluster import load_cluster
from baton.launcher.config import load
from baton.launcher.devices import gpu_memory
from baton.launcher.errors import is_out_of_memory
from baton.launcher.planner import automatic
from baton.launcher.planner.plan import make_plan
from baton.launcher.run_directory import read_config
from baton.training.monitoring.metrics import read_metrics

CONFIGS = Path(str(files("baton.configs")))
RUN = CONFIGS / "runs" / "papers" / "mamba-1.4b-pile.yaml"
GIB = 1 << 30
PAIRS = [("none", True), ("selective", True), ("none", False), ("selective", False), ("full", True), ("full", False)]
"""Fastest first."""


def words_of(recompute, graphs):
    return [f"training.recompute={recompute}", f"training.cuda_graphs={str(graphs).lower()}"]


def chosen(config, capacity=None, **more):
    resolved, choice = automatic.resolve(config, capacity, **more)
    assert (choice.recompute, choice.cuda_graphs) == (resolved.training.recompute, resolved.training.cuda_graphs)
    return choice.recompute, choice.cuda_graphs


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["training.micro_batch_size=1"],
        ["layout.tensor=4"],
        ["model=lattice-1.3b"],
        ["model=gsa-1.3b"],
        ["training.bptt={mode: exact, segment: 256}"],
    ],
)
def test_the_fastest_pair_that_fits_is_chosen_at_any_size_of_memory(words):
    config = load(RUN, words)
    peaks = {pair: max(stage.memory.peak for stage in make_plan(load(RUN, [*words, *words_of(*pair)])).stages) for pair in PAIRS}
    for peak in peaks.values():
        for capacity in (peak - 1, peak):
            fitting = [pair for pair in PAIRS if peaks[pair] <= capacity]
            expected = fitting[0] if fitting else min(PAIRS, key=lambda pair: peaks[pair])
            assert chosen(config, capacity) == expected
            assert make_plan(config, memory_gib=capacity / GIB).fits is bool(fitting)
    assert chosen(config) == PAIRS[0], "nothing is known of the memory"


def test_all_pairs_that_may_be_set_are_ordered():
    assert set(PAIRS) == set(product(("none", "selective", "full"), (True, False)))
    for pair in PAIRS:
        load(RUN, words_of(*pair))


@pytest.mark.parametrize(
    ("words", "kind", "expected"),
    [
        (["layout.pipeline=2"], None, ("none", False)),
        (["layout.context=2"], None, ("none", True)),
        (["training.bptt={mode: exact, segment: 256}"], None, ("none", True)),
        (["training.bptt={mode: truncated, segment: 256, gradient_segments: 1}"], None, ("none", True)),
        (["training.bptt={mode: exact, segment: 256}", "layout.context=2"], None, ("none", False)),
        (["training.bptt={mode: exact, segment: 256}", "model=transformer-1.3b"], None, ("none", False)),
        (["profile=true"], None, ("none", False)),
        (["device=cpu"], None, ("none", False)),
        ([], "cpu", ("none", False)),
        (["model=lattice-1.3b", "model.mixers.lattice.sparsity=0.1"], None, ("none", False)),
    ],
    ids=str,
)
def test_what_the_run_sets_and_what_cannot_be_recorded(words, kind, expected):
    assert chosen(load(RUN, words), kind=kind) == expected


def test_what_is_set_is_not_changed():
    config = load(RUN, words_of("none", False))
    assert automatic.resolve(config, 1) == (config, None)


def test_what_was_out_of_memory_is_not_chosen_again():
    config, failed, taken = load(RUN), [], []

    def planned(pair):
        return automatic.planned_peak(load(RUN, words_of(*pair)))

    while not taken or len(set(taken)) == len(taken):
        taken.append(chosen(config, failed=failed))
        failed.append(planned(taken[-1]))
    *taken, again = taken
    assert again == taken[-1], "the last one has no successor"
    lower = [pair for n, pair in enumerate(PAIRS) if all(planned(pair) < planned(before) for before in PAIRS[:n])]
    assert taken == lower
    assert sorted(failed[:-1], reverse=True) == failed[:-1]
    assert taken[-1][0] == "full"


def test_a_plan_says_what_is_chosen(capsys):
    """On an H100 the 1.4B model with 8 x 2048 tokens a micro-batch fits as a whole, with 16 x 2048 it does not."""
    from baton.launcher.cli import main

    for size, recompute in ((8, "none"), (16, "full")):
        assert main(["plan", str(RUN), "--cluster", "h100", f"training.micro_batch_size={size}", "layout.data=1"]) == 0
        *_, choice, verdict = capsys.readouterr().out.splitlines()
        assert choice.startswith(f"auto: training.recompute={recompute}, training.cuda_graphs=")
        assert verdict.startswith("fits: ")


def test_errors_that_say_that_memory_is_short():
    import torch

    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.int8)
    assert is_out_of_memory(caught.value)
    wrapped = ValueError("a layer")
    wrapped.__cause__ = caught.value
    assert is_out_of_memory(wrapped)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    assert not is_out_of_memory(RuntimeError("a size of 3 is out of range"))


def test_no_gpu_has_no_memory(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpu_memory() is None


def test_a_run_that_is_out_of_memory_goes_on_with_settings_that_need_less(inputs, undisturbed, launch, tmp_path):
    """On a CPU, where the choice is none until memory was short; two steps after the first checkpoint. On one rank, compared with
    the undisturbed run on two."""
    values = inputs.settings()
    values["layout"] = {}
    values["training"]["callbacks"] = {"support.out_of_memory:AsksForTooMuch": {"after": 7}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    folder = tmp_path / "run"
    ended = launch(folder, str(tmp_path / "run.yaml"), where=tmp_path).end()
    assert ended.status == 0, ended.err
    attempts = sorted((folder / "attempts").iterdir())
    attempts = [path for path in attempts if path.name.isdigit()]
    forms = [read_config(path / "config.yaml").training.recompute for path in attempts]
    assert forms[0] == "none"
    assert forms[-1] == "full"
    assert read_config(folder / "config.yaml").training.recompute == "auto"
    assert "baton: out of memory; starting again with settings that need less" in ended.err
    assert "out of memory (" in ended.err
    assert "set training.recompute=full" in ended.err

    def losses(run):
        return {row["step"]: row["loss"] for row in read_metrics(run / "metrics.jsonl") if row["kind"] == "train"}

    assert losses(folder) == pytest.approx(losses(undisturbed), rel=1e-5)


def test_a_run_with_settings_of_its_own_ends_when_it_is_out_of_memory(inputs, launch, tmp_path):
    values = inputs.settings()
    values["training"]["callbacks"] = {"support.out_of_memory:AsksForTooMuch": {"after": 1}}
    values["training"]["recompute"] = "none"
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    ended = launch(tmp_path / "run", str(tmp_path / "run.yaml"), where=tmp_path).end()
    assert ended.status == 1
    assert "set training.recompute=full" in ended.err
    assert "Traceback" not in ended.err
    assert [path.name for path in (tmp_path / "run" / "attempts").iterdir() if path.name.isdigit()] == ["0001"]


HYBRID = ["model=gated-delta-net-hybrid-1.3b", "layout.context=1", "training.recompute=auto"]
MILLION = CONFIGS / "runs" / "mamba-1.4b-million.yaml"


@pytest.mark.parametrize(("segment", "order"), [
    # long segments read the keys seldom: copies take less than another forward pass
    (131072, [("none", False), ("none", True), ("full", False), ("full", True)]),
    # short ones with as many keys as queries: another forward pass takes less
    (4096, [("none", False), ("full", False), ("none", True), ("full", True)]),
])  # fmt: skip
def test_keys_are_offloaded_where_nothing_faster_fits(segment, order):
    words = [*HYBRID, f"training.bptt.segment={segment}"]
    if segment == 4096:
        words.append("model.mixers.attention.kv_heads=16")
    config = load(MILLION, words)

    def planned(recompute, offload):
        set_words = [f"training.recompute={recompute}", f"training.offload_kv={str(offload).lower()}"]
        return automatic.planned_peak(load(MILLION, [*words, *set_words]))

    peaks = {form: planned(*form) for form in order}
    assert peaks["none", True] < peaks["none", False]
    for capacity in sorted({p - d for p in peaks.values() for d in (0, 1)}):
        resolved, choice = automatic.resolve(config, capacity)
        fitting = [form for form in order if peaks[form] <= capacity]
        expected = fitting[0] if fitting else min(order, key=lambda form: peaks[form])
        assert (resolved.training.recompute, resolved.training.offload_kv) == (choice.recompute, choice.offload_kv) == expected
        assert f"training.offload_kv={str(expected[1]).lower()}" in str(choice)
    on_cpu, _ = automatic.resolve(config, 1, "cpu")
    assert on_cpu.training.offload_kv is False


def test_what_is_not_kept_is_not_offloaded():
    resolved, choice = automatic.resolve(load(RUN, ["training.bptt={mode: exact, segment: 256}"]), 1)
    assert resolved.training.offload_kv is False
    assert choice.offload_kv is None
    assert "offload_kv" not in str(choice)
    (note,) = [note for note in load(RUN, ["training.offload_kv=true"]).notes() if "offload" in note]
    assert note.startswith("note: training.offload_kv=true without effect")


def test_a_plan_says_what_offloading_takes():
    words = [*HYBRID, "training.bptt.segment=131072", "layout.data=2"]
    plan = make_plan(load(MILLION, words), load_cluster("h100"))
    lines = list(plan.lines())
    assert plan.fits
    assert lines[-2].startswith("auto: training.recompute=full, training.cuda_graphs=false, training.offload_kv=true")
    # 6 layers of 2 x 4 x 128 numbers in bfloat16 and float32, of 7 of 8 segments
    assert plan.offloaded == 6 * 2 * 4 * 128 * (2 + 4) * 7 * 131072
    assert any(line.split("page-locked")[-1].split() == ["31.50", "GiB"] for line in lines if "keys, values" in line)
    (of_node,) = [line for line in lines if "of a node's 2 ranks" in line]
    assert of_node.split()[-2:] == [f"{2 * (plan.offloaded + plan.host) / GIB:,.2f}", "GiB"]
    assert plan.speed.fetch > 0
    cluster = load_cluster("h100")
    slower = cluster.model_copy(update={"bandwidth_gb_s": cluster.bandwidth_gb_s.model_copy(update={"to_host": 25.0})})
    assert make_plan(load(MILLION, words), slower).speed.fetch == pytest.approx(2 * plan.speed.fetch)
    assert plan.to_json()["offload_kv"] is True
