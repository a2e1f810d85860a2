"""Anomalous steps make no update on any rank, their cause is reported, and the run continues according to guard.policy."""

import json
import math
import random
import re
from collections import defaultdict
from dataclasses import asdict
from itertools import islice

import pytest
import torch
from support.long_form import some
from support.models import MODEL, micro_batches, training

from baton.data_pipeline.config import InductionConfig, ShardsConfig
from baton.data_pipeline.dataset import Dataset
from baton.data_pipeline.errors import DataError
from baton.data_pipeline.evaluation import documents
from baton.data_pipeline.prepare import prepare
from baton.data_pipeline.run_source import BatchStream
from baton.data_pipeline.steps import StepPlan
from baton.data_pipeline.tokenizer import load_tokenizer
from baton.data_pipeline.tokenizer_training import train_tokenizer
from baton.models.config import ModelConfig
from baton.models.settings import kinds
from baton.parallel.pipeline import StepSchedule
from baton.training import loop, run_setup
from baton.training.build import build
from baton.training.callbacks.checkpoint import CheckpointCallback
from baton.training.checkpoint.config import CheckpointConfig
from baton.training.checkpoint.manifest import Manifest
from baton.training.errors import RunError
from baton.training.evaluation.config import EvaluationConfig
from baton.training.monitoring.anomaly_detection import AnomalyDetector
from baton.training.monitoring.anomaly_recovery import AnomalyRecovery
from baton.training.monitoring.config import GuardConfig, MonitoringConfig
from baton.training.monitoring.event_log import EventLog, read_events
from baton.training.monitoring.metrics import read_metrics
from baton.training.monitoring.tensorboard import TensorBoardWriter
from baton.training.run import RunSettings
from baton.training.step.executor import StepExecutor


class Refusing:
    """A judge that refuses by its numbers; the calls count from 0."""

    def __init__(self, loss=(), norm=()):
        self._bad, self._calls = {"loss": loss, "norm": norm}, {"loss": 0, "norm": 0}

    def _next(self, what):
        self._calls[what] += 1
        return f"{what} refused" if self._calls[what] - 1 in self._bad[what] else None

    def check_loss(self, loss):
        return self._next("loss")

    def check_grad_norm(self, norm):
        assert math.isfinite(norm)
        assert norm > 0
        return self._next("norm")

    def check_update_norm(self, norm):
        return None

    def record(self, loss, norm):
        pass

    def recent(self):
        return {}

    def restore(self, recent):
        pass


def state_of(train_state):
    """Bits of everything that an update changes, on this rank."""
    state = {name: p.detach().clone() for name, p in train_state.model.named_parameters()}
    for n, fragment in enumerate(train_state.engine.fragments()):
        state |= {f"{n}.{what}": getattr(fragment, what).clone() for what in ("master", "exp_avg", "exp_avg_sq")}
    return state | {name: count.clone() for name, count in train_state.engine.update_counts().items()}


def with_refusals(mesh):
    """Steps of which the second and the fourth are refused, and the same without them: (results, states equal)."""
    results, states = [], []
    for anomaly_detector, steps in ((Refusing(loss=(1,), norm=(2,)), (0, 5, 1, 6, 2)), (None, (0, 1, 2))):
        train_state = build(MODEL, training(), mesh)
        executor = StepExecutor(train_state.model, train_state.engine, mesh, anomaly_detector=anomaly_detector)
        made = []
        for step in steps:
            before = state_of(train_state)
            result = executor.step(micro_batches(step, mesh.data_rank, mesh.layout.data, 2), 3e-3)
            made.append((result.loss, result.grad_norm, result.anomaly, result.updated))
            same = all(torch.equal(x, before[name]) for name, x in state_of(train_state).items())
            assert same is not result.updated
        results.append([one for one in made if one[3]])
        states.append(state_of(train_state))
    return results, all(torch.equal(x, states[1][name]) for name, x in states[0].items())


REFUSED_ON = [{"data": 2, "zero": 0}, {"data": 2}, {"data": 2, "zero": 2}, {"tensor": 2}, {"pipeline": 2, "data": 2}]


