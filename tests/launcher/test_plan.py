"""`baton plan`: its arithmetic is compared with the modules themselves, and with what running models were seen to keep and send."""

import json
import re
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest
import yaml
from support import plans
from support.plans import BATCH, CONTEXT, EXCHANGED, HANDED_ON, RECOMPUTED, SENT_WITH, VARIANTS, run_of

from baton.launcher.arithmetic import REDUCE_BUCKET, Arithmetic
from baton.launcher.cli import main
from baton.launcher.cluster import Cluster, load_cluster
from baton.launcher.config import RunConfig, load
from baton.launcher.errors import ConfigError
from baton.launcher.plan import make_plan
from baton.models.config import ModelConfig
from baton.models.settings import SMALL_WIDTH, MixerConfig, footprint

RUN = Path(str(files("baton.configs"))) / "runs" / "papers" / "mamba-1.4b-pile.yaml"


@pytest.fixture(scope="module")
def measured():
    done = subprocess.run([sys.executable, "-P", plans.__file__], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


# ---------------------------------------------------------------------------------------------------------- against the modules


def on_meta(config, dtype="float32"):
    import torch

    from baton.models.lm import LanguageModel

    with torch.device("meta"):
        return LanguageModel(config, compute_dtype=getattr(torch, dtype))


def shipped():
    return sorted(path.name.removesuffix(".yaml") for path in (files("baton.configs") / "models").iterdir())


def planned(model):
    """The arithmetic of a run of this model."""
    training = {"steps": 1, "context": 64, "global_batch_tokens": 64, "optimizer": {"lr": 1e-3}}
    return Arithmetic(RunConfig.model_validate({"name": "x", "model": model.model_dump(), "training": training}))


def assert_parameters(config):
    from baton.parallel.layout import named_layouts
    from baton.parallel.tensor import ComputeCopy

    model = on_meta(config)
    by_module = {name: (layout.shape, layout.split, bool(layout.partial_over)) for name, _, layout in named_layouts(model)}
    counted = {p.name: (p.shape, p.split, p.partial) for p in planned(config).parameters}
    assert counted == by_module
    copied = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, ComputeCopy)}
    if not config.tie_embeddings:
        copied.remove("embedding.weight")  # looked up in float32
    assert {p.name for p in planned(config).parameters if p.uses} == copied


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_the_modules(variant, tied):
    assert_parameters(run_of(variant).model.model_copy(update={"tie_embeddings": tied}))


@pytest.mark.parametrize("name", shipped())
def test_parameters_of_shipped_models_are_the_modules(name):
    assert_parameters(ModelConfig(**yaml.safe_load((files("baton.configs") / "models" / f"{name}.yaml").read_text())))


@pytest.mark.parametrize("variant", VARIANTS)
def test_states_are_the_modules(variant):
    config = run_of(variant)
    types = {"compute": "bfloat16", "float32": "float32", "int64": "int64", "bool": "bool"}
    (name,) = config.model.mixers
    model = on_meta(config.model, "bfloat16")
    by_module = {x.name: (x.shape, str(x.dtype), x.tp, x.grad, x.grows) for x in model.layers["0"].leaves}
    leaves = config.model.mixers[name].footprint(SMALL_WIDTH).leaves
    counted = {f"{name}.{x.name}": (x.shape, f"torch.{types[x.dtype]}", x.tp, x.grad, x.grows) for x in leaves}
    assert counted == by_module


