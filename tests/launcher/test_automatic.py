"""training.recompute=auto and training.cuda_graphs=auto: the choice, compared with the plans of explicit settings."""

import math
from importlib.resources import files
from itertools import product
from pathlib import Path

import pytest
import yaml
from support.long_form import some

from baton.launcher import run_directory, worker
from baton.launcher.cluster import load_cluster
from baton.launcher.config import load
from baton.launcher.devices import gpu_memory
from baton.launcher.errors import ConfigError, is_out_of_memory
from baton.launcher.planner import automatic
from baton.launcher.planner.plan import make_plan
from baton.launcher.run_directory import read_config
from baton.parallel import control_groups
from baton.training.monitoring.metrics import read_metrics

CONFIGS = Path(str(files("baton.configs")))
RUN = CONFIGS / "runs" / "papers" / "mamba-1.4b-pile.yaml"
GIB = 1 << 30
KEEPING = ("none", "states", "selective")
PAIRS = [*((form, graphs) for graphs in (True, False) for form in KEEPING), ("full", True), ("full", False)]
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
        pytest.param(["training.micro_batch_size=1"], marks=pytest.mark.long),
        pytest.param(["layout.tensor=4"], marks=pytest.mark.long),
        ["model=lattice-1.3b"],
        pytest.param(["model=gsa-1.3b"], marks=pytest.mark.long),
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
    assert set(PAIRS) == set(product((*KEEPING, "full"), (True, False)))
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


@pytest.mark.long  # a start for each choice; the choices themselves are tested above
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
    (131072, [("none", False), ("states", False), ("none", True), ("states", True), ("full", False), ("full", True)]),
    # short ones with as many keys as queries: another forward pass takes less
    (4096, [("none", False), ("states", False), ("full", False), ("none", True), ("states", True), ("full", True)]),
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


KEPT = [*HYBRID, "training.bptt.segment=131072", "layout.data=2"]
"""Two ranks of 31.5 GiB of keys and values of earlier segments each, beside 8 GiB of copies of saves."""
FORMS = [("none", False), ("states", False), ("none", True), ("states", True), ("full", False), ("full", True)]


@pytest.mark.parametrize(("ranks", "pipeline"), some(list(product((1, 2), (1, 2))), [(2, 1)]))
def test_keys_are_offloaded_where_the_hosts_of_all_ranks_have_room(ranks, pipeline):
    """At any size of both memories, the plan's choice is the fastest of those that fit both; it fits if one of them does."""
    words = [*KEPT, f"layout.pipeline={pipeline}"]
    nodes = load_cluster("h100").model_copy(update={"gpus_per_node": ranks, "slurm": None, "reserved_gib": 0.0})

    def plan(gib, host_gib, *more):
        cluster = nodes.model_copy(update={"memory_gib": gib, "host_memory_gib": host_gib})
        return make_plan(load(MILLION, [*words, *more]), cluster)

    explicit = {
        form: plan(1, None, f"training.recompute={form[0]}", f"training.offload_kv={str(form[1]).lower()}") for form in FORMS
    }
    needs = {form: (found.memory.peak, found.on_host.of_node) for form, found in explicit.items()}
    assert len({host for _, host in needs.values()}) == 2, "what is recomputed makes no difference to the host"
    if ranks == 2 and pipeline == 1:
        assert needs["none", True][1] == 2 * (63 << 29) + 2 * explicit["none", True].host
    for gpu in sorted({peak - d for peak, _ in needs.values() for d in (0, 1)}):
        for host in sorted({of_node - d for _, of_node in needs.values() for d in (0, 1)}):
            found = plan(gpu / GIB, (math.ceil(host / 0.9) + 0.5) / GIB)
            assert (found.capacity, found.on_host.usable) == (gpu, host)
            fitting = [form for form in FORMS if needs[form][0] <= gpu and needs[form][1] <= host]
            chosen = found.config.training.recompute, found.config.training.offload_kv
            assert found.fits is bool(fitting)
            if fitting:
                assert chosen == fitting[0]
                continue
            # only the host is too small for what would fit the GPUs
            on_gpu = [needs[form][1] for form in FORMS if needs[form][0] <= gpu]
            none_on_host = host < min(of_node for _, of_node in needs.values())
            assert (found.choice.refusal() is not None) is (none_on_host or bool(on_gpu))
            assert needs[chosen][1] <= host or (none_on_host and not chosen[1])


