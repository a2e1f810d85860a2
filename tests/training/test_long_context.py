"""Long-context evaluation: validation in segments, loss by position, norms of States, and the metrics of a run that uses it.

Values are compared with numpy on one process, whole rows at once, on data, sequence, pipeline and tensor ranks. B'MOJO selects by
its own scores; in float64 these leave nothing to chance.
"""

import json
import math
import random
import shutil
from functools import cache
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
import torch
from support.compare import relative_error
from support.grid import model_for
from support.long_rows import ROWS, SEGMENT, SEGMENTS, TOKENS, Float64, joined, model_on, own_spans, plain, rows_of, whole_batch
from support.pool_runs import train_run
from support.recurrences import seeded
from support.runs import published
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from baton.data_pipeline.dataset import Dataset
from baton.data_pipeline.evaluation import documents
from baton.data_pipeline.packing import Batch
from baton.data_pipeline.prepare import prepare
from baton.data_pipeline.tokenizer import load_tokenizer
from baton.data_pipeline.tokenizer_training import train_tokenizer
from baton.models.config import ModelConfig
from baton.models.lm import LanguageModel
from baton.models.settings import SMALL_WIDTH, kinds
from baton.parallel.context_parallel import ContextLink, add_gather
from baton.parallel.param_layout import initialize_parameters
from baton.training.config import BpttConfig
from baton.training.config_checks import check_long_evaluation
from baton.training.errors import RunError
from baton.training.evaluation.config import EvaluationConfig
from baton.training.evaluation.evaluate import evaluate, evaluate_task
from baton.training.evaluation.long_context import LongRows, borders, evaluate_long
from baton.training.monitoring.metrics import read_metrics
from baton.training.optimizer_config import ScheduleConfig

MIXERS = (*(kind for kind, settings in kinds().items() if not settings.small().state_grows), "hybrid")
STAGES = {"pipeline": 2, "context": 2}
OFTEN = ("full_attention", "gated_delta_net", "mamba")
LAYOUTS = ({"data": 2}, STAGES, {"tensor": 2, "pipeline": 2})


def validated(mesh, mixers):
    """Of each mixer: loss, loss and accuracy at labels, and what is seen by position."""
    found = []
    if mesh.link is not None:
        add_gather(mesh.link, mesh.layout)
    for mixer in mixers:
        model = model_on(mesh, model_for(mixer), link=ContextLink(0, [mesh.rank], mesh.device))
        rows = torch.arange(mesh.data_rank, ROWS, mesh.layout.data)
        batches = [own_spans(rows_of(whole_batch(), part), mesh, SEGMENTS) for part in rows.split(2)]
        labels = int(whole_batch().count_labels())
        with Float64():
            nats = evaluate(model, [joined(b) for b in batches], 1, labels, mesh, segments=SEGMENTS).loss
            scored = evaluate_task(model, [joined(b) for b in batches], labels, mesh, segments=SEGMENTS)
            model.link = mesh.link  # as in a run that does not cut sequences
            seen = evaluate_long(model, [iter(b) for b in batches], mesh, segment=SEGMENT, segments=SEGMENTS)
            assert model.link is mesh.link
        found.append((nats, scored.loss, scored.accuracy, seen.losses, seen.positions, seen.norms))
    return found