def test_chunks_and_buckets_are_the_kernels():
    from baton.kernels import diagonal_scan, protocol
    from baton.kernels.delta_rule import chunked as delta_rule
    from baton.kernels.eidetic_attention import chunked as eidetic_attention
    from baton.kernels.gated_linear_attention import chunked as linear_attention
    from baton.kernels.gated_slot_attention import chunked as slot_attention
    from baton.kernels.orthogonal_state import chunked as orthogonal_state
    from baton.kernels.window_attention import chunked as window_attention
    from baton.parallel.zero import deepspeed_config

    assert footprint.LINEAR_ATTENTION_CHUNK == linear_attention.CHUNK == slot_attention.CHUNK
    assert delta_rule.CHUNK == footprint.DELTA_RULE_CHUNK
    assert orthogonal_state._STEPS_LENGTH == footprint.LATTICE_STEPS_CHUNK
    assert orthogonal_state._SPAN_LENGTH == footprint.LATTICE_SPAN_CHUNK
    assert window_attention._BLOCK == footprint.WINDOW_BLOCK
    assert eidetic_attention._BLOCK == footprint.EIDETIC_BLOCK
    assert protocol._ALIGNMENT_BYTES == footprint.MESSAGE_ALIGNMENT
    for batch, channels, d_state in ((1, 64, 16), (1, 1024, 16), (4, 4096, 16), (1, 2048, 5), (2, 1024, 4)):
        carrier = footprint.Carrier("scan", (), chunk=1, elements=channels * d_state)
        expected = diagonal_scan.chunk_length(batch, channels // 2, d_state)
        assert carrier.tokens_per_chunk(footprint.Work(batch, 1 << 20, tensor=2)) == expected
    assert deepspeed_config(1.0)["zero_optimization"]["reduce_bucket_size"] == REDUCE_BUCKET


# ---------------------------------------------------------------------------------------------------- against running models

BATCH_NUMBERS = 4 * 8 + 4  # bytes per token of the batch and of what the loss keeps, which the measurement of the stack has not


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_activations_are_what_autograd_keeps(measured, variant, precision):
    """To 3 %: seeds of a chunk and the like are not counted."""
    arithmetic = Arithmetic(run_of(variant, precision=precision))
    # the last norm's output is kept by the loss
    without = BATCH_NUMBERS + 4 * SMALL_WIDTH
    counted = arithmetic.activations(recompute=False) - BATCH * CONTEXT * without
    assert counted == pytest.approx(measured["saved"][variant][precision], rel=0.03)


@pytest.mark.parametrize("variant", RECOMPUTED)
@pytest.mark.parametrize("recompute", [False, True])
def test_what_lives_after_forward_is_activations_and_states(measured, variant, recompute):
    arithmetic = Arithmetic(run_of(variant, precision="bfloat16"))
    counted = arithmetic.activations(recompute=recompute) + arithmetic.states - BATCH * CONTEXT * BATCH_NUMBERS
    assert counted == pytest.approx(measured["living"][f"{variant} {recompute}"], rel=0.1)


def test_a_gpu_keeps_less():
    on_cpu, on_gpu = (Arithmetic(run_of("gla", device=device)).activations(recompute=False) for device in ("cpu", "cuda"))
    assert 0.5 < on_gpu / on_cpu < 1


@pytest.mark.parametrize("variant", EXCHANGED)
@pytest.mark.parametrize(("precision", "recompute"), SENT_WITH)
def test_tensor_ranks_exchange_what_is_counted(measured, variant, precision, recompute):
    arithmetic = Arithmetic(run_of(variant, precision=precision, recompute=recompute, tensor=2))
    per_micro_batch = sum(arithmetic.tensor_volumes().values()) // arithmetic.micro_batches
    assert per_micro_batch == measured["sent"][f"{variant} {precision} {recompute}"]


def test_zero_exchanges_what_is_counted(measured):
    exchange = Arithmetic(run_of("gla", data=2)).exchange()
    numbers = Arithmetic(run_of("gla", data=2)).local_count
    # beside them the norm, the overflow and the like; partitions are padded
    assert measured["zero"]["allreduce_"] == pytest.approx(4 * numbers, abs=16)
    assert measured["zero"]["_allgather_base_"] == pytest.approx(4 * numbers, abs=64)
    assert {name: one.bytes for name, one in exchange.items()} == {
        "gradients: all-reduce over data": 4 * numbers,
        "parameters: all-gather over data": 2 * numbers,
    }


@pytest.mark.parametrize("variant", HANDED_ON)
def test_sequence_ranks_hand_on_what_is_counted(measured, variant):
    arithmetic = Arithmetic(run_of(variant, sequence=2))
    exchange = arithmetic.exchange()
    names = {"right": "States: to the next rank", "left": "cotangents: to the rank before"}
    counted = {direction: exchange[name].bytes // 2 for direction, name in names.items()}
    assert counted == measured["handed on"][variant]
    # what a span makes of a State may be a matrix, which is counted as large as the State
    kept = arithmetic.activations(recompute=False) - BATCH * CONTEXT // 2 * (BATCH_NUMBERS + 4 * SMALL_WIDTH)
    assert kept == pytest.approx(measured["saved of a segment"][variant], rel=0.06)


# ------------------------------------------------------------------------------------------------------------------ the command


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
    done = subprocess.run([sys.executable, "-c", code, *words], cwd=tmp_path, capture_output=True, text=True, check=True)
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


def test_memory_alone_gives_a_verdict(plan):
    status, out, _ = plan(RUN, "--memory-gib", 79)
    assert (status, out.splitlines()[-1][:5]) == (0, "fits:")
    status, out, _ = plan(RUN, "--memory-gib", 20)
    assert (status, out.splitlines()[-1][:13]) == (2, "does not fit:")
    assert "fits with training.recompute=true" in out


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
    assert (memory.parameters, memory.gradients, memory.optimizer) == (4 * n, 4 * n, 12 * n // 8)
    assert 0.99 * 2 * n < memory.compute_copies < 2 * n
    halved = make_plan(load(RUN, ["layout.tensor=2"])).memory
    assert halved.parameters == pytest.approx(2 * n, rel=0.001)
    assert halved.optimizer == pytest.approx(12 * n / 16, rel=0.001)
    float32 = make_plan(load(RUN, ["training.precision=float32"])).memory
    assert float32.compute_copies == 0


@pytest.mark.parametrize(
    ("words", "memory", "advice"),
    [
        ((), 20, ("training.recompute=true",)),
        (("training.recompute=true",), 17.2, ("training.micro_batch=1",)),
        (("training.recompute=true", "training.micro_batch=1"), 16.5, ("layout.data=16",)),
        (("training.recompute=true", "training.micro_batch=1"), 10, ("layout.tensor=2",)),
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
    words = ["layout.data=512", "layout.sequence=8", "training.context=1048576", "training.global_batch_tokens=1073741824"]
    status, out, err = plan(RUN, *words, "training.micro_batch=1", "--cluster", "h200", "--json")
    values = json.loads(out)
    assert (status in (0, 2), err, values["ranks"]) == (True, "", 4096)
    one = json.loads(plan(RUN, "layout.data=1", "training.micro_batch=1", "--json")[1])
    assert one["exchange"] == {}
    assert one["memory"]["optimizer"] == 12 * one["parameters"]
    assert values["memory"]["optimizer"] == pytest.approx(12 * one["parameters"] / 4096, rel=1e-5)
    assert values["exchange"]["States: to the next rank"] > 0


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


def test_a_cluster_of_ones_own(plan, tmp_path):
    path = tmp_path / "ours.yaml"
    values = load_cluster("h100").model_dump() | {"name": "ours", "memory_gib": 40}
    path.write_text(yaml.safe_dump(values))
    status, out, _ = plan(RUN, "--cluster", path)
    assert (status, "on ours" in out, "does not fit" in out) == (2, True, True)
    assert Cluster(**values).memory_gib == 40


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


def test_a_cluster_file_is_strict(plan, tmp_path):
    path = tmp_path / "ours.yaml"
    for text, needle in (("{name: x}", "gpus_per_node: Field required"), ("[", "not valid YAML"), ("3", "the file: ")):
        path.write_text(text)
        status, _, err = plan(RUN, "--cluster", path)
        assert (status, err.count("\n")) == (2, 1)
        assert needle in err


def test_a_kind_that_does_not_say_what_it_takes_is_refused():
    class Silent(MixerConfig):
        kind: str = "silent"

    config = load(RUN)
    model = config.model.model_copy(update={"mixers": {"mamba": Silent()}})
    with pytest.raises(ConfigError, match=r"model\.mixers\.mamba: kind silent does not say what it takes"):
        Arithmetic(config.model_copy(update={"model": model}))