def test_a_plan_says_what_both_memories_lack(capsys, tmp_path):
    from baton.launcher.cli import main

    def verdict(memory_gib, host_gib, *more):
        values = load_cluster("h100").model_dump() | {"name": "ours", "memory_gib": memory_gib, "host_memory_gib": host_gib}
        (tmp_path / "ours.yaml").write_text(yaml.safe_dump(values))
        status = main(["plan", str(MILLION), "--cluster", str(tmp_path / "ours.yaml"), *KEPT, *more])
        *_, auto, last = capsys.readouterr().out.splitlines()
        return status, auto, last

    status, auto, last = verdict(79.6, 120)
    assert (status, last.startswith("fits: ")) == (0, True)
    assert "training.offload_kv=true" in auto
    assert " per rank, 79.0 of 108.0 GiB of a node's host)" in auto
    status, auto, last = verdict(79.6, 60)
    assert status == 2
    assert "training.offload_kv=false" in auto
    assert last.startswith("does not fit: ")
    assert "too much (with training.offload_kv=true, 79.00 GiB of 54.00 GiB of a node's host memory); fits with " in last
    advice = last.partition("fits with ")[2].split()
    assert verdict(79.6, 60, *advice)[0] == 0
    assert "offload_kv" not in " ".join(advice)


@pytest.fixture
def gpu_machine(monkeypatch):
    """A function: this machine has GPUs of so many bytes that ranks may fill, and a host of so many that they may page-lock."""

    def make(gpus, capacity, usable):
        monkeypatch.setattr(run_directory, "kind_here", lambda wanted: "cuda")
        monkeypatch.setattr(run_directory, "gpu_memory", lambda: (gpus, math.ceil((capacity + 3 * GIB) / 0.97) + 1))
        monkeypatch.setattr(run_directory, "host_memory", lambda: math.ceil(usable / 0.9))

    return make


@pytest.mark.parametrize("usable", [79 * GIB, 79 * GIB - 1])
def test_a_start_chooses_for_all_ranks_what_the_plan_does(gpu_machine, tmp_path, capsys, usable):
    """One process writes it into the attempt's configuration, which every rank of every node reads."""
    gpu_machine(2, 74 * GIB, usable)
    config = load(MILLION, [*KEPT, f"directory={tmp_path / 'run'}"])
    cluster = load_cluster("h100").model_copy(update={"host_memory_gib": (math.ceil(usable / 0.9) + 0.5) / GIB, "slurm": None})
    planned = make_plan(config, cluster, memory_gib=74)
    if not planned.fits:
        with pytest.raises(ConfigError, match=r"has too little memory: 79\.00 GiB of 79\.00 GiB") as caught:
            run_directory.open_attempt(config).__enter__()
        assert "\n" not in str(caught.value)
        assert caught.value.exit_status == 2
        assert not (tmp_path / "run" / "config.yaml").exists(), "the same command with other settings is no other run's"
        assert not [*(tmp_path / "run" / "attempts").glob("[0-9]*")]
        return
    with run_directory.open_attempt(config) as attempt:
        chosen = read_config(attempt / "config.yaml")
    assert not automatic.is_automatic(chosen)
    assert chosen.training.offload_kv is True
    names = ("recompute", "cuda_graphs", "offload_kv")
    assert [getattr(chosen.training, name) for name in names] == [getattr(planned.config.training, name) for name in names]
    assert str(planned.choice).split(" (")[0] in capsys.readouterr().err


