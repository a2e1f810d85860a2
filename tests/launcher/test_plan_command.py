"""The command `baton plan`: its verdicts, advice and errors, for pipeline stages and thousands of ranks as for one rank."""

import dataclasses
import json
import re
import subprocess
import sys
import time
from importlib.resources import files
from pathlib import Path

import pytest
import yaml
from support.measured_costs import ZERO

from baton.launcher.cli import main
from baton.launcher.cluster import Cluster, load_cluster
from baton.launcher.config import load
from baton.launcher.errors import ConfigError
from baton.launcher.planner.comm_volume import ring
from baton.launcher.planner.memory import Arithmetic, of_stages
from baton.launcher.planner.plan import make_plan
from baton.models.settings import MixerConfig

RUN = Path(str(files("baton.configs"))) / "runs" / "papers" / "mamba-1.4b-pile.yaml"


@pytest.fixture
def plan(capsys):
    """A function: `baton plan` with words; its status, what it printed, and what it said of an error."""

    def run(*words):
        status = main(["plan", *map(str, words)])
        out, err = capsys.readouterr()
        return status, out, err

    return run


def test_a_plan_needs_no_torch_and_writes_nothing(tmp_path):
    code = (
        "import sys; from baton.launcher.cli import main; status = main(sys.argv[1:]); "
        "print(status, *[m for m in ('torch', 'deepspeed', 'megatron') if m in sys.modules])"
    )
    words = ["plan", str(RUN), "--cluster", "h100"]
    done = subprocess.run([sys.executable, "-P", "-c", code, *words], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0"
    assert done.stdout.splitlines()[-2].startswith("fits: ")
    assert not list(tmp_path.iterdir())


def test_without_a_cluster_there_are_no_times_and_no_verdict(plan):
    status, out, _ = plan(RUN)
    assert status == 0
    assert "tokens/s" not in out
    assert re.fullmatch(
        r"needs [0-9.]+ GiB per rank; --cluster FILE or --memory-gib N says whether that fits", out.splitlines()[-1]
    )
    assert "1,372,178,432 parameters, 8 ranks" in out


def test_a_plan_says_which_of_the_runs_files_are_not_there(plan, tmp_path, monkeypatch):
    """A plan needs neither data nor tokenizer; `baton train` does, so their absence is said, and changes no verdict."""
    monkeypatch.chdir(tmp_path)
    status, out, err = plan(RUN, "data.path=shards", "data.tokenizer=t.model", "--memory-gib", 79)
    assert status == 0
    assert out.splitlines()[-1].startswith("fits:")
    tokenizer, data = err.splitlines()
    assert tokenizer.startswith("not there yet, so `baton train` would refuse: data.tokenizer=t.model: no such file")
    assert data.startswith("not there yet, so `baton train` would refuse: data.path=shards: ")


def test_a_plan_runs_no_command_and_asks_no_server_for_the_data(plan, tmp_path):
    words = (f"data.path=pipe:touch {tmp_path}/was-here; cat {{}}", "data.tokenizer=t.model", "--memory-gib", 79)
    status, _, err = plan(RUN, *words)
    assert status == 0
    assert not (tmp_path / "was-here").exists()
    assert len(err.splitlines()) == 1, "the tokenizer alone is missed"


def test_memory_alone_gives_a_verdict(plan):
    status, out, _ = plan(RUN, "--memory-gib", 79)
    assert (status, out.splitlines()[-1][:5]) == (0, "fits:")
    status, out, _ = plan(RUN, "training.recompute=none", "--memory-gib", 20)
    assert (status, out.splitlines()[-1][:13]) == (2, "does not fit:")
    assert "fits with training.recompute=full" in out


@pytest.mark.parametrize("cluster", ["a100", "h100", "h200"])
def test_shipped_clusters_plan_every_shipped_run(cluster):
    known = load_cluster(cluster)
    for path in sorted(RUN.parent.glob("*.yaml")):
        found = make_plan(load(path), known)
        assert found.memory.peak > 9 * found.parameters
        assert 0 < found.speed.utilisation < 1
        assert found.fits or found.advice


def test_json_is_the_same_plan(plan):
    status, out, _ = plan(RUN, "--cluster", "h100", "--json")
    values = json.loads(out)
    found = make_plan(load(RUN), load_cluster("h100"))
    assert status == 0
    assert (values["parameters"], values["ranks"], values["cluster"], values["fits"]) == (1_372_178_432, 8, "h100", True)
    assert values["memory"]["peak"] == found.memory.peak
    assert values["seconds"]["step"] == pytest.approx(found.speed.step)
    assert values["exchange"] == found.exchange


def test_sizes_of_what_stays_are_the_arithmetic_of_adam():
    """4 bytes of parameters, 4 of gradients, 2 of compute copies, 12 over the data and sequence ranks; all over the tensor's."""
    n = 1_372_178_432
    memory = make_plan(load(RUN)).memory
    assert (memory.parameters, memory.gradients, memory.optimizer) == (4 * n, 4 * n, 8 * n // 8)
    assert 0.99 * 2 * n < memory.compute_copies < 2 * n
    halved = make_plan(load(RUN, ["layout.tensor=2"])).memory
    assert halved.parameters == pytest.approx(2 * n, rel=0.001)
    assert halved.optimizer == pytest.approx(8 * n / 16, rel=0.001)
    float32 = make_plan(load(RUN, ["training.compute_dtype=float32"])).memory
    assert float32.compute_copies == 0


def test_moments_in_bfloat16_take_half(plan):
    two = ["training.optimizer.moments_dtype=bfloat16"]
    found, halved = make_plan(load(RUN)), make_plan(load(RUN, two))
    assert halved.memory.optimizer == found.memory.optimizer // 2
    saved = make_plan(load(RUN, ["device=cpu", *two]))
    assert saved.host == make_plan(load(RUN, ["device=cpu"])).host * 8 // 12
    update, half = (of_stages(load(RUN, words))[0].operations().update for words in ([], two))
    assert update - half == pytest.approx(8 * 1_372_178_432 // 8, rel=1e-3), "four bytes less are read, and written"
    for words, said in (
        ([*two, "layout.zero=0"], "training.optimizer.moments_dtype=bfloat16 does not go with layout.zero=0"),
        ([*two, "training.optimizer.betas=[0.9, 0.999]"], "moments_dtype=bfloat16 does not go with betas=[0.9, 0.999]"),
    ):
        with pytest.raises(ConfigError) as refused:
            load(RUN, words)
        assert said in str(refused.value)
        assert "\n" not in str(refused.value)


def test_the_copy_of_a_save_is_in_host_memory_beside_a_gpus_and_in_a_cpus_own(plan):
    """12 bytes a number of the rank's part; page-locked, what torch's allocator makes of it."""
    n = 1_372_178_432
    found = make_plan(load(RUN))
    assert (found.host, found.memory.saved) == (2 << 30, 0)
    assert 12 * n // 8 < found.host < 2 * 12 * n // 8
    assert make_plan(load(RUN, ["layout.zero=0"])).host == 16 << 30
    cpu = make_plan(load(RUN, ["device=cpu"]))
    assert cpu.host == cpu.memory.saved == 12 * n // 8
    stages = make_plan(load(RUN, ["device=cpu", "layout.pipeline=4"]))
    assert stages.host == max(12 * stage.parameters // 8 for stage in stages.stages)
    line = r"copy of what a checkpoint holds, page-locked +2\.00 GiB\n"
    assert re.search(r"host memory per rank\n  " + line, plan(RUN)[1])
    assert re.search(r"copy of what a checkpoint holds +1\.92 GiB\n", plan(RUN, "device=cpu")[1])
    values = json.loads(plan(RUN, "--json")[1])
    assert values["host"] == values["stages"][0]["host"] == 2 << 30


def test_a_nodes_host_must_have_what_its_ranks_page_lock(plan, tmp_path):
    """Eight ranks of 2 GiB each, nine tenths of a node's memory for them; ranks on processors have it in their own memory."""
    path = tmp_path / "ours.yaml"
    values = load_cluster("h100").model_dump() | {"name": "ours", "memory_gib": 200}

    def found(host_gib, *words):
        path.write_text(yaml.safe_dump(values | {"host_memory_gib": host_gib}))
        status, out, _ = plan(RUN, "--cluster", path, *words)
        return status, out

    status, out = found(17.7)
    assert status == 2
    assert re.search(r"copies, of a node's 8 ranks +16\.00 GiB\n  90% of a node's memory +15\.93 GiB\n", out)
    assert (
        "does not fit: 16.00 GiB of 15.93 GiB of a node's host memory, 71.68 MiB too much; use data ranks on more nodes "
        "(layout.data), which divide a save's copy, or nodes with more memory" in out
    )
    status, out = found(17.8)
    assert (status, "\nfits: " in out) == (0, True)
    assert found(None)[0] == found(17.7, "device=cpu")[0] == 0
    kept = ["training.bptt={mode: exact, segment: 8192}", "training.sequence_length=1048576", "training.micro_batch_size=1"]
    kept += ["training.global_batch_tokens=8388608", "model=gated-delta-net-hybrid-1.3b", "training.offload_kv=true"]
    status, out = found(300, *kept)
    assert (status, "or training.offload_kv=false where GPUs have room for these, or layout.context to" in out) == (2, True)
    answer = json.loads(plan(RUN, "--cluster", path, "--json", *kept)[1])
    assert (answer["fits"], answer["host_capacity"]) == (False, 300 << 30)
    assert answer["host_of_node"] == 8 * (answer["host"] + answer["offloaded"]) > 0.9 * answer["host_capacity"]


def test_a_nodes_host_has_the_copies_of_the_ranks_that_write_and_each_stages_own(plan, tmp_path):
    """Without ZeRO one data rank writes for all; the second stage of a node has less to copy than the first."""
    path = tmp_path / "ours.yaml"
    values = load_cluster("h100").model_dump() | {"name": "ours", "host_memory_gib": 24}
    path.write_text(yaml.safe_dump(values))
    one_writes = make_plan(load(RUN, ["layout.zero=0"]), load_cluster(str(path)))
    assert (one_writes.on_host.of_node, one_writes.fits) == (16 << 30, True)
    unequal = make_plan(load(RUN, ["layout.data=2", "layout.pipeline=4"]), load_cluster(str(path)))
    assert unequal.on_host.of_node == 2 * sum(stage.host for stage in unequal.stages) < 8 * unequal.host
    over_nodes = make_plan(load(RUN, ["layout.pipeline=2"]), load_cluster(str(path)))
    assert over_nodes.on_host.of_node == 8 * over_nodes.host, "a node has ranks of one stage"
    path.write_text(yaml.safe_dump(values | {"host_memory_gib": 10}))
    assert (
        "use layout.zero=1 and data ranks on more nodes, which divide a save's copy"
        in plan(RUN, "layout.zero=0", "--cluster", path)[1]
    )


def test_a_plan_for_a_cluster_without_gpus_is_that_of_ranks_on_processors(tmp_path):
    path = tmp_path / "ours.yaml"
    path.write_text(yaml.safe_dump(load_cluster("sandbox").model_dump() | {"memory_gib": 99, "host_memory_gib": 1}))
    auto, cpu = (make_plan(load(RUN, [f"device={device}"]), load_cluster(str(path))) for device in ("auto", "cpu"))
    assert load(RUN).device == "auto"
    assert (auto.memory, auto.on_host.of_node, auto.fits) == (cpu.memory, 0, True)


def test_what_a_plan_advises_fits_the_host_too(tmp_path):
    """Keys and values of earlier segments beside the GPUs would make room on them, and nodes have none for these."""
    path, words = tmp_path / "ours.yaml", ["training.bptt={mode: exact, segment: 8192}", "training.sequence_length=1048576"]
    words += ["training.micro_batch_size=1", "training.global_batch_tokens=8388608", "model=gated-delta-net-hybrid-1.3b"]
    for gib, advice in ((4000, "training.offload_kv=true"), (100, "layout.tensor=2")):
        values = load_cluster("h100").model_dump() | {"name": "ours", "memory_gib": 50, "host_memory_gib": gib}
        path.write_text(yaml.safe_dump(values))
        found = make_plan(load(RUN, [*words, "training.offload_kv=false"]), load_cluster(str(path)))
        assert (found.memory.peak > found.capacity, found.advice) == (True, (advice,))
        assert make_plan(load(RUN, [*words, "training.offload_kv=false", advice]), load_cluster(str(path))).fits


def test_lanes_that_a_step_may_give_back_are_counted_once():
    """The States of a step's lanes beside those of all lanes, whatever segments the step has."""
    words = ["training.bptt={mode: truncated, segment: 512}", "training.lanes=512"]
    found, cut = make_plan(load(RUN, words)), make_plan(load(RUN, [*words, "training.bptt.gradient_segments=1"]))
    training = load(RUN, words).training
    assert found.memory.before == cut.memory.before == found.memory.lanes * training.sequences_per_step // 512 > 0
    assert make_plan(load(RUN)).memory.before == 0


def test_stages_share_the_model_and_the_first_keeps_most_activations():
    whole = make_plan(load(RUN))
    found = make_plan(load(RUN, ["layout.pipeline=4"]))
    assert found.parameters == whole.parameters == sum(stage.parameters for stage in found.stages)
    assert [stage.layers.stop for stage in found.stages[:-1]] == [stage.layers.start for stage in found.stages[1:]]
    assert found.fullest == 0
    assert found.memory == found.stages[0].memory
    assert [stage.in_flight for stage in found.stages] == [4, 3, 2, 1]
    # stages 1 and 2 have equal layers, and one micro-batch more or less
    one, two = (stage.memory.activations for stage in found.stages[1:3])
    each = of_stages(load(RUN, ["layout.pipeline=4"]))[1].activations(full_recompute=False)
    assert len(found.stages[1].layers) == len(found.stages[2].layers)
    assert one - two == each
    # the last one is lent the embedding: values, copy and gradient, and no optimizer
    last, head = found.stages[-1], 50280 * 2048
    assert last.memory.parameters == last.memory.gradients == 4 * (last.parameters + head)
    assert last.memory.optimizer == 8 * -(-last.parameters // 8)
    assert [stage.memory.loss > 0 for stage in found.stages] == [False, False, False, True]
    untied = make_plan(load(RUN, ["layout.pipeline=4", "model.tie_embeddings=false"])).stages[-1]
    assert untied.memory.parameters == 4 * untied.parameters
    assert not any("tied" in name for name in untied.exchange)


def test_a_stage_waits_for_the_others():
    """(stages - 1) / micro-batches of the time of the passes, and none of the update's."""
    cluster, words = load_cluster("h100"), ["layout.data=1", "layout.pipeline=4", "training.micro_batch_size=1"]
    few, many = (make_plan(load(RUN, [*words, f"training.global_batch_tokens={2048 * n}"]), cluster) for n in (4, 64))
    assert (few.bubble, many.bubble) == (pytest.approx(3 / 7), pytest.approx(3 / 67))
    for plan, n in ((few, 4), (many, 64)):
        passes = plan.speed.bubble * n / 3
        assert 0 < passes < plan.speed.step - plan.speed.bubble
    assert many.speed.bubble == pytest.approx(few.speed.bubble), "as long, however many follow"
    assert few.speed.bubble > 0.3 * few.speed.step > 0.3 * many.speed.step / 16
    assert make_plan(load(RUN), cluster).speed.bubble == 0


def test_the_table_has_a_line_per_stage_and_says_when_micro_batches_are_few(plan):
    words = ["layout.pipeline=4", "layout.data=64", "--cluster", "h100"]
    status, out, _ = plan(RUN, *words)
    lines = out.splitlines()
    at = lines.index("bubble: 60% of the micro-batches' time a stage waits for others")
    assert [line.split()[0] for line in lines[at - 5 : at]] == ["stage", "0", "1", "2", "3"]
    assert lines[at - 1].split()[1].endswith("-47")
    assert "memory per rank of stage 0, which has most" in lines
    assert "note: 2 micro-batches do not fill layout.pipeline=4 stages" in out
    assert status == 0
    assert "do not fill" not in plan(RUN, "layout.pipeline=4", "--cluster", "h100")[1]
    values = json.loads(plan(RUN, *words, "--json")[1])
    assert [stage["layers"][0] for stage in values["stages"]] == [int(line.split()[1].split("-")[0]) for line in lines[at - 4 : at]]
    assert values["fullest_stage"] == 0
    assert values["memory"] == values["stages"][0]["memory"]


def test_gathered_states_go_to_every_rank_of_the_sequence():
    """Mamba's scan: a decay and a sum for every number of state, to 7 ranks; the convolution's tail goes to one as before."""
    words = ["layout.data=1", "layout.context=8", "training.cuda_graphs=false"]
    relayed, gathered = (make_plan(load(RUN, [*words, *more])) for more in ((), ("layout.context_comm=all_gather",)))
    state = 48 * relayed.micro_batches * 4 * 4096 * 16 * load(RUN).training.micro_batch_size
    names = {"States": "to the next rank", "cotangents": "to the rank before"}
    for what, where in names.items():
        assert gathered.exchange[f"{what}: all-gather over context"] == 7 * 2 * state
        assert relayed.exchange[f"{what}: {where}"] - gathered.exchange[f"{what}: {where}"] == state
    # whose spans' scans run again for their gradient: kept is the span's decay, not the States on the way
    assert dataclasses.replace(gathered.memory, activations=0, in_hand=0) == dataclasses.replace(
        relayed.memory, activations=0, in_hand=0
    )
    assert 0 < gathered.memory.activations < relayed.memory.activations
    early = make_plan(load(RUN, [*words, "layout.context_comm=early"]))
    assert early.memory == gathered.memory
    assert early.exchange == relayed.exchange
    # every rank's part passes every link of the ring, where a State goes to a neighbour once
    cluster = load_cluster("h100")
    slower, faster = (make_plan(load(RUN, [*words, *more]), cluster) for more in (("layout.context_comm=all_gather",), ()))
    assert slower.speed.exchange > faster.speed.exchange


def test_a_shared_residual_stream_saves_memory_where_layers_are_run_again():
    """Without recomputation, which gathers what layers read once more, it sends no more, and keeps a part of what norms make beside
    what is gathered of it."""
    words = ["layout.tensor=4"]
    whole, shared = (make_plan(load(RUN, [*words, *more])) for more in ((), ("layout.sequence_parallel=true",)))
    tokens, width = load(RUN).training.micro_batch_size * 2048, 2048
    # a quarter of what 48 norms make, which on one rank is what the layers keep anyway; three quarters of a number per row, and of
    # what the last norm makes, which nobody else keeps
    more = 48 * (tokens // 4 * 2 * width - 3 * tokens // 4 * 4) - 3 * tokens // 4 * 2 * width
    assert shared.memory.activations - whole.memory.activations == more
    partial = "partial gradients: all-reduce over tensor"
    assert partial not in whole.exchange
    assert shared.exchange[partial] == ring(2 * 4 * 49 * width, 4)
    assert sum(shared.exchange.values()) - shared.exchange[partial] == sum(whole.exchange.values())
    again = [make_plan(load(RUN, [*words, "training.recompute=full", *more])) for more in ((), ("layout.sequence_parallel=true",))]
    assert again[0].memory.activations / 4 < again[1].memory.activations < again[0].memory.activations / 3.5
    sent = [sum(value for name, value in plan.exchange.items() if name.startswith("layers forward")) for plan in again]
    assert sent[1] - sent[0] == pytest.approx(48 * whole.micro_batches * ring(2 * tokens * width, 4), rel=1e-9)


def test_without_zero_every_rank_has_all_moments():
    """8 bytes of moments, from ZeRO-1 on over the ranks; the parameters are the master weights."""
    n = 1_372_178_432
    memory = {zero: make_plan(load(RUN, [f"layout.zero={zero}"])).memory for zero in ZERO}
    assert [memory[zero].optimizer for zero in ZERO] == [8 * n, 8 * n // 8, 8 * n // 8]
    assert len({memory[zero].gradients for zero in ZERO}) == 1, "whole until the step"
    sent = {zero: make_plan(load(RUN, [f"layout.zero={zero}"])).exchange for zero in ZERO}
    assert sum(sent[0].values()) == ring(8 * n, 8)
    assert sum(sent[2].values()) == sum(sent[1].values()) - ring(4 * n, 8)
    found = make_plan(load(RUN, ["layout.zero=0", "training.recompute=full", "training.micro_batch_size=1"]), memory_gib=22)
    assert found.advice == ("layout.zero=1",)
    assert make_plan(load(RUN, ["training.recompute=full", "training.micro_batch_size=1"]), memory_gib=22).fits


@pytest.mark.parametrize(
    ("words", "memory", "advice"),
    [
        (("layout.tensor=8", "training.recompute=full", "training.micro_batch_size=1"), 2.3, ("layout.pipeline=2",)),
        (("training.recompute=none",), 20, ("training.recompute=full",)),
        ((), 16.5, ("training.micro_batch_size=1",)),
        (("training.recompute=full",), 16.5, ("training.micro_batch_size=1",)),
        (("training.recompute=full", "training.micro_batch_size=1"), 15.9, ("layout.data=16",)),
        (("training.recompute=full", "training.micro_batch_size=1"), 10, ("layout.tensor=2",)),
    ],
)
def test_advice_is_the_first_change_that_fits_and_does_fit(words, memory, advice):
    config = load(RUN, list(words))
    found = make_plan(config, memory_gib=memory)
    assert not found.fits
    assert found.advice == advice
    assert make_plan(load(RUN, [*words, *advice]), memory_gib=memory).fits


def test_where_nothing_helps_the_plan_says_so(plan):
    status, out, _ = plan(RUN, "--memory-gib", 0.5)
    assert status == 2
    assert "nothing that was tried fits" in out.splitlines()[-1]


def test_four_thousand_ranks_are_planned_as_one_is(plan):
    words = ["layout.data=512", "layout.context=8", "training.sequence_length=1048576", "training.global_batch_tokens=1073741824"]
    status, out, err = plan(RUN, *words, "training.micro_batch_size=1", "--cluster", "h200", "--json")
    values = json.loads(out)
    assert (status in (0, 2), err, values["ranks"]) == (True, "", 4096)
    one = json.loads(plan(RUN, "layout.data=1", "training.micro_batch_size=1", "--json")[1])
    assert one["exchange"] == {}
    assert one["memory"]["optimizer"] == 8 * one["parameters"]
    assert values["memory"]["optimizer"] == pytest.approx(8 * one["parameters"] / 4096, rel=1e-5)
    assert values["exchange"]["States: to the next rank"] > 0


def test_four_thousand_ranks_in_stages_are_planned_and_advised_at_once(plan):
    words = ["layout.data=64", "layout.pipeline=16", "layout.tensor=4", "training.micro_batch_size=1", "model.n_layers=128"]
    began = time.process_time()
    status, out, err = plan(RUN, *words, "--cluster", "h200", "--memory-gib", 1, "--json")
    seconds = time.process_time() - began
    values = json.loads(out)
    assert (status, err, values["ranks"], len(values["stages"])) == (2, "", 4096, 16)
    assert sum(stage["parameters"] for stage in values["stages"]) == values["parameters"]
    assert seconds < 20, "every advice was tried, each with a cut of its own"


def test_rings_within_a_node_are_faster_and_tensor_groups_share_a_nodes_network():
    cluster = load_cluster("h100")
    inside, between = cluster.bandwidth_gb_s.in_node * 1e9, cluster.bandwidth_gb_s.between_nodes * 1e9
    assert cluster.seconds(10**9, 8, 1) == pytest.approx(10**9 / inside)
    # eight ranks of a node enter and leave it together; with tensor groups of 4 only two of each data group are in a node
    assert cluster.seconds(10**9, 64, 1) == pytest.approx(10**9 / (8 * between))
    assert cluster.seconds(10**9, 16, 4) == pytest.approx(10**9 / (2 * between))
    # a neighbour on another node is alone
    assert cluster.seconds(10**9, 8, 1, pairs=True) == pytest.approx(10**9 / inside)
    assert cluster.seconds(10**9, 16, 1, pairs=True) == pytest.approx(10**9 / between)
    assert cluster.seconds(10**9, 16, 8) == pytest.approx(10**9 / between)


@pytest.mark.parametrize(
    ("layout", "factor"),
    [
        ({"layout.tensor": 2, "layout.data": 1}, 4),
        ({"layout.tensor": 1, "layout.data": 2}, 1),
        ({"layout.context": 2, "layout.data": 1}, 1),
        ({"layout.pipeline": 2, "layout.data": 1}, 1),
    ],
    ids=str,
)
def test_what_tensor_ranks_exchange_has_a_share_of_the_rate(layout, factor):
    """All else is sent at the whole of it, once a step or to a neighbour, except for the tokens' broadcast, which is small."""
    full = load_cluster("a100")
    quarter = full.model_copy(update={"bandwidth_gb_s": full.bandwidth_gb_s.model_copy(update={"share_in_passes": 0.25})})
    full = full.model_copy(update={"bandwidth_gb_s": full.bandwidth_gb_s.model_copy(update={"share_in_passes": 1.0})})
    config = load(RUN, ["training.micro_batch_size=1", *(f"{key}={value}" for key, value in layout.items())])
    seconds = [make_plan(config, cluster).speed.exchange for cluster in (full, quarter)]
    assert seconds[0] > 0
    assert seconds[1] / seconds[0] == pytest.approx(factor, rel=0.01)


CASE = re.compile(
    r"(?P<model>[\w.-]+), (?:1 rank|(?P<layout>\w+ \d+(?:, \w+ \d+)*)), (?P<rows>\d+)x(?P<length>\d+) x (?P<count>\d+)"
)
STEPS = [
    (CASE.fullmatch(row["case"]), row["ours"])
    for row in json.loads((Path(__file__).parents[2] / "benchmarks" / "results" / "scaling.json").read_text())
    if (row["metric"], row["device"]) == ("seconds a step", "4 x NVIDIA H200")
]
"""Cases of benchmarks/scaling.py that were measured on this machine, each with the median of its steps."""


@pytest.mark.parametrize(("case", "measured"), STEPS, ids=[case[0] for case, _ in STEPS])
def test_a_step_takes_as_long_as_planned(case, measured, tmp_path):
    """Within 15 %."""
    rows, length, count = (int(case[name]) for name in ("rows", "length", "count"))
    layout = {name: int(ranks) for name, _, ranks in (part.partition(" ") for part in (case["layout"] or "data 1").split(", "))}
    if ranks := layout.pop("sequence_parallel", 0):
        layout |= {"tensor": ranks, "sequence_parallel": True}
    values = {
        "name": "measured",
        "model": case["model"],
        "data": {"path": "shards", "tokenizer": "tokenizer.model"},
        "layout": layout,
        "training": {
            "steps": 10,
            "sequence_length": length,
            "micro_batch_size": rows,
            "global_batch_tokens": rows * length * count * layout.get("data", 1),
            "recompute": "none",
            "optimizer": {"lr": 1e-4},
        },
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    planned = make_plan(load(tmp_path / "run.yaml", []), load_cluster("h200")).speed.step
    assert planned == pytest.approx(measured, rel=0.15)


def test_measured_steps_are_of_every_layout():
    layouts = [case["layout"] for case, _ in STEPS]
    assert None in layouts
    names = {part.partition(" ")[0] for layout in layouts if layout for part in layout.split(", ")}
    assert names == {"data", "context", "tensor", "sequence_parallel", "pipeline"}


LONG = {
    row["metric"]: row["ours"]
    for row in json.loads((Path(__file__).parents[2] / "benchmarks" / "results" / "long_context.json").read_text())
    if row["case"] == "gated-delta-net-hybrid-1.3b 1048576, one document, keys and values offloaded, exact"
}
"""Of benchmarks/long_context.py on an H200."""


def test_a_step_of_a_million_tokens_is_as_planned(tmp_path):
    """Full attention is nearly all of it, and keys and values come from the host: time within 15 %, memory within 10 %."""
    length = 1048576
    values = {
        "name": "measured",
        "model": "gated-delta-net-hybrid-1.3b",
        "data": {"path": "shards", "tokenizer": "tokenizer.model"},
        "training": {
            "steps": 10,
            "sequence_length": length,
            "global_batch_tokens": length,
            "recompute": "none",
            "cuda_graphs": False,
            "offload_kv": True,
            "bptt": {"mode": "exact", "segment": 16384},
            "optimizer": {"lr": 1e-4},
        },
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    found = make_plan(load(tmp_path / "run.yaml", []), load_cluster("h200"))
    assert found.speed.attention > 0.8 * found.speed.step
    assert found.speed.fetch > 0
    assert found.speed.step == pytest.approx(LONG["seconds a step"], rel=0.15)
    assert found.stages[0].memory.peak / 2**30 == pytest.approx(LONG["peak GiB"], rel=0.1)


def test_a_cluster_of_ones_own(plan, tmp_path):
    path = tmp_path / "ours.yaml"
    values = load_cluster("h100").model_dump() | {"name": "ours", "memory_gib": 18}
    path.write_text(yaml.safe_dump(values))
    status, out, _ = plan(RUN, "--cluster", path)
    assert (status, "on ours" in out, "does not fit" in out) == (2, True, True)
    assert Cluster(**values).memory_gib == 18


REFUSALS = {
    "unknown key": ((RUN, "training.stepz=3"), "unknown key training.stepz"),
    "data does not divide": ((RUN, "layout.data=7"), "layout.data=7 does not divide the 256 sequences"),
    "tensor does not divide": ((RUN, "layout.tensor=3"), "layout.tensor=3 does not divide"),
    "no vocabulary": ((RUN, "model.vocab_size=null"), "set model.vocab_size=N to plan without it"),
    "unknown cluster": ((RUN, "--cluster", "b100"), "no cluster is called 'b100'; known: a100, h100, h200"),
    "no such file": ((RUN, "--cluster", "nowhere.yaml"), "nowhere.yaml: no such file"),
}


@pytest.mark.parametrize(("words", "needle"), REFUSALS.values(), ids=REFUSALS.keys())
def test_refusals_are_one_line(plan, words, needle):
    status, out, err = plan(*words)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert needle in err


def test_the_duration_is_that_of_all_steps_at_their_own_speed():
    """A warm-up of the batch and of the length: three kinds of steps, each planned as a run of its own."""
    warmup = ["training.batch_size_warmup=[{steps: 100, global_batch_tokens: 262144}]"]
    warmup += ["training.sequence_length_warmup=[{steps: 300, sequence_length: 1024}]"]
    cluster, steps = load_cluster("h100"), load(RUN).training.steps
    found = make_plan(load(RUN, warmup), cluster).duration
    # shorter sequences come in larger micro-batches, of as many tokens
    short = ["training.sequence_length=1024", f"training.micro_batch_size={2 * load(RUN).training.micro_batch_size}"]
    alone = [
        (100, ["training.global_batch_tokens=262144", *short]),
        (200, short),
        (steps - 300, []),
    ]
    plans = [(count, make_plan(load(RUN, words), cluster)) for count, words in alone]
    assert found.seconds == pytest.approx(sum(count * plan.speed.step for count, plan in plans), rel=1e-9)
    assert found.tokens == sum(count * plan.config.training.global_batch_tokens for count, plan in plans)
    assert found.gpu_hours == pytest.approx(8 * found.seconds / 3600)


def test_nodes_set_the_data_ranks(plan):
    status, out, _ = plan(RUN, "--cluster", "h100", "--nodes", 4, "layout.tensor=2", "--json")
    assert (status, json.loads(out)["ranks"], json.loads(out)["layout"]["data"]) == (0, 32, 16)
    assert json.loads(out)["duration"]["gpus"] == 32
    for words, needle in (
        (("--nodes", 2), "--nodes needs --cluster"),
        (("--cluster", "h100", "--nodes", 2, "layout.data=4"), "--nodes sets layout.data, and so does layout.data=4"),
        (("--cluster", "h100", "--nodes", 1, "layout.pipeline=3"), "8 ranks are no multiple of the 3"),
    ):
        status, out, err = plan(RUN, *words)
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert needle in err


def test_smaller_nodes_have_fewer_ranks_and_their_network_in_between(plan):
    """Two nodes of four GPUs: the eight ranks of one node, whose gradients go over the network between nodes instead."""
    status, out, _ = plan(RUN, "--cluster", "h100", "--nodes", 2, "--gpus-per-node", 4, "--json")
    split, one = json.loads(out), json.loads(plan(RUN, "--cluster", "h100", "--nodes", 1, "--json")[1])
    assert (status, split["ranks"], one["ranks"], one["duration"]["gpus"]) == (0, 8, 8, 8)
    assert split["seconds"]["exchange"] > one["seconds"]["exchange"]
    assert split["seconds"]["matrix"] == one["seconds"]["matrix"]
    status, out, err = plan(RUN, "--gpus-per-node", 4)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "--gpus-per-node needs --cluster" in err


def test_hours_are_steps_times_the_step_and_called_an_estimate(plan):
    text, found = plan(RUN, "--cluster", "h100")[1], json.loads(plan(RUN, "--cluster", "h100", "--json")[1])
    hours = load(RUN).training.steps * sum(
        found["seconds"][part] for part in ("matrix", "elementwise", "memory", "eager", "exchange")
    )
    hours /= 3600
    assert f"{hours:,.1f} hours on 8 GPUs, {8 * hours:,.1f} GPU-hours" in text
    assert "not a measurement" in text


@pytest.mark.parametrize("form", [[], ["training.recompute=none", "training.cuda_graphs=false"]], ids=["auto", "set"])
def test_a_larger_micro_batch_is_advised_where_it_fits_and_is_faster(form):
    words, cluster = ["training.micro_batch_size=1", *form], load_cluster("h100")
    plans = {n: make_plan(load(RUN, [*words, f"training.micro_batch_size={n}"]), cluster) for n in (1, 2, 4, 8, 16, 32)}
    (size, peak), first = plans[1].larger, plans[1].config.training
    assert peak == plans[size].memory.peak <= plans[size].capacity
    assert plans[size].speed.step < plans[1].speed.step

    def as_fast(plan):
        training = plan.config.training
        return plan.fits and (training.recompute, training.cuda_graphs) == (first.recompute, first.cuda_graphs)

    assert as_fast(plans[size])
    assert not any(as_fast(plan) for n, plan in plans.items() if n > size)
    assert plans[size].larger is None


def test_a_cluster_file_is_strict(plan, tmp_path):
    path = tmp_path / "ours.yaml"
    misspelt = yaml.safe_dump(load_cluster("sandbox").model_dump(mode="json")).replace("  partition:", "  partiton:")
    for text, needle in (
        (misspelt, "unknown key slurm.partiton; did you mean slurm.partition?"),
        ("{name: x, memory_tb: 3}", "unknown key memory_tb; did you mean memory_bandwidth_tb_s?"),
        ("{name: x}", "gpus_per_node is missing; set it in the file ("),
        ("[", "not valid YAML"),
        ("3", "the file: "),
    ):
        path.write_text(text)
        status, _, err = plan(RUN, "--cluster", path)
        assert (status, err.count("\n")) == (2, 1)
        assert needle in err


def test_a_kind_that_does_not_say_what_it_takes_is_refused():
    class Silent(MixerConfig):
        kind: str = "silent"

    config = load(RUN)
    model = config.model.model_copy(update={"mixers": {"mamba": Silent()}})
    with pytest.raises(ConfigError, match=r"model\.mixers\.mamba: kind silent does not say what it costs"):
        Arithmetic(config.model_copy(update={"model": model}))


@pytest.mark.parametrize("key", ["memory_gib", "host_memory_gib", "reserved_gib"])
@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), "lots", "", True, [1], 1e300])
def test_a_memory_that_is_none_is_refused_in_one_line(plan, tmp_path, key, value):
    path = tmp_path / "ours.yaml"
    path.write_text(yaml.safe_dump(load_cluster("h100").model_dump() | {"name": "ours", key: value}))
    status, out, err = plan(RUN, "--cluster", path)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"baton: {path}: {key}=")


def test_memories_that_are_very_small_or_large(plan, tmp_path):
    path = tmp_path / "ours.yaml"
    for key in ("memory_gib", "host_memory_gib"):
        path.write_text(yaml.safe_dump(load_cluster("h100").model_dump() | {"name": "ours", key: 1e-9}))
        status, out, _ = plan(RUN, "--cluster", path)
        assert (status, " of 0 bytes " in out.splitlines()[-1]) == (2, True)
    assert plan(RUN, "--memory-gib", "1e300")[0] == 0