@pytest.mark.parametrize("layout", some(REFUSED_ON, REFUSED_ON[4:]), ids=str)
def test_a_refused_step_changes_nothing_and_the_next_ones_are_as_without_it(pool, layout):
    for (with_them, without_them), same in pool.run(with_refusals, **layout):
        assert with_them == without_them
        assert len(with_them) == 3
        assert same


def update_norms(mesh):
    """The engine's norm of each update, and the norm of what parameters changed by, all tensor parts together."""
    train_state, found = build(MODEL, training(), mesh), []
    executor = StepExecutor(train_state.model, train_state.engine, mesh)
    executor.compute_update_norm = True
    for step in range(3):
        before = {name: p.detach().clone().double() for name, p in train_state.model.named_parameters()}
        result = executor.step(micro_batches(step, mesh.data_rank, mesh.layout.data, 2), 3e-3)
        after = {name: p.detach().double() for name, p in train_state.model.named_parameters()}
        found.append((result.update_norm, sum(float((after[n] - before[n]).square().sum()) for n in after) ** 0.5))
    return found


@pytest.mark.parametrize("layout", some(REFUSED_ON[:3], REFUSED_ON[2:3]), ids=str)
def test_the_norm_of_an_update_is_that_of_the_change(pool, layout):
    for norms in pool.run(update_norms, **layout):
        assert all(ours == pytest.approx(true, rel=1e-4) for ours, true in norms)
        assert len({round(ours, 9) for ours, _ in norms}) == 3


def test_the_norm_of_an_update_is_the_same_on_any_layout(pool):
    one = [ours for ours, _ in pool.run(update_norms, data=1)[0]]
    for layout in ({"tensor": 2, "data": 2}, {"pipeline": 3}):
        assert [ours for ours, _ in pool.run(update_norms, **layout)[0]] == pytest.approx(one, rel=1e-5)


def planted(mesh, what, victim):
    """A NaN planted on one rank; what the step says."""
    train_state = build(MODEL, training(), mesh)
    executor = StepExecutor(train_state.model, train_state.engine, mesh, schedule=StepSchedule())
    executor.step(micro_batches(0, mesh.data_rank, mesh.layout.data, 2, mesh.context_rank, mesh.layout.context), 1e-3)
    if mesh.rank == victim:
        block = None if what == "tokens" else train_state.model.layers["1"]["mamba"]
        if what == "weight":
            with torch.no_grad():
                block.mixer.D[3] = torch.nan
        elif what == "tokens":

            def poison(module, arguments, output):
                if calls.append(1) or len(calls) % 2 == 0:  # the second micro-batch, also when it is run once more
                    output = output.clone()
                    output[1, 5, 3] = torch.nan
                return output

            calls = []
            train_state.model.embedding.register_forward_hook(poison)
        elif what == "gradient":
            block.mixer.D.register_hook(lambda gradient: torch.where(gradient == gradient.max(), torch.nan, gradient))
        elif what == "inside":
            block.mixer.x_proj.register_forward_hook(lambda m, a, o: (o[0], o[1].index_fill(1, torch.tensor(4), torch.inf)))
        elif what in ("large", "sum"):
            value = {"large": 1e20, "sum": 3e38}[what]
            block.mixer.D.register_hook(lambda gradient: torch.full_like(gradient, value))
        else:
            glitch = iter([True])
            block.register_forward_hook(lambda m, a, o: ((o[0][0], o[0][1] * torch.nan), o[1]) if next(glitch, False) else o)
    before = state_of(train_state)
    result = executor.step(micro_batches(1, mesh.data_rank, mesh.layout.data, 2, mesh.context_rank, mesh.layout.context), 1e-3)
    unchanged = all(x.isnan().any() or torch.equal(x, before[name]) for name, x in state_of(train_state).items())
    return result.anomaly, None if result.nonfinite is None else asdict(result.nonfinite), unchanged


# the default run plants a value of each kind on a layout of its own
LAYOUTS = [{"data": 2}, {"data": 2, "zero": 2}, {"tensor": 2}, {"pipeline": 3}, {"context": 2}]


@pytest.mark.parametrize("layout", some(LAYOUTS, LAYOUTS[4:]), ids=str)
def test_a_nan_in_a_weight_is_named_with_its_rank(pool, layout):
    for said, where, unchanged in pool.run(planted, "weight", 1, **layout):
        assert (
            said
            == "the loss or a gradient is not finite: parameter layers.1.mamba.mixer.D holds values that are not finite (rank 1)"
        )
        assert where["rank"] == 1
        assert unchanged