@cache
def expected_of(mixer, spans):
    """The same by numpy from whole rows, and States from running the tokens before each border alone."""
    model, batch = plain(model_for(mixer)), whole_batch()
    with torch.no_grad():
        hidden, _ = model(batch.tokens, batch.pos)
        logits = model.local_logits(hidden)[..., : model.vocab_size].numpy()
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    nats = -np.take_along_axis(log_p, batch.labels.clamp(min=0).numpy()[..., None], -1)[..., 0]
    counted = batch.labels.numpy() >= 0
    right = logits[..., :61].argmax(-1) == batch.labels.numpy()
    buckets = {}
    for n, p in zip(nats[counted], batch.pos.numpy()[counted], strict=True):
        buckets.setdefault(int(math.log2(p + 1)), []).append(n)
    norms = {}
    for border in range(TOKENS // spans, TOKENS + 1, TOKENS // spans):
        # rows that go on: the last label before the border counts
        live = batch.labels[:, border - 1] >= 0
        with torch.no_grad():
            _, states = model(batch.tokens[live, :border], batch.pos[live, :border])
        for layer, leaves in model.state_specs.items():
            for leaf in leaves:
                if leaf.grad and not leaf.grows:
                    mean_square = float(states[layer][leaf.name].square().sum()) / int(live.sum())
                    norms.setdefault(leaf.name, {}).setdefault(layer, []).append(mean_square**0.5)
    losses = [(2**k, float(np.mean(buckets[k])), len(buckets[k])) for k in sorted(buckets)]
    return nats[counted].mean(), right[counted].mean(), losses, norms


@pytest.mark.parametrize(
    ("layout", "mixers"),
    [(STAGES, OFTEN), *(pytest.param(layout, MIXERS, marks=pytest.mark.long) for layout in LAYOUTS)],
    ids=lambda x: str(x) if isinstance(x, dict) else f"{len(x)} mixers",
)
def test_validation_in_segments_equals_whole_rows(pool, single_mesh, layout, mixers):
    """Every mixer that has a State in the long form, some of them always."""
    tensor = layout.get("tensor", 1)
    mixers = [
        m for m in mixers if all(n % tensor == 0 for s in model_for(m).mixers.values() for n in s.sizes(SMALL_WIDTH).values())
    ]
    assert len(mixers) >= 3
    spans = SEGMENTS * layout.get("context", 1)
    for result in pool.run(validated, mixers, timeout_s=300, **layout):
        for mixer, (nats, scored, accuracy, losses, places, norms) in zip(mixers, result, strict=True):
            loss, right, buckets, expected = expected_of(mixer, spans)
            assert (nats, scored) == pytest.approx((loss, loss), rel=1e-6), mixer  # the loss itself is float32
            assert accuracy == pytest.approx(right)
            assert [(first, n) for first, _, n in losses] == [(first, n) for first, _, n in buckets]
            assert [x for _, x, _ in losses] == pytest.approx([x for _, x, _ in buckets], rel=1e-6), mixer
            assert places == [n * TOKENS // spans for n in range(1, spans + 1)]
            assert {(name, layer) for name in norms for layer in norms[name]} == {
                (name, layer) for name in expected for layer in expected[name]
            }
            for name, of_layer in expected.items():
                for layer, values in of_layer.items():
                    error = relative_error(torch.tensor(norms[name][layer]), torch.tensor(values))
                    assert error <= 1e-9, (mixer, name, layer, error)


def task_evaluations(mesh, segment):
    """What a run that cuts its sequences into segments of so many tokens records of two cases, one of them no multiple of that."""
    from support.models import training

    from baton.data_pipeline.run_source import TaskSource
    from baton.data_pipeline.task_config import MqarConfig
    from baton.training.build import build
    from baton.training.callbacks.task_evaluation import TaskEvaluationCallback
    from baton.training.run import RunProgress, RunSettings

    task = MqarConfig(length=16, pairs=2, vocab_size=61, cases=[{}, {"length": 40, "pairs": 4}])
    bptt = None if segment is None else BpttConfig(mode="exact", segment=segment)
    sizes = {"sequence_length": 32, "global_batch_tokens": 64, "steps": 3, "evaluation": EvaluationConfig(tokens=600)}
    config = training(bptt=bptt, schedule=ScheduleConfig(kind="constant"), **sizes)
    settings = RunSettings(Path("none"), model_for("mamba"), task, config, "")
    rows = []

    class Seen:
        def log_task_evaluation(self, step, tokens, cases):
            rows.append(cases)

    evaluator = TaskEvaluationCallback(build(model_for("mamba"), config, mesh), TaskSource(task), Seen(), settings)
    evaluator.after_step(RunProgress(3, 192, {}), None)
    return rows


@pytest.mark.parametrize("layout", [pytest.param({"data": 1}, marks=pytest.mark.long), {"context": 2}], ids=str)
def test_a_task_is_scored_in_segments_as_it_is_whole(pool, layout):
    [[whole]] = pool.run(task_evaluations, None)
    for [cut] in pool.run(task_evaluations, 16, **layout):
        assert list(cut) == list(whole) == ["length-16-pairs-2", "length-40-pairs-4"]
        for name, (loss, accuracy) in whole.items():
            assert cut[name] == (pytest.approx(loss, rel=1e-6), accuracy)


def test_borders_are_dense_at_first_and_sixteen_to_an_octave_later():
    assert borders(5) == [1, 2, 3, 4, 5]
    found = borders(1000)
    assert found[:33] == [*range(1, 33), 34]
    assert found[-1] == 1000
    assert all(16 <= sum(n <= x < 2 * n for x in found) <= 16 for n in (16, 32, 64, 128, 256))


@cache
def corpus(folder):
    """Documents of random words, most of them short and a few long, as a dataset; and a tokenizer."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(1, 9))) for _ in range(200)]
    text = " ".join(draw.choices(words, k=2000))
    sizes = [3000, 200, 900, 150, 5000, 400, 700, 250, 1500, 300] * 4
    pieces = [text[37 * n :][:size] for n, size in enumerate(sizes)]
    (folder / "all.jsonl").write_text("".join(json.dumps({"text": piece}) + "\n" for piece in pieces))
    prepare(
        [folder / "all.jsonl"], folder / "shards", shard_bytes=8_000, validation_fraction=0.3, workers=1, progress=lambda *_: None
    )
    train_tokenizer(documents(Dataset.open(folder / "shards"), "train"), folder / "tokenizer.model", 380, threads=1)
    return folder / "shards", folder / "tokenizer.model"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return corpus(tmp_path_factory.mktemp("long"))


@pytest.mark.parametrize("tokens", [500, 100_000])
def test_rows_are_the_longest_documents_one_after_the_other(data, tokens):
    dataset, tokenizer = Dataset.open(data[0]), load_tokenizer(data[1])
    texts = sorted((payload.decode() for *_, payload in dataset.samples("validation")), key=lambda t: -len(t))
    rows = LongRows(dataset, tokenizer, rows=3, tokens=tokens)
    pieces = rows.segments(range(1, 3), 64)
    count = -(-rows.tokens // 64)
    found = [next(pieces) for _ in range(count)]
    assert rows.tokens <= tokens
    if tokens == 500:
        assert rows.tokens == 500
    for row in (1, 2):
        inputs, labels, pos = [], [], []
        for text in texts[row::3]:
            ids = [int(i) for i in tokenizer.encode(text)]
            inputs += [tokenizer.eod_id, *ids]
            labels += [*ids, tokenizer.eod_id]
            pos += range(len(ids) + 1)
        n = min(len(labels), count * 64)
        assert tokens == 500 or n == len(labels), "the whole split is read when as much is asked for"
        got = [np.concatenate([getattr(b, name)[row - 1] for b in found]) for name in ("tokens", "labels", "pos")]
        assert got[0][:n].tolist() == inputs[:n]
        assert got[1].tolist() == labels[:n] + [-1] * (count * 64 - n)
        assert got[2][:n].tolist() == pos[:n]


def test_long_rows_are_refused_where_there_are_none_or_states_cannot_go_on():
    from support.models import training

    def refused(model, ranks=1, documents=True, **evaluation):
        with pytest.raises(RunError) as caught:
            check_long_evaluation(model, training(evaluation=EvaluationConfig(**evaluation)), ranks, documents=documents)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    mamba = model_for("mamba")
    assert "add a longer case to data.cases" in refused(mamba, documents=False, long_tokens=100)
    assert "layout.context=2 does not divide" in refused(mamba, ranks=2, gradient_reach_segment_length=13)
    assert "make it 6 tokens or more" in refused(mamba, ranks=2, gradient_reach_segment_length=4)
    check_long_evaluation(mamba, training(evaluation=EvaluationConfig(long_tokens=100, every=0)), 3, documents=True)
    check_long_evaluation(model_for("full_attention"), training(evaluation=EvaluationConfig(long_tokens=100)), 1, documents=True)


LONG_ROWS, LONG_SEGMENT, WIDTH = 4, 2048, 64


def peaks(mesh, counts):
    """Peak resident bytes of looking at rows of so many segments, one after the other."""
    config = ModelConfig(**model_for("retnet").model_dump() | {"d_model": WIDTH, "n_layers": 1, "loss_chunk": 256})
    model, found = LanguageModel(config), []
    initialize_parameters(model, 0, 0, 1)
    for count in counts:
        parts = (long_part(s) for s in range(count))
        Path("/proc/self/clear_refs").write_text("5")  # begin to count the peak again
        evaluate_long(model, [parts], mesh, segment=LONG_SEGMENT, segments=count)
        [line] = [x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM")]
        found.append(int(line.split()[1]) * 1024)
    return found


def long_part(s):
    pos = torch.arange(s * LONG_SEGMENT, (s + 1) * LONG_SEGMENT, dtype=torch.int32).repeat(LONG_ROWS, 1)
    tokens = torch.randint(61, pos.shape, generator=seeded(s))
    return Batch(tokens, tokens, pos)


def test_memory_does_not_grow_with_the_row(pool):
    """What the heap does not give back at once is some megabytes, and is the same after a while."""
    [[*_, four, sixteen]] = pool.run(peaks, [16, 16, 4, 16], timeout_s=300)
    hidden = LONG_ROWS * LONG_SEGMENT * WIDTH * 4
    assert sixteen - four < 3 * hidden, f"12 more segments hold more than the hidden vectors of three: {four}, {sixteen}"


RUN_STEPS, EVERY = 4, 2


@pytest.fixture(scope="module")
def run(data, pool, tmp_path_factory):
    """A run on two sequence ranks under truncated backpropagation: its folder."""
    folder = tmp_path_factory.mktemp("run")
    mixers = {"mamba": {"kind": "mamba", "d_state": 4}, "lattice": {"kind": "lattice", "head_dim": 8, "slots": 4}}
    values = {
        "name": "long",
        "device": "cpu",
        "model": {"d_model": 16, "n_layers": 2, "pattern": ["mamba", "lattice"], "mixers": mixers},
        "data": {"path": str(data[0]), "tokenizer": str(data[1]), "unit_documents": 4},
        "layout": {"context": 2},
        "training": {
            "steps": RUN_STEPS,
            "sequence_length": 64,
            "global_batch_tokens": 128,
            "micro_batch_size": 2,
            "compute_dtype": "float32",
            "log_every": 1,
            "bptt": {"mode": "truncated", "segment": 16, "gradient_segments": 2},
            "optimizer": {"lr": 1e-2},
            "checkpoint": {"every": 3},
            "evaluation": {
                "every": 2,
                "tokens": 300,
                "sample_tokens": 0,
                "long_tokens": 198,
                "long_rows": 2,
                "gradient_reach_segment_length": 8,
                "gradient_reach_segments": 6,
            },
            "monitoring": {"state_grad_norm_every": EVERY},
        },
    }
    (folder / "run.yaml").write_text(json.dumps(values))
    said, _ = pool.run(train_run, str(folder / "run"), str(folder / "run.yaml"), context=2)
    assert "validation loss from position  1: " in said
    assert "gradient reach in tokens, at most 40  " in said
    return folder / "run"


@pytest.fixture(scope="module")
def resumed(run, pool, tmp_path_factory):
    """A copy of the run, killed after its last step but with no checkpoint after step 3, and resumed."""
    folder = tmp_path_factory.mktemp("resumed") / "run"
    shutil.copytree(run, folder)
    for later in published(folder):
        if later > 3:
            shutil.rmtree(folder / "checkpoints" / f"step-{later:08d}")
    assert published(folder) == [3]
    pool.run(train_run, str(folder), context=2)
    return folder


def of_kind(folder, kind):
    return [row for row in read_metrics(folder / "metrics.jsonl") if row["kind"] == kind]


def test_a_resumed_run_records_what_it_sees_without_gap_or_overlap(run, resumed):
    for kind in ("state_gradients", "long_context", "gradient_reach"):
        assert [row["step"] for row in of_kind(run, kind)] == [2, 4], kind
        assert of_kind(resumed, kind) == of_kind(run, kind), "the same, to the last bit"


def test_the_record_of_a_run_has_what_was_asked_for(run):
    for row in of_kind(run, "long_context"):
        assert row["positions"][:3] == [8, 16, 24]
        assert row["positions"][-1] == 208, "whole segments"
        assert set(row["states"]) == {"mamba.conv", "mamba.h", "lattice.conv", "lattice.S"}
        assert row["losses"][0]["labels"] >= 2, "each document's first token"
        assert sum(bucket["labels"] for bucket in row["losses"]) <= 2 * 208
        assert row["losses"][-1]["from"] > 64, "far beyond the training context"
    for row in of_kind(run, "state_gradients"):
        assert (row["span"], row["boundaries"]) == (8, [0, 1, 2, 3]), "the cut is a border too"
        assert {layer for of_layer in row["norms"].values() for layer in of_layer} == {"0", "1"}
        assert min(row["norms"]["mamba selective_scan-euler-gated"]["0"]) > 0
    for row in of_kind(run, "gradient_reach"):
        assert (row["span"], len(row["boundaries"])) == (4, 11)
        assert set(row["reach"]) == set(row["norms"])


def last_measured(row):
    """Where the rows end, nothing is."""
    return [norm for norm in row["states"]["lattice.S"]["1"] if norm is not None][-1]


def test_tensorboard_shows_it_as_scalars_and_pictures_also_after_a_restart(resumed):
    events = EventAccumulator(str(resumed / "tensorboard"), size_guidance={"scalars": 0, "images": 0})
    events.Reload()
    for kind, tag, value in (
        ("long_context", "loss_by_position/from_0000064", lambda row: next(b["loss"] for b in row["losses"] if b["from"] == 64)),
        ("long_context", "state_norm/lattice.S/layer_1", last_measured),
        ("state_gradients", "state_gradient_at_first_border/mamba.selective_scan-euler-gated/layer_0",
         lambda row: row["norms"]["mamba selective_scan-euler-gated"]["0"][0]),
        ("gradient_reach", "gradient_reach_tokens/lattice.lattice-dec-project/layer_1",
         lambda row: row["reach"]["lattice lattice-dec-project"]["1"]),
    ):  # fmt: skip
        expected = [(row["step"], value(row)) for row in of_kind(resumed, kind)]
        assert [(e.step, e.value) for e in events.Scalars(tag)] == [(step, pytest.approx(x, rel=1e-6)) for step, x in expected]
        pictures = {e.step: e for e in events.Images(kind)}  # this reader keeps those from before a restart
        assert sorted(pictures) == [step for step, _ in expected]
        assert all(e.width > 300 for e in pictures.values())


@pytest.mark.long
def test_the_picture_of_a_run_shows_the_last_that_was_seen(run, tmp_path):
    from baton.training.monitoring.plots import plot

    with_all = matplotlib.image.imread(plot(run, tmp_path / "all.png"))
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(run / "metrics.jsonl", bare)
    rows = [
        line for line in (bare / "metrics.jsonl").read_text().splitlines() if json.loads(line)["kind"] in ("train", "evaluation")
    ]
    (bare / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    without = matplotlib.image.imread(plot(bare, tmp_path / "bare.png"))
    assert with_all.shape[0] > 1.5 * without.shape[0]