def test_the_ranks_of_a_node_share_its_host_and_nodes_do_not(gpu_machine, tmp_path):
    """As a job of SLURM starts it: two ranks, of one node or of two."""
    gpu_machine(2, 74 * GIB, 40 * GIB)
    config = load(MILLION, [*KEPT, f"directory={tmp_path / 'run'}"])
    run_directory.open_run(config)
    attempt = run_directory.new_attempt(config, 1)
    assert read_config(attempt / "config.yaml").training.offload_kv is True
    with pytest.raises(ConfigError, match="too little memory"):
        run_directory.new_attempt(config, 2)
    assert [path.name for path in (tmp_path / "run" / "attempts").iterdir()] == ["0001"]


def test_the_limit_of_a_job_is_what_its_host_has(gpu_machine, tmp_path, monkeypatch):
    """SLURM's --mem sets it for a group of processes, here of version 2."""
    gpu_machine(2, 74 * GIB, 1 << 50)
    root, group = tmp_path / "root", "system.slice/slurmstepd.scope/job_3"
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(f"0::/{group}/step_batch/user/task_0\n")
    (root / "proc/self/mountinfo").write_text("41 31 0:38 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
    (root / "sys/fs/cgroup" / group).mkdir(parents=True)
    limit = root / "sys/fs/cgroup" / group / "memory.max"
    monkeypatch.setattr(control_groups.os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1 << 40}.__getitem__)
    monkeypatch.setattr(run_directory, "host_memory", lambda: control_groups.host_memory(root))
    config = load(MILLION, [*KEPT, f"directory={tmp_path / 'run'}"])
    for text in ("max", str(100 * GIB)):
        limit.write_text(f"{text}\n")
        assert run_directory.for_this_machine(config).training.offload_kv is True
    limit.write_text(str(80 * GIB))
    with pytest.raises(ConfigError, match=r"79\.00 GiB of 72\.00 GiB of a node's host memory"):
        run_directory.for_this_machine(config)


def test_what_a_gpu_lacks_is_no_refusal_for_the_host(gpu_machine, tmp_path, capsys):
    """Nothing fits the GPU by the plan, which may be wrong: of what the host has room for, what needs least is tried."""
    gpu_machine(2, 8 * GIB, 40 * GIB)
    chosen = run_directory.for_this_machine(load(MILLION, [*KEPT, f"directory={tmp_path / 'run'}"])).training
    assert (chosen.recompute, chosen.offload_kv) == ("full", False)
    assert "too much; `baton plan` says what to change" in capsys.readouterr().err


def test_copies_of_saves_alone_may_be_too_much(gpu_machine, tmp_path):
    """Also of a model that offloads nothing."""
    gpu_machine(1, 74 * GIB, 16 * GIB)
    config = load(RUN, ["layout.data=1", f"directory={tmp_path / 'run'}"])
    run_directory.for_this_machine(config)
    gpu_machine(1, 74 * GIB, 16 * GIB - 1)
    with pytest.raises(ConfigError, match="use data ranks on more nodes") as caught:
        run_directory.for_this_machine(config)
    assert "offload_kv" not in str(caught.value)
    run_directory.for_this_machine(load(RUN, ["layout.data=1", *words_of("none", True), f"directory={tmp_path / 'run'}"]))


def test_out_of_memory_advises_offloading_where_the_host_has_room(monkeypatch, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(load(MILLION, [*KEPT, "training.offload_kv=false"]).to_yaml())
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for usable, advised in ((79 * GIB, True), (79 * GIB - 1, False)):
        monkeypatch.setattr(control_groups, "host_memory", lambda usable=usable: math.ceil(usable / 0.9))
        assert worker._remedy(path).startswith("set training.offload_kv=true, ") is advised


def test_out_of_memory_is_said_though_the_tokenizer_cannot_be_read_any_more(tmp_path):
    path, tokenizer = tmp_path / "config.yaml", tmp_path / "tokenizer.model"
    tokenizer.write_bytes(b"damaged")
    path.write_text(load(MILLION, [*KEPT, "training.offload_kv=false", f"data.tokenizer={tokenizer}"]).to_yaml())
    assert worker._remedy(path).startswith("set training.offload_kv=true, ")