@pytest.mark.parametrize("layout", some(LAYOUTS, LAYOUTS[3:4]), ids=str)
def test_a_nan_in_one_documents_tokens_is_named_with_its_place(pool, layout):
    victim = 0 if "pipeline" in layout else 1
    for said, where, unchanged in pool.run(planted, "tokens", victim, **layout):
        assert said.endswith(f"the first value that is not finite comes out of embedding (rank {victim}, micro-batch 1)")
        assert (where["row"], where["data_rank"]) == (1, 1 if "data" in layout else 0)
        assert where["column"] == (12 + 5 if "context" in layout else 5)
        assert unchanged


@pytest.mark.parametrize("layout", some(LAYOUTS, LAYOUTS[2:3]), ids=str)
def test_the_module_inside_a_layer_is_named_and_not_the_layer(pool, layout):
    for said, where, unchanged in pool.run(planted, "inside", 1, **layout):
        assert said.endswith("the first value that is not finite comes out of layers.1.mamba.mixer.x_proj (rank 1, micro-batch 0)")
        assert (where["row"], where["column"]) == (0, 12 + 4 if "context" in layout else 4)
        assert unchanged


@pytest.mark.parametrize("layout", some(LAYOUTS, LAYOUTS[1:2]), ids=str)
def test_a_nan_in_one_ranks_gradient_is_named_with_its_rank(pool, layout):
    for said, _, unchanged in pool.run(planted, "gradient", 1, **layout):
        assert (
            "gradient of layers.1.mamba.mixer.D is not finite, and all gradients that lead to it are (rank 1, micro-batch 0)"
            in said
        )
        assert unchanged


@pytest.mark.parametrize("layout", some(LAYOUTS, LAYOUTS[:1]), ids=str)
def test_a_gradient_whose_square_overflows_is_said_to_be_too_large(pool, layout):
    for said, where, unchanged in pool.run(planted, "large", 1, **layout):
        assert said == "a gradient is finite, but so large that the square of its norm is not"
        assert where is None
        assert unchanged


def test_a_gradient_that_overflows_in_the_sum_of_micro_batches_is_not_said_to_be_finite(pool):
    for said, where, unchanged in pool.run(planted, "sum", 1, data=2):
        assert said == "a gradient is finite in each micro-batch, and not when they are summed"
        assert where is None
        assert unchanged


def test_a_nan_that_does_not_come_back_is_said_to_be_none_of_the_steps(pool):
    for said, where, unchanged in pool.run(planted, "glitch", 1, data=2):
        assert said == "the loss or a gradient is not finite, and in a second run of the step all are"
        assert where is None
        assert unchanged


def test_spikes_are_judged_against_the_median_of_accepted_steps():
    anomaly_detector = AnomalyDetector(GuardConfig(loss_spike=2.0, norm_spike=5.0, update_spike=3.0, window=4))
    assert anomaly_detector.check_loss(1000.0) is None, "nothing is known yet"
    for loss in (3.0, 4.0, 5.0):
        anomaly_detector.record(loss, loss / 10)
    assert anomaly_detector.check_loss(7.9) is None
    assert anomaly_detector.check_loss(8.1) == "the loss 8.1 is more than 2 times 4, the median of the last 3 steps"
    assert anomaly_detector.check_grad_norm(2.1).startswith("the gradient norm 2.1 is more than 5 times 0.4")
    assert anomaly_detector.check_grad_norm(1.9) is None
    assert [anomaly_detector.check_update_norm(x) is None for x in (1.0, 1.0, 1.0, 3.5, 2.5)] == [True, True, True, False, True]
    off = AnomalyDetector(GuardConfig())
    for _ in range(99):
        off.record(1.0, 1.0)
    assert off.check_loss(1e9) is off.check_grad_norm(1e9) is None
    assert off.recent() == {}


