"""CUDA graphs: recorded and replayed passes give the same steps bitwise. On a CPU a pass or its operators run again."""

import weakref
from contextlib import contextmanager
from itertools import product

import pytest
import torch
from support.long_form import some
from support.models import SHARED, micro_batches, model_of, training
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from baton.data_pipeline.packing import Batch
from baton.launcher.config import load
from baton.launcher.errors import ConfigError
from baton.models.settings import kinds
from baton.parallel import comm_timing
from baton.parallel import mesh as meshes
from baton.parallel.cast_weights import drop_cast_weights
from baton.parallel.config import LayoutConfig
from baton.parallel.pipeline import StepSchedule
from baton.training.bptt.lane_states import LaneStates
from baton.training.build import build, make_deterministic
from baton.training.errors import RunError
from baton.training.monitoring.state_gradients import StateGradientMonitor
from baton.training.step.cuda_graphs import CudaGraphs
from baton.training.step.executor import StepExecutor
from baton.training.step.graph_recorder import CudaGraphRecorder
from baton.training.step.microbatch_runner import MicrobatchRunner

MIXERS = (*kinds(), "hybrid")


@contextmanager
def without_waiting():
    """Context in which DeepSpeed may not wait for the device, which is nothing on a CPU and ends a recording on a GPU."""
    from deepspeed.accelerator import get_accelerator

    accelerator = type(get_accelerator())

    def waits(self, device_index=None):
        raise AssertionError("a pass waits for its device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accelerator, "synchronize", waits)
        yield


class Again:
    """Repeats by running again, which needs no GPU: memory is the same each time, as a graph's is."""

    most = 2

    def __init__(self, device):
        self.records = 0

    def warm_up(self, run):
        run()

    def record(self, run):
        self.records += 1
        assert self.records <= self.most

        def asks_nothing():
            with without_waiting():
                run()

        return asks_nothing

    def release(self):
        pass


class OfRoles(Again):
    """Passes of segments, however many, have at most eight parts."""

    most = 8


class OfOperators(OfRoles):
    """Repeats the operators that were called, on the memory of their results, as a graph does its kernels: no Python of the passes
    runs again. Recording computes too, with what is there. On a CPU shapes depend on where documents begin: none may."""

    def record(self, run):
        self.records += 1
        assert self.records <= self.most
        calls = []

        class Listening(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                found = function(*args, **(kwargs or {}))
                given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
                made = [x for x in tree_leaves(found) if isinstance(x, torch.Tensor)]
                new = [x.untyped_storage()._cdata not in given for x in made]
                calls.append((function, args, kwargs or {}, made, new))
                return found

        with Listening():
            run()

        @torch.no_grad()
        def again():
            for function, args, kwargs, made, new in calls:
                found = [x for x in tree_leaves(function(*args, **kwargs)) if isinstance(x, torch.Tensor)]
                for x, own, value in zip(made, new, found, strict=True):
                    if own:
                        x.detach().copy_(value)

        return again


def cut(batch, tokens, device, lanes=()):
    return Batch(*(x[:, :tokens].to(device) for x in (batch.tokens, batch.labels, batch.pos)), lanes)


def steps(mesh, mixer, recorder, compute_dtype="bfloat16", recompute="none", bptt=None, count=5, inside=False):
    """Results of steps, and the parameters behind them: shorter sequences after two, then one that a NaN makes be refused.

    inside: no document begins in the tokens.
    """
    config = training(compute_dtype=compute_dtype, recompute=recompute, bptt=bptt)
    train_state = build(model_of(mixer), config, mesh)
    graphs = None if recorder is None else CudaGraphs(train_state.model, recorder)
    lanes = LaneStates(train_state.model, config, mesh) if config.carries_lane_states else None
    executor, found = StepExecutor(train_state.model, train_state.engine, mesh, lanes=lanes, cuda_graphs=graphs), []
    link = train_state.model.link
    monitor = None if link is None else StateGradientMonitor(train_state.model, link, mesh, keep=link.size > 1)
    victim = train_state.model.embedding.weight
    for step in range(count):
        planted, before = step == 3, victim.detach().clone()
        if planted:
            with torch.no_grad():
                victim[:, 1] = torch.nan
            drop_cast_weights(train_state.model)
        ranks = mesh.layout.context
        if monitor is not None:
            monitor.start()
        own = micro_batches(step, mesh.data_rank, mesh.layout.data, config.micro_batch_size, mesh.context_rank, ranks)
        tokens = 24 if step < 2 else 13
        if bptt is not None:
            tokens -= tokens % bptt["segment"]
            segments, own = tokens // bptt["segment"], own[:2]
            executor.schedule = StepSchedule(segments, min(segments, bptt.get("gradient_segments", segments)))
            for batch in own:
                ongoing = torch.arange(batch.pos.shape[1], dtype=batch.pos.dtype)
                if inside:
                    batch.pos.copy_(100 + ongoing)
                elif step in (0, 4):  # a lane begins with a document, also behind a step that zeroed it
                    batch.pos.copy_(torch.where((batch.pos == 0).cumsum(1) > 0, batch.pos, ongoing))
        numbers = range(mesh.data_rank, 8, mesh.layout.data)
        rows = [tuple(numbers[n : n + 2]) for n in range(0, len(numbers), 2)]
        result = executor.step([cut(b, tokens // ranks, mesh.device, r) for b, r in zip(own, rows)], 3e-3)
        assert result.updated is not planted, result
        seen = None if monitor is None or planted else monitor.read(24 // ranks, cut=lanes is not None)
        found.append((str(result.loss), str(result.grad_norm), result.labels, str(result.nonfinite), seen))
        if planted:
            with torch.no_grad():
                victim.copy_(before)
            drop_cast_weights(train_state.model)
    executor.close()
    assert graphs is None or graphs._recorded is None
    left = {name: p.detach().clone() for name, p in train_state.model.named_parameters()}
    if lanes is not None:
        left |= lanes.to_message(lanes.read(range(mesh.data_rank, 8, mesh.layout.data)))
    return found, left


def differences(mesh, mixers, recorder, compute_dtype="bfloat16", recompute="none", bptt=None, count=5):
    """What is not the same with recorded passes and without, by mixer. recorder: name of a class of this file, or the class."""
    found, recorder = {}, globals()[recorder] if isinstance(recorder, str) else recorder
    for mixer in mixers:
        (plain, expected), (results, parameters) = (
            steps(mesh, mixer, made, compute_dtype, recompute, bptt, count, recorder is OfOperators) for made in (None, recorder)
        )
        found[mixer] = [(a, b) for a, b in zip(plain, results, strict=True) if a != b]
        found[mixer] += [name for name, x in expected.items() if not torch.equal(x, parameters[name])]
    return found


@pytest.mark.parametrize(
    ("layout", "mixers"),
    [
        ({}, ("bmojo",)),
        pytest.param({}, ("lattice", "bmojo"), marks=pytest.mark.long),
        pytest.param({"data": 2, "zero": 2}, ("retnet",), marks=pytest.mark.long),
        *(pytest.param({"data": 2, "zero": zero}, ("hybrid",), marks=pytest.mark.long) for zero in (0, 2)),
        pytest.param({"tensor": 2}, ("longhorn",), marks=pytest.mark.long),
        pytest.param({"tensor": 2}, ("hybrid",), marks=pytest.mark.long),
        ({"context": 2}, ("longhorn",)),
        pytest.param({"context": 2}, ("hybrid",), marks=pytest.mark.long),
        *(
            pytest.param({"context": 2, "context_comm": form}, ("hybrid", "bmojo"), marks=pytest.mark.long)
            for form in ("ring", "early", "all_gather")
        ),
        pytest.param({}, MIXERS, marks=pytest.mark.long),
    ],
    ids=lambda x: str(x) if isinstance(x, dict) else f"{len(x)} mixers",
)
def test_recorded_passes_are_plain_passes_to_the_bit(pool, layout, mixers):
    for found in pool.run(differences, mixers, "Again", timeout_s=600, **layout):
        assert found == {mixer: [] for mixer in mixers}


EXACT = {"mode": "exact", "segment": 6}
ALL, SOME, ONE = ({"mode": "truncated", "segment": 6, "gradient_segments": n} for n in (4, 2, 1))
SEGMENTED = (*(kind for kind, settings in kinds().items() if not settings.small().state_grows), "hybrid")


@pytest.mark.parametrize(
    ("bptt", "mixer", "recompute", "recorder", "count"),
    [
        (EXACT, "mamba", "none", "OfRoles", 5),
        pytest.param(ALL, "linear_attention", "none", "OfOperators", 5, marks=pytest.mark.long),
        (SOME, "attention", "full", "OfOperators", 5),
        pytest.param(ONE, "retnet", "none", "OfOperators", 5, marks=pytest.mark.long),
        *(
            pytest.param(bptt, mixer, recompute, recorder, 5, marks=pytest.mark.long)
            for mixer in SEGMENTED
            for bptt in (EXACT, ALL, SOME, ONE)
            for recompute in ("none", "full")
            for recorder in ("OfRoles", "OfOperators")
            # a lane of Lattice must begin with a document
            if (mixer, recorder) != ("lattice", "OfOperators") or bptt is EXACT
        ),
    ],
    ids=lambda x: str(x.get("gradient_segments", "exact")) if isinstance(x, dict) else None,
)
def test_recorded_passes_of_segments_are_plain_passes_to_the_bit(single_mesh, bptt, mixer, recompute, recorder, count):
    """Losses, gradients, those of States, and the States that lanes carry. In the later steps half as many segments are read."""
    assert differences(single_mesh, [mixer], recorder, recompute=recompute, bptt=bptt, count=count) == {mixer: []}


@pytest.mark.long
@pytest.mark.parametrize("layout", [{"data": 2, "zero": 2}, {"tensor": 2}], ids=str)
@pytest.mark.parametrize("bptt", [EXACT, SOME], ids=lambda bptt: bptt["mode"])
def test_recorded_passes_of_segments_are_plain_passes_over_ranks(pool, bptt, layout):
    for found in pool.run(differences, ("hybrid", "bmojo"), "OfRoles", bptt=bptt, timeout_s=600, **layout):
        assert found == {"hybrid": [], "bmojo": []}


def test_a_trace_has_the_memory_of_what_is_recorded(single_mesh, monkeypatch):
    """The recorded passes' gradients alone are as large as the model."""
    train_state = build(model_of("retnet"), training(), single_mesh)
    graphs, alive = CudaGraphs(train_state.model, Again), []
    executor, traced = StepExecutor(train_state.model, train_state.engine, single_mesh, cuda_graphs=graphs), MicrobatchRunner.finish
    batches = [cut(batch, 24, single_mesh.device) for batch in micro_batches(0, 0, 1, 2)]
    executor.step(batches, 1e-3)
    gradients = [weakref.ref(gradient) for _, gradient in graphs._recorded.gradients]

    def finish(runner):
        alive.append(sum(gradient() is not None for gradient in gradients))
        traced(runner)

    monkeypatch.setattr(MicrobatchRunner, "finish", finish)
    with torch.no_grad():
        train_state.model.embedding.weight[:, 1] = torch.nan
    assert not executor.step(batches, 1e-3).updated
    assert alive == [0]


def of_batches(mesh, mixer, recorder, counts):
    """Losses, norms and parameters of steps of so many micro-batches without a first token; how often passes were recorded; and
    of which parameters a backward pass replaces the gradient, which is NaN before it."""
    config = training(compute_dtype="bfloat16")
    train_state, times = build(model_of(mixer), config, mesh), []

    def counted(device):
        times.append(device)
        return recorder(device)

    graphs = None if recorder is None else CudaGraphs(train_state.model, counted)
    executor, results = StepExecutor(train_state.model, train_state.engine, mesh, cuda_graphs=graphs), []
    for step, count in enumerate(counts):
        if graphs is not None and graphs._recorded is not None:
            added = {gradient.data_ptr() for gradient in graphs._recorded.added}
            for _, gradient in graphs._recorded.gradients:
                if gradient.data_ptr() not in added:
                    gradient.fill_(torch.nan)
        own = micro_batches(step, 0, 1, 2)[:count]
        for batch in own:
            batch.pos.copy_(100 + torch.arange(batch.pos.shape[1]))
        result = executor.step([cut(b, 24, mesh.device) for b in own], 3e-3)
        assert result.updated, result
        results.append((str(result.loss), str(result.grad_norm)))
    replaced = None
    if graphs is not None:
        added = {gradient.data_ptr() for gradient in graphs._recorded.added}
        replaced = {name for name, p in train_state.model.named_parameters() if p.grad is None} - {
            name
            for (name, p), (_, gradient) in zip(train_state.model.named_parameters(), graphs._recorded.gradients, strict=True)
            if gradient.data_ptr() in added
        }
    executor.close()
    return results, [p.detach().clone() for p in train_state.model.parameters()], len(times), replaced


@pytest.mark.parametrize("mixer", ["mamba", *SHARED])  # tied; untied, and with weights that layers share
@pytest.mark.parametrize("recorder", some([Again, OfOperators], [OfOperators]))
def test_a_steps_only_backward_pass_replaces_the_gradients_of_weights(single_mesh, mixer, recorder):
    plain = of_batches(single_mesh, mixer, None, (1, 1, 1))
    recorded = of_batches(single_mesh, mixer, recorder, (1, 1, 1))
    assert recorded[0] == plain[0]
    assert all(torch.equal(a, b) for a, b in zip(recorded[1], plain[1], strict=True))
    assert recorded[2] == 1
    weights = {name for name, p in build(model_of(mixer), training(), single_mesh).model.named_parameters() if p.dim() == 2}
    assert recorded[3] & weights, "matmuls replace what their gradient was"


def test_steps_of_other_counts_are_recorded_again_only_where_they_add(single_mesh):
    counts = (1, 1, 2, 1, 3)
    plain, recorded = (of_batches(single_mesh, "hybrid", recorder, counts) for recorder in (None, Again))
    assert recorded[0] == plain[0]
    assert all(torch.equal(a, b) for a, b in zip(recorded[1], plain[1], strict=True))
    assert recorded[2] == 2
    assert recorded[3] == set(), "all gradients are added to"


class Stale(OfRoles):
    """What runs again begins with the State that entered the last of the segments between."""

    def record(self, run):
        replay, passes = super().record(run), run.func.__self__
        if (run.func.__name__, run.args) != ("forward", ("between",)):
            return replay
        seen = []

        def again():
            block = passes.entering.memory.block
            seen.append(block.clone())
            block.copy_(seen[0])
            replay()

        return again


def test_a_recorded_segment_that_begins_with_another_state_is_found(single_mesh):
    with pytest.raises(RunError, match="a segment that was computed twice left another State the second time"):
        steps(single_mesh, "retnet", Stale, bptt=EXACT, count=1)


def test_the_comparison_sees_another_micro_batch(pool):
    assert pool.run(differences, ["mamba"], "Forgetful")[0]["mamba"]


class Forgetful(Again):
    """Its second forward pass and all behind it read the tokens of the first."""

    def record(self, run):
        replay = super().record(run)
        if self.records > 1:
            return replay
        (tokens, *_), ran = run.func.__self__.inputs, []

        def again():
            ran.append(tokens.clone())
            tokens.copy_(ran[0])
            run()

        return again


OF_THE_HOST = """
import sys
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import JITFunction
from baton.kernels.compile.aot import META, Target, compiling
from baton.models.config import ModelConfig
from baton.models.settings import SMALL_WIDTH, kinds
from baton.parallel import mesh as meshes
from baton.parallel import comm_timing
from baton.parallel.config import LayoutConfig
from baton.parallel.linear import fused_grad_accumulation
from baton.parallel.pipeline import StepSchedule
from baton.training.bptt.lane_states import LaneStates
from baton.training.build import build_model
from baton.training.config import TrainingConfig
from baton.training.step.cuda_graphs import CudaGraphs
from baton.training.evaluation.generation import Draws, Sampling, _Decoding
from baton.training.evaluation.prompts import Room, rows_of_tokens
from baton.data_pipeline.packing import Batch

JITFunction._do_compile = lambda self, key, *_: self  # nothing is compiled here


class Watched(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls):  # nothing is compiled
        return False

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        given = [x for x in torch.utils._pytree.tree_leaves((arguments, options or {})) if isinstance(x, torch.Tensor)]
        made = function(*arguments, **(options or {}))
        given += [x for x in torch.utils._pytree.tree_leaves(made) if isinstance(x, torch.Tensor)]
        if any(x.device != META for x in given):
            seen.append(f"{name}: {function} of {[(x.device.type, tuple(x.shape)) for x in given]}")
        return made


class Recorder:
    def __init__(self, device):
        pass

    def warm_up(self, run):
        run()

    def record(self, run):
        with Watched():
            run()
        return lambda: None

    def release(self):
        pass


@torch.no_grad()
def decode(model):
    ids, pos = (torch.empty(2, 64, dtype=dtype, device=META) for dtype in (torch.int64, torch.int32))
    states = model(ids, pos)[1]
    draws = Draws([0, 0], 9, META)
    decoding = _Decoding(model, states, Room(rows_of_tokens(model), [64, 64], 9), draws, Sampling(0.9, 5, 0.9), 64, None)
    with Watched():
        decoding._run()


seen = []
ALONE, comms = LayoutConfig(), ["ring", "all_gather"]
FORMS = [{}, {"recompute": "full"}, {"recompute": "selective"}]
FORMS += [{"bptt": {"mode": "exact", "segment": 16}}, {"bptt": {"mode": "truncated", "segment": 32, "gradient_segments": 1}}]
LONG = sys.argv[1:] == ["long"]
BY_OPERATORS = () if LONG else ("s4d", "ttt")  # PyTorch's, of which chunks of a few tokens have many
if LONG:
    FORMS.append({"compute_dtype": "float32"})
    comms.append("early")
LAYOUTS = [LayoutConfig(tensor=2), *(LayoutConfig(context=2, context_comm=comm) for comm in comms)]
PLAIN, *OTHERS = [*((form, ALONE) for form in FORMS), *(({}, layout) for layout in LAYOUTS)]
# a mixer of each family goes through one of them beside the plain form, mamba through the rest
FAMILIES = "gla", "bmojo", "lattice", "gated_delta_net", "attention"
OFTEN = "mamba", *FAMILIES, "gsa", "mamba3", "rwkv7", "channel_mix", "swiglu"  # of each kind of recurrence and of State
met = {name: [OTHERS[FAMILIES.index(name)]] if name in FAMILIES else [] for name in kinds()} | {"mamba": OTHERS[len(FAMILIES) :]}
if LONG:
    met = dict.fromkeys(kinds(), OTHERS)
for name, settings, (changes, layout) in (
    (name, settings, case) for name, settings in kinds().items() for case in (PLAIN, *met[name])
):
    if (layout.context > 1 or "bptt" in changes) and settings.small().state_grows:
        continue
    if not LONG and name not in OFTEN:
        continue
    if name in BY_OPERATORS and (changes or layout.context_comm != "ring"):
        continue
    model = ModelConfig(d_model=SMALL_WIDTH, n_layers=1, vocab_size=64, pattern=[name], mixers={name: settings.small()})
    values = {"steps": 1, "sequence_length": 64, "global_batch_tokens": 128, "micro_batch_size": 2}
    values |= {"compute_dtype": "bfloat16", **changes}
    with compiling(Target(90)):
        mesh = meshes.initialize(layout, device=META, rank=0, store=FakeStore())
        config = TrainingConfig(**values, optimizer={"lr": 1e-3})
        built = build_model(model, config, META, mesh)
        lanes = LaneStates(built, config, mesh) if config.carries_lane_states else None
        ids, pos = (torch.empty(2, 64, dtype=dtype, device=META) for dtype in (torch.int64, torch.int32))
        with fused_grad_accumulation():
            schedule = StepSchedule(config.segments, config.gradient_segments)
            CudaGraphs(built, Recorder).runner([Batch(ids, ids, pos, (0, 1))], 1.0, schedule, lanes)
        if changes == {} and layout == ALONE:  # and a step of decoding
            decode(built)
        meshes.shutdown()
whole = {"attention": kinds()["attention"].small().model_copy(update={"window": None})}
with compiling(Target(90)):
    mesh = meshes.initialize(ALONE, device=META, rank=0, store=FakeStore())
    model = ModelConfig(d_model=SMALL_WIDTH, n_layers=1, vocab_size=64, pattern=["attention"], mixers=whole)
    decode(build_model(model, TrainingConfig(**values, optimizer={"lr": 1e-3}), META, mesh))
    meshes.shutdown()
print("\\n".join(seen))
seen.clear()
with Watched():
    torch.zeros(2).to(META)
assert seen, "what is of the host is seen"
"""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("words", [(), pytest.param(("long",), marks=pytest.mark.long)], ids=len)
def test_passes_ask_nothing_of_the_host(programs, words):
    """A graph has no host: on tensors that have no values, so that asking for one fails, no operation meets a tensor of the CPU."""
    assert programs.run(OF_THE_HOST, *words).strip() == ""


RUN = """
name: graphs
model: {d_model: 32, n_layers: 2, vocab_size: 64, pattern: [mamba], mixers: {mamba: {d_state: 4}}}
data: {kind: mqar, length: 64, vocab_size: 64}
training: {steps: 2, sequence_length: 64, global_batch_tokens: 256, micro_batch_size: 2, cuda_graphs: true, optimizer: {lr: 1.0e-3}}
"""


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["layout.pipeline=2"], "layout.pipeline=2"),
        (["training.bptt={mode: exact, segment: 32}", "layout.context=2"], "training.bptt over layout.context=2"),
        (
            ["training.bptt={mode: exact, segment: 32}", "model.mixers.mamba={kind: attention, window: null, heads: 2}"],
            "training.bptt of model.mixers.mamba",
        ),
        (["device=cpu", "profile=true", "training.steps=20"], "device=cpu and profile"),
    ],
    ids=lambda x: x if isinstance(x, str) else None,
)
def test_what_cannot_be_recorded_is_refused(tmp_path, words, named):
    (tmp_path / "run.yaml").write_text(RUN)
    load(tmp_path / "run.yaml", ["layout.data=2", "layout.tensor=2", "layout.context=2", "training.recompute=selective"])
    for mode in ("exact", "truncated"):
        load(tmp_path / "run.yaml", ["layout.data=2", "layout.tensor=2", f"training.bptt={{mode: {mode}, segment: 32}}"])
    with pytest.raises(ConfigError) as refused:
        load(tmp_path / "run.yaml", words)
    assert str(refused.value).startswith(f"training.cuda_graphs=true does not go with {named}: ")


@pytest.fixture
def on_gpu():
    make_deterministic(training())
    yield meshes.initialize(LayoutConfig(), device=torch.device("cuda", 0), rank=0, store=torch.distributed.HashStore())
    meshes.shutdown()
    torch.set_deterministic_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("mixer", MIXERS)
def test_graphs_are_plain_passes_to_the_bit(mixer, on_gpu):
    for compute_dtype in ("bfloat16", "float32"):
        assert differences(on_gpu, [mixer], CudaGraphRecorder, compute_dtype) == {mixer: []}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("recompute", "mixer"),
    [
        *(("states", mixer) for mixer in ("decays", "gates", "deltas")),
        *product(("selective", "full"), ("mamba", "longhorn", "bmojo", "falcon", "hybrid")),
    ],
)
def test_what_is_recomputed_is_recorded_too(mixer, recompute, on_gpu):
    assert differences(on_gpu, [mixer], CudaGraphRecorder, recompute=recompute) == {mixer: []}


@pytest.mark.gpu
@pytest.mark.parametrize("mixer", SEGMENTED)
def test_graphs_of_segments_are_plain_passes_to_the_bit(mixer, on_gpu):
    number = SEGMENTED.index(mixer)
    for bptt, recompute in ((EXACT, "none"), ((ALL, SOME, ONE)[number % 3], ("none", "full")[number % 2])):
        assert differences(on_gpu, [mixer], CudaGraphRecorder, recompute=recompute, bptt=bptt) == {mixer: []}


def on_ranks(mesh, mixers, recompute="none"):
    make_deterministic(training())
    return differences(mesh, mixers, CudaGraphRecorder, recompute=recompute)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(
    ("form", "recompute"), [("ring", "none"), ("early", "none"), ("all_gather", "none"), ("ring", "selective"), ("ring", "full")]
)
def test_messages_between_context_ranks_are_recorded_too(form, recompute, gpu_pool):
    mixers = ("gsa", "bmojo", "hybrid") if recompute == "none" else ("bmojo", "hybrid")
    for found in gpu_pool.run(on_ranks, mixers, recompute, context=2, context_comm=form, timeout_s=600):
        assert found == {mixer: [] for mixer in mixers}


def rank_of(mesh):
    return mesh.rank


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_process_groups_can_be_destroyed_after_their_collectives_were_recorded(gpu_pool):
    """NCCL waits without a limit for graphs that have them."""
    for found in gpu_pool.run(on_ranks, ["hybrid"], tensor=2, timeout_s=600):
        assert found == {"hybrid": []}
    assert gpu_pool.run(rank_of, data=2, timeout_s=120) == [0, 1]  # another layout has other groups


@pytest.mark.gpu
@pytest.mark.parametrize("bptt", [None, EXACT], ids=["whole", "segments"])
def test_a_graph_is_launched_and_not_its_kernels(bptt, on_gpu, monkeypatch):
    from triton.runtime import JITFunction

    launched, run = [], JITFunction.run
    monkeypatch.setattr(JITFunction, "run", lambda self, *a, **k: (launched.append(self), run(self, *a, **k))[1])
    train_state, schedule = build(model_of("hybrid"), training(bptt=bptt), on_gpu), StepSchedule(*(4, 4) if bptt else ())
    graphs = CudaGraphs(train_state.model)
    executor = StepExecutor(train_state.model, train_state.engine, on_gpu, schedule=schedule, cuda_graphs=graphs)
    batches = [cut(b, 24, on_gpu.device) for b in micro_batches(0, 0, 1, 2)]
    executor.step(batches, 1e-3)
    assert launched
    launched.clear()
    executor.step(batches, 1e-3)
    assert {kernel.__name__ for kernel in launched} == {"adamw_kernel"}, "the update is launched by itself"


@pytest.mark.gpu
def test_what_a_graph_waits_for_is_not_timed(on_gpu):
    """Events that were recorded have no time."""
    comm_timing.take_wait_seconds()
    x, recorder = torch.ones(3, device=on_gpu.device), CudaGraphRecorder(on_gpu.device)
    with comm_timing.timed_wait():
        x += 1
    torch.cuda.synchronize()
    assert comm_timing.take_wait_seconds() > 0

    def run():
        with comm_timing.timed_wait():
            x.add_(1)

    recorder.warm_up(run)
    torch.cuda.synchronize()
    comm_timing.take_wait_seconds()
    recorder.record(run)()
    torch.cuda.synchronize()
    assert comm_timing.take_wait_seconds() == 0
    assert x.tolist() == [4.0] * 3