STEPS = 16


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A dataset in which every document has a character of its own, and its tokenizer; the tokens of two documents that are met in
    the 9th to 12th of the steps and never again, and those documents' names."""
    folder, rng = tmp_path_factory.mktemp("guard"), random.Random(0)
    texts = ["".join(rng.choice("abcdefgh ") for _ in range(rng.randint(20, 90))) for _ in range(60)]
    texts = [f"{text[:15]}{chr(0x4E00 + n)}{text[15:]}" for n, text in enumerate(texts)]
    (folder / "all.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prepare([folder / "all.jsonl"], folder / "shards", validation_fraction=0.0, workers=1, progress=lambda done, total: None)
    dataset, model = Dataset.open(folder / "shards"), folder / "t.model"
    train_tokenizer(documents(dataset, "train"), model, 350, threads=1)
    tokenizer = load_tokenizer(model)
    own = {int(tokenizer.encode(chr(0x4E00 + n))[-1]): chr(0x4E00 + n) for n in range(60)}
    plan = {"lanes": 4, "lanes_per_step": 4, "micro_batch_size": 1, "data_rank": 0, "data_size": 1, "start_step": 0, "prefetch": 1}
    met = defaultdict(list)
    with BatchStream(dataset, tokenizer, StepPlan.constant(sequence_length=16, **plan), seed=0, unit_documents=4) as stream:
        for data in islice(stream, STEPS):
            for batch in data.micro_batches:
                for token in own.keys() & set(batch.tokens.flat):
                    met[token].append(data.step)
    tokens = [token for token, steps in sorted(met.items()) if len(steps) == 1 and 8 <= steps[0] < 12][:2]
    (shard,) = dataset.shards["train"]
    payloads = dataset.read(shard, 0, 60)
    named = [[dataset.named(shard, i) for i, payload in enumerate(payloads) if own[token].encode() in payload] for token in tokens]
    return folder, tokens, [name for (name,) in named]


def error_of(settings, mesh):
    """What a run ends with; None: it is done."""
    try:
        loop.train(settings, mesh)
    except RunError as error:
        return str(error)
    return None


def run(mesh, corpus, bad, folder, policy, bptt=None, every=5):
    """A whole run of `train` in which poisonous documents make NaN: what it raised."""
    data = ShardsConfig(path=str(corpus / "shards"), tokenizer=str(corpus / "t.model"), unit_documents=4)
    config = ModelConfig(d_model=16, n_layers=2, mixers={"mamba": kinds()["mamba"](d_state=4)}, pad_vocab_to=4)
    settings = training(
        steps=STEPS,
        sequence_length=16,
        global_batch_tokens=64,
        micro_batch_size=1,
        bptt=bptt,
        checkpoint=CheckpointConfig(every=every),
        evaluation=EvaluationConfig(every=0),
        monitoring=MonitoringConfig(update_norm_every=4, state_grad_norm_every=1),
        guard=GuardConfig(policy=policy, max_interventions=2),
    )
    theirs, add = run_setup.build, TensorBoardWriter.add

    def build_poisoned(*arguments):
        train_state = theirs(*arguments)

        def poison(module, arguments, output):
            return torch.where(torch.isin(arguments[0], torch.tensor(bad))[..., None], torch.nan, output)

        train_state.model.embedding.register_forward_hook(poison)
        return train_state

    def without_pictures(writer, row):
        # of the State gradients of every step: each takes half a second
        if row["kind"] != "state_gradients":
            add(writer, row)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_setup, "build", build_poisoned)
        patch.setattr(TensorBoardWriter, "add", without_pictures)
        return error_of(RunSettings(folder, config, data, settings, ""), mesh)


def skipped(folder):
    manifest = Manifest.read(folder / "checkpoints" / f"step-{STEPS:08d}")
    return [place for cursor in manifest.cursors.values() for place in cursor["skipped"]]


@pytest.fixture(scope="module")
def rolled_back(pool, corpus, tmp_path_factory):
    """The folder of a run on two data ranks that meets both documents, and what its ranks raised."""
    folder, tokens, _ = corpus
    place = tmp_path_factory.mktemp("rolled_back")
    return place, pool.run(run, folder, tokens, place, "rollback", None, STEPS, data=2)


def test_rollback_leaves_out_the_one_document_and_the_run_ends(corpus, rolled_back):
    """And a second one that is met before the next checkpoint: the first does not come back."""
    (_, _, victims), (place, raised) = corpus, rolled_back
    assert raised == [None, None]
    rows = [row for row in read_metrics(place / "metrics.jsonl") if row["kind"] == "train"]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1)), "no step is missing or there twice"
    assert all(math.isfinite(row["loss"]) for row in rows)
    assert [row["step"] for row in rows if "update_norm" in row] == [4, 8, 12, 16]
    events = read_events(place)
    assert [event["kind"] for event in events] == ["rollback", "rollback"]
    assert sorted(event["documents"] for event in events) == sorted([victim] for victim in victims)
    assert all("comes out of embedding" in event["reason"] for event in events)
    assert len(skipped(place)) == 2


def interrupted_run(mesh, corpus, bad, folder):
    """`run`, which ends as it goes back to a checkpoint."""

    def interrupted(of):
        raise RunError("interrupted")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "_roll_back", interrupted)
        return run(mesh, corpus, bad, folder, "rollback", None, STEPS)


@pytest.mark.parametrize("layout", some([{"data": 2}, {"tensor": 2}], [{"data": 2}]), ids=str)
def test_a_run_that_ends_between_a_rollback_and_a_save_leaves_the_documents_out_all_the_same(
    pool, corpus, rolled_back, tmp_path, layout
):
    folder, tokens, victims = corpus
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    killed.mkdir()
    if layout == {"data": 2}:
        whole, _ = rolled_back
    else:
        whole.mkdir()
        pool.run(run, folder, tokens, whole, "rollback", None, STEPS, **layout)
    for _ in victims:
        assert pool.run(interrupted_run, folder, tokens, killed, **layout) == ["interrupted"] * 2
        (killed / "events.jsonl").write_text((killed / "events.jsonl").read_text() + '{"kind": "rollb')  # cut short
    assert pool.run(run, folder, tokens, killed, "rollback", None, STEPS, **layout) == [None, None]
    events = [event for event in read_events(killed) if event["kind"] == "rollback"]
    assert sorted(event["documents"] for event in events) == sorted([victim] for victim in victims), "none is met again"
    assert skipped(killed) == skipped(whole)
    ended = [[row["loss"] for row in read_metrics(of / "metrics.jsonl") if row["kind"] == "train"] for of in (whole, killed)]
    assert ended[0] == ended[1]


@pytest.mark.long
def test_starts_of_other_layouts_leave_the_documents_out_too(pool, corpus, tmp_path):
    """The second start saves step 0, whose lanes have cursors only because documents are left out of some."""
    folder, tokens, victims = corpus
    assert pool.run(interrupted_run, folder, tokens, tmp_path, data=1) == ["interrupted"]
    assert pool.run(interrupted_run, folder, tokens, tmp_path, data=2) == ["interrupted"] * 2
    assert pool.run(run, folder, tokens, tmp_path, "rollback", None, STEPS, data=1) == [None]
    assert sorted(event["documents"] for event in read_events(tmp_path)) == sorted([victim] for victim in victims)
    assert len(skipped(tmp_path)) == 2


def test_lines_that_are_no_events_are_left_out_of_the_log(tmp_path):
    assert read_events(tmp_path) == []
    good = {"kind": "skip", "step": 3}
    lines = [b"[1]", b"null", b"7", b'{"kind": "rollback"}', b'{"step": 2}', b'{"kind": "change", "step": "2"}', b"\xff\xfe\0", b""]
    (tmp_path / "events.jsonl").write_bytes(b"\n".join([*lines, json.dumps(good).encode(), b'{"kind": "rollb']))
    assert read_events(tmp_path) == [good]


def recalled(mesh, folder, lines):
    """What a start from step 4 leaves out by an event log; or its error. lines: None: a folder is where the log should be."""
    events = EventLog(folder, mesh.is_main)
    if mesh.is_main and lines is None:
        events.path.mkdir()
    elif mesh.is_main:
        events.path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    recovery = AnomalyRecovery(training(lanes=4, global_batch_tokens=32, sequence_length=8), events, mesh, {"stream": "ours"})
    try:
        recovery.remember(4)
    except DataError as error:
        return str(error)
    return {lane: cursor.skipped for lane, cursor in recovery.without_documents({}).items()}


def test_a_start_leaves_out_what_the_logs_rollbacks_of_its_stream_and_of_later_steps_have(pool, tmp_path):
    def event(places, step=5, stream="ours"):
        return {"kind": "rollback", "step": step, "stream": stream, "places": places}

    lines = [
        {"kind": "rollback", "step": 9, "documents": ["of before there were places"]},
        event([[0, 0, 1, 2], [3, 0, 0, 1]]),
        event([[1, 0, 0, 0]], step=4),
        event([[1, 0, 0, 0]], stream="another"),
        event([[9, 0, 0, 0], [1, 0, 0], [1, 0, 0, -1], [1, 0, 0, "0"], "1000", 1]),
        event(7),
        event([[0, 0, 1, 2]], step=6),
    ]
    assert pool.run(recalled, tmp_path, lines, data=2) == [{0: ((0, 1, 2),), 2: ()}, {1: (), 3: ((0, 0, 1),)}]


def test_an_event_log_that_cannot_be_read_is_an_error_of_all_ranks(pool, tmp_path):
    said = pool.run(recalled, tmp_path, None, data=2)
    assert said[0] == said[1]
    assert "events.jsonl: cannot be read (Is a directory), and has the documents that earlier rollbacks left out" in said[0]


def synthetic_run(mesh, folder):
    """A run on examples that nobody has written, of which one step is refused."""
    settings = training(
        steps=4, sequence_length=16, global_batch_tokens=32, micro_batch_size=1, evaluation=EvaluationConfig(every=0),
        checkpoint=CheckpointConfig(every=2), guard=GuardConfig(policy="rollback"),
    )  # fmt: skip
    config, data = ModelConfig(d_model=16, n_layers=1, mixers={"mamba": kinds()["mamba"](d_state=4)}), InductionConfig(length=16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_setup, "AnomalyDetector", lambda guard: Refusing(loss=(0, 4)))
        loop.train(RunSettings(folder, config, data, settings, ""), mesh)


def test_a_synthetic_task_is_rolled_back_without_documents(single_mesh, tmp_path, capfd):
    """Before there is a lane's cursor, and from one."""
    synthetic_run(single_mesh, tmp_path)
    assert [(event["kind"], event["documents"]) for event in read_events(tmp_path)] == [("rollback", [])] * 2
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl") if row["kind"] == "train"] == [1, 2, 3, 4]
    said = [line for line in capfd.readouterr().out.splitlines() if "refused" in line]
    back = "loss refused; going back to the last checkpoint"
    assert said == [f"step 1: {back} (rollback 1 of 3)", f"step 4: {back} (rollback 2 of 3)"]


def spiking_run(mesh, folder, spike_at, interrupted_at=None):
    """A run in which the loss of a step, counted from 1, is ten times what it is."""
    settings = training(
        steps=8, sequence_length=16, global_batch_tokens=32, micro_batch_size=1, evaluation=EvaluationConfig(every=0),
        checkpoint=CheckpointConfig(every=2), guard=GuardConfig(policy="rollback", loss_spike=5.0, norm_spike=1e6, window=8),
    )  # fmt: skip
    config, data = ModelConfig(d_model=16, n_layers=1, mixers={"mamba": kinds()["mamba"](d_state=4)}), InductionConfig(length=16)
    step, seen = StepExecutor.step, []

    def interrupted(executor, batches, *rest, **named):
        if executor.anomaly_detector.steps == interrupted_at:
            raise RunError("interrupted")
        return step(executor, batches, *rest, **named)

    class Spiking(AnomalyDetector):
        """Counts the steps of the run, and those that it is asked about."""

        @property
        def steps(self):
            return len(self.recent()["loss"])

        def check_loss(self, loss):
            seen.append(self.steps + 1)
            return super().check_loss(10 * loss if seen.count(spike_at) == 1 and seen[-1] == spike_at else loss)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_setup, "AnomalyDetector", Spiking)
        patch.setattr(StepExecutor, "step", interrupted)
        error = error_of(RunSettings(folder, config, data, settings, ""), mesh)
    return error or Manifest.read(folder / "checkpoints" / "step-00000008").recent


def test_a_run_that_goes_on_judges_spikes_as_one_that_was_not_interrupted(single_mesh, tmp_path):
    """A spike in the fifth step, one after the checkpoint from which the run goes on: medians need four steps."""
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    whole.mkdir()
    resumed.mkdir()
    expected = spiking_run(single_mesh, whole, 5)
    assert {name: len(values) for name, values in expected.items()} == {"loss": 8, "norm": 8}
    assert spiking_run(single_mesh, resumed, 5, interrupted_at=4) == "interrupted"
    assert spiking_run(single_mesh, resumed, 5) == expected
    (one,), (other,) = read_events(whole), read_events(resumed)
    assert (
        (one["kind"], one["step"], one["reason"])
        == (other["kind"], other["step"], other["reason"])
        == ("rollback", 5, one["reason"])
    )
    assert "the median of the last 4 steps" in one["reason"]


def ruined_run(mesh, folder, policy, ruined):
    """A run whose values are infinite after these updates: what it raised."""
    settings = training(
        steps=6, sequence_length=16, global_batch_tokens=32, micro_batch_size=1, evaluation=EvaluationConfig(every=0),
        checkpoint=CheckpointConfig(every=2, keep_last=1), guard=GuardConfig(policy=policy),
    )  # fmt: skip
    config, data = ModelConfig(d_model=16, n_layers=1, mixers={"mamba": kinds()["mamba"](d_state=4)}), InductionConfig(length=16)
    left, after_step = list(ruined), CheckpointCallback.after_step

    def ruin(callback, progress, result):
        if left and progress.step == left[0]:
            left.pop(0)
            with torch.no_grad():
                callback._train_state.model.norm.weight.fill_(math.inf)
                for fragment in callback._train_state.engine.fragments():
                    fragment.master.fill_(math.inf)
        after_step(callback, progress, result)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointCallback, "after_step", ruin)
        return error_of(RunSettings(folder, config, data, settings, ""), mesh)


@pytest.mark.parametrize("step", [2, 4])
def test_values_that_are_not_finite_take_no_good_checkpoints_place(single_mesh, tmp_path, capfd, step):
    """The run goes back behind them, to the initial values or to a later checkpoint."""
    assert ruined_run(single_mesh, tmp_path, "rollback", [step]) is None
    (event,) = read_events(tmp_path)
    assert (event["kind"], event["step"]) == ("rollback", step + 1)
    kept = f"the newest checkpoint is step-{step - 2:08d}"
    assert re.search(rf"step {step} is not saved: .* is not finite after its update; {kept}\n", capfd.readouterr().out)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000006"]


def test_a_last_update_that_is_not_finite_is_no_success(single_mesh, tmp_path):
    message = ruined_run(single_mesh, tmp_path, "stop", [6])
    assert "step 6 is not saved" in message
    assert "the newest checkpoint is step-00000004; lower training.optimizer.lr" in message
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000004"]


def test_skip_makes_no_update_and_goes_on(pool, corpus, tmp_path):
    """Also where lanes carry States: those of the step are forgotten. Nothing is recorded of the step but the event."""
    folder, (token, _), (victim, _) = corpus
    assert pool.run(run, folder, [token], tmp_path, "skip", bptt={"mode": "truncated", "segment": 8}, data=2) == [None, None]
    (event,) = read_events(tmp_path)
    assert (event["kind"], event["documents"]) == ("skip", [victim])
    rows = read_metrics(tmp_path / "metrics.jsonl")
    for kind in ("train", "state_gradients"):
        recorded = [row["step"] for row in rows if row["kind"] == kind]
        assert recorded == [step for step in range(1, STEPS + 1) if step != event["step"]], kind
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()
    assert skipped(tmp_path) == []
    assert Manifest.read(tmp_path / "checkpoints" / f"step-{STEPS:08d}").adam_steps == STEPS - 1


def test_stop_names_the_document_and_the_next_start_resumes(pool, corpus, tmp_path):
    folder, (token, _), (victim, _) = corpus
    for message in pool.run(run, folder, [token], tmp_path, "stop", data=2):
        assert victim in message
        assert "comes out of embedding (rank" in message
        assert "it resumes from its last checkpoint" in message
    (event,) = read_events(tmp_path)
    assert event["kind"] == "stop"
    assert pool.run(run, folder, [token], tmp_path, "rollback", data=2) == [None, None]
    assert [event["kind"] for event in read_events(tmp_path)] == ["stop", "rollback"]
